"""The linear map from many channels by the kernel for Hopper, run on a CPU; on a GPU see test_ops_gpu."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.ops import hopper, linear
from quickvit.ops.triton import hopper_long
from quickvit.ops.triton.boxes import shares


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(hopper_long, "_long_linear", OnCpu(hopper_long._long_linear))
    monkeypatch.setattr(hopper_long, "multiprocessors", lambda device: 3)


def problem(tokens, channels, width=1024, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(tokens)

    def noise(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    m, f = channels // 8, width // 8
    return noise(tokens, channels), (
        noise(4, f, m, scale=m**-0.5),
        noise(1, 2 * f, 2 * m, scale=(2 * m) ** -0.5),
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "channels", "width"),
    [
        (1, 2048, 1024),
        (129, 2048, 1024),
        (700, 512, 1024),
        (256, 3072, 1024),
        (130, 5120, 1280),
        (300, 768, 1280),
    ],
)
def test_a_linear_map(tokens, channels, width, transposed, dtype):
    x, weights = problem(tokens, channels, width, dtype)
    expected = linear.definition(x.float(), *(w.float() for w in weights))
    if transposed:
        weights = [w.mT.contiguous().mT for w in weights]
    y = torch.full((tokens, width), float("nan"), dtype=dtype)
    hopper_long.linear(x, *weights, y)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


def test_no_tokens():
    x, weights = problem(0, 2048)
    hopper_long.linear(x, *weights, x[:, :1024])


@pytest.mark.parametrize("blocks", [1, 2, 7, 66, 99, 100, 1000])
@pytest.mark.parametrize("programs", [1, 3, 132])
@pytest.mark.parametrize("cost", [2, 4])
def test_programs_end_at_about_the_same_time(blocks, programs, cost):
    longer, less, more = shares(2 * blocks, 4 * blocks, cost, programs)
    twos = [len(range(p, 2 * blocks, programs)) for p in range(programs)]
    assert all(two == max(twos) for two in twos[:longer])
    assert longer * less + (programs - longer) * more >= 4 * blocks
    # In less time it cannot be done.
    time = cost * min(twos) + more - 1
    assert sum(max(time - cost * two, 0) for two in twos) < 4 * blocks


def test_large_shares_at_the_size_of_vit_large():
    # 66 of the 132 multiprocessors of an H200 have two tiles of E and one other, 66 have one and five.
    assert shares(2 * 99, 4 * 99, 4, 132) == (66, 1, 5)


def test_the_product_is_made_of_it(monkeypatch):
    monkeypatch.setattr(hopper, "linear_kernel", lambda *_: hopper_long)
    x, weights = problem(5, 2048)
    y = linear.octic_linear(x, *weights)
    expected = linear.definition(x.float(), *(w.float() for w in weights))
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "channels", "width", "memory", "taken"),
    [
        (torch.bfloat16, 4096, 1024, 232448, True),
        (torch.float16, 3072, 1024, 232448, True),
        (torch.float32, 4096, 1024, 232448, False),
        (torch.bfloat16, 1024, 1024, 232448, False),
        (torch.bfloat16, 3840, 1280, 232448, True),
        (torch.bfloat16, 3072, 768, 232448, False),
        (torch.bfloat16, 4096, 1024, 166912, False),
    ],
)
def test_what_it_takes(monkeypatch, dtype, channels, width, memory, taken):
    monkeypatch.setattr(hopper_long, "shared_memory", lambda device: memory)
    hopper_long.takes.cache_clear()
    assert hopper_long.takes(torch.device("cuda"), dtype, channels, width) == taken
    hopper_long.takes.cache_clear()
