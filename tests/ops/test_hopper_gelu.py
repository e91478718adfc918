"""A linear map and GELU in one kernel for Hopper, run on a CPU."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.ops import hopper, mlp
from quickvit.ops.gelu import definition as gelu
from quickvit.ops.linear import definition as linear
from quickvit.ops.triton import hopper_gelu

# Of lanes past the end, whose results nobody uses.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(hopper_gelu, "_linear_gelu", OnCpu(hopper_gelu._linear_gelu))
    monkeypatch.setattr(hopper_gelu, "multiprocessors", lambda device: 3)


def problem(tokens, channels, width, dtype):
    generator = torch.Generator().manual_seed(tokens)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    x, f, m = noise(tokens, channels).to(dtype), width // 8, channels // 8
    weights = noise(4, f, m) / m**0.5, noise(1, 2 * f, 2 * m) / (2 * m) ** 0.5
    return x, tuple(weight.to(dtype) for weight in weights), noise(f)


@pytest.mark.parametrize("channels", [1024, 1280])
@pytest.mark.parametrize(("tokens", "width"), [(1, 256), (130, 768), (450, 2048)])
@pytest.mark.parametrize(("biased", "scaled"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_linear_map_and_gelu(tokens, channels, width, biased, scaled, dtype):
    x, weights, bias = problem(tokens, channels, width, dtype)
    bias = bias if biased else None
    factors = 0.5 + torch.rand(tokens) if scaled else None
    y = torch.full((tokens + 1, width), float("nan"), dtype=dtype)
    hopper_gelu.linear_gelu(x, *weights, bias, y[:tokens], factors)
    products = linear(x.float(), *(w.float() for w in weights)).to(dtype).float()
    products = products if factors is None else factors[:, None] * products
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y[:tokens].float(), gelu(products, bias), rtol=tolerance, atol=tolerance)
    assert y[tokens].isnan().all()


def test_no_tokens():
    x, weights, bias = problem(0, 1024, 256, torch.bfloat16)
    hopper_gelu.linear_gelu(x, *weights, bias, torch.empty(0, 256, dtype=x.dtype))


def test_the_perceptron_is_made_of_it(monkeypatch):
    monkeypatch.setattr(hopper, "launches_gelu", lambda *_: True)
    monkeypatch.setattr(mlp, "kernels", None)
    x, up, bias = problem(70, 1280, 512, torch.bfloat16)
    down = tuple((torch.randn_like(w.float().mT) / 10).to(x.dtype) for w in up)
    y = torch.full_like(x, float("nan"))
    mlp.in_parts(x, y, up, bias, down)

    def expected(factors):
        hidden = factors * linear(x.double(), *(w.double() for w in up))
        return linear(gelu(hidden, bias), *(w.double() for w in down))

    torch.testing.assert_close(y.double(), expected(1), rtol=3e-2, atol=3e-2)
    # In three parts, each with its own factors.
    monkeypatch.setattr(mlp, "HIDDEN_BYTES", 2**15)
    factors, stream = 0.5 + torch.rand(70), x.clone()
    mlp.mlp_onto(stream, factors, *up, bias, *down)
    torch.testing.assert_close(stream.double(), x + expected(factors[:, None]), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("dtype", "channels", "width", "memory", "taken"),
    [
        (torch.bfloat16, 1024, 4096, 232448, True),
        (torch.float16, 1024, 512, 232448, True),
        (torch.bfloat16, 1280, 5120, 232448, True),
        (torch.float32, 1024, 4096, 232448, False),
        (torch.bfloat16, 768, 3072, 232448, False),
        (torch.bfloat16, 1664, 6656, 232448, False),
        (torch.bfloat16, 1024, 4224, 232448, False),
        (torch.bfloat16, 1024, 4096, 166912, False),
    ],
)
def test_what_it_takes(monkeypatch, dtype, channels, width, memory, taken):
    monkeypatch.setattr(hopper_gelu, "shared_memory", lambda device: memory)
    hopper_gelu.takes.cache_clear()
    assert hopper_gelu.takes(torch.device("cuda"), dtype, channels, width) == taken
    hopper_gelu.takes.cache_clear()
