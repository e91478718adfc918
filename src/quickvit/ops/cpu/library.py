"""The C kernels: compiled on first use, kept in a cache, and called through ctypes.

The compiler is `$CC` or the first of cc, gcc and clang; the cache is the folder quickvit/kernels of `$XDG_CACHE_HOME`
or of ~/.cache. Without a compiler, or with QUICKVIT_CPU_KERNELS=0 in the environment, there are no kernels.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import overload

import torch
from torch import Tensor

from quickvit.ops.storage import cache_folder

logger = logging.getLogger(__name__)

SWITCH = "QUICKVIT_CPU_KERNELS"
FOLDER = Path(__file__).parent
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
)
COMPILE_SECONDS = 300
_DIGEST_SIZE = sha256().digest_size


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether there are kernels; compiles them where needed."""
    return _library() is not None


def call(
    name: str, *arguments: Tensor | ctypes.c_void_p | float | int | None, threads: int | None = None
) -> None:
    """Run a kernel on so many threads, by default PyTorch's: tensors go as pointers, numbers as int64 and float."""
    number = ctypes.c_int64(torch.get_num_threads() if threads is None else threads)
    getattr(_library(), name)(*map(_argument, arguments), number)


def size(name: str, *arguments: int) -> int:
    """What one of the C functions that count floats or items says."""
    function = getattr(_library(), name)
    function.restype = ctypes.c_int64
    return function(*map(ctypes.c_int64, arguments))


def scratch(name: str, *arguments: int) -> tuple[Tensor, int]:
    """Memory for PyTorch's threads, of the size that the C function says each needs, and their number."""
    threads = torch.get_num_threads()
    memory = torch.empty(threads * size(name, *arguments), dtype=torch.float32, device="cpu")
    return memory, threads


@overload
def checked(tensor: Tensor, *shape: int) -> Tensor: ...
@overload
def checked(tensor: Tensor | None, *shape: int) -> Tensor | None: ...
def checked(tensor: Tensor | None, *shape: int) -> Tensor | None:
    """The tensor as kernels read it, contiguous in single precision; a ValueError for another shape."""
    if tensor is None:
        return None
    if tensor.shape != shape:
        raise ValueError(f"expected a tensor of shape {shape}, got {tuple(tensor.shape)}")
    return tensor.to(torch.float32).contiguous()


def strided(tensor: Tensor) -> ctypes.c_void_p:
    """The pointer of a tensor whose strides are handed to the kernel as well."""
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(f"expected single precision on the CPU, got {tensor.dtype} on {tensor.device}")
    return ctypes.c_void_p(tensor.data_ptr())


def _argument(value):
    if isinstance(value, Tensor):
        if not value.is_contiguous():
            raise ValueError(f"expected a contiguous tensor, got strides {value.stride()}")
        return strided(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_float(value) if isinstance(value, float) else value


class _NotHere(Exception):
    """Why there are no kernels on this machine."""


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return _open()
    except _NotHere as reason:
        logger.info("no CPU kernels: %s", reason)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no CPU kernels: %s", getattr(error, "stderr", None) or error)
    return None


def _open() -> ctypes.CDLL:
    if os.environ.get(SWITCH) == "0":
        raise _NotHere(f"{SWITCH} is 0")
    compiler = _compiler()
    # Looked up among the dependencies of PyTorch: the threads that its own operators run on.
    runtime = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    if runtime is None:
        raise _NotHere("PyTorch does not run on an OpenMP runtime with the interface of GNU's")
    library = _load(compiler)
    library.use_runtime(runtime)
    return library


def _compiler() -> list[str]:
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise _NotHere(f"CC is no command, {os.environ['CC']!r}: {error}") from error
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise _NotHere("there is no C compiler; install one, or set CC to it")


def _load(compiler: list[str]) -> ctypes.CDLL:
    name = f"{_key(compiler)}.so"
    try:
        path = _built(compiler, cache_folder("kernels") / name)
        _require_ours(path.parent, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.info("the CPU kernels cannot be kept: %s", error)
    with TemporaryDirectory() as folder:
        # A loaded library needs its file no more.
        return ctypes.CDLL(str(_built(compiler, Path(folder) / name)))


def _built(compiler: list[str], path: Path) -> Path:
    """The path of the library, after building it if it is not there or damaged."""
    if not _is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            sources = sorted(FOLDER.glob("*.c"))
            command = [*compiler, *FLAGS, *map(str, sources), "-o", str(new), "-lm"]
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS
            )
            content = new.read_bytes()
            # The loader ignores what stands behind the library.
            new.write_bytes(content + sha256(content).digest())
            new.replace(path)
    return path


def _require_ours(folder: Path, file: Path) -> None:
    """Refuse a library that somebody else could have put there."""
    owners = {place.stat().st_uid for place in (folder, file)}
    if owners != {os.geteuid()} or folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {folder}")


def _is_whole(path: Path) -> bool:
    if not path.is_file():
        return False
    content = path.read_bytes()
    return sha256(content[:-_DIGEST_SIZE]).digest() == content[-_DIGEST_SIZE:]


def _key(compiler: list[str]) -> str:
    """A digest of everything that the library depends on: sources, command and processor."""
    key = sha256(repr((compiler, FLAGS, platform.machine(), _processor())).encode())
    for path in sorted((*FOLDER.glob("*.c"), *FOLDER.glob("*.h"))):
        key.update(path.read_bytes())
    return key.hexdigest()[:16]


def _processor() -> str:
    """What tells processors apart that -march=native would compile differently for."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.split(":")[0].strip() in names)
