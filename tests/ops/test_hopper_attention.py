"""Attention and its gradient by the kernels for Hopper, run on a CPU; on a GPU see test_ops_gpu."""

import math
from types import SimpleNamespace

import pytest
import torch
from timm.models.vision_transformer import Block
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.group import D8, Layout
from quickvit.layers import StandardAttention, StandardBlock
from quickvit.ops import attention, hopper, linear, self_attention, standard
from quickvit.ops.packing import unpack
from quickvit.ops.triton import hopper_attention, hopper_gradient, hopper_heads

HOPPER = 227 * 1024
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    for module, name in (
        (hopper_attention, "_attention"),
        (hopper_gradient, "_attention_gradient"),
        (hopper_heads, "_linear_heads"),
    ):
        monkeypatch.setattr(module, name, OnCpu(getattr(module, name)))
    for module in (hopper_heads, hopper_attention):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    for module in (hopper_attention, hopper_gradient):
        monkeypatch.setattr(module, "shared_memory", lambda device: HOPPER)
    hopper_attention._places.cache_clear()


def attention_of(qkv, pairs):
    return hopper_attention.attention_forward(*qkv.unbind(0 if pairs else 2), pairs=pairs)


def in_pairs(x):
    """What the kernels read: the pieces 0 2 4 6 1 3 5 7, pairs of entries at the same place side by side."""
    return x.unflatten(-1, (4, 2, 5, 2)).permute(0, 1, 2, 5, 4, 3, 6).flatten(-4).contiguous()


def in_pieces(x):
    """Of what they write: pieces 0 to 7."""
    return x.unflatten(-1, (5, 8, 2)).transpose(-2, -3).flatten(-3)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("length", [1, 17, 64, 65, 101, 128])
def test_attention_and_its_gradient(length, pairs):
    generator = torch.Generator().manual_seed(length)
    number, heads = 2, 3
    q, k, v, dout = (
        torch.randn(number, length, heads, 80, generator=generator).mul(2).bfloat16() for _ in range(4)
    )
    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / 80**0.5
    expected = scores.softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(expected, exact, dout.double().transpose(1, 2))
    if pairs:
        q, k, v, dout = (in_pairs(x) for x in (q, k, v, dout))
    qkv = torch.stack([q, k, v], dim=0 if pairs else 2)
    out, logs = attention_of(qkv, pairs)
    torch.testing.assert_close(logs, (scores.logsumexp(-1) / math.log(2)).float(), rtol=1e-4, atol=1e-4)
    grads = hopper_gradient.attention_backward(dout, qkv, out, logs, pairs=pairs)
    results = out, *grads.unbind(0 if pairs else 2)
    for found, exact in zip(results, (expected, *gradients), strict=True):
        found = in_pieces(found) if pairs else found
        exact = exact.detach().transpose(1, 2).float()
        largest = exact.abs().max().item()
        torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=1e-2 * largest + 1e-5)


@pytest.mark.parametrize("dim", [104, 112])
@pytest.mark.parametrize("length", [1, 64, 65, 100, 150])
def test_attention_of_large_heads(length, dim):
    """Of which only a part of a last tile exists, and of the next head nothing is seen or overwritten."""
    generator = torch.Generator().manual_seed(length)
    qkv = torch.randn(3, length, 3, 5, dim, generator=generator).mul(2).bfloat16()
    q, k, v = (x.double().transpose(1, 2) for x in qkv.unbind(2))
    scores = q @ k.mT / dim**0.5
    out, logs = attention_of(qkv, pairs=False)
    torch.testing.assert_close(logs, (scores.logsumexp(-1) / math.log(2)).float(), rtol=1e-4, atol=1e-4)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).float()
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2 * expected.abs().max().item())


@pytest.mark.parametrize("dim", [80, 104])
def test_blocks_are_not_given_free_too_early(dim, monkeypatch):
    """In a ring that has room for one head each block waits for the place of one that was just used."""
    length, heads = 150, 6
    blocks = hopper_attention.GROUPS[dim] + 2 * 3
    memory = 1024 + blocks * 64 * 2 * sum(hopper_attention.PARTS[dim])
    monkeypatch.setattr(hopper_attention, "shared_memory", lambda device: memory)
    monkeypatch.setattr(hopper_attention, "multiprocessors", lambda device: 1)
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(1, length, 3, heads, dim, generator=generator).mul(2).bfloat16()
    expected = attention.attend(*(x.double() for x in qkv.unbind(2))).float()
    out, _ = attention_of(qkv, pairs=False)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2 * expected.abs().max().item())


