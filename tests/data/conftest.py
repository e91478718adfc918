"""Image folders for the tests of the data room."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def write_images():
    """Write random images of 12 × 10 pixels to these paths below a folder, one after the other different."""
    generator = np.random.default_rng(0)

    def write(root: Path, *names: str) -> Path:
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(path)
        return root

    return write


@pytest.fixture
def huge_png():
    """A PNG of a few bytes whose header promises gigabytes."""

    def make(width: int = 60_000, height: int = 60_000) -> bytes:
        header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = (header, b"IDAT" + zlib.compress(b"\0"), b"IEND")
        body = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
        return b"\x89PNG\r\n\x1a\n" + b"".join(body)

    return make
