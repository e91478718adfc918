"""On what something ran: hardware, versions, commit, command. Where that is written, with the result."""

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
    """Write a record as JSON, whole or not at all, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2) + "\n"
    if path.exists() and not path.is_file():
        # A pipe or /dev/stdout, which nothing may take the place of.
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_file(path: str | Path) -> None:
    """Raise an OSError unless a file can be written here; nothing is made."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; expected the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"cannot write {path}: it is read-only")
    # A pipe or a device is written to where it is.
    if not path.exists() or path.is_file():
        require_folder(path.parent)


def require_folder(path: str | Path) -> None:
    """Raise an OSError unless this folder is there and can be written to, or can be made; nothing is made."""
    path = Path(path).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"cannot write to the folder {path}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to the folder {path}: {there} is read-only")


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