def test_octic_attention_without_gradients_takes_them(monkeypatch):
    """For large heads, in batches of which short ones keep PyTorch's operator."""
    monkeypatch.setattr(attention, "fused", lambda *_: True)
    monkeypatch.setattr(attention, "_reads_packed", lambda *_: False)
    monkeypatch.setattr(attention, "_fits_whole_heads", lambda *_: False)
    monkeypatch.setattr(hopper, "takes_attention", lambda q, graded: not graded and q.shape[1] > 64)
    calls, forward = [], hopper_attention.attention_forward
    monkeypatch.setattr(
        hopper_attention, "attention_forward", lambda *a, **k: calls.append(a[0].shape) or forward(*a, **k)
    )
    torch.manual_seed(0)
    heads, shapes, layout = 2, ((2, 70), (3, 5)), Layout(3 * 208)
    qkv, bias = torch.randn(155, 3 * 208).half(), torch.randn(3 * 26).half()

    def operator(qkv, bias):
        return attention.octic_attention(qkv, heads, layout, bias, shapes=shapes)

    expected = attention.definition(qkv.double(), heads, layout, bias.double(), shapes=shapes)
    with torch.no_grad():
        torch.testing.assert_close(operator(qkv, bias).double(), expected, rtol=1e-2, atol=1e-2)
    assert calls == [(2, 70, 2, 104)]
    operator(qkv.requires_grad_(), bias)
    assert len(calls) == 1


def test_attention_of_heads_can_be_compiled(monkeypatch):
    monkeypatch.setattr(hopper, "takes_attention", lambda q, graded: True)
    q, k, v = torch.randn(3, 2, 70, 2, 104).half()
    compiled = torch.compile(attention._attend, backend="aot_eager", fullgraph=True)
    expected = attention.attend(q.double(), k.double(), v.double())
    torch.testing.assert_close(compiled(q, k, v, 0.0).double(), expected, rtol=1e-2, atol=1e-2)


def test_flops_of_attention_of_heads_are_counted():
    q, k, v = (torch.empty(2, 70, 2, 104, dtype=torch.half, device="meta") for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        attention._attention_of_heads(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * (2 * 70**2) * 208


def test_what_is_not_finite_stays_in_its_sequence():
    generator = torch.Generator().manual_seed(0)
    heads, dim, length = 2, 80, 70
    features, dout = (
        torch.randn(2, length, *size, generator=generator).bfloat16()
        for size in ((3, heads, dim), (heads, dim))
    )
    results = []
    for bad in (0.0, float("nan")):
        qkv, grad = (torch.cat([x[:1], x[1:] + bad]) for x in (features, dout))
        out, logs = attention_of(qkv, pairs=False)
        dqkv = hopper_gradient.attention_backward(grad, qkv, out, logs, pairs=False)
        assert out[1].isfinite().all() == (bad == 0.0)
        results.append([out[0], dqkv[0]])
    for clean, found in zip(*results, strict=True):
        assert torch.equal(clean, found)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "shapes", [((2, 70),), ((1, 70), (3, 5)), ((2, 9),), ((1, 66), (0, 70), (2, 3), (1, 65))]
)
def test_the_operator_takes_batches_long_and_short(shapes, biased, compiled):
    generator = torch.Generator().manual_seed(len(shapes))

    def noise(*sizes):
        # Triton's interpreter cannot multiply in bfloat16.
        return torch.randn(sizes, generator=generator).half()

    tokens = sum(number * length for number, length in shapes)
    inputs = [noise(tokens, 1280), noise(4, 480, 160) / 13, noise(1, 960, 320) / 18]
    inputs += [noise(480)] if biased else []
    dout = noise(tokens, 1280)

    def operator(x, weight_1, weight_2, bias=None):
        return self_attention.octic_self_attention(x, weight_1, weight_2, bias, 16, shapes=shapes)

    def definition(x, weight_1, weight_2, bias=None):
        qkv = linear.definition(x, weight_1, weight_2)
        return attention.definition(qkv, 16, Layout(3840), bias, shapes=shapes)

    if compiled:
        operator = torch.compile(operator, backend="aot_eager", fullgraph=True)
    results = []
    for function, dtype in ((operator, torch.float16), (definition, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))])
    for actual, expected in zip(*results, strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2 * largest)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_standard_block_takes_them(compiled, monkeypatch):
    """Its attention is that of PyTorch's operator, for packed sequences too, of which short ones keep it."""
    monkeypatch.setattr(standard, "fused", lambda *_: True)
    monkeypatch.setattr(hopper, "takes_attention", lambda q, graded: graded and q.shape[1] > 64)
    calls, forward = [], hopper_attention.attention_forward
    monkeypatch.setattr(
        hopper_attention, "attention_forward", lambda *a, **k: calls.append(a[0].shape) or forward(*a, **k)
    )
    torch.manual_seed(0)
    block = StandardBlock(160, 2, qkv_bias=True, attn_layer=StandardAttention).half()
    theirs = Block(160, 2, qkv_bias=True).double()
    theirs.load_state_dict(block.state_dict())
    shapes = (2, 70), (3, 5)
    x, grad = (torch.randn(2 * 70 + 3 * 5, 160).half() for _ in range(2))

    def ours(x):
        return torch.cat([block(x[:140].unflatten(0, shapes[0])).flatten(0, 1), block(x, shapes=shapes)])

    leaf = x.clone().requires_grad_()
    out = (torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours)(leaf)
    out.backward(torch.cat([grad[:140], grad]))
    assert calls == 2 * [(2, 70, 2, 80)]
    exact = x.double().requires_grad_()
    batches = [theirs(batch).flatten(0, 1) for batch in unpack(exact, shapes)]
    expected = torch.cat([batches[0], *batches])
    expected.backward(torch.cat([grad[:140], grad]).double())
    pairs = [
        (out, expected),
        (leaf.grad, exact.grad),
        (block.attn.qkv.weight.grad, theirs.attn.qkv.weight.grad),
    ]
    for found, value in pairs:
        torch.testing.assert_close(found.double(), value, rtol=1e-2, atol=1e-2 * value.abs().max().item())


