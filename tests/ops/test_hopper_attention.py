"""Attention and its gradient by the kernels for Hopper, run on a CPU; on a GPU see test_ops_gpu."""

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.group import D8, Layout
from quickvit.ops import attention, hopper, linear
from quickvit.ops.triton import hopper_attention, hopper_heads

HOPPER = 227 * 1024
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    for name in ("_attention", "_attention_gradient"):
        monkeypatch.setattr(hopper_attention, name, OnCpu(getattr(hopper_attention, name)))
    monkeypatch.setattr(hopper_heads, "_linear_heads", OnCpu(hopper_heads._linear_heads))
    monkeypatch.setattr(hopper_heads, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(hopper_attention, "shared_memory", lambda device: HOPPER)


def in_pairs(x):
    """What the kernels read: the pieces 0 2 4 6 1 3 5 7, pairs of entries at the same place side by side."""
    return x.unflatten(-1, (4, 2, 5, 2)).permute(0, 1, 2, 5, 4, 3, 6).flatten(-4).contiguous()


def in_pieces(x):
    """Of what they write: pieces 0 to 7."""
    return x.unflatten(-1, (5, 8, 2)).transpose(-2, -3).flatten(-3)


@pytest.mark.parametrize("length", [1, 17, 64, 65, 101, 128])
def test_attention_and_its_gradient(length):
    generator = torch.Generator().manual_seed(length)
    number, heads = 2, 3
    q, k, v, dout = (
        torch.randn(number, length, heads, 80, generator=generator).mul(2).bfloat16() for _ in range(4)
    )
    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / 80**0.5
    expected = scores.softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(expected, exact, dout.double().transpose(1, 2))
    q, k, v, dout = (in_pairs(x) for x in (q, k, v, dout))
    out, logs = hopper_attention.attention_forward(q, k, v)
    torch.testing.assert_close(logs, (scores.logsumexp(-1) / math.log(2)).float(), rtol=1e-4, atol=1e-4)
    grads = hopper_attention.attention_backward(dout, q, k, v, out, logs)
    for found, exact in zip((out, *grads), (expected, *gradients), strict=True):
        exact = exact.detach().transpose(1, 2).float()
        largest = exact.abs().max().item()
        torch.testing.assert_close(in_pieces(found).float(), exact, rtol=2e-2, atol=1e-2 * largest + 1e-5)


def test_what_is_not_finite_stays_in_its_sequence():
    generator = torch.Generator().manual_seed(0)
    heads, dim, length = 2, 80, 70
    features = [torch.randn(2, length, heads, dim, generator=generator).bfloat16() for _ in range(4)]
    results = []
    for bad in (0.0, float("nan")):
        q, k, v, dout = (torch.cat([x[:1], x[1:] + bad]) for x in features)
        out, logs = hopper_attention.attention_forward(q, k, v)
        grads = hopper_attention.attention_backward(dout, q, k, v, out, logs)
        assert out[1].isfinite().all() == (bad == 0.0)
        results.append([x[0] for x in (out, *grads)])
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
        return attention.octic_self_attention(x, weight_1, weight_2, bias, 16, shapes=shapes)

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


def test_they_are_for_heads_of_80_and_what_fits_into_shared_memory():
    def most(dim, dtype=torch.bfloat16):
        return hopper_attention.most_tokens(torch.device("cuda"), dtype, dim)

    assert [most(80), most(80, torch.float16), most(64), most(80, torch.float32)] == [320, 320, 0, 0]


def test_a_model_can_be_compiled_for_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr(hopper, "_is_known", lambda device: True)

    def choose(x):
        return x + 1 if x.shape[0] <= hopper._most_tokens(torch.device("cuda"), torch.bfloat16, 80) else x

    compiled = torch.compile(choose, backend="eager", fullgraph=True, dynamic=True)
    assert [compiled(torch.zeros(tokens))[0].item() for tokens in (257, 197, 321)] == [1, 1, 0]


def test_they_are_for_many_features(monkeypatch):
    monkeypatch.setattr(hopper, "takes_heads", lambda x, heads, tokens: tokens <= 320)
    monkeypatch.setattr(attention, "fused", lambda *_: True)

    def takes(*shape, shapes=None):
        return attention.takes_self_attention(torch.empty(shape, device="meta"), 16, D8, shapes)

    assert [takes(64, 257, 1280), takes(8, 257, 1280), takes(64, 325, 1280)] == [True, False, False]
    packed = 100 * 197 + 100 * 37, 1280
    assert takes(*packed, shapes=((100, 197), (100, 37)))
    assert not takes(*packed, shapes=((60, 325), (100, 39)))


def test_many_features_are_many_in_a_compiled_model_not_in_an_exported_one():
    class Choice(torch.nn.Module):
        def forward(self, x):
            return x + 1 if attention._are_many(2**30) else x

    x = torch.zeros(1)
    assert torch.compile(Choice(), backend="eager", fullgraph=True)(x) == 1
    for strict in (True, False):
        assert torch.export.export(Choice(), (x,), strict=strict).module()(x) == 0
