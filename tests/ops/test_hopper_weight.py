"""Weight gradients by the kernel for Hopper, run on a CPU; on a GPU see test_ops_gpu."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.ops import hopper
from quickvit.ops.triton import hopper_weight, weight_gradient


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    kernel = OnCpu(hopper_weight._hopper_partial_sums)
    monkeypatch.setattr(hopper_weight, "_hopper_partial_sums", kernel)
    monkeypatch.setattr(hopper_weight, "multiprocessors", lambda device: 5)


def expected(grad, x):
    """Of each irrep, with both components of E in one."""
    one, two = (t.double().unflatten(1, (8, -1)).split(4, dim=1) for t in (grad, x))
    first = torch.einsum("tni,tnj->nij", one[0], two[0])
    pairs = [t.unflatten(1, (2, 2)).flatten(2) for t in (one[1], two[1])]
    return first, torch.einsum("tni,tnj->ij", *pairs).unsqueeze(0)


@pytest.mark.parametrize("tokens", [1, 65, 700])
@pytest.mark.parametrize(
    ("channels", "width"), [(1024, 1024), (1024, 1536), (2048, 1024), (1280, 1280), (1280, 1536)]
)
def test_weight_gradients(tokens, channels, width):
    generator = torch.Generator().manual_seed(tokens)
    x, grad = (torch.randn(tokens, side, generator=generator).bfloat16() for side in (channels, width))
    found = weight_gradient.weight_gradient(grad, x, hopper_weight)
    for ours, exact in zip(found, expected(grad, x), strict=True):
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=1e-2 * tokens**0.5)


def test_no_tokens():
    found = weight_gradient.weight_gradient(torch.empty(0, 1024), torch.empty(0, 2048), hopper_weight)
    assert [tuple(weight.shape) for weight in found] == [(4, 128, 256), (1, 256, 512)]
    assert not any(weight.any() for weight in found)


@pytest.mark.parametrize(("turns", "rows", "columns"), [(197, 512, 128), (257, 640, 160), (1, 128, 128)])
def test_all_tokens_are_in_a_slice(turns, rows, columns):
    steps, twos, ones = hopper_weight._cut(turns, rows, columns, 132)
    slices = -(-turns // steps)
    assert 0 < slices <= 16
    assert (twos, ones) == (slices * 2 * -(-2 * rows // 128), slices * 4 * -(-rows // 128))


def test_it_is_for_some_widths(monkeypatch):
    monkeypatch.setattr(hopper_weight, "shared_memory", lambda device: 232448)
    hopper_weight.takes.cache_clear()

    def takes(channels, width, dtype=torch.bfloat16):
        return hopper_weight.takes(torch.device("cuda"), dtype, channels, width)

    assert [takes(1024, 4096), takes(4096, 1024), takes(1280, 3840)] == [True, True, True]
    assert [takes(768, 3072), takes(1664, 8192), takes(1024, 4096, torch.float32)] == [False, False, False]
    hopper_weight.takes.cache_clear()


def test_it_is_not_for_a_cpu():
    assert hopper.weight_kernel(torch.empty(1, 1024), torch.empty(1, 1024)) is None
