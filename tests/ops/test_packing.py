"""Packed sequences: where each batch lies, and what of them is copied on the way through a block."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quickvit.layers import OcticBlock, StandardBlock
from quickvit.ops.cpu import library
from quickvit.ops.packing import pack, places, unpack

WIDTH = 64
SHAPES = ((2, 9), (3, 4))


def test_batches_lie_one_after_the_other():
    batches = [torch.randn(*shape, 3) for shape in (*SHAPES, (0, 5))]
    packed, shapes = pack(batches)
    assert shapes == (*SHAPES, (0, 5))
    assert packed.shape == (30, 3)
    for found, batch in zip(unpack(packed, shapes), batches, strict=True):
        assert torch.equal(found, batch)
        assert found.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert [*places(((2, 9), (0, 5), (3, 4)))] == [(0, 2, 9), (18, 3, 4)]


class Copies(TorchDispatchMode):
    """Counts the entries that are written by operators which only move them, or make room for them."""

    MOVING = frozenset(
        ("cat", "stack", "clone", "copy_", "_to_copy", "zeros", "zeros_like", "new_zeros", "zero_", "fill_")
    ) | frozenset(f"{name}_backward" for name in ("slice", "select", "split", "split_with_sizes"))
    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count, and call."""
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in self.MOVING:
            self.entries += out.numel()
        return out


def copied(block, shapes):
    """Entries that are copied, forwards and backwards, per channel of a token."""
    tokens = sum(number * length for number, length in shapes)
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    with Copies() as copies:
        block(x, shapes=shapes).backward(torch.ones(tokens, WIDTH))
    return copies.entries / (tokens * WIDTH)


@pytest.mark.skipif(not library.available(), reason="there is no C compiler")
def test_nothing_is_copied_for_several_batches_in_an_octic_block():
    block = OcticBlock(WIDTH, 2, init_values=1.0)
    assert copied(block, SHAPES) == copied(block, ((6, 5),))


def test_of_several_batches_in_a_standard_block_only_the_result_of_attention_is_copied():
    """PyTorch's operator writes tensors of its own. Gradients of q, k and v are put together for one batch too."""
    block = StandardBlock(WIDTH, 2, norm_layer=nn.LayerNorm, qkv_bias=True)
    assert copied(block, SHAPES) == copied(block, ((6, 5),)) + 1
