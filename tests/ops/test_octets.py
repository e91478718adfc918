"""Features as octets, and attention by way of them."""

import math

import pytest
import torch

pytest.importorskip("triton")

import cuda_on_cpu
from gluon_on_cpu import OnCpu

from quickvit.group import D8, Layout
from quickvit.ops import attention, hopper, linear, self_attention
from quickvit.ops.norm import deviation
from quickvit.ops.triton import hopper_attention
from quickvit.ops.triton.octets import from_octets

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("channels", [16, 208, 1024, 1664])
@pytest.mark.parametrize("tokens", [0, 1, 197])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_entries_find_their_blocks(tokens, channels, dtype):
    packed = torch.randn(tokens, channels, device=DEVICE).to(dtype)
    blocks = packed.split([block.width for block in Layout(channels).blocks], dim=1)
    octets = torch.cat([block.unflatten(1, (channels // 8, -1)) for block in blocks], dim=2)
    found = torch.full((tokens + 1, channels), math.nan, dtype=dtype, device=DEVICE)
    from_octets(octets, found[:tokens])
    assert torch.equal(found[:tokens], packed)
    assert found[tokens].isnan().all()


@pytest.mark.skipif(not cuda_on_cpu.COMPILER, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("norm", [None, (1e-6, 0.25)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("channels", "shapes"), [(1280, ((1, 65),)), (1664, ((2, 70),)), (1792, ((1, 65), (1, 82)))]
)
def test_attention_by_way_of_octets(channels, shapes, biased, norm, monkeypatch):
    cuda_on_cpu.use(monkeypatch)
    monkeypatch.setattr(hopper, "takes_octets", lambda *_: True)
    monkeypatch.setattr(hopper_attention, "_attention", OnCpu(hopper_attention._attention))
    monkeypatch.setattr(hopper_attention, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(hopper_attention, "shared_memory", lambda device: cuda_on_cpu.SHARED)
    hopper_attention._places.cache_clear()
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    tokens, m = sum(number * length for number, length in shapes), channels // 8
    x, bias = 2 * noise(tokens, channels) + 1, noise(3 * m) if biased else None
    weights = noise(4, 3 * m, m) / m**0.5, noise(1, 6 * m, 2 * m) / m**0.5
    found = self_attention.octic_self_attention(x, *weights, bias, 16, shapes=shapes, norm=norm)
    x = x.double() if norm is None else x.double() * deviation(x, *norm)[:, None]
    products = linear.definition(x, *(weight.double() for weight in weights))
    bias = None if bias is None else bias.double()
    exact = attention.definition(products, 16, Layout(3 * channels, D8), bias, shapes=shapes)
    assert (found - exact).norm() < 0.01 * exact.norm()


def test_they_are_for_many_long_sequences_without_gradients(monkeypatch):
    monkeypatch.setattr(self_attention, "fused", lambda *_: True)
    monkeypatch.setattr(hopper, "_makes_octets", lambda *_: True)
    monkeypatch.setattr(hopper, "_most_tokens", lambda *_: 448)
    monkeypatch.setattr(hopper, "takes_heads", lambda *_: False)

    class Gpu(torch.Tensor):
        is_cuda = True

    def takes(*shape, graded=False, shapes=None):
        x = torch.empty(shape, device="meta").as_subclass(Gpu)
        return self_attention.takes_self_attention(x, 16, D8, shapes, graded=graded)

    assert takes(64, 257, 1664)
    assert takes(64, 257, 1792)
    assert takes(64, 257, 1280)
    assert not takes(64, 257, 1408)
    assert not takes(64, 257, 1664, graded=True)
    assert not takes(4, 257, 1664)
    assert not takes(400, 37, 1664)
    assert not takes(64, 500, 1664)
    assert takes(64 * 197 + 64 * 65, 1664, shapes=((64, 197), (64, 65)))
    assert not takes(64 * 197 + 64 * 37, 1664, shapes=((64, 197), (64, 37)))
