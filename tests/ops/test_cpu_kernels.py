"""The C kernels against their definitions in float64, gradients too, on outputs and scratch that start as NaN."""

import math
import os

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from quickvit.bench.timing import threads
from quickvit.group import D2, D8, Layout
from quickvit.layers import OcticBlock, OcticMlp
from quickvit.ops import attention, gelu, linear, mlp, norm, octic_attention, octic_gelu, octic_linear, plain
from quickvit.ops.backend import fused
from quickvit.ops.cpu import library
from quickvit.ops.cpu.linear import linear_forward, mlp_forward
from quickvit.ops.packing import pack, unpack

EPS = 1e-6

pytestmark = pytest.mark.skipif(not library.available(), reason="there is no C compiler")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel forgets to write is NaN, and so is what it finds in its scratch memory."""

    def poisoned(empty):
        def filled(*args, **kwargs):
            tensor = empty(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape)


def outcomes(function, tensors, dtype, grads):
    """Results and gradients of a function of the tensors in this dtype, all in float64."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    slopes = torch.autograd.grad(results, leaves, [g.to(dtype) for g in grads[: len(results)]])
    return [t.detach().double() for t in (*results, *slopes)]


def assert_as_exact(kernel, definition, tensors, grads) -> None:
    """Errors of results and gradients against float64: at most twice those of the definition, and two roundings."""
    exact = outcomes(definition, tensors, torch.float64, grads)
    single = outcomes(definition, tensors, torch.float32, grads)
    ours = outcomes(kernel, tensors, torch.float32, grads)
    assert len(ours) == len(exact)
    for a, b, c in zip(ours, single, exact, strict=True):
        assert a.shape == c.shape
        assert a.isfinite().all()
        rounding = torch.finfo(torch.float32).eps * c.abs().max()
        assert (a - c).abs().max() <= 2 * ((b - c).abs().max() + rounding)


# ---------------------------------------------------------------------- against the definitions


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("tokens", "copies"), [(1, 8), (197, 24), (33, 208), (40, 1)])
def test_gelu(tokens, copies, number):
    x, bias, grad = draw(tokens, 8 * copies, scale=2), draw(copies), draw(tokens, 8 * copies)
    with threads(number):
        assert_as_exact(octic_gelu, gelu.definition, (x, bias), (grad,))
        assert_as_exact(octic_gelu, gelu.definition, (x,), (grad,))


def test_what_gelu_leaves_as_it_is_leaks_nowhere():
    """Of a feature that all poses share, A1, come equal numbers, whose differences are 0."""
    x = torch.zeros(64, 128)
    x[:, :16] = torch.randn(64, 16)
    y = octic_gelu(x)
    assert y[:, :16].any()
    assert not y[:, 16:].any()


def test_gelu_is_exact_from_tail_to_tail():
    z = torch.cat([torch.linspace(-12, 12, 80_001), torch.tensor([-1e4, -0.0, 0.0, 1e4])])
    # Equal sub-tokens of the regular domain are A1 alone: x = √8 z on A1.
    x = functional.pad(math.sqrt(8) * z.unsqueeze(1), (0, 7))
    y, exact = octic_gelu(x)[:, 0].double() / math.sqrt(8), functional.gelu(x[:, 0].double() / math.sqrt(8))
    assert ((y - exact).abs() <= 3e-7 * exact.abs().clamp(1, None)).all()
    assert octic_gelu(torch.full((1, 8), math.nan)).isnan().all()


@pytest.mark.parametrize("pair_weight", [1.0, 0.25])
@pytest.mark.parametrize(("batch", "tokens", "copies"), [(1, 1, 8), (2, 33, 24), (3, 5, 208), (2, 3, 13)])
def test_norm(batch, tokens, copies, pair_weight):
    layout = Layout(8 * copies)
    x, gain, shift = draw(batch, tokens, 8 * copies) + 3, draw(6 * copies), draw(copies)

    def kernel(x, gain, shift):
        return norm.octic_layer_norm(x, gain, shift, EPS, layout, pair_weight=pair_weight)

    def definition(x, gain, shift):
        return norm.definition(x, gain, shift, EPS, layout, pair_weight=pair_weight)

    assert_as_exact(kernel, definition, (x, gain, shift), (draw(*x.shape),))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("options", ["", "bias", "scale", "bias scale samples", "samples"])
