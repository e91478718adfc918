"""Rows taken out of a tensor and put back."""

import pytest
import torch
from some_rows import rows_at
from torch.utils._python_dispatch import TorchDispatchMode

CHOSEN = torch.tensor([4, 0, 3])


def tokens(number):
    return torch.randn(number, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def test_taken_and_spread():
    rows, x = rows_at(CHOSEN, 6), tokens(6)
    assert rows.place.tolist() == [1, -1, -1, 2, 0, -1]
    assert torch.equal(rows.of(x), x[CHOSEN])
    expected = torch.zeros(6, 2, dtype=torch.float64).index_copy(0, CHOSEN, tokens(3))
    assert torch.equal(rows.spread(tokens(3)), expected)


def test_what_is_left_out_may_be_anything():
    rows, x = rows_at(CHOSEN, 6), tokens(6)
    x[1] = torch.nan
    assert rows.of(x).isfinite().all()
    assert rows.spread(torch.full((3, 2), torch.inf))[[1, 2, 5]].eq(0).all()


@pytest.mark.parametrize("way", ["of", "spread"])
def test_gradients(way):
    rows = rows_at(CHOSEN, 6)
    x = tokens(6 if way == "of" else 3).requires_grad_()
    assert torch.autograd.gradcheck(getattr(rows, way), (x,))
    assert torch.autograd.gradgradcheck(getattr(rows, way), (x,))


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_nothing_is_written_twice():
    """Neither way adds up into places of memory, on a GPU by atomic operations, of which bfloat16 has slow ones."""
    rows, x = rows_at(CHOSEN, 6), tokens(6).requires_grad_()
    with Calls() as calls:
        (x + rows.spread(rows.of(x) * 2)).sum().backward()
    assert "index_select" in calls.names
    assert not any(name.startswith(("index_add", "index_put", "scatter")) for name in calls.names)
