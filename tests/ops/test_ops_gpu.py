"""The fused operators on a CUDA device: errors against float64, whole models, compilation and CUDA graphs."""

import math

import pytest
import torch
from some_rows import rows_at

from quickvit import QuickVisionTransformer, act_on_image
from quickvit.group import Layout
from quickvit.layers import OcticMlp
from quickvit.ops import attention, gelu, hopper, linear, mlp, norm, plain, self_attention, standard
from quickvit.testing import assert_invariant, randomize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# Width, heads and tokens: heads of 64 and 128 read packed channels, those of 80 and 104 go through a copy.
SHAPES = [(64, 2, 1), (1024, 16, 197), (1280, 16, 257), (1664, 16, 33), (512, 8, 1023), (1024, 8, 257)]


OPERATORS = [
    "linear",
    "gelu",
    "norm",
    "residual norm",
    "residual norm of some tokens",
    "attention",
    "self-attention",
    "packed attention",
    "packed self-attention",
    "standard attention",
]


def cases(width, heads, tokens, dtype):
    """Each operator with its definition and fresh inputs."""
    layout, qkv_layout = Layout(width), Layout(3 * width)
    m = layout.copies

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    def residual_definition(x, branch, bias, scale, gain, shift):
        z = norm.residual(x, branch, layout, bias=bias, scale=scale)
        return z + norm.definition(z, gain, shift, 1e-6, layout)

    def residual_fused(x, branch, bias, scale, gain, shift):
        return sum(norm.octic_residual_norm(x, branch, gain, shift, 1e-6, layout, bias=bias, scale=scale))

    def rows(count):
        return rows_at(torch.randperm(2 * tokens, device=DEVICE)[:count], 2 * tokens)

    added, normed, factors = rows(tokens), rows(tokens + 1), torch.rand(tokens, device=DEVICE)
    some = {"sample_scale": factors, "added": added}

    def some_definition(x, branch, bias, scale, gain, shift):
        z = norm.residual(x, branch, layout, bias=bias, scale=scale, **some)
        y = norm.definition(normed.of(z.flatten(0, 1)), gain, shift, 1e-6, layout)
        return z.flatten(0, 1) + normed.spread(y)

    def some_fused(x, branch, bias, scale, gain, shift):
        rest = {"bias": bias, "scale": scale, "normed": normed, **some}
        z, y = norm.octic_residual_norm(x, branch, gain, shift, 1e-6, layout, **rest)
        return z.flatten(0, 1) + normed.spread(y)

    def attend(qkv, bias):
        return attention.octic_attention(qkv, heads, qkv_layout, bias)

    def self_attend(x, weight_1, weight_2, bias, **shapes):
        runs = width == 64 * heads and hopper.takes(x, 3 * width)
        if not runs and not hopper.takes_heads(x, heads, tokens):
            pytest.skip("there is no kernel for this")
        return self_attention.octic_self_attention(x, weight_1, weight_2, bias, heads, **shapes)

    def self_attention_definition(x, weight_1, weight_2, bias):
        return plain()(attend)(linear.definition(x, weight_1, weight_2), bias)

    # The tokens of two sequences in another division.
    shapes = ((1, tokens), (tokens, 1))

    def attend_packed(qkv, bias):
        return attention.octic_attention(qkv.flatten(0, 1), heads, qkv_layout, bias, shapes=shapes)

    def self_attend_packed(x, weight_1, weight_2, bias):
        return self_attend(x.flatten(0, 1), weight_1, weight_2, bias, shapes=shapes)

    def packed_definition(x, weight_1, weight_2, bias):
        return plain()(attend_packed)(linear.definition(x, weight_1, weight_2), bias)

    def standard_attend(qkv):
        if tokens > hopper._most_tokens(qkv.device, qkv.dtype, width // heads, True):
            pytest.skip("there is no kernel for this")
        return standard._attention(qkv)[0]

    x = randn(2, tokens, width)
    qkv = randn(4, 3 * m, m) / m**0.5, randn(1, 6 * m, 2 * m) / m**0.5, randn(3 * m)
    return {
        "linear": (
            linear.octic_linear,
            linear.definition,
            [x, randn(4, 3 * m, m) / 8, randn(1, 6 * m, 2 * m) / 8, randn(3 * m)],
        ),
        "gelu": (gelu.octic_gelu, gelu.definition, [x, randn(m)]),
        "norm": (
            lambda x, g, s: norm.octic_layer_norm(x, g, s, 1e-6, layout),
            lambda x, g, s: norm.definition(x, g, s, 1e-6, layout),
            [x + 1, randn(layout.gains), randn(m)],
        ),
        "residual norm": (
            residual_fused,
            residual_definition,
            [x, randn(*x.shape), randn(m), randn(layout.gains), randn(layout.gains), randn(m)],
        ),
        "residual norm of some tokens": (
            some_fused,
            some_definition,
            [x, randn(tokens, width), randn(m), randn(layout.gains), randn(layout.gains), randn(m)],
        ),
        "attention": (
            attend,
            plain()(attend),
            [randn(2, tokens, 3 * width), randn(3 * m)],
        ),
        "self-attention": (self_attend, self_attention_definition, [x, *qkv]),
        "packed attention": (
            attend_packed,
            plain()(attend_packed),
            [randn(2, tokens, 3 * width), randn(3 * m)],
        ),
        "packed self-attention": (self_attend_packed, packed_definition, [x, *qkv]),
        "standard attention": (
            standard_attend,
            plain()(standard.attention),
            [randn(2, tokens, 3, heads, width // heads)],
        ),
    }


def relative(actual, reference):
    """Relative error, on the scale of the reference's own size."""
    assert actual.isfinite().all()
    return ((actual.double() - reference).norm() / reference.norm().clamp_min(1e-6)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_error_is_at_most_twice_that_of_the_definition(name, shape, dtype):
    torch.manual_seed(0)
    fused, definition, tensors = cases(*shape, dtype)[name]
    results = []
    grad = None
    for function, cast in ((definition, torch.float64), (fused, dtype), (definition, dtype)):
        leaves = [t.detach().to(cast).requires_grad_() for t in tensors]
        out = function(*leaves)
        grad = torch.randn_like(out) if grad is None else grad
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    reference, ours, theirs = results
    floor = 4 * torch.finfo(dtype).eps
    for exact, a, b in zip(reference, ours, theirs, strict=True):
        assert relative(a, exact) <= 2 * relative(b, exact) + floor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1280, 1664, 1792])
def test_error_of_attention_without_gradients(width, dtype, monkeypatch):
    monkeypatch.setattr(hopper, "MANY_ENTRIES", 0)
    torch.manual_seed(0)
    fused, definition, tensors = cases(width, 16, 257, dtype)["attention"]
    reference = definition(*(t.double() for t in tensors))
    ours, theirs = relative(fused(*tensors), reference), relative(definition(*tensors), reference)
    assert ours <= 2 * theirs + 4 * torch.finfo(dtype).eps


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
def test_what_is_not_finite_stays_in_its_image():
    torch.manual_seed(0)
    images = torch.randn(2 * 257, 1280, device=DEVICE, dtype=torch.bfloat16)
    weights = (
        torch.randn_like(images[:240]).view(4, 480, 160),
        torch.randn_like(images[:240]).view(1, 960, 320),
    )
    results = []
    for bad in (0.0, float("nan")):
        x = torch.cat([images[:257], images[257:] + bad]).requires_grad_()
        out = self_attention.octic_self_attention(x, *weights, None, 16, shapes=((2, 257),))
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert out[257:].isfinite().all() == (bad == 0.0)
        results.append((out[:257], grad[:257]))
    for clean, found in zip(*results, strict=True):
        assert torch.equal(clean, found)


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("dim", [80, 104, 112])
def test_attention_of_hopper_is_right_again_and_again(dim):
    """Groups of warps go on with what others may still read or write: of many heads not one row may be wrong."""
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(64, 257, 16, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    scores = torch.einsum("bnhd,bmhd->bhnm", q.float(), k.float()) / dim**0.5
    expected = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v.float())
    for _ in range(20):
        out, logs = hopper.attention_kernels().attention_forward(q, k, v, pairs=False)
        torch.testing.assert_close(logs, scores.logsumexp(-1) / math.log(2), rtol=0, atol=1e-2)
        assert (out.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_strided_input(name):
    fused, _, tensors = cases(1024, 16, 197, torch.bfloat16)[name]
    x, *rest = tensors
    wide = torch.cat([x, x], dim=1)[:, ::2]
    expected = fused(wide.contiguous(), *rest)
    torch.testing.assert_close(fused(wide, *rest), expected)
    # Vectors whose entries do not lie side by side.
    apart = [torch.stack([t, 1 + t], dim=1)[:, 0] if t.ndim == 1 else t for t in rest]
    torch.testing.assert_close(fused(wide, *apart), expected)


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("tokens", [1, 64, 197, 1023, 12608])
@pytest.mark.parametrize("width", [768, 1024])
@pytest.mark.parametrize("transposed", [False, True])
def test_hopper_has_a_kernel_for_the_linear_map(width, tokens, transposed):
    torch.manual_seed(0)
    m = width // 8

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE).bfloat16() / m**0.5

    x, weights = randn(tokens, width), (randn(4, 4 * m, m), randn(1, 8 * m, 2 * m))
    y = x.new_full((tokens, 4 * width), float("nan"))
    given = [w.mT.contiguous().mT for w in weights] if transposed else weights
    assert hopper.takes(x, 4 * width)
    hopper.kernels().linear(x, *given, y)
    assert relative(y, linear.definition(x.double(), *(w.double() for w in weights))) < 2e-3


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("tokens", [1, 64, 197, 1023, 12608])
@pytest.mark.parametrize("channels", [1024, 1280])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_has_one_kernel_for_the_linear_map_and_gelu(tokens, dtype, channels):
    torch.manual_seed(0)

    def randn(*shape):
        return (torch.randn(*shape, device=DEVICE) / 128**0.5).to(dtype)

    m, f = channels // 8, channels // 2
    x, weights, bias = 10 * randn(tokens, channels), (randn(4, f, m), randn(1, 2 * f, 2 * m)), randn(f)
    together, apart = (x.new_full((tokens, 8 * f), float("nan")) for _ in range(2))
    hopper.gelu_kernels().linear_gelu(x, *weights, bias, together)
    linear.products(x, *weights, apart)
    apart = gelu.octic_gelu(apart, bias)
    products = linear.definition(x.double(), *(w.double() for w in weights))
    exact = gelu.definition(products, bias.double())
    assert relative(together, exact) < 1.2 * relative(apart, exact)


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
def test_graphs_have_hoppers_kernel_and_few_tokens_without_graphs_do_not(monkeypatch):
    launched, launch = [], hopper.kernels().linear
    monkeypatch.setattr(hopper, "_launched", set())
    monkeypatch.setattr(hopper.kernels(), "linear", lambda *args: (launched.append(args), launch(*args)))
    x = torch.randn(197, 1024, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.randn_like(x[:128]).view(4, 256, 128), torch.randn_like(x[:128]).view(1, 512, 256)
    with torch.no_grad():
        first, second = (linear.octic_linear(x, *weights) for _ in range(2))
        assert len(launched) == 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear.octic_linear(x, *weights)
        assert len(launched) == 2
    graph.replay()
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(captured, second)


def test_the_perceptron_without_gradients_takes_little_memory(monkeypatch):
    net = OcticMlp(1280, 5120).to(DEVICE, torch.bfloat16)
    x = torch.randn(64, 257, 1280, device=DEVICE, dtype=torch.bfloat16)
    with plain():
        expected = net.double()(x.double())
    net.bfloat16()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        ours = net(x)
    assert torch.cuda.max_memory_allocated() - before < mlp.HIDDEN_BYTES + 2.5 * ours.nbytes
    assert relative(ours, expected) < 0.02
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert relative(net.float()(x.float()), expected) < 0.02


@pytest.mark.parametrize(("width", "heads"), [(1280, 16), (1664, 16)])
def test_a_model_without_gradients_takes_little_memory(width, heads):
    """Stream and branch take the place of those before; there are q, k, v and the result, in heads and packed."""
    options = {"embed_dim": width, "num_heads": heads, "depth": 4, "mlp_ratio": 2, "patch_size": 14}
    net = QuickVisionTransformer(family="d8", init_values=1.0, num_classes=0, **options)
    net = randomize(net).to(DEVICE, torch.bfloat16).eval()
    x = torch.randn(64, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        net(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ours = net(x)
        used = torch.cuda.max_memory_allocated() - before
        # Who looks finds what nobody has overwritten.
        for block in net.blocks:
            block.register_forward_hook(lambda *_: None)
        expected = net(x)
    assert used < 8.2 * 64 * 257 * width * x.element_size()
    assert relative(ours, expected.double()) < 0.02


def test_the_perceptron_overwrites_what_nobody_needs():
    net = OcticMlp(320, 1280).to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 37, 320, device=DEVICE, dtype=torch.bfloat16)
    for compiled in (net.deferred, torch.compile(net.deferred, fullgraph=True)):
        with torch.no_grad():
            expected, taken = net(x), x.clone()
            y, bias = compiled(taken, overwrite=True)
        assert y.data_ptr() == taken.data_ptr()
        torch.testing.assert_close(y + net.fc2.out_layout.embed_invariant(bias), expected)


def model(family, **options):
    options = {"embed_dim": 256, "num_heads": 4, "depth": 4, "img_size": 64, "num_classes": 10, **options}
    return randomize(QuickVisionTransformer(family=family, init_values=1.0, **options)).to(DEVICE)


@pytest.mark.parametrize("family", ["d8", "i8", "h8"])
def test_fused_models_compute_what_plain_ones_do(family):
    net = model(family, drop_path_rate=0.2)
    x = torch.randn(8, 3, 64, 64, device=DEVICE)

    def step():
        torch.manual_seed(0)
        out = net(x)
        return out, torch.autograd.grad(out.square().mean(), list(net.parameters()))

    out, grads = step()
    with plain():
        expected, wanted = step()
    assert relative(out, expected.double()) < 1e-5
    for a, b in zip(grads, wanted, strict=True):
        assert relative(a, b.double()) < 1e-3


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_under_autocast(mode):
    net = model("i8")
    x = torch.randn(8, 3, 64, 64, device=DEVICE)
    compiled = torch.compile(net, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(x).float().square().mean()
        loss.backward()
    actual = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        net(x).float().square().mean().backward()
    errors = [relative(a, p.grad.double()) for a, p in zip(actual, net.parameters(), strict=True)]
    assert sorted(errors)[len(errors) // 2] < 0.05


@pytest.mark.parametrize("width", [256, 320], ids="{} channels".format)
@pytest.mark.parametrize("mode", ["none", "default", "reduce-overhead"])
def test_packed_crops_under_autocast(mode, width):
    """Heads of 64, read from packed channels, and of 80: the gradients of separate passes."""
    net = model("h8", embed_dim=width, dynamic_img_size=True)
    crops = [torch.randn(n, 3, s, s, device=DEVICE) for n, s in ((4, 64), (6, 32))]
    pass_through = net.forward_crops
    if mode != "none":
        pass_through = torch.compile(pass_through, fullgraph=True, dynamic=False, mode=mode)

    def gradients(passes):
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            tokens = passes()
        sum(x.float().square().mean() for x in tokens).backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        actual = gradients(lambda: pass_through(crops))
    expected = gradients(lambda: [net.forward_features(x) for x in crops])
    errors = [relative(a, b.double()) for a, b in zip(actual, expected, strict=True)]
    assert sorted(errors)[len(errors) // 2] < 0.05


@pytest.mark.parametrize("mode", ["none", "default", "reduce-overhead"])
def test_subsets_of_packed_crops(mode):
    """The gradients of the definition; a compiled graph draws other samples, so there they are only finite."""
    net = model(
        "h8", drop_path_rate=0.5, uniform_drop_path=True, drop_path_subset=True, dynamic_img_size=True
    )
    crops = [torch.randn(n, 3, s, s, device=DEVICE) for n, s in ((4, 64), (6, 32))]
    run = net.forward_crops
    if mode != "none":
        run = torch.compile(run, fullgraph=True, dynamic=False, mode=mode)

    def gradients(passes, precision):
        net.zero_grad()
        torch.manual_seed(0)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            tokens = passes(crops)
        sum(x.float().square().mean() for x in tokens).backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    for precision in ("float32", "bf16"):
        actual = gradients(run, precision)
        assert all(grad.isfinite().all() for grad in actual)
        with plain():
            expected = gradients(net.forward_crops, precision)
        errors = [relative(a, b.double()) for a, b in zip(actual, expected, strict=True)]
        if mode == "none":
            assert sorted(errors)[len(errors) // 2] < (1e-4 if precision == "float32" else 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invariance_on_the_gpu(dtype):
    net = model("i8").to(dtype).eval()
    x = torch.randn(8, 3, 64, 64, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        assert_invariant(net, x, act_on_image, tolerance=1e-4 if dtype == torch.float32 else 0.2)


def test_gradient_checkpointing_on_the_gpu():
    net = model("h8")
    x = torch.randn(4, 3, 64, 64, device=DEVICE)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    net.set_grad_checkpointing()
    for a, b in zip(torch.autograd.grad(net(x).sum(), list(net.parameters())), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_of_partly_frozen_models_on_the_gpu():
    """What needs no gradient itself may still be what a checkpoint computes from again."""
    net = model("d8").requires_grad_(False)
    trained = [*net.blocks[1].attn.requires_grad_().parameters()]
    x = torch.randn(4, 3, 64, 64, device=DEVICE)
    expected = torch.autograd.grad(net(x).sum(), trained)
    net.set_grad_checkpointing()
    for a, b in zip(torch.autograd.grad(net(x).sum(), trained), expected, strict=True):
        torch.testing.assert_close(a, b)


@torch.no_grad()
@pytest.mark.parametrize("part", ["attn", "attn.qkv", "attn.proj", "norm1", "norm2", "mlp", "mlp.fc1", "ls1"])
def test_nothing_that_a_hook_has_seen_is_overwritten(part):
    net = model("d8").bfloat16().eval()
    x, seen = torch.randn(4, 3, 64, 64, device=DEVICE, dtype=torch.bfloat16), []

    def note(module, arguments, result):
        seen.extend((tensor, tensor.clone()) for tensor in (arguments[0], result))

    expected = net(x)
    for block in net.blocks:
        block.get_submodule(part).register_forward_hook(note)
    torch.testing.assert_close(net(x), expected, rtol=0.1, atol=0.1)
    assert len(seen) == 2 * len(net.blocks)
    assert all(torch.equal(kept, copy) for kept, copy in seen)
