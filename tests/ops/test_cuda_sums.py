"""Partial sums of weight gradients by the kernel in CUDA."""

import re
from types import SimpleNamespace

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import SHARED

pytest.importorskip("triton")

from quickvit.ops import hopper
from quickvit.ops.cuda import library, sums
from quickvit.ops.linear import weight_grad
from quickvit.ops.triton import weight_gradient

SHAPES = [(384, 128), (128, 128), (480, 160), (640, 160), (624, 208), (1024, 208), (1920, 224)]


@pytest.mark.skipif(not library.available(), reason="needs PyTorch for CUDA")
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_products_go_on_and_registers_suffice(a, b):
    assert sums.takes(torch.device("cpu"), torch.bfloat16, a, b)
    _, log = library.compile_source(sums.source(torch.bfloat16, a, b, SHARED), (9, 0))
    assert "Potential Performance Loss" not in log
    assert re.search(r"(\d+) bytes spill stores", log)[1] == "0"


needs_compiler = pytest.mark.skipif(not cuda_on_cpu.COMPILER, reason="needs a C++ compiler")


def difference(monkeypatch, a, b, tokens, steps, *, dtype=torch.bfloat16, seed=0, change=None):
    """The relative error of the sums; NaN where nothing was written."""
    cuda_on_cpu.use(monkeypatch, seed, change)
    generator = torch.Generator().manual_seed(tokens)
    x, y = (torch.randn(tokens, 8 * width, generator=generator).to(dtype) for width in (a, b))
    slices = -(-tokens // (64 * steps))
    partial = torch.full((slices, 12 * a * b), float("nan"))
    sums.partial_sums(x, y, partial, steps)
    exact = []
    for left, right in zip(x.double().split(64 * steps), y.double().split(64 * steps), strict=True):
        blocks = [(i, 1) for i in range(4)] + [(4, 2), (6, 2)]
        parts = [left[:, i * a : (i + k) * a].T @ right[:, i * b : (i + k) * b] for i, k in blocks]
        exact.append(torch.cat([part.flatten() for part in parts]))
    exact = torch.stack(exact)
    return ((partial - exact).norm() / exact.norm()).item()


@needs_compiler
@pytest.mark.parametrize(
    ("a", "b", "tokens", "steps"),
    [
        (384, 128, 130, 2),
        (128, 128, 64, 1),
        (480, 160, 450, 3),
        (160, 160, 1, 1),
        (208, 208, 200, 4),
        (232, 224, 130, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_exact(monkeypatch, a, b, tokens, steps, dtype):
    assert difference(monkeypatch, a, b, tokens, steps, dtype=dtype) < 1e-6


@needs_compiler
@pytest.mark.parametrize("seed", range(3))
def test_its_warps_may_run_in_any_order(monkeypatch, seed):
    assert difference(monkeypatch, 136, 128, 700, 6, seed=seed) < 1e-6


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("        barrier_wait(ring.full + 8 * slot, turn / SLOTS & 1);\n", ""),
        ("        products_wait<1>();\n", ""),
        ("    products_wait<0>();\n", ""),
        ("        barrier_wait(ring.empty + 8 * slot, turn / SLOTS & 1 ^ 1);\n", ""),
        ("if (left != item.plane)", "if (left == item.plane)"),
    ],
    ids=lambda change: change[0].strip(),
)
def test_what_would_be_seen(monkeypatch, change):
    """Barriers that are left out, and what is not shared."""
    for seed in range(8):
        try:
            if not difference(monkeypatch, 136, 128, 700, 6, seed=seed, change=change) < 1e-6:
                return
        except RuntimeError:
            return
    pytest.fail("the kernel with the change is right")


@needs_compiler
@pytest.mark.parametrize(("rows", "columns"), [(160, 136), (136, 160), (128, 128)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_gradients_of_weights(monkeypatch, rows, columns, tokens):
    """With the sum over slices, by Triton's interpreter."""
    monkeypatch.setattr(sums, "WIDTHS", (128, 136))
    cuda_on_cpu.use(monkeypatch)
    monkeypatch.setattr(hopper, "takes_sums", lambda a, b: a.shape[1] >= b.shape[1])
    monkeypatch.setattr(weight_gradient, "multiprocessors", lambda device: 40)
    grad, x = (torch.randn(tokens, 8 * width).bfloat16() for width in (rows, columns))
    assert weight_gradient.takes(grad, x)
    found = weight_gradient.weight_gradient(grad, x)
    exact = weight_grad(grad.double(), x.double(), 4, 1)
    for ours, right in zip(found, exact, strict=True):
        # The interpreter cuts bits off where a GPU rounds.
        torch.testing.assert_close(ours.double(), right, rtol=2**-7, atol=1e-4)


def test_it_is_for_many_features(monkeypatch):
    monkeypatch.setattr(hopper, "_is_known", lambda device: True)

    def takes(tokens, a, b, dtype=torch.bfloat16, other=torch.bfloat16):
        x, y = (
            SimpleNamespace(
                is_cuda=True,
                device=torch.device("cpu"),
                dtype=t,
                shape=(tokens, 8 * n),
                numel=lambda n=n: tokens * 8 * n,
            )
            for n, t in ((a, dtype), (b, other))
        )
        return hopper.takes_sums(x, y)

    assert takes(16448, 480, 160)
    assert not takes(1000, 480, 160)
    assert not takes(16448, 480, 96)
    assert not takes(16448, 480, 160, torch.float32, torch.float32)
    assert not takes(16448, 480, 160, other=torch.float16)


def test_which_widths_it_takes():
    cpu = torch.device("cpu")
    assert not sums.takes(cpu, torch.float32, 480, 160)
    assert not sums.takes(cpu, torch.bfloat16, 480, 96)
    assert not sums.takes(cpu, torch.bfloat16, 484, 160)
    assert all(8 * 2 * sums._slots(b, SHARED) <= sums.REST for b in sums.WIDTHS)