@pytest.mark.parametrize(("batch", "tokens", "copies"), [(2, 33, 24), (3, 1, 13)])
def test_residual_norm(batch, tokens, copies, options, number):
    layout = Layout(8 * copies)
    x, branch = draw(batch, tokens, 8 * copies), draw(batch, tokens, 8 * copies)
    names = [name for name in ("bias", "scale") if name in options]
    parameters = [draw({"bias": copies, "scale": 6 * copies}[name]) for name in names]
    samples = torch.arange(1.0, batch + 1) if "samples" in options else None
    grads = draw(*x.shape), draw(*x.shape)

    def kernel(x, branch, gain, shift, *rest):
        given = dict(zip(names, rest, strict=True))
        return norm.octic_residual_norm(x, branch, gain, shift, EPS, layout, sample_scale=samples, **given)

    def definition(*tensors):
        with plain():
            return kernel(*tensors)

    tensors = (x, branch, draw(6 * copies), draw(copies), *parameters)
    with threads(number):
        assert_as_exact(kernel, definition, tensors, grads)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("shapes", "heads", "c"),
    [
        (((2, 197),), 2, 8),
        (((1, 1),), 1, 1),
        (((2, 33), (0, 4), (3, 5)), 3, 13),
        (((1, 20), (1, 70)), 5, 10),
    ],
)
def test_attention(shapes, heads, c, number):
    width, tokens = 8 * c * heads, sum(batch * length for batch, length in shapes)
    layout = Layout(3 * width)
    qkv, bias, grad = draw(tokens, 3 * width), draw(3 * width // 8), draw(tokens, width)

    def kernel(qkv, bias=None):
        return octic_attention(qkv, heads, layout, bias, shapes=shapes)

    def definition(qkv, bias=None):
        return attention.definition(qkv, heads, layout, bias, shapes=shapes)

    with threads(number):
        assert_as_exact(kernel, definition, (qkv, bias), (grad,))
        assert_as_exact(kernel, definition, (qkv,), (grad,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_of_packed_batches_is_that_of_each(dtype):
    batches, bias = [draw(2, 9, 96).to(dtype), draw(3, 4, 96).to(dtype)], draw(12).to(dtype)
    packed, shapes = pack(batches)
    found = unpack(octic_attention(packed, 2, Layout(96), bias, shapes=shapes), shapes)
    for out, batch in zip(found, batches, strict=True):
        assert torch.equal(out, octic_attention(batch, 2, Layout(96), bias))


def test_gradients_of_packed_attention():
    """Of the definition, which the kernels are compared with, in float64 against finite differences."""
    qkv, bias = draw(7, 48).double().requires_grad_(), draw(6).double().requires_grad_()

    def attend(qkv, bias):
        return octic_attention(qkv, 2, Layout(48), bias, shapes=((1, 3), (2, 2)))

    assert torch.autograd.gradcheck(attend, (qkv, bias))


def test_attention_survives_large_logits():
    qkv, shapes = draw(9, 48, scale=60), ((1, 9),)
    out = octic_attention(qkv, 1, Layout(48), shapes=shapes)
    exact = attention.definition(qkv.double(), 1, Layout(48), shapes=shapes)
    torch.testing.assert_close(out, exact.float(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 8, 24), (197, 24, 96), (33, 208, 13), (70, 3, 1), (65, 16, 128)]
)
def test_linear(tokens, inputs, outputs, number):
    x, grad = draw(tokens, 8 * inputs), draw(tokens, 8 * outputs)
    one, two = draw(4, outputs, inputs), draw(1, 2 * outputs, 2 * inputs)
    with threads(number):
        assert_as_exact(octic_linear, linear.definition, (x, one, two, draw(outputs)), (grad,))
        assert_as_exact(octic_linear, linear.definition, (x, one, two), (grad,))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("tokens", "width", "hidden"), [(1, 8, 8), (197, 64, 256), (50, 104, 24)])
def test_mlp_in_one_step(tokens, width, hidden, number):
    mlp = OcticMlp(width, hidden).eval()
    for p in mlp.parameters():
        torch.nn.init.normal_(p)
    x = draw(tokens, width)
    with threads(number), torch.no_grad():
        ours = mlp(x).double()
        with plain():
            single = mlp(x).double()
        exact = mlp.double()(x.double())
    assert ours.isfinite().all()
    assert (ours - exact).abs().max() <= 2 * (single - exact).abs().max()


def test_mlp_holds_many_hidden_features_in_little_scratch():
    # As wide as that of the largest model: fewer tokens at a time.
    x, one, two = draw(19, 8), draw(4, 3072, 1), draw(1, 6144, 2)
    with torch.no_grad():
        y = mlp_forward(x, one, two, None, one.mT, two.mT)
        exact = linear.definition(gelu.definition(linear.definition(x, one, two)), one.mT, two.mT)
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


# ---------------------------------------------------------------------- what they are given


def test_results_do_not_depend_on_the_threads():
    block, x = OcticBlock(192, 3), draw(2, 197, 192)
    results = []
    for number in (1, 2):
        with threads(number):
            y = block(x)
            block.zero_grad()
            y.square().sum().backward()
            with torch.no_grad():
                results.append([y, block(x), *(p.grad.clone() for p in block.parameters() if p.ndim == 1)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_no_tokens_and_strided_tokens():
    one, two = draw(4, 3, 2), draw(1, 6, 4)
    layout, gain, shift = Layout(16), draw(12), draw(2)

    def norm_of(x):
        return norm.octic_layer_norm(x, gain, shift, EPS, layout)

    def attend(qkv):
        return octic_attention(qkv, 2, Layout(48))

    def multiply(x):
        return octic_linear(x, one, two)

    def mlp(x):
        with torch.no_grad():
            return OcticMlp(16, 32).eval()(x)

    for function, width in ((octic_gelu, 16), (norm_of, 16), (attend, 48), (multiply, 16), (mlp, 16)):
        assert function(draw(2, 0, width)).shape[:2] == (2, 0)
        x = draw(3, 5, width)
        torch.manual_seed(0)
        expected = function(x)
        for strided in (
            draw(3, 5, 2 * width)[..., :width].copy_(x),
            x.transpose(0, 1).contiguous().transpose(0, 1),
            x.mT.contiguous().mT,
        ):
            assert not strided.is_contiguous()
            torch.manual_seed(0)
            assert torch.equal(function(strided), expected)


def test_the_bias_of_a_perceptron_has_no_gaps(monkeypatch):
    given = []
    monkeypatch.setattr(mlp, "_mlp", lambda x, one, two, bias, *_: given.append(bias) or x)
    bias = draw(6)[::2]
    mlp.octic_mlp(draw(5, 16), draw(4, 3, 2), draw(1, 6, 4), bias, draw(4, 2, 3), draw(1, 4, 6))
    assert given[0].is_contiguous()
    assert torch.equal(given[0], bias)


def test_strided_gradients():
    x = draw(3, 5, 16).requires_grad_()
    for function in (octic_gelu, lambda x: octic_linear(x, draw(4, 2, 2), draw(1, 4, 4))):
        torch.manual_seed(0)
        y = function(x)
        grad = draw(*y.shape)
        expected = torch.autograd.grad(y, x, grad, retain_graph=True)
        assert torch.equal(torch.autograd.grad(y, x, grad.mT.contiguous().mT)[0], expected[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: octic_gelu(draw(2, 16), draw(3)), r"2 entries, got shape \(3,\)"),
        (lambda: linear_forward(draw(2, 16), draw(4, 3, 3), draw(1, 6, 6), None), "expected tokens"),
        (lambda: linear_forward(draw(2, 24), draw(4, 3, 3).double(), draw(1, 6, 6), None), "float64"),
        (lambda: linear_forward(draw(24, 2).T, draw(4, 3, 3), draw(1, 6, 6), None), "contiguous"),
        (lambda: library.call("gelu_forward", draw(16, 2).T, None, draw(2, 16), 2, 2), "contiguous"),
        (lambda: octic_attention(draw(1, 2, 48), 3, Layout(48)), "do not make 3 heads"),
        (lambda: octic_attention(draw(5, 48), 2, Layout(48), shapes=((2, 3),)), "do not make the 5 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------------- who takes them


def test_the_kernels_take_single_precision_and_the_octic_group_alone():
    x = torch.zeros(2, 8)
    assert fused(x, D8)
    assert not fused(x, D2)
    assert not fused(x.double(), D8)
    assert not fused(x.bfloat16(), D8)
    assert not fused(x.to("meta"), D8)
    with plain():
        assert not fused(x, D8)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused(x, D8)


def test_dropout_in_attention_takes_the_definition():
    qkv, options = draw(50, 48), {"shapes": ((1, 20), (3, 10)), "dropout": 0.5}
    torch.manual_seed(0)
    dropped = octic_attention(qkv, 2, Layout(48), **options)
    torch.manual_seed(0)
    assert torch.equal(dropped, attention.definition(qkv, 2, Layout(48), **options))


def test_autocast_trains_a_block():
    block = OcticBlock(64, 2, init_values=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(draw(2, 9, 64))
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.skipif(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry,
    reason="this PyTorch does not count its own attention",
)
@pytest.mark.parametrize("shapes", [((2, 9),), ((1, 8), (5, 2))])
def test_flops_are_those_of_the_definition(shapes):
    block, x = OcticBlock(64, 2).eval(), draw(18, 64)

    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            with torch.no_grad():
                block(x, shapes=shapes)
            block(x, shapes=shapes).sum().backward()
        return counter.get_total_flops()

    ours = count()
    # The definition's transforms of GELU are no matrix products.
    with plain():
        assert ours == count()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operators_are_registered_soundly(monkeypatch):
    monkeypatch.undo()  # opcheck compares what is not written yet
    x, qkv = draw(6, 16).requires_grad_(), draw(7, 48).requires_grad_()
    gain, shift, bias = draw(12).requires_grad_(), draw(2).requires_grad_(), draw(2).requires_grad_()
    branch, samples = draw(6, 16).requires_grad_(), draw(3)
    ops, rest = torch.ops.quickvit, (EPS, 0.25, torch.float32)
    opcheck(ops.octic_gelu_fused_cpu.default, (x, bias))
    opcheck(ops.octic_gelu_fused__cpu.default, (x.detach(), bias.detach()))
    opcheck(ops.octic_layer_norm_cpu.default, (x, gain, shift, *rest))
    for options in ((None, None, None), (bias, gain, samples)):
        opcheck(ops.octic_residual_norm_cpu.default, (x, branch, *options, None, None, 6, gain, shift, *rest))
    opcheck(ops.octic_attention_cpu.default, (qkv, draw(6).requires_grad_(), 2, [1, 2], [3, 2]))
    weights = draw(4, 3, 2), draw(1, 6, 4)
    opcheck(ops.octic_linear.default, (x, *(w.requires_grad_() for w in weights), None))
    weights = draw(4, 3, 2), draw(1, 6, 4), draw(3), draw(4, 2, 3), draw(1, 4, 6)
    opcheck(ops.octic_mlp.default, (x.detach(), *weights))
    opcheck(ops.octic_mlp_.default, (x.detach(), *weights))
    square = draw(4, 2, 2), draw(1, 4, 4)
    for of_sum in (None, bias.detach()):
        opcheck(ops.octic_mlp_onto.default, (x.detach(), *rest[:2], *weights, of_sum))
        opcheck(ops.octic_linear_onto.default, (x.detach(), x.detach().clone(), *square, of_sum))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_processes_work_on_one_thread():
    x = draw(300, 64)
    with threads(2):
        expected = octic_gelu(x)
        context = torch.multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_in_child, args=(queue, x))
        child.start()
        child.join(60)
    assert child.exitcode == 0
    assert queue.get() == expected.sum().item()


def _in_child(queue, x: Tensor) -> None:
    torch.set_num_threads(1)  # as PyTorch's DataLoader does
    queue.put(octic_gelu(x).sum().item())


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("hidden_bytes", [1, 3000, 2**26])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_perceptron_of_a_part_of_the_tokens_at_a_time(tokens, hidden_bytes, overwrite, monkeypatch):
    monkeypatch.setattr(mlp, "HIDDEN_BYTES", hidden_bytes)
    torch.manual_seed(0)
    x = torch.randn(tokens, 32)
    weights = [
        torch.randn(4, 8, 4),
        torch.randn(1, 16, 8),
        torch.randn(8),
        torch.randn(4, 4, 8),
        torch.randn(1, 8, 16),
    ]
    hidden = gelu.definition(linear.definition(x, *weights[:2]), weights[2])
    y = x if overwrite else torch.full_like(x, torch.nan)
    mlp.in_parts(x, y, tuple(weights[:2]), weights[2], tuple(weights[3:]))
    torch.testing.assert_close(y, linear.definition(hidden, *weights[3:]), rtol=1e-4, atol=1e-4)
