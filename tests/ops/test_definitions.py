"""The operators against their definitions in standard PyTorch, with gradients, compiled, and under autocast."""

from contextlib import nullcontext

import pytest
import torch
from torch.library import opcheck

from quickvit.group import D2, D8, DihedralGroup, Layout
from quickvit.ops import attention, gelu, mlp, norm, octic_gelu, octic_linear, plain
from quickvit.ops.cpu import library
from quickvit.ops.rows import Rows

GROUPS = [D2, D8, DihedralGroup(12)]


def weights(group, rows, columns, dtype=torch.float64):
    one = torch.randn(group.num_one_dim, rows, columns, dtype=dtype, requires_grad=True)
    two = torch.randn(group.num_two_dim, 2 * rows, 2 * columns, dtype=dtype, requires_grad=True)
    return one, two, torch.randn(rows, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
def test_linear_equals_its_definition(group, shape):
    x = torch.randn(*shape, 2 * group.order, dtype=torch.float64, requires_grad=True)
    parameters = weights(group, 3, 2)
    fused = octic_linear(x, *parameters)
    with plain():
        defined = octic_linear(x, *parameters)
    torch.testing.assert_close(fused, defined)
    grad = torch.randn_like(fused)
    leaves = [t for t in (x, *parameters) if t.numel()]
    for a, b in zip(
        torch.autograd.grad(fused, leaves, grad), torch.autograd.grad(defined, leaves, grad), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_takes_strided_input(dtype):
    x = torch.randn(5, 32, dtype=dtype)
    parameters = weights(D8, 3, 2, dtype)
    expected = octic_linear(x[:, :16].contiguous(), *parameters)
    torch.testing.assert_close(octic_linear(x[:, :16], *parameters), expected)
    columns = x[:, :16].T.contiguous().T
    torch.testing.assert_close(octic_linear(columns, *parameters), expected)


@pytest.mark.parametrize("wanted", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_has_each_gradient_alone(wanted, dtype):
    """As where the other parameters are frozen."""
    inputs = [torch.randn(5, 16, dtype=dtype), *(w.detach() for w in weights(D8, 3, 2, dtype))]
    leaf, grad = inputs[wanted].requires_grad_(), torch.randn(5, 24, dtype=dtype)
    (found,) = torch.autograd.grad(octic_linear(*inputs), leaf, grad)
    with plain():
        (expected,) = torch.autograd.grad(octic_linear(*inputs), leaf, grad)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_refuses_parameters_of_different_maps(dtype):
    x, (one, two, bias) = torch.randn(5, 16, dtype=dtype), (w.detach() for w in weights(D8, 3, 2, dtype))
    for wrong in ((one, two[:, :2], bias), (one, two[..., :2], bias), (one, two, bias[:2])):
        with pytest.raises(ValueError, match=r"expected .* got "):
            octic_linear(x, *wrong)


@pytest.mark.skipif(not library.available(), reason="there is no C compiler")
def test_no_hidden_features_are_refused():
    shapes = (4, 0, 2), (1, 0, 4), (0,), (4, 2, 0), (1, 4, 0)
    with pytest.raises(ValueError, match=r"weights \[4, o, i\].*\(4, 0, 2\)"):
        mlp.octic_mlp(torch.randn(5, 16), *map(torch.empty, shapes))


def test_vectors_of_another_length_are_refused():
    """Kernels would read past their ends."""
    layout = Layout(64)
    x, gain, m = torch.randn(2, 3, 64), torch.ones(layout.gains), torch.ones(layout.copies)
    calls = {
        r"bias of 8 entries, got shape \(7,\)": lambda: octic_gelu(x, m[:7]),
        r"gain of 48 entries, got shape \(8,\)": lambda: norm.octic_layer_norm(x, m, m, 1e-6, layout),
        r"shift of 8 entries, got shape \(1,\)": lambda: norm.octic_layer_norm(x, gain, m[:1], 1e-6, layout),
        r"scale of 48 entries, got shape \(8,\)": lambda: norm.octic_residual_norm(
            x, x, gain, m, 1e-6, layout, scale=m
        ),
        r"shift of 8 entries, got shape \(2,\)": lambda: norm.octic_residual_norm(
            x, x, gain, m[:2], 1e-6, layout
        ),
        r"branch like x, \(2, 3, 64\), got \(2, 1, 64\)": lambda: norm.octic_residual_norm(
            x, x[:, :1], gain, m, 1e-6, layout
        ),
        r"bias of 24 entries, got shape \(8,\)": lambda: attention.octic_attention(
            torch.randn(2, 3, 192), 2, Layout(192), m
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_no_tokens_have_factors_of_their_samples():
    layout, x = Layout(64), torch.zeros(2, 0, 64)
    options = {"sample_scale": torch.ones(2)}
    z, y = norm.octic_residual_norm(
        x, x, torch.ones(layout.gains), torch.ones(layout.copies), 1e-6, layout, **options
    )
    assert z.shape == y.shape == x.shape


@pytest.mark.parametrize("length", [1, 7, 16, 17, 31, 39])
def test_attention_finds_the_largest_logit_where_it_comes_last(length):
    layout, qkv = Layout(24), torch.randn(1, length, 24)
    # q and k of A1.
    qkv[0, :, 0] = qkv[0, -1, 1] = 100
    qkv[0, :-1, 1] = 0
    found = attention.octic_attention(qkv, 1, layout)
    with plain():
        expected = attention.octic_attention(qkv, 1, layout)
    torch.testing.assert_close(found, expected)


def test_linear_leaves_no_output_unwritten(monkeypatch):
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: new_empty(self, *a, **k).fill_(float("nan"))
    )
    y = octic_linear(torch.randn(7, 16, dtype=torch.float64), *weights(D8, 3, 2))
    assert y.isfinite().all()


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 197])
def test_gelu_equals_its_definition(group, tokens):
    x = torch.randn(tokens, 2 * group.order, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    fused = octic_gelu(x, bias, group)
    with plain():
        defined = octic_gelu(x, bias, group)
    torch.testing.assert_close(fused, defined)
    grad = torch.randn_like(fused)
    for a, b in zip(
        torch.autograd.grad(fused, (x, bias), grad),
        torch.autograd.grad(defined, (x, bias), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_gelu_works_in_chunks(monkeypatch):
    x = torch.randn(37, 16, dtype=torch.float64)
    whole = octic_gelu(x)
    monkeypatch.setattr(gelu, "_STEP_ELEMENTS", 5 * 16)
    torch.testing.assert_close(octic_gelu(x), whole)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operators_are_registered_soundly():
    parameters = weights(D8, 3, 2)
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    opcheck(torch.ops.quickvit.octic_linear.default, (x, *parameters))
    opcheck(torch.ops.quickvit.octic_linear.default, (x, *parameters[:2], None))
    opcheck(torch.ops.quickvit.octic_gelu.default, (x, torch.randn(2, dtype=torch.float64), 8))


def test_autocast_multiplies_in_half_precision():
    x, parameters = torch.randn(5, 16), weights(D8, 3, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = octic_linear(x, *parameters)
        wide = octic_linear(x.double(), *(p.double() for p in parameters))
    assert y.dtype == torch.bfloat16
    assert wide.dtype == torch.float64
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters)


def test_gelu_overwrites_only_where_no_gradient_needs_its_input():
    x, bias = torch.randn(2, 7, 16), torch.randn(2)
    expected = octic_gelu(x, bias)
    kept = x.clone().requires_grad_()
    y = octic_gelu(kept * 1, bias, overwrite=True)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert kept.grad is not None
    trained = bias.clone().requires_grad_()
    octic_gelu(x.clone(), trained, overwrite=True).sum().backward()
    assert trained.grad is not None
    with torch.no_grad():
        spare = x.clone()
        y = octic_gelu(spare, bias, overwrite=True)
        strided = octic_gelu(x.transpose(0, 1).contiguous().transpose(0, 1), bias, overwrite=True)
    assert y.data_ptr() == spare.data_ptr()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(strided, expected)


@pytest.mark.skipif(not library.available(), reason="there is no C compiler")
@pytest.mark.parametrize("module", [norm, gelu, attention], ids=lambda module: module.__name__)
def test_kernels_find_entries_of_vectors_side_by_side(module, monkeypatch):
    """Those in C make sure of it, those in Triton do not."""
    found, kernels = [], module.kernels

    class Noting:
        def __init__(self, x, name):
            self.kernels = kernels(x, name)

        def __getattr__(self, name):
            def call(*arguments, **options):
                found.extend(a for a in arguments if isinstance(a, torch.Tensor) and a.ndim == 1)
                return getattr(self.kernels, name)(*arguments, **options)

            return call

    monkeypatch.setattr(module, "kernels", Noting)
    x, layout = torch.randn(3, 5, 16), Layout(16)

    def vector(size):
        return torch.randn(size, 2)[:, 0].requires_grad_()

    if module is norm:
        branch, factors = torch.randn_like(x), torch.rand(3, 2)[:, 0]
        rest = {"bias": vector(2), "scale": vector(12), "sample_scale": factors}
        z, y = norm.octic_residual_norm(x, branch, vector(12), vector(2), 1e-6, layout, **rest)
        y = z + y + norm.octic_layer_norm(x, vector(12), vector(2), 1e-6, layout)
    elif module is gelu:
        y = octic_gelu(x, vector(2))
    else:
        y = attention.octic_attention(torch.randn(3, 5, 48), 2, Layout(48), vector(6))
    y.sum().backward()
    assert found
    assert all(tensor.is_contiguous() for tensor in found)


def test_a_factor_for_each_sample_is_asked_for():
    x, line, layout = torch.randn(6, 5, 64), torch.ones(48), Layout(64)
    with pytest.raises(ValueError, match="6 samples"):
        norm.octic_residual_norm(x, x, line, line[:8], 1e-6, layout, sample_scale=torch.ones(4))


@pytest.mark.parametrize("count", [0, 1])
def test_tokens_without_a_branch_get_no_bias(count, monkeypatch):
    """Kernels know them by their factors."""
    chosen = torch.tensor([1])[:count]
    added = Rows(chosen, torch.tensor([-1, count - 1, -1], dtype=torch.int32))
    given = []
    monkeypatch.setattr(
        norm, "_residual_norm", lambda *arguments: given.extend(arguments) or 3 * [torch.empty(3, 16)]
    )
    monkeypatch.setattr(norm, "fused", lambda *_: True)
    x, line = torch.randn(3, 16, device="meta"), torch.ones(12, device="meta")
    norm.octic_residual_norm(x, x[:count], line, line[:2], 1e-6, Layout(16), bias=line[:2], added=added)
    assert given[4].shape == (count,)


@pytest.mark.parametrize("eps", [0, 1])
@torch.no_grad()
def test_whole_numbers_are_numbers(eps):
    x, line, layout = torch.randn(5, 16), torch.ones(12), Layout(16)
    found = norm.octic_layer_norm(x, line, line[:2], eps, layout, pair_weight=1)
    with plain():
        expected = norm.octic_layer_norm(x, line, line[:2], eps, layout, pair_weight=1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_refuses_broken_octets(dtype):
    with pytest.raises(ValueError, match="multiple of 8 channels for D8, got 60"):
        octic_gelu(torch.ones(3, 60, dtype=dtype))


def test_gradients_within_autocast_have_the_type_of_the_forward_pass():
    x = torch.randn(5, 16)
    parameters = weights(D8, 3, 2, torch.float32)
    y = octic_linear(x, *parameters).square().sum()
    expected = torch.autograd.grad(y, parameters, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, parameters)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_of_samples_have_gradients(dtype):
    layout, generator = Layout(16), torch.Generator().manual_seed(0)
    x, branch = torch.randn(2, 2, 3, 16, generator=generator).to(dtype)
    gain, shift, factors = (
        torch.ones(12, dtype=dtype),
        torch.zeros(2, dtype=dtype),
        torch.ones(2, dtype=dtype),
    )
    grads = []
    for standard in (False, True):
        factors = factors.detach().requires_grad_()
        with plain() if standard else nullcontext():
            z, y = norm.octic_residual_norm(x, branch, gain, shift, 1e-6, layout, sample_scale=factors)
        grads.append(torch.autograd.grad((z * y).square().sum(), factors)[0])
    torch.testing.assert_close(*grads)
    assert grads[0].abs().min() > 0


def test_squares_that_overflow_are_no_zeros():
    """Whoever looks whether outputs are finite must see that a run has diverged."""
    x = torch.ones(2, 16)
    x[0, 3] = 1e20
    y = norm.octic_layer_norm(x, torch.ones(12), torch.zeros(2), 1e-6, Layout(16))
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_numbers_of_channels_are_named(dtype):
    x, layout = torch.randn(5, 24, dtype=dtype), Layout(16)
    gain, shift = torch.ones(12, dtype=dtype), torch.zeros(2, dtype=dtype)
    with pytest.raises(ValueError, match="expected 16 channels, as the layout has, got 24"):
        norm.octic_layer_norm(x, gain, shift, 1e-6, layout)
    with pytest.raises(ValueError, match="expected 16 channels, as the layout has, got 24"):
        norm.octic_residual_norm(x[:, :16], x, gain, shift, 1e-6, layout)
    with pytest.raises(ValueError, match="expected 16 channels, as the weights have, got 24"):
        octic_linear(x, torch.ones(4, 3, 2, dtype=dtype), torch.ones(1, 6, 4, dtype=dtype))


def test_negative_views_keep_their_sign():
    weight = torch.randn(4, 3, 2, dtype=torch.complex64).conj().imag
    assert weight.is_neg()
    x, other = torch.randn(5, 16), torch.randn(1, 6, 4)
    torch.testing.assert_close(octic_linear(x, weight, other), octic_linear(x, weight.clone(), other))


@pytest.mark.parametrize("part", ["branch", "gain", "bias"])
def test_compiled_gradients_have_the_types_that_were_promised(part):
    torch.compiler.reset()
    values = {"x": torch.randn(2, 3, 16), "branch": torch.randn(2, 3, 16), "gain": torch.randn(12)}
    values |= {"shift": torch.zeros(2), "bias": torch.randn(2)}
    values[part] = values[part].bfloat16()

    def loss(x, branch, gain, shift, bias):
        return sum(
            t.square().sum()
            for t in norm.octic_residual_norm(x, branch, gain, shift, 1e-6, Layout(16), bias=bias)
        )

    compiled = torch.compile(loss, backend="aot_eager")
    for function in (loss, compiled):
        inputs = [value.detach().requires_grad_() for value in values.values()]
        function(*inputs).backward()
        assert all(value.grad.dtype == value.dtype for value in inputs)


def test_no_tokens_with_gaps_have_no_results():
    x = torch.zeros(0, 32)[:, ::2]
    assert octic_linear(x, torch.ones(4, 3, 2), torch.ones(1, 6, 4)).shape == (0, 24)
