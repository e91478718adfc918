"""Multi-head attention in one step, in parts; on a GPU see test_ops_gpu."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from quickvit.group import Layout
from quickvit.layers import OcticBlock
from quickvit.ops import attention, linear, mha
from quickvit.testing import randomize

SHAPES = [((3, 5),), ((1, 7), (0, 4), (4, 3)), ((5, 1),)]


def problem(shapes, width=32, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    m, tokens = width // 8, sum(number * length for number, length in shapes)
    weights = noise(4, 3 * m, m), noise(1, 6 * m, 2 * m), noise(3 * m), noise(4, m, m), noise(1, 2 * m, 2 * m)
    return noise(tokens, width), weights


def definition(x, weights, heads, shapes):
    qkv_1, qkv_2, bias, proj_1, proj_2 = weights
    qkv = linear.definition(x, qkv_1, qkv_2)
    out = attention.definition(qkv, heads, Layout(qkv.shape[1]), bias, shapes=shapes)
    return linear.definition(out, proj_1, proj_2)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("size", [1, 3000, 2**30])
def test_it_is_both_maps_and_attention(shapes, size, monkeypatch):
    monkeypatch.setattr(mha, "QKV_BYTES", size)
    x, weights = problem(shapes)
    expected = definition(x, weights, 2, shapes)
    given = x.clone()
    torch.testing.assert_close(mha.octic_mha(x, *weights, 2, shapes=shapes), expected)
    assert torch.equal(x, given)
    result = mha.octic_mha(x, *weights, 2, shapes=shapes, overwrite=True)
    assert result is x
    torch.testing.assert_close(x, expected)


def test_images_need_no_shapes():
    shapes = ((3, 5),)
    x, weights = problem(shapes)
    found = mha.octic_mha(x.view(3, 5, -1), *weights, 2)
    torch.testing.assert_close(found, definition(x, weights, 2, shapes).view(3, 5, -1))


def test_no_part_has_more_bytes_than_it_may(monkeypatch):
    monkeypatch.setattr(mha, "QKV_BYTES", 1000)
    parts = [*mha._parts(((7, 20), (3, 60), (2, 1)), 10)]
    assert [shape for _, (shape,) in parts] == [(4, 20), (3, 20), (1, 60), (1, 60), (1, 60), (2, 1)]
    assert [(tokens.start, tokens.stop) for tokens, _ in parts] == [
        (0, 80),
        (80, 140),
        (140, 200),
        (200, 260),
        (260, 320),
        (320, 322),
    ]
    assert len([*mha._parts(((2, 20), (1, 60)), 10)]) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_are_made_of_it(compiled, monkeypatch):
    block = randomize(OcticBlock(32, 2)).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)

    def twice(x):
        return block(*block(x, defer=True))

    with torch.no_grad():
        expected, given = twice(x), x.clone()
        monkeypatch.setattr("quickvit.layers.attention.takes_mha", lambda *_: True)
        if compiled:
            twice = torch.compile(twice, backend="aot_eager", fullgraph=True)
        found = twice(x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(x, given)


def test_what_a_hook_kept_is_not_overwritten(monkeypatch):
    monkeypatch.setattr("quickvit.layers.attention.takes_mha", lambda *_: True)
    block, kept = randomize(OcticBlock(32, 2)).double(), []
    block.norm1.register_forward_hook(lambda module, inputs, output: kept.append(output))
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        block(x)
        torch.testing.assert_close(kept[0], block.norm1(x))


def test_it_is_for_a_gpu_without_gradients():
    x, group = torch.empty(2, 32), Layout(32).group
    assert not mha.takes_mha(x, group)


def test_it_is_registered_soundly():
    shapes = ((3, 5),)
    x, weights = problem(shapes, dtype=torch.float32)
    for operator in (torch.ops.quickvit.octic_mha, torch.ops.quickvit.octic_mha_):
        opcheck(operator.default, (x, *weights, 2, [3], [5]))


def test_its_operations_are_counted():
    shapes = ((3, 5), (1, 4))
    x, weights = problem(shapes)

    def count(function, *args, **options):
        with FlopCounterMode(display=False) as counter:
            function(*args, **options)
        return counter.get_total_flops()

    expected = count(definition, x, weights, 2, shapes)
    for overwrite in (False, True):
        assert count(mha.octic_mha, x, *weights, 2, shapes=shapes, overwrite=overwrite) == expected
