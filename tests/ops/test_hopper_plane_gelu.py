"""GELU with the products of E before it, run on a CPU: of tokens whose channels do not all fit."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.ops.gelu import definition as gelu
from quickvit.ops.linear import definition as linear
from quickvit.ops.linear import line_products
from quickvit.ops.norm import deviation
from quickvit.ops.triton import hopper_plane_gelu as kernels

# Of lanes past the end, whose results nobody uses.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "_plane_gelu", OnCpu(kernels._plane_gelu))
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)


# Components of 416 and 448 channels, of which the first are no whole boxes, and of 96, which are more than one.
@pytest.mark.parametrize("channels", [1664, 1792, 384])
@pytest.mark.parametrize(("tokens", "width"), [(1, 256), (130, 768), (450, 2048)])
@pytest.mark.parametrize(("biased", "norm"), [(True, None), (False, None), (True, (0.1, 0.25))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_linear_map_and_gelu(tokens, channels, width, biased, norm, dtype):
    generator = torch.Generator().manual_seed(tokens)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    f, m = width // 8, channels // 8
    x, bias = noise(tokens, channels).to(dtype), noise(f) if biased else None
    weights = [(noise(n, k * f, k * m) / (k * m) ** 0.5).to(dtype) for n, k in ((4, 1), (1, 2))]
    x = x if norm is None else 2 * x + 1
    factors = None if norm is None else deviation(x, *norm)
    y = torch.full((tokens + 1, width), float("nan"), dtype=dtype)
    line_products(x, weights[0], y[:tokens])
    kernels.plane_gelu(x, weights[1], bias, y[:tokens], factors)
    products = linear(x.float(), *(w.float() for w in weights)).to(dtype).float()
    products = products if norm is None else factors[:, None] * products
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y[:tokens].float(), gelu(products, bias), rtol=tolerance, atol=tolerance)
    assert y[tokens].isnan().all()


def test_no_tokens():
    x, y, two = torch.empty(0, 1664), torch.empty(0, 256), torch.empty(1, 64, 416)
    kernels.plane_gelu(x, two, None, y)


@pytest.mark.parametrize(
    ("dtype", "channels", "width", "memory", "taken"),
    [
        (torch.bfloat16, 1664, 8192, 232448, True),
        (torch.float16, 1792, 15360, 232448, True),
        (torch.float32, 1664, 8192, 232448, False),
        (torch.bfloat16, 2048, 8192, 232448, False),
        (torch.bfloat16, 1280, 8192, 232448, False),
        (torch.bfloat16, 1680, 8192, 232448, False),
        (torch.bfloat16, 1664, 8320, 232448, False),
        (torch.bfloat16, 1664, 8192, 166912, False),
    ],
)
def test_what_it_takes(monkeypatch, dtype, channels, width, memory, taken):
    monkeypatch.setattr(kernels, "shared_memory", lambda device: memory)
    kernels.takes.cache_clear()
    assert kernels.takes(torch.device("cuda"), dtype, channels, width) == taken
    kernels.takes.cache_clear()
