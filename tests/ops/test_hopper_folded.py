"""A folded block by the kernels that a Hopper runs, run on a CPU: what each needs of the others is there."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")

from gluon_on_cpu import OnCpu

from quickvit.layers import OcticBlock, folded
from quickvit.ops import hopper as switch
from quickvit.ops import mlp, self_attention
from quickvit.ops.triton import deviation, gelu, hopper, hopper_attention, hopper_gelu, hopper_heads
from quickvit.testing import randomize

HOPPER = 227 * 1024
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def launched(monkeypatch):
    """The path of a Hopper, whatever the device, and the names of what launches kernels, as it is called."""
    calls = []

    def watch(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (calls.append(name), function(*a, **k))[1])

    for module, name in (
        (hopper, "_octic_linear"),
        (hopper_attention, "_attention"),
        (hopper_gelu, "_linear_gelu"),
        (hopper_heads, "_linear_heads"),
    ):
        monkeypatch.setattr(module, name, OnCpu(getattr(module, name)))
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    for module in (hopper, hopper_attention):
        monkeypatch.setattr(module, "shared_memory", lambda device: HOPPER)
    hopper_attention._places.cache_clear()
    for module, name in (
        (deviation, "deviation"),
        (gelu, "gelu_forward"),
        (hopper, "linear_heads"),
        (hopper_gelu, "linear_gelu"),
        (hopper_heads, "linear_heads"),
    ):
        watch(module, name)
    monkeypatch.setattr(folded, "_has_kernels", lambda x, group: True)
    monkeypatch.setattr(folded, "takes_self_attention", lambda x, *_: x.shape[-1] in (1024, 1280))
    monkeypatch.setattr(switch, "launches_gelu", lambda x, *_, **__: x.shape[-1] in (1024, 1280))
    monkeypatch.setattr(mlp, "kernels", lambda x, name: gelu)
    for module in (mlp, self_attention):
        monkeypatch.setattr(module, "deviation", lambda *arguments: deviation.deviation(*arguments))
    return calls


# Heads of 64 and of 80, whose sequences may be too short for the kernel of Hopper; and a width without such kernels,
# whose hidden features exist in two parts.
@pytest.mark.parametrize(
    ("width", "shapes", "expected"),
    [
        (1024, ((3, 19),), ["deviation", "linear_heads", "linear_gelu"]),
        (1024, ((2, 19), (3, 7)), ["deviation", "linear_heads", "linear_gelu"]),
        (1280, ((2, 70),), ["linear_heads", "linear_gelu"]),
        (1280, ((1, 70), (3, 5)), ["linear_heads", "deviation", "linear_gelu"]),
        (208, ((3, 19),), 2 * ["deviation", "gelu_forward"]),
    ],
)
@torch.no_grad()
def test_it_is_the_block(width, shapes, expected, launched, monkeypatch):
    tokens = sum(number * length for number, length in shapes)
    if width == 208:
        monkeypatch.setattr(mlp, "HIDDEN_BYTES", 2 * tokens * 416 // 2)
    torch.manual_seed(0)
    nets = [
        randomize(OcticBlock(width, 16 if width > 208 else 2, 2, init_values=1.0), seed) for seed in (0, 1)
    ]
    # Triton's interpreter cannot multiply in bfloat16.
    first, second = (net.eval().fuse().half() for net in nets)
    x = (1 + torch.randn(tokens, width)).half()
    y, left = first(x, defer=True, shapes=shapes)
    y = second(y, left, shapes=shapes)
    assert launched == 2 * expected
    exact = x.double()
    for net in nets:
        exact = net.double()(exact, shapes=shapes)
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=2e-2)
