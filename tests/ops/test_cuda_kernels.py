"""Kernels in CUDA: what NVIDIA's compiler makes of them, and what they compute on a CPU."""

import re

import cuda_on_cpu
import pytest
import torch

pytest.importorskip("triton", reason="constants come from the kernels in Triton")

from quickvit.ops.cuda import library, panel
from quickvit.ops.gelu import definition as gelu
from quickvit.ops.linear import definition as linear

# What a program may have on Hopper.
SHARED = 232448


@pytest.mark.skipif(not library.available(), reason="needs PyTorch for CUDA")
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("channels", "width", "heads"),
    [(1024, 4096, 0), (1280, 5120, 0), (1664, 8192, 0), (1792, 15360, 0), (1280, 3840, 16)],
)
def test_products_go_on_and_registers_suffice(channels, width, heads, dtype, bias):
    cpu = torch.device("cpu")
    assert panel.takes_heads(cpu, dtype, channels) if heads else panel.takes(cpu, dtype, channels, width)
    _, log = library.compile_source(panel.source(dtype, channels, width, bias, heads, SHARED), (9, 0))
    assert "Potential Performance Loss" not in log
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= 32


@pytest.mark.skipif(not library.available(), reason="needs PyTorch for CUDA")
def test_what_the_compiler_says_is_an_error():
    with pytest.raises(library.CudaError, match="nonsense"):
        library.compile_source("nonsense;", (9, 0))


needs_compiler = pytest.mark.skipif(not cuda_on_cpu.COMPILER, reason="needs a C++ compiler")


def on_cpu(monkeypatch, seed=0, change=None):
    """Let kernels run on a CPU, two clusters of two programs, from a source with a change."""

    def kernel(device, dtype, channels, width, bias, heads):
        source = panel.source(dtype, channels, width, bias, heads, SHARED)
        if change:
            assert change[0] in source
            source = source.replace(*change)
        room = panel.shared_bytes(channels, panel._columns(channels, heads), SHARED)
        return cuda_on_cpu.OnCpu(source, room, seed)

    monkeypatch.setattr(panel, "_kernel", kernel)
    monkeypatch.setattr(panel, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(library, "Boxes", cuda_on_cpu.Matrix)
    monkeypatch.setattr(library, "Together", list)


def problem(channels, width, tokens, dtype, bias):
    generator = torch.Generator().manual_seed(tokens)
    f, m = width // 8, channels // 8
    x, one, two = (
        (torch.randn(shape, generator=generator) / scale**0.5).to(dtype)
        for shape, scale in (((tokens, channels), 1), ((4, f, m), m), ((1, 2 * f, 2 * m), 2 * m))
    )
    return x, one, two, None if bias is None else torch.randn(f, generator=generator).to(bias)


def relative_error(monkeypatch, channels, width, tokens, *, dtype, bias, seed=0, change=None):
    """The error of the kernel on a CPU; it is NaN where nothing was written."""
    on_cpu(monkeypatch, seed, change)
    x, one, two, shift = problem(channels, width, tokens, dtype, bias)
    y = torch.full((tokens + 1, width), float("nan"), dtype=dtype)
    panel.linear_gelu(x, one, two, shift, y[:tokens])
    assert y[tokens].isnan().all()
    products = linear(x.double(), one.double(), two.double())
    exact = gelu(products, None if shift is None else shift.double())
    return ((y[:tokens].double() - exact).norm() / exact.norm()).item()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("channels", "width", "tokens"), [(1024, 1024, 1), (1024, 1024, 197), (1280, 768, 130), (1664, 768, 70)]
)
@pytest.mark.parametrize("biased", [None, "float32", "same"])
def test_it_is_the_linear_map_and_gelu(monkeypatch, channels, width, tokens, dtype, biased):
    bias = {"float32": torch.float32, "same": dtype}.get(biased)
    error = relative_error(monkeypatch, channels, width, tokens, dtype=dtype, bias=bias)
    assert error < torch.finfo(dtype).eps / 2


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("bias", [None, torch.float32], ids=str)
def test_heads_are_in_pairs(monkeypatch, tokens, bias, dtype):
    on_cpu(monkeypatch)
    x, one, two, shift = problem(1280, 3 * 1280, tokens, dtype, bias)
    heads = panel.linear_heads(x, one, two, shift)
    packed = linear(x.double(), one.double(), two.double(), None if shift is None else shift.double())
    # Of a head's entries: the piece, and the place in it.
    entry = torch.arange(80)
    piece, place = entry % 8 // 2 * 2 + entry // 8 % 2, entry // 16 * 2 + entry % 2
    feature, head = torch.arange(3).view(3, 1, 1), torch.arange(16).view(16, 1)
    single = piece * 480 + (feature * 16 + head) * 10 + place
    double = piece // 2 * 960 + (feature * 16 + head) * 20 + piece % 2 * 10 + place
    columns = torch.where(piece < 4, single, double)
    exact = packed[:, columns].permute(1, 0, 2, 3)
    assert ((heads.double() - exact).norm() / exact.norm()).item() < torch.finfo(dtype).eps / 2


@needs_compiler
@pytest.mark.parametrize("seed", range(5))
def test_its_warps_may_run_in_any_order(monkeypatch, seed):
    assert relative_error(monkeypatch, 1024, 1024, 260, dtype=torch.bfloat16, bias=None, seed=seed) < 4e-3


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("    barrier_wait(desk.empty, phase ^ 1);\n", ""),
        ("        barrier_wait(desk.full, phase);\n", ""),
        ("        ring.wait(turn);\n", ""),
        ("            products_wait<AHEAD>();\n", ""),
        ("        barrier_wait(ring.empty + 8 * turn.slot, turn.phase ^ 1);\n", ""),
        ("            barrier_wait(weights_full, panels++ & 1);\n", ""),
        ("16 * (4 * block + piece ^ row)", "16 * (4 * block + piece)"),
    ],
    ids=lambda change: change[0].strip(),
)
def test_barriers_are_needed(monkeypatch, change):
    """But the order of the bytes on a desk is not: that is for speed."""
    of_speed = change[1] != ""
    right = []
    for seed in range(8):
        problem = {"dtype": torch.bfloat16, "bias": None, "seed": seed, "change": change}
        try:
            right.append(relative_error(monkeypatch, 1280, 1024, 450, **problem) < 4e-3)
        except RuntimeError:
            right.append(False)
        if not right[-1]:
            break
    assert all(right) == of_speed


@needs_compiler
def test_a_kernel_that_waits_for_ever_is_seen(monkeypatch):
    change = "if (lane == 0) barrier_arrive(desk.full);", ""
    with pytest.raises(RuntimeError, match="waits for ever"):
        relative_error(monkeypatch, 1024, 1024, 64, dtype=torch.bfloat16, bias=None, change=change)


@pytest.mark.parametrize("channels", panel.COLUMNS)
def test_shared_memory_suffices(channels):
    columns = panel.COLUMNS[channels]
    slots = panel._slots(channels, columns, SHARED)
    barriers = 8 * (2 * slots + 8 * panel.HELPERS + 2)
    assert barriers <= panel.REST
    assert slots > 2


def test_other_sizes_have_no_kernel():
    cpu = torch.device("cpu")
    assert not panel.takes(cpu, torch.bfloat16, 512, 2048)
    assert not panel.takes(cpu, torch.float32, 1024, 4096)
    assert not panel.takes(cpu, torch.bfloat16, 1024, 4100)
    assert not panel.takes_heads(cpu, torch.bfloat16, 1024)
