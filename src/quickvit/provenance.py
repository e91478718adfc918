"""On what something ran: hardware, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import quickvit

COMMIT = "QUICKVIT_COMMIT"


def surroundings(device: torch.device, command: str) -> dict[str, Any]:
    """Everything beside its numbers that a record needs."""
    return {
        "hardware": hardware(device),
        "versions": versions(),
        "commit": commit(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """The device and the processor."""
    facts: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "gpu_multiprocessors": properties.multi_processor_count,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        }
    return facts


def versions() -> dict[str, str | None]:
    """Python, the libraries that matter for speed, and this one."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda
    for name in ("triton", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**found, "quickvit": quickvit.__version__}


def commit() -> str | None:
    """The commit of the checkout that this package runs from, "-dirty" if changed; None outside one.

    The environment variable QUICKVIT_COMMIT goes before it, for code that was copied without its history.
    """
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    file = Path(quickvit.__file__)
    # A package that is installed somewhere below a foreign checkout is not tracked by it.
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def write(record: dict[str, Any], path: str | Path) -> None:
    """Write a record as JSON, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
