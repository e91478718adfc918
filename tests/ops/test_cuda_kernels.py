"""Kernels in CUDA: what NVIDIA's compiler makes of them, and what they compute on a CPU."""

import re

import cuda_on_cpu
import pytest
import torch

pytest.importorskip("triton", reason="constants come from the kernels in Triton")

from cuda_on_cpu import SHARED

from quickvit.ops.cuda import library, panel
from quickvit.ops.gelu import definition as gelu
from quickvit.ops.heads import merge_heads, split_heads
from quickvit.ops.linear import definition as linear
from quickvit.ops.triton.octets import from_octets

# Of the norm of the error, in bfloat16, which rounds to eight bits.
ROUNDING = torch.finfo(torch.bfloat16).eps / 4


@pytest.mark.skipif(not library.available(), reason="needs PyTorch for CUDA")
@pytest.mark.parametrize(
    ("after", "bias", "scaled"),
    [
        ("GELU", None, True),
        ("GELU", torch.float32, False),
        ("GELU", torch.bfloat16, True),
        ("BOTH", torch.float32, False),
        ("GRADIENT", None, False),
        ("OCTETS", torch.float32, True),
    ],
)
@pytest.mark.parametrize(
    ("channels", "width"), [(768, 3072), (1024, 4096), (1280, 5120), (1664, 8192), (1792, 15360)]
)
def test_products_go_on_and_registers_suffice(channels, width, after, bias, scaled):
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    assert panel.takes(cpu, dtype, channels, width)
    width = 3 * channels if after == "OCTETS" else width
    source = panel.source(channels, width, after, bias, scaled, 16, SHARED)
    _, log = library.compile_source(source, (9, 0))
    assert "Potential Performance Loss" not in log
    assert re.search(r"(\d+) bytes spill stores", log)[1] == "0"


@pytest.mark.skipif(not library.available(), reason="needs PyTorch for CUDA")
def test_what_the_compiler_says_is_an_error():
    with pytest.raises(library.CudaError, match="nonsense"):
        library.compile_source("nonsense;", (9, 0))


needs_compiler = pytest.mark.skipif(not cuda_on_cpu.COMPILER, reason="needs a C++ compiler")


def problem(channels, width, tokens, *, dtype=torch.bfloat16, bias=None, scaled=False, size=1.0):
    """Operands, and the products in float64, without the bias."""
    generator = torch.Generator().manual_seed(tokens)
    f, m = width // 8, channels // 8
    x, one, two = (
        (torch.randn(shape, generator=generator) / scale**0.5).to(dtype)
        for shape, scale in (((tokens, channels), 1), ((4, f, m), m), ((1, 2 * f, 2 * m), 2 * m))
    )
    shift = None if bias is None else (size * torch.randn(f, generator=generator)).to(bias)
    factors = size * (torch.rand(tokens, generator=generator) + 0.5) if scaled else None
    x = x if scaled else (size * x).to(dtype)
    products = linear(x.double(), one.double(), two.double())
    return (
        (x, one, two, shift),
        factors,
        products if factors is None else factors.double()[:, None] * products,
    )


def relative_error(monkeypatch, *sizes, seed=0, change=None, **options):
    """The error of the kernel with GELU on a CPU; it is NaN where nothing was written."""
    cuda_on_cpu.use(monkeypatch, seed, change)
    operands, factors, products = problem(*sizes, **options)
    tokens, width = products.shape
    y = torch.full((tokens + 1, width), float("nan"), dtype=torch.bfloat16)
    panel.linear_gelu(*operands, y[:tokens], factors)
    assert y[tokens].isnan().all()
    shift = operands[3]
    exact = gelu(products, None if shift is None else shift.double())
    return relative(y[:tokens], exact)


