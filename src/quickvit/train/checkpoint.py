"""Checkpoints of a run: written while it goes on, whole or not at all, and never trusted when read.

A checkpoint is a folder `step-00001200` with one safetensors file per rank and a manifest in JSON that holds the
SHA-256 of each. The state is named tensors; a rank writes its own shards of them, and says in its file's header
where in the whole tensor they lie, so that any other number of ranks can read them. Nothing is pickled, neither
here nor in PyTorch's distributed checkpoints' manner, whose metadata is a pickle that runs code when it is read.

The files are written to `.step-00001200.partial`, flushed to disk, and the folder renamed once the manifest is
there too. So a folder with the final name is complete, whenever the process was killed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from quickvit.models import CheckpointError
from quickvit.train.distributed import World
from quickvit.train.norms import first_index, local

logger = logging.getLogger(__name__)

FORMAT = "quickvit training state 1"
MANIFEST = "manifest.json"
PIECES = "pieces"
OWN = "own."
_NAME = re.compile(r"step-(\d{8,})")


class Piece(NamedTuple):
    """The part of a tensor that a file holds: the whole's shape, and where in it the part begins."""

    shape: tuple[int, ...]
    first: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    step: updates done. files: size and SHA-256 of each. about: what the run wants to find again, as JSON.
    """

    step: int
    files: dict[str, dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT

    def write(self, path: Path) -> None:
        """Write to a file, with a checksum of the manifest itself."""
        content = asdict(self)
        text = json.dumps({"manifest": content, "sha256": _digest(content)}, indent=2)
        with path.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read from a file; a `CheckpointError` says what is wrong with it."""
        try:
            outer = json.loads(path.read_text(encoding="utf-8"))
            content = outer["manifest"]
            if outer["sha256"] != _digest(content):
                raise CheckpointError("its manifest does not have the checksum that it had when written")
            if content.get("format") != FORMAT:
                raise CheckpointError(f"its format is {content.get('format')!r}, expected {FORMAT!r}")
            manifest = cls(**content)
            names = ", ".join(manifest.files)
            if not all(map(isinstance, (manifest.step, manifest.files, manifest.about), (int, dict, dict))):
                raise TypeError("step, files and about are of other types")
        except OSError as error:
            raise CheckpointError(f"its manifest cannot be read: {error.strerror}") from error
        except CheckpointError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"its manifest is damaged or foreign: {error}") from error
        if not all(re.fullmatch(r"rank-\d+\.safetensors", name) for name in manifest.files):
            raise CheckpointError(f"its manifest names files that no rank writes: {names}")
        if path.parent.name != _folder_name(manifest.step):
            raise CheckpointError(f"it is of step {manifest.step}")
        return manifest


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2])


