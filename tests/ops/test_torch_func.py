"""What PyTorch can do to functions of standard operators it can do to ours."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from quickvit.group import DihedralGroup
from quickvit.group.layout import packed_fourier_matrix
from quickvit.layers import OcticAttention, OcticBlock, OcticLayerNorm, OcticLinear, OcticMlp
from quickvit.ops import plain
from quickvit.ops.backend import is_plain
from quickvit.testing import randomize

LAYERS = {
    "linear": OcticLinear(64, 32),
    "norm": OcticLayerNorm(64),
    "mlp": OcticMlp(64, 128),
    "attention": OcticAttention(64, 2),
    "block": OcticBlock(64, 2, init_values=1.0),
}
# PyTorch's own attention has no derivative forwards.
WITHOUT_ATTENTION = [name for name in LAYERS if name not in ("attention", "block")]


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request):
    return request.param


def case(name, dtype):
    return randomize(LAYERS[name]).to(dtype).eval(), torch.randn(3, 5, 64, dtype=dtype)


# PyTorch says of itself how it decomposes operators, and that it calls attention once for each sample.
@pytest.mark.filterwarnings("ignore:.*jit.script:FutureWarning", "ignore:.*jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_derivatives_forwards(name, dtype):
    layer, x = case(name, dtype)
    direction, step = torch.randn_like(x), 1e-6
    exact = layer.double()
    with torch.no_grad(), plain():
        sides = [exact(x.double() + sign * step * direction.double()) for sign in (1, -1)]
    expected = (sides[0] - sides[1]) / (2 * step)
    layer = layer.to(dtype)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
    for tangent in (jvp(layer, (x,), (direction,))[1], dual):
        torch.testing.assert_close(tangent.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_each_sample(name, dtype):
    layer, x = case(name, dtype)
    parameters = {key: value.detach() for key, value in layer.named_parameters()}

    def loss(parameters, sample):
        return functional_call(layer, parameters, (sample[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        layer.zero_grad()
        layer(sample[None]).square().sum().backward()
        for key, value in layer.named_parameters():
            torch.testing.assert_close(found[key][i], value.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_one_token(name, dtype):
    layer, x = case(name, dtype)
    torch.testing.assert_close(layer(x[0, 0]), layer(x)[0, 0])
    with torch.no_grad():
        torch.testing.assert_close(layer(x[0, 0]), layer(x)[0, 0])


def test_contexts_of_threads_may_overlap():
    first, second = plain(), plain()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_plain()
    second.__exit__(None, None, None)
    assert not is_plain()


def test_matrices_outlive_the_mode_they_were_made_in():
    packed_fourier_matrix.cache_clear()
    layer, x = OcticMlp(24, 24, group=DihedralGroup(12)).double(), torch.randn(2, 24, dtype=torch.float64)
    with torch.inference_mode():
        layer(x)
    with plain():
        layer(x).sum().backward()


@pytest.mark.filterwarnings("ignore:.*jit.script:FutureWarning", "ignore:.*jit.script:DeprecationWarning")
# Of PyTorch's own layer norm release 2.11 compiles none.
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_derivatives_forwards_of_compiled_functions(name):
    torch.compiler.reset()
    layer, x = case(name, torch.float32)
    direction = torch.randn_like(x)

    def tangent(x, direction):
        return jvp(layer, (x,), (direction,))[1]

    expected = tangent(x, direction)
    assert expected.abs().max() > 0
    compiled = torch.compile(tangent, backend="aot_eager")
    torch.testing.assert_close(compiled(x, direction), expected, atol=1e-4, rtol=1e-4)
