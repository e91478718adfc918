"""The linear map by the kernel for Hopper, run on a CPU; on a GPU see test_ops_gpu."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.group import D8, Layout
from quickvit.ops import attention, plain, self_attention
from quickvit.ops import hopper as switch
from quickvit.ops.linear import definition as linear
from quickvit.ops.triton import hopper

HOPPER = 227 * 1024
# Of lanes past the end, whose results nobody uses.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(hopper, "_octic_linear", OnCpu(hopper._octic_linear))
    monkeypatch.setattr(hopper, "shared_memory", lambda device: HOPPER)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 3)


def problem(tokens, channels, hidden):
    generator = torch.Generator().manual_seed(tokens + channels)

    def noise(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    m, f = channels // 8, hidden // 8
    weights = noise(4, f, m, scale=m**-0.5), noise(1, 2 * f, 2 * m, scale=(2 * m) ** -0.5)
    return noise(tokens, channels), weights, torch.randn(f, generator=generator)


def of_the_definition(x, weights, bias=None):
    return linear(x.float(), *(w.float() for w in weights), bias)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "channels", "width"), [(1, 256, 1024), (450, 256, 2048), (200, 768, 1024), (130, 1024, 1024)]
)
def test_a_linear_map(tokens, channels, width, transposed):
    x, weights, _ = problem(tokens, channels, width)
    expected = of_the_definition(x, weights)
    if transposed:
        weights = [w.mT.contiguous().mT for w in weights]
    y = torch.full((tokens, width), float("nan"), dtype=x.dtype)
    hopper.linear(x, *weights, y)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


def in_heads(x, piece):
    """A packed feature [T, C] with its channels in heads: pieces of A1 A2 B1 B2 of each, then pieces of E of each."""
    one, two = x.unflatten(1, (8, -1)).split(4, dim=1)
    one = one.unflatten(2, (-1, piece)).transpose(1, 2)
    two = two.reshape(len(x), 2, -1, 2 * piece).transpose(1, 2)
    return torch.cat([one.flatten(1), two.flatten(1)], dim=1)


@pytest.mark.parametrize("piece", [8, 16])
@pytest.mark.parametrize(("biased", "scaled"), [(True, False), (False, False), (True, True), (False, True)])
def test_a_linear_map_to_heads(piece, biased, scaled):
    x, weights, bias = problem(200, 256, 3072)
    bias = bias if biased else None
    factors = 0.5 + torch.rand(200) if scaled else torch.ones(200)
    y = hopper.linear_heads(x, *weights, bias, piece, factors if scaled else None)
    expected = in_heads(of_the_definition(factors[:, None] * x, weights, bias), piece)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_any_number_of_buffers_will_do(monkeypatch, stages):
    monkeypatch.setattr(hopper, "_stages", lambda *_: stages)
    x, weights, _ = problem(1000, 256, 1024)
    y = torch.empty(1000, 1024, dtype=x.dtype)
    hopper.linear(x, *weights, y)
    torch.testing.assert_close(y.float(), of_the_definition(x, weights), rtol=1e-2, atol=1e-2)


def test_buffers_fit_into_shared_memory():
    assert [hopper._stages(width // 8, HOPPER) for width in (768, 1024, 1280)] == [8, 4, 1]
    assert hopper._stages(1664 // 8, HOPPER) < 1


def test_it_is_for_some_widths():
    def takes(channels, width, dtype=torch.bfloat16):
        return hopper.takes(torch.device("cuda"), dtype, channels, width)

    assert [takes(1024, 4096), takes(768, 3072), takes(1024, 1024)] == [True, True, True]
    assert [takes(1280, 5120), takes(768, 2304), takes(512, 2048)] == [False, False, False]
    assert not takes(1024, 4096, torch.float32)


def test_programs_end_at_about_the_same_time():
    # Of 33 programs for each pair of panels 15 take 14 blocks of tokens each, and 18 take 11.
    assert hopper._programs(197, 4, 132) == (15, 18)
    # No more programs than there is work for, and each panel has one.
    assert hopper._programs(1, 4, 132) == (1, 1)
    assert hopper._programs(197, 200, 132) == (1, 1)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("shapes", [None, ((2, 19), (3, 7))])
def test_self_attention_and_its_gradients(heads, shapes):
    x, weights, bias = problem(59, 1024, 3072)
    if shapes is None:
        x = x[:57].unflatten(0, (3, 19))
    # Triton's interpreter cannot multiply in bfloat16.
    inputs = [t.detach().half().requires_grad_() for t in (x, *weights, bias)]
    y = self_attention.octic_self_attention(*inputs, heads, shapes=shapes)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    with plain():
        qkv = linear(*exact)
        expected = attention.octic_attention(qkv, heads, Layout(3072), shapes=shapes)
    torch.testing.assert_close(y.double(), expected, rtol=5e-3, atol=5e-3)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).half()
    found = torch.autograd.grad(y, inputs, grad)
    for one, two in zip(found, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=5e-3, atol=5e-3 * two.abs().max().item())


def test_self_attention_takes_a_bias_with_gaps():
    x, weights, bias = problem(38, 1024, 3072)
    inputs = [t.half() for t in (x.unflatten(0, (2, 19)), *weights)]
    gaps = bias.half().repeat_interleave(2)[::2]
    expected = self_attention.octic_self_attention(*inputs, gaps.contiguous(), 8)
    assert torch.equal(self_attention.octic_self_attention(*inputs, gaps, 8), expected)


@pytest.mark.parametrize("other", [1, 2])
def test_self_attention_refuses_weights_of_another_type(other):
    x, weights, _ = problem(8, 1024, 3072)
    inputs = [x.unflatten(0, (2, 4)), *weights]
    inputs[other] = inputs[other].half()
    with pytest.raises(ValueError, match=r"expected weights in torch\.bfloat16, as x, got .*torch\.float16"):
        self_attention.octic_self_attention(*inputs, None, 16)


def test_self_attention_is_for_many_features_and_heads_of_64(monkeypatch):
    monkeypatch.setattr(self_attention, "fused", lambda *_: True)
    monkeypatch.setattr(switch, "takes", lambda *_: True)

    def takes(images, heads):
        x = torch.empty(images, 197, 1024, device="meta")
        return self_attention.takes_self_attention(x, heads, D8)

    assert [takes(64, 16), takes(64, 8), takes(8, 16)] == [True, False, False]


def test_what_the_hardware_cannot_copy_is_copied_first():
    x, weights, _ = problem(70, 256, 1024)
    expected, found = (torch.empty(70, 1024, dtype=x.dtype) for _ in range(2))
    hopper.linear(x, *weights, expected)
    shifted = torch.empty(70 * 256 + 1, dtype=x.dtype)[1:].view(70, 256).copy_(x)
    hopper.linear(shifted, *weights, found)
    assert torch.equal(found, expected)


def test_few_tokens_have_it_in_graphs_only(monkeypatch):
    capturing = False
    monkeypatch.setattr(switch, "_launched", set())
    monkeypatch.setattr(switch, "_takes", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def launches(tokens, transposed=False, dtype=torch.bfloat16):
        x, out = (torch.empty(tokens, width, dtype=torch.bfloat16, device="meta") for width in (1024, 4096))
        x = SimpleNamespace(is_cuda=True, device="cuda", dtype=x.dtype, shape=x.shape, nbytes=x.nbytes)
        out = SimpleNamespace(shape=out.shape, nbytes=out.nbytes, data_ptr=lambda: 0, stride=out.stride)
        weight = torch.empty(4, 512, 128, dtype=dtype)
        return switch.launches(x, weight.mT if transposed else weight, out)

    # The first call compiles it.
    assert [launches(197), launches(197), launches(64 * 197), launches(512 * 197)] == [
        True,
        False,
        False,
        True,
    ]
    assert [launches(197, transposed=True), launches(197, transposed=True)] == [True, False]
    gelu = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=(197, 1024), nbytes=1)
    weight, bias = torch.empty(4, 512, 128, dtype=torch.bfloat16), torch.empty(512)

    def launches_gelu(weight=weight, bias=bias):
        return switch.launches_gelu(gelu, weight, bias, gelu)

    assert [launches_gelu(), launches_gelu()] == [True, False]
    # Without a bias, or with one of another type, it is another kernel.
    assert [launches_gelu(bias=None), launches_gelu(bias=None)] == [True, False]
    assert [launches_gelu(bias=bias.bfloat16()), launches_gelu(bias=bias.bfloat16())] == [True, False]
    capturing = True
    assert launches_gelu()
    assert launches(197)
    assert not launches(197, dtype=torch.float32)
    assert not launches_gelu(weight=weight.float())


@pytest.mark.parametrize(
    ("capability", "hip", "release", "known"),
    [
        (9, None, "3.6.0", True),
        (9, None, "3.9.1", True),
        (9, None, "3.10.1", False),
        (8, None, "3.6.0", False),
        (9, "6.4", "3.6.0", False),
    ],
)
def test_it_is_for_hopper_and_known_releases(monkeypatch, caplog, capability, hip, release, known):
    switch._is_known.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("triton.__version__", release)
    assert switch._is_known(torch.device("cuda")) == known
    # Where nothing but the release is in the way, somebody should know.
    assert (f"not {release}: others run" in caplog.text) == (release == "3.10.1")
    switch._is_known.cache_clear()


def test_the_choice_is_known_to_the_compiler(monkeypatch):
    monkeypatch.setattr(switch, "_is_known", lambda device: True)

    def choose(x):
        return x + 1 if switch._takes("hopper", x.device, x.dtype, x.shape[-1], 512) else x

    compiled = torch.compile(choose, fullgraph=True, backend="eager", dynamic=False)
    for answer in (True, False):
        torch.compiler.reset()
        monkeypatch.setattr(
            switch, "_module", lambda _, answer=answer: SimpleNamespace(takes=lambda *_: answer)
        )
        assert compiled(torch.zeros(3, 128))[0, 0] == answer
