"""Arrays with a row per sample on disk, written in chunks that are each whole or missing, read memory-mapped.

A chunk counts as whole if its checksum is in a ledger. First computation, resumption after an interruption and
repair of a damaged file are therefore the same: fill in what is missing. Rows that could not be computed are tried
again each time, since a disk or a network may have failed for a moment.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quickvit.train.distributed import World

# Rows that are kept or redone together.
CHUNK = 512
# Where a type has none of numpy's, its bits are kept in an integer of the same size.
NUMPY_TYPES = {
    torch.bfloat16: np.int16,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.uint8: np.uint8,
    torch.int64: np.int64,
}
# The array that says which rows were written; an image that cannot be read leaves its row empty.
PRESENT = "present"

# Some rows, ascending, and the values of the arrays there.
Rows = tuple[Sequence[int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Spec:
    """Shape and type of one row of an array."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class ArrayStore:
    """Arrays of `rows` rows in a folder of their own below `root`, found again by their key.

    key: everything that decides the content; it names the folder and is written into it for human readers.
    label: begins the folder's name.
    """

    def __init__(
        self, root: str | Path, label: str, key: Mapping[str, Any], rows: int, specs: Mapping[str, Spec]
    ) -> None:
        outline = {name: [list(spec.shape), str(spec.dtype)] for name, spec in specs.items()}
        text = json.dumps({**key, "rows": rows, "arrays": outline}, indent=2, sort_keys=True)
        digest = blake2b(text.encode(), digest_size=8).hexdigest()
        self.rows, self.specs = rows, {**specs, PRESENT: Spec((), torch.uint8)}
        self.folder = Path(root).expanduser() / "-".join([re.sub(r"[^\w.-]+", "_", label), digest])
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "key.json").write_text(text + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """The number of chunks."""
        return -(-self.rows // CHUNK)

    def chunk(self, number: int) -> range:
        """The rows of a chunk."""
        return range(number * CHUNK, min((number + 1) * CHUNK, self.rows))

    # ------------------------------------------------------------------ writing

    def fill(self, produce: Callable[[Sequence[int]], Iterable[Rows]], world: World | None = None) -> None:
        """Have `produce` compute the rows that are wanted, in order, shared between all processes."""
        world = world or World()
        wanted = world.gather(self.wanted() if world.main else {})[0]
        if not wanted:
            return
        if world.main:
            self.prepare()
        world.barrier()
        left = list(wanted.items())[world.rank :: world.size]
        seen: set[int] = set()

        def commit() -> None:
            number, asked = left.pop(0)
            self.commit(number, set(self.chunk(number)) - (set(asked) - seen), world.rank)

        for rows, values in produce([row for _, asked in left for row in asked]):
            self.write(rows, values)
            seen.update(rows)
            while left and left[0][1][-1] <= rows[-1]:
                commit()
        while left:
            commit()
        world.barrier()

    def prepare(self) -> None:
        """Give every file its full size, if the disk has room for what is not there yet."""
        sizes = {name: self.rows * spec.row_bytes for name, spec in self.specs.items()}
        missing = sum(size - min(size, self._used(self._path(name))) for name, size in sizes.items())
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise OSError(
                f"the features take {missing / 1e9:.1f} GB more in {self.folder}, and {free / 1e9:.1f} GB are free; "
                "choose another folder for the cache"
            )
        for name, size in sizes.items():
            with self._path(name).open("ab") as file:
                file.truncate(size)

    def write(self, rows: Sequence[int] | Tensor, values: Mapping[str, Tensor]) -> None:
        """Write some rows, given in ascending order, of some arrays."""
        rows = torch.as_tensor(rows)
        starts = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
        for name, value in values.items():
            spec = self.specs[name]
            content = _as_numpy(value.to("cpu", spec.dtype).contiguous())
            # A full disk is an error of a write; memory-mapped, it would kill the process.
            with self._path(name).open("r+b") as file:
                for start, stop in pairwise(starts):
                    if stop > start:
                        file.seek(int(rows[start]) * spec.row_bytes)
                        file.write(content[start:stop].tobytes())

    def commit(self, number: int, present: Container[int], writer: int = 0) -> None:
        """Declare a chunk whole, of which some rows are present; simultaneous writers have different numbers."""
        rows = self.chunk(number)
        self.write(rows, {PRESENT: torch.tensor([row in present for row in rows])})
        line = " ".join([str(number), *(f"{name}:{self._checksum(name, number):08x}" for name in self.specs)])
        with (self.folder / f"ledger.{writer}").open("a", encoding="utf-8") as ledger:
            # A line that a crash cut off must not swallow this one.
            ledger.write(f"\n{line}\n")

    # ------------------------------------------------------------------ reading

    def missing(self) -> list[int]:
        """The chunks that are not whole in all arrays."""
        if not all(self._path(name).is_file() for name in self.specs):
            return list(range(len(self)))
        known = set(self._ledgers())
        return [
            number
            for number in range(len(self))
            if not all((number, name, f"{self._checksum(name, number):08x}") in known for name in self.specs)
        ]

    def wanted(self) -> dict[int, Sequence[int]]:
        """By chunk the rows to compute: all of one that is not whole, else those that are absent."""
        missing = self.missing()
        wanted: dict[int, Sequence[int]] = {number: self.chunk(number) for number in missing}
        if len(missing) == len(self):
            return wanted
        # What was cut off from this file is missing anyway.
        absent = np.flatnonzero(np.fromfile(self._path(PRESENT), np.uint8) == 0).tolist()
        for number, rows in groupby(absent, lambda row: row // CHUNK):
            wanted.setdefault(number, list(rows))
        return dict(sorted(wanted.items()))

    def read(self, name: str) -> Tensor:
        """An array, memory-mapped; what is written to it stays in memory."""
        spec = self.specs[name]
        shape = (self.rows, *spec.shape)
        if not self.rows:
            return torch.empty(shape, dtype=spec.dtype)
        array = np.memmap(self._path(name), NUMPY_TYPES[spec.dtype], "c", shape=shape)
        return torch.from_numpy(array).view(spec.dtype)

    # ------------------------------------------------------------------ parts

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _used(self, path: Path) -> int:
        """Bytes that a file takes on the disk; one that was only given its size takes none."""
        return path.stat().st_blocks * 512 if path.is_file() else 0

    def _checksum(self, name: str, number: int) -> int:
        """The checksum of the bytes that are there: of fewer, if the file was cut off."""
        rows, row_bytes = self.chunk(number), self.specs[name].row_bytes
        with self._path(name).open("rb") as file:
            file.seek(rows.start * row_bytes)
            return zlib.crc32(file.read(len(rows) * row_bytes))

    def _ledgers(self) -> Iterator[tuple[int, str, str]]:
        """Chunk, array and checksum of everything that was ever declared whole."""
        for path in self.folder.glob("ledger.*"):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                number, *entries = line.split() or [""]
                for entry in entries:
                    name, _, checksum = entry.partition(":")
                    if number.isdecimal():
                        yield int(number), name, checksum


def _as_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