def test_flops_of_standard_attention_are_counted():
    qkv = torch.empty(2, 70, 3, 2, 80, dtype=torch.half, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        standard._attention(qkv)[0].sum().backward()
    # Two products, and of the gradient five.
    assert counter.get_total_flops() == (2 + 5) * 2 * (2 * 70**2) * 160


def test_standard_attention_is_for_many_long_sequences(monkeypatch):
    monkeypatch.setattr(hopper, "_most_tokens", lambda device, dtype, dim, graded: 320 if dim == 80 else 0)

    def takes(number, length, heads=16, dim=80):
        q = SimpleNamespace(is_cuda=True, device=None, dtype=None, shape=(number, length, heads, dim))
        q.numel = lambda: math.prod(q.shape)
        return hopper.takes_attention(q, graded=True)

    assert takes(64, 257)
    assert not any([takes(8, 257), takes(64, 325), takes(360, 64), takes(64, 257, 20, 64)])


def test_they_are_for_some_heads_and_what_fits_into_shared_memory(monkeypatch):
    monkeypatch.setattr(hopper, "_is_known", lambda device: True)

    def most(dim, graded, dtype=torch.bfloat16):
        return hopper._most_tokens(torch.device("cuda"), dtype, dim, graded)

    assert [most(80, True), most(80, True, torch.float16), most(64, True), most(104, True)] == [
        320,
        320,
        0,
        0,
    ]
    assert [most(80, False), most(104, False), most(112, False), most(64, False)] == [576, 448, 448, 0]
    assert not most(80, False, torch.float32)


def test_a_model_can_be_compiled_for_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr(hopper, "_is_known", lambda device: True)

    def choose(x):
        return (
            x + 1 if x.shape[0] <= hopper._most_tokens(torch.device("cuda"), torch.bfloat16, 80, True) else x
        )

    compiled = torch.compile(choose, backend="eager", fullgraph=True, dynamic=True)
    assert [compiled(torch.zeros(tokens))[0].item() for tokens in (257, 197, 321)] == [1, 1, 0]


def test_they_are_for_many_features(monkeypatch):
    monkeypatch.setattr(hopper, "takes_heads", lambda x, heads, tokens: tokens <= 320)
    monkeypatch.setattr(self_attention, "fused", lambda *_: True)

    def takes(*shape, shapes=None):
        return self_attention.takes_self_attention(torch.empty(shape, device="meta"), 16, D8, shapes)

    assert [takes(64, 257, 1280), takes(8, 257, 1280), takes(64, 325, 1280)] == [True, False, False]
    packed = 100 * 197 + 100 * 37, 1280
    assert takes(*packed, shapes=((100, 197), (100, 37)))
    assert not takes(*packed, shapes=((60, 325), (100, 39)))


def test_many_features_are_many_in_a_compiled_model_not_in_an_exported_one():
    class Choice(torch.nn.Module):
        def forward(self, x):
            return x + 1 if hopper.are_many(2**30) else x

    x = torch.zeros(1)
    assert torch.compile(Choice(), backend="eager", fullgraph=True)(x) == 1
    for strict in (True, False):
        assert torch.export.export(Choice(), (x,), strict=strict).module()(x) == 0
