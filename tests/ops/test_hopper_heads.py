"""The linear map to heads in pairs by the kernel for Hopper, run on a CPU."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.ops.linear import definition
from quickvit.ops.norm import deviation
from quickvit.ops.triton import hopper_heads
from quickvit.ops.triton.heads import to_heads


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(hopper_heads, "_linear_heads", OnCpu(hopper_heads._linear_heads))


# Of 16 programs some have the last tile of a block and the first of the next, so that each group has none of one.
@pytest.mark.parametrize(("tokens", "programs"), [(0, 3), (1, 3), (64, 3), (130, 3), (300, 3), (192, 16)])
@pytest.mark.parametrize(("biased", "norm"), [(True, None), (False, None), (True, (0.1, 0.25))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_linear_map_and_a_copy_into_heads(tokens, programs, biased, norm, dtype, monkeypatch):
    monkeypatch.setattr(hopper_heads, "multiprocessors", lambda device: programs)
    generator = torch.Generator().manual_seed(tokens)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    x, bias = noise(tokens, 1280).to(dtype), noise(480)
    weights = [(noise(*shape) / shape[2] ** 0.5).to(dtype) for shape in ((4, 480, 160), (1, 960, 320))]
    bias = bias if biased else None
    x = x if norm is None else 2 * x + 1
    found = hopper_heads.linear_heads(x, *weights, bias, norm)
    products = definition(x.float(), *(weight.float() for weight in weights))
    products = products if norm is None else deviation(x, *norm)[:, None] * products
    expected = to_heads(products, 16, 3, bias, (tokens, 1), 0, pairs=True)
    tolerance = torch.finfo(dtype).eps
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), exact[:, 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "channels", "heads", "memory", "taken"),
    [
        (torch.bfloat16, 1280, 16, 232448, True),
        (torch.float16, 1280, 16, 232448, True),
        (torch.float32, 1280, 16, 232448, False),
        (torch.bfloat16, 1280, 20, 232448, False),
        (torch.bfloat16, 1024, 16, 232448, False),
        (torch.bfloat16, 1280, 16, 166912, False),
    ],
)
def test_what_it_takes(monkeypatch, dtype, channels, heads, memory, taken):
    monkeypatch.setattr(hopper_heads, "shared_memory", lambda device: memory)
    hopper_heads.takes.cache_clear()
    assert hopper_heads.takes(torch.device("cuda"), dtype, channels, heads) == taken
    hopper_heads.takes.cache_clear()
