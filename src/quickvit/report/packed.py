"""Tensors in JSON: whole numbers of few bits, in base64."""

from __future__ import annotations

import base64
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quickvit.report.entry import Entry

TYPES = {8: "<i1", 16: "<i2"}


def steps(bits: int) -> int:
    """How many steps there are to each side of zero."""
    return int(2 ** (bits - 1) - 1)


def pack(values: Tensor, bits: int = 16) -> dict[str, Any]:
    """A tensor as an object; the largest magnitude, `scale`, is `steps` of the numbers."""
    scale = values.abs().max().item() or 1.0
    whole = (values.double() / scale * steps(bits)).round().numpy().astype(TYPES[bits])
    coded = base64.b64encode(whole.tobytes()).decode()
    return {"shape": list(values.shape), "bits": bits, "scale": scale, "values": coded}


def unpack(entry: Entry, *shape: int | None) -> Tensor:
    """A tensor from an object that is not trusted; it must have this shape, where that is known."""
    found, bits, scale = entry.integers("shape"), entry.integer("bits"), entry.number("scale")
    if bits not in TYPES:
        raise entry.wrong("bits", f"one of {', '.join(map(str, TYPES))}")
    if scale is None or scale <= 0:
        raise entry.wrong("scale", "a positive number")
    fits = len(found) == len(shape) and all(w in (None, f) for f, w in zip(found, shape, strict=True))
    if not fits or min(found) < 1:
        words = " × ".join("n" if wanted is None else str(wanted) for wanted in shape)
        raise entry.wrong("shape", f"that of {words} numbers")
    try:
        data = base64.b64decode(entry.text("values"), validate=True)
    except ValueError as error:
        raise entry.wrong("values", "base64") from error
    if len(data) * 8 != prod(found) * bits:
        raise entry.wrong("values", f"{prod(found)} numbers of {bits} bits in base64")
    whole = np.frombuffer(data, TYPES[bits]).astype(np.float64).reshape(found)
    return torch.from_numpy(whole * (scale / steps(bits))).float()