def relative(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@needs_compiler
@pytest.mark.parametrize(
    ("channels", "width", "tokens"),
    [
        (768, 768, 130),
        (1024, 1024, 1),
        (1024, 1024, 197),
        (1280, 768, 130),
        (1664, 768, 70),
        (1792, 512, 300),
    ],
)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_it_is_the_linear_map_and_gelu(monkeypatch, channels, width, tokens, bias, scaled):
    assert relative_error(monkeypatch, channels, width, tokens, bias=bias, scaled=scaled) < ROUNDING


@needs_compiler
@pytest.mark.parametrize(
    ("channels", "width", "tokens"), [(1024, 512, 197), (1280, 768, 1), (1664, 768, 130)]
)
@pytest.mark.parametrize("bias", [None, torch.float32], ids=str)
def test_with_gelu_comes_what_it_is_of(monkeypatch, channels, width, tokens, bias):
    cuda_on_cpu.use(monkeypatch)
    operands, _, products = problem(channels, width, tokens, bias=bias)
    y, hidden = (torch.full((tokens + 1, width), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    panel.linear_gelu(*operands, y[:tokens], hidden=hidden[:tokens])
    assert y[tokens].isnan().all()
    assert hidden[tokens].isnan().all()
    if bias is not None:
        products[:, : width // 8] += operands[3].double()
    assert relative(hidden[:tokens], products) < ROUNDING
    assert relative(y[:tokens], gelu(products)) < ROUNDING


@needs_compiler
@pytest.mark.parametrize(
    ("channels", "width", "tokens"), [(1024, 512, 197), (1280, 768, 1), (1664, 768, 130)]
)
@pytest.mark.parametrize("size", [1e-7, 1.0, 1e5])
def test_the_gradient_of_gelu(monkeypatch, channels, width, tokens, size):
    """However small gradients are, and far out."""
    cuda_on_cpu.use(monkeypatch)
    (grad, one, two, _), _, grads = problem(channels, width, tokens, size=size)
    hidden = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    hidden[tokens // 2] *= 1000
    found = torch.full((tokens + 1, width), float("nan"), dtype=torch.bfloat16)
    panel.gelu_gradient(grad, one, two, hidden, found[:tokens])
    assert found[tokens].isnan().all()
    x = hidden.double().requires_grad_()
    (exact,) = torch.autograd.grad(gelu(x), x, grads)
    assert relative(found[:tokens], exact) < 1.6 * ROUNDING


@needs_compiler
@pytest.mark.parametrize(
    ("channels", "tokens"), [(768, 65), (1024, 1), (1280, 130), (1664, 70), (1664, 300), (1792, 65)]
)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_octets_are_q_k_and_v(monkeypatch, channels, tokens, bias, scaled):
    cuda_on_cpu.use(monkeypatch)
    heads = 12 if channels == 768 else 16
    operands, factors, products = problem(channels, 3 * channels, tokens, bias=bias, scaled=scaled)
    if bias is not None:
        products[:, : 3 * channels // 8] += operands[3].double()
    octets = panel.linear_octets(*operands, heads, factors)
    # Heads begin at multiples of 32 bytes.
    assert octets.stride(2) % 16 == 0
    for found, feature in zip(octets, split_heads(products, None, heads, [tokens], [1]), strict=True):
        packed = found.new_empty(tokens, channels)
        from_octets(found.reshape(tokens, -1, 8), packed)
        assert relative(packed, merge_heads([feature])) < ROUNDING
        # A head's entries are the same in both.
        both = (x.unflatten(1, (heads, -1)).sort(-1).values for x in (found.flatten(1), feature.flatten(1)))
        torch.testing.assert_close(*(x.double() for x in both), rtol=0.01, atol=0.02)


# Of small numbers float16 keeps less.
@needs_compiler
@pytest.mark.parametrize(("size", "tolerance"), [(1e-3, 1.2), (0.1, 1), (30, 1), (3000, 1), (10000, 1)])
@pytest.mark.parametrize("scaled", [False, True])
def test_small_and_large_features(monkeypatch, size, tolerance, scaled):
    error = relative_error(monkeypatch, 1024, 512, 130, size=size, scaled=scaled, bias=torch.float32)
    assert error < tolerance * ROUNDING


@needs_compiler
@pytest.mark.parametrize("seed", range(5))
def test_its_warps_may_run_in_any_order(monkeypatch, seed):
    assert relative_error(monkeypatch, 1024, 3072, 260, seed=seed) < ROUNDING


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("        work.ring.wait(work.turn);\n", ""),
        ("            products_wait<AHEAD>();\n", ""),
        ("    products_wait<0>();\n", ""),
        ("        barrier_wait(ring.empty + 8 * turn.slot, turn.phase ^ 1);\n", ""),
        ("if (share.begins(tile)) barrier_wait(weights_full, panels++ & 1);", ""),
        ("            barrier_wait(weights_empty, panels++ & 1 ^ 1);\n", ""),
        ("work.turn.skip(TURNS), work.done.skip(TURNS);", ""),
        ("if (tile > share.first) barrier_wait(order + 8 * group, tiles++ & 1);", ""),
        (
            "multiply<2 * COLUMNS, 2 * M>(component, weights, work, 0, AHEAD, part == 1",
            "multiply<2 * COLUMNS, 2 * M>(component, weights, work, 0, AHEAD, true",
        ),
    ],
    ids=lambda change: change[0].strip(),
)
def test_what_would_be_seen(monkeypatch, change):
    """Barriers and turns that are left out, or come too often."""
    for seed in range(8):
        try:
            error = relative_error(monkeypatch, 1280, 3072, 300, seed=seed, change=change)
        except RuntimeError:
            return
        if not error < ROUNDING:
            return
    pytest.fail("the kernel with the change is right")


@needs_compiler
def test_a_kernel_that_waits_for_ever_is_seen(monkeypatch):
    change = (
        "if (threadIdx.x % 32 < CLUSTER) barrier_arrive_at",
        "if (threadIdx.x % 32 < 1) barrier_arrive_at",
    )
    with pytest.raises(RuntimeError, match="waits for ever"):
        relative_error(monkeypatch, 1024, 1024, 64, change=change)


@pytest.mark.parametrize("channels", panel.COLUMNS)
def test_shared_memory_suffices(channels):
    slots = panel._slots(channels, SHARED)
    assert 8 * (2 * slots + 2 + panel.GROUPS) <= panel.REST
    assert slots > 6


def test_other_sizes_have_no_kernel():
    cpu = torch.device("cpu")
    assert not panel.takes(cpu, torch.bfloat16, 512, 2048)
    assert not panel.takes(cpu, torch.float16, 1024, 4096)
    assert not panel.takes(cpu, torch.float32, 1024, 4096)
    assert not panel.takes(cpu, torch.bfloat16, 1024, 4100)
    assert panel.takes_octets(cpu, torch.bfloat16, 1664)
    assert not panel.takes_octets(cpu, torch.float16, 1664)
    assert not panel.takes_octets(cpu, torch.bfloat16, 512)