class Store:
    """The checkpoints in a folder.

    `begin` copies the state and returns; `settle` makes a checkpoint of what was written. Both, and `newest` and
    `load`, are called on all ranks together.
    """

    def __init__(self, folder: Path, world: World, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder, self.world, self.keep = folder, world, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._begun: tuple[Manifest, Future[dict[str, Any]]] | None = None
        self._written = True

    def path(self, step: int) -> Path:
        """Where the checkpoint after so many updates lies."""
        return self.folder / _folder_name(step)

    def paths(self) -> list[Path]:
        """The complete checkpoints, newest first."""
        found = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_step, reverse=True)

    # ------------------------------------------------------------------ writing

    @property
    def writing(self) -> bool:
        """Whether this rank's file is still being written."""
        return self._begun is not None and not self._begun[1].done()

    @property
    def unsettled(self) -> bool:
        """Whether a checkpoint was begun that is none yet."""
        return self._begun is not None

    def begin(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        about: dict[str, Any] | None = None,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy the state and write it in the background.

        tensors: the same names on all ranks, sharded or equal. own: what this rank alone has.
        """
        self.settle()
        # What all ranks have alike is written by one.
        written = {n: t for n, t in tensors.items() if isinstance(t, DTensor) or self.world.main}
        written |= {f"{OWN}{self.world.rank}.{name}": tensor for name, tensor in (own or {}).items()}
        copies, pieces = {}, {}
        for name, tensor in written.items():
            copies[name] = local(tensor).detach().to("cpu", copy=True).contiguous()
            pieces[name] = Piece(tuple(tensor.shape), first_index(tensor), str(tensor.dtype))
        path = self._partial(step) / self._file(self.world.rank)
        self._begun = Manifest(step, {}, about or {}), self._thread.submit(_write, path, copies, pieces)

    def settle(self) -> bool:
        """Wait for what was begun and make it a checkpoint; False if the last one could not be written.

        A failure (a full disk, for example) is logged and leaves the older checkpoints as they are.
        """
        if self._begun is None:
            return self._written
        manifest, written = self._begun
        self._begun = None
        file, failure = None, None
        try:
            file = written.result()
        except OSError as error:
            failure = str(error)
        results = self.world.gather((file, failure))
        failure = next((reason for _, reason in results if reason is not None), None)
        if self.world.main:
            files = {self._file(rank): file for rank, (file, _) in enumerate(results) if file is not None}
            if failure is None:
                failure = self._publish(replace(manifest, files=files))
            if failure is not None:
                shutil.rmtree(self._partial(manifest.step), ignore_errors=True)
        failure = self.world.gather(failure)[0]
        if failure is not None:
            logger.warning("no checkpoint of step %d in %s: %s", manifest.step, self.folder, failure)
        self._written = failure is None
        return self._written

    def _publish(self, manifest: Manifest) -> str | None:
        """Give a written checkpoint its manifest and its name, and drop the oldest; the reason if that fails."""
        partial, final = self._partial(manifest.step), self.path(manifest.step)
        try:
            manifest.write(partial / MANIFEST)
            _flush(partial)
            if final.exists():
                _remove(final)
            partial.rename(final)
            _flush(self.folder)
        except OSError as error:
            return str(error)
        # Newer ones are left from before a restart, and not sound: they must not cost those that are.
        reached = [path for path in self.paths() if _step(path) <= manifest.step]
        try:
            for old in reached[self.keep :]:
                _remove(old)
        except OSError as error:
            logger.warning("an old checkpoint could not be removed from %s: %s", self.folder, error)
        return None

    def _partial(self, step: int) -> Path:
        return self.folder / f".{_folder_name(step)}.partial"

    @staticmethod
    def _file(rank: int) -> str:
        return f"rank-{rank:05d}.safetensors"

    # ------------------------------------------------------------------ reading

    def newest(
        self, tensors: Mapping[str, Tensor], require: Callable[[Path, dict[str, Any]], None] | None = None
    ) -> tuple[Path, Manifest] | None:
        """The newest sound checkpoint of this state; why newer ones are not is logged.

        Raises a `CheckpointError` if there are checkpoints and none is sound. `require` looks at what a manifest that
        can be read is about, before the tensors are, whose names say less of another run.
        """
        if self.world.main:
            for left in self.folder.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)
        reasons = []
        # All ranks try the same ones, even if they see a folder on a network at different times.
        for path in self.world.gather(self.paths())[0]:
            try:
                if require is not None:
                    require(path, self._about(path))
                return path, self.check(path, tensors)
            except CheckpointError as error:
                logger.warning("%s is not used: %s", path, error)
                reasons.append(f"{path}: {error}")
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be resumed from; move them away to start anew:\n"
                + "\n".join(reasons)
            )
        return None

    def _about(self, path: Path) -> dict[str, Any]:
        """What a manifest is about, on all ranks."""
        try:
            about, problem = Manifest.read(path / MANIFEST).about, None
        except CheckpointError as error:
            about, problem = {}, str(error)
        self._raise_together(problem)
        return about

    def check(self, path: Path, tensors: Mapping[str, Tensor] | None = None) -> Manifest:
        """The manifest of a checkpoint that is whole, and of this state; the ranks share the reading."""
        try:
            manifest = Manifest.read(path / MANIFEST)
            names = sorted(manifest.files)
            for name in names[self.world.rank :: self.world.size]:
                _check_file(path / name, manifest.files[name])
            if tensors is not None:
                _check_fit(_pieces(path, manifest), tensors)
            problem = None
        except CheckpointError as error:
            problem = str(error)
        self._raise_together(problem)
        return manifest

    def _raise_together(self, problem: str | None) -> None:
        """The first problem that any rank has is that of all."""
        problem = next((found for found in self.world.gather(problem) if found is not None), None)
        if problem is not None:
            raise CheckpointError(problem)

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checked checkpoint into the state; each rank reads what it needs."""
        manifest = Manifest.read(path / MANIFEST)
        with torch.no_grad():
            for name in manifest.files:
                with _opened(path / name) as file:
                    for tensor_name, piece in _file_pieces(file).items():
                        if tensor_name in tensors:
                            _copy_overlap(tensors[tensor_name], piece, file, tensor_name)

    def load_own(self, path: Path, rank: int) -> dict[str, Tensor]:
        """What a rank alone had."""
        name, prefix = self._file(rank), f"{OWN}{rank}."
        if name not in Manifest.read(path / MANIFEST).files:
            raise CheckpointError(f"{path} has nothing of rank {rank}")
        with _opened(path / name) as file:
            names = [n for n in _file_pieces(file) if n.startswith(prefix)]
            return {n.removeprefix(prefix): file.get_tensor(n) for n in names}


# ---------------------------------------------------------------------- files


def _write(path: Path, tensors: dict[str, Tensor], pieces: dict[str, Piece]) -> dict[str, Any]:
    """Write one rank's file through to the disk; its size and checksum."""
    metadata = {"format": "pt", PIECES: json.dumps({name: piece._asdict() for name, piece in pieces.items()})}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, str(path), metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    _flush(path)
    return {"bytes": path.stat().st_size, "sha256": _file_digest(path)}


def _flush(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems on networks cannot do this for folders, and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a checkpoint; killed half-way, what is left does not look like one."""
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------- is it sound, and ours?


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path.name} has {size} bytes, {expected['bytes']} were written")
        if _file_digest(path) != expected["sha256"]:
            raise CheckpointError(f"{path.name} does not have the checksum that it had when written")
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"its manifest is damaged or foreign: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _file_pieces(file: Any) -> dict[str, Piece]:
    """What a file says that its tensors are parts of."""
    try:
        stored = json.loads((file.metadata() or {})[PIECES])
        pieces = {
            name: Piece(tuple(map(int, p["shape"])), tuple(map(int, p["first"])), str(p["dtype"]))
            for name, p in stored.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it does not say where its tensors belong: {error}") from error
    if set(pieces) != set(file.keys()):
        raise CheckpointError("it does not say of all its tensors where they belong")
    for name, piece in pieces.items():
        part = file.get_slice(name).get_shape()
        inside = len(part) == len(piece.shape) == len(piece.first) and all(
            f >= 0 and f + length <= whole
            for f, length, whole in zip(piece.first, part, piece.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{name} {tuple(part)} at {piece.first} is no part of {piece.shape}")
    return pieces


def _pieces(path: Path, manifest: Manifest) -> dict[str, tuple[Piece, int]]:
    """Every tensor of a checkpoint, and how many of its values are there."""
    found: dict[str, tuple[Piece, int]] = {}
    for file_name in manifest.files:
        with _opened(path / file_name) as file:
            for name, piece in _file_pieces(file).items():
                first, count = found.get(name, (piece, 0))
                found[name] = first, count + math.prod(file.get_slice(name).get_shape())
    return found


def _check_fit(found: Mapping[str, tuple[Piece, int]], tensors: Mapping[str, Tensor]) -> None:
    """Whether a checkpoint's tensors are those of this state, and complete."""
    problems = [f"no {name}" for name in tensors if name not in found]
    problems += [f"also {name}" for name in found if name not in tensors and not name.startswith(OWN)]
    for name, tensor in tensors.items():
        if name in found:
            piece, count = found[name]
            if (piece.shape, piece.dtype) != (tuple(tensor.shape), str(tensor.dtype)):
                problems.append(
                    f"{name} {piece.shape} {piece.dtype} for {tuple(tensor.shape)} {tensor.dtype}"
                )
            elif count != tensor.numel():
                problems.append(f"{count} of the {tensor.numel()} values of {name}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"it is of another run: it has {', '.join(problems[:5])}{more}")


def _copy_overlap(tensor: Tensor, piece: Piece, file: Any, name: str) -> None:
    """Copy what a piece in a file and this rank's part of a tensor have in common."""
    target, target_first = local(tensor), first_index(tensor)
    # A number has no slices.
    source = file.get_slice(name) if piece.shape else file.get_tensor(name)
    into, outof = [], []
    for first, length, own_first, own_length in zip(
        piece.first, source.get_shape() if piece.shape else (), target_first, target.shape, strict=True
    ):
        begin, end = max(first, own_first), min(first + length, own_first + own_length)
        if begin >= end:
            return
        into.append(slice(begin - own_first, end - own_first))
        outof.append(slice(begin - first, end - first))
    target[tuple(into)].copy_(source[tuple(outof)])
