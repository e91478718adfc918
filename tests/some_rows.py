"""Rows that a test has chosen."""

import torch
from torch import Tensor

from quickvit.ops.rows import Rows


def rows_at(chosen: Tensor, total: int) -> Rows:
    """The rows with these numbers [n], each of them once, of `total` rows."""
    place = torch.full((total,), -1, dtype=torch.int32, device=chosen.device)
    order = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device)
    return Rows(chosen, place.scatter(0, chosen, order))
