"""A linear map and GELU in one kernel for Hopper, run on a CPU."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.ops import hopper, mlp
from quickvit.ops.gelu import definition as gelu
from quickvit.ops.linear import definition as linear
from quickvit.ops.norm import deviation
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
@pytest.mark.parametrize(
    ("biased", "norm"), [(True, None), (False, None), (True, (1e-6, 1.0)), (True, (0.1, 0.25))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_linear_map_and_gelu(tokens, channels, width, biased, norm, dtype):
    x, weights, bias = problem(tokens, channels, width, dtype)
    bias = bias if biased else None
    y = torch.full((tokens + 1, width), float("nan"), dtype=dtype)
    x = x if norm is None else 2 * x + 1
    hopper_gelu.linear_gelu(x, *weights, bias, y[:tokens], norm)
    products = linear(x.float(), *(w.float() for w in weights)).to(dtype).float()
    products = products if norm is None else deviation(x, *norm)[:, None] * products
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y[:tokens].float(), gelu(products, bias), rtol=tolerance, atol=tolerance)
    assert y[tokens].isnan().all()


def test_no_tokens():
    x, weights, bias = problem(0, 1024, 256, torch.bfloat16)
    hopper_gelu.linear_gelu(x, *weights, bias, torch.empty(0, 256, dtype=x.dtype))


def test_the_perceptron_is_made_of_it(monkeypatch):
    monkeypatch.setattr(hopper, "launches_gelu", lambda *_, **__: True)
    monkeypatch.setattr(mlp, "kernels", None)
    x, up, bias = problem(70, 1280, 512, torch.bfloat16)
    down = tuple((torch.randn_like(w.float().mT) / 10).to(x.dtype) for w in up)
    y = torch.full_like(x, float("nan"))
    mlp.in_parts(x, y, up, bias, down)

    def expected(factors):
        hidden = factors * linear(x.double(), *(w.double() for w in up))
        return linear(gelu(hidden, bias), *(w.double() for w in down))

    torch.testing.assert_close(y.double(), expected(1), rtol=3e-2, atol=3e-2)
    # In three parts, of tokens that are normalised before, and onto them.
    monkeypatch.setattr(mlp, "HIDDEN_BYTES", 2**15)
    stream, norm, second_bias = x.clone(), (0.1, 0.25), torch.randn(160).to(x.dtype)
    mlp.mlp_onto(stream, *norm, *up, bias, *down, second_bias)
    total = x + expected(deviation(x, *norm)[:, None])
    total[:, :160] += second_bias
    torch.testing.assert_close(stream.double(), total, rtol=3e-2, atol=3e-2)


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
