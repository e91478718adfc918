"""Attention and its gradient by the kernels for Hopper, run on a CPU; on a GPU see test_ops_gpu."""

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.group import Layout
from quickvit.ops import attention, hopper
from quickvit.ops.triton import hopper_attention
from quickvit.ops.triton.heads import to_packed

HOPPER = 227 * 1024
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    for name in ("_attention", "_attention_gradient"):
        monkeypatch.setattr(hopper_attention, name, OnCpu(getattr(hopper_attention, name)))
    monkeypatch.setattr(hopper_attention, "shared_memory", lambda device: HOPPER)


@pytest.mark.parametrize("length", [1, 17, 64, 65, 101, 128])
def test_attention_and_its_gradient(length):
    generator = torch.Generator().manual_seed(length)
    number, heads, origin = 2, 3, 5
    q, k, v, dout = (
        torch.randn(number, length, heads, 80, generator=generator).mul(2).bfloat16() for _ in range(4)
    )
    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / 80**0.5
    expected = scores.softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(expected, exact, dout.double().transpose(1, 2))
    out, dqkv = (
        torch.full((origin + number * length + 3, parts * 80 * heads), float("nan"), dtype=torch.bfloat16)
        for parts in (1, 3)
    )
    logs = hopper_attention.attention_forward(q, k, v, out, origin)
    torch.testing.assert_close(logs, (scores.logsumexp(-1) / math.log(2)).float(), rtol=1e-4, atol=1e-4)
    hopper_attention.attention_backward(dout, q, k, v, out, logs, dqkv, origin)
    for found, features in ((out, [expected]), (dqkv, gradients)):
        packed = torch.full_like(found, float("nan"), dtype=torch.float32)
        to_packed([x.detach().transpose(1, 2).float().contiguous() for x in features], packed, origin)
        # Nothing is written before or after the batch.
        torch.testing.assert_close(
            found.float(),
            packed,
            rtol=2e-2,
            atol=1e-2 * packed.nan_to_num().abs().max().item(),
            equal_nan=True,
        )


def test_what_is_not_finite_stays_in_its_sequence():
    generator = torch.Generator().manual_seed(0)
    heads, dim, length = 2, 80, 70
    features = [torch.randn(2, length, heads, dim, generator=generator).bfloat16() for _ in range(4)]
    results = []
    for bad in (0.0, float("nan")):
        q, k, v, dout = (torch.cat([x[:1], x[1:] + bad]) for x in features)
        out, dqkv = (torch.zeros(2 * length, parts * heads * dim).bfloat16() for parts in (1, 3))
        logs = hopper_attention.attention_forward(q, k, v, out, 0)
        hopper_attention.attention_backward(dout, q, k, v, out, logs, dqkv, 0)
        assert out[length:].isfinite().all() == (bad == 0.0)
        results.append((out[:length], dqkv[:length]))
    for clean, found in zip(*results, strict=True):
        assert torch.equal(clean, found)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "shapes", [((2, 70),), ((1, 70), (3, 5)), ((2, 9),), ((1, 66), (0, 70), (2, 3), (1, 65))]
)
def test_the_operator_takes_batches_long_and_short(shapes, biased, compiled):
    generator = torch.Generator().manual_seed(len(shapes))
    heads, tokens = 2, sum(number * length for number, length in shapes)
    # Triton's interpreter cannot multiply in bfloat16.
    qkv, dout = (torch.randn(tokens, width, generator=generator).half() for width in (480, 160))
    inputs = [qkv, *([torch.randn(60, generator=generator).half()] if biased else [])]
    numbers, lengths = ([*sizes] for sizes in zip(*shapes, strict=True))

    def operator(qkv, bias=None):
        return attention._head_attention(qkv, bias, heads, numbers, lengths)[0]

    def definition(qkv, bias=None):
        return attention.definition(qkv, heads, Layout(480), bias, shapes=shapes)

    if compiled:
        operator = torch.compile(operator, backend="aot_eager", fullgraph=True)
    results = []
    for function, dtype in ((operator, torch.float16), (definition, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))])
    for actual, expected in zip(*results, strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(actual.double(), expected, rtol=5e-3, atol=5e-3 * largest)


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
    monkeypatch.setattr(hopper, "takes_attention", lambda *_: True)

    def takes(images):
        return attention._takes_heads(torch.empty(images * 257, 3840, device="meta"), 16, 257)

    assert [takes(64), takes(8)] == [True, False]


def test_many_features_are_many_in_a_compiled_model_not_in_an_exported_one():
    class Choice(torch.nn.Module):
        def forward(self, x):
            return x + 1 if attention._are_many(2**30) else x

    x = torch.zeros(1)
    assert torch.compile(Choice(), backend="eager", fullgraph=True)(x) == 1
    for strict in (True, False):
        assert torch.export.export(Choice(), (x,), strict=strict).module()(x) == 0
