"""Invariants in half precision, and after their memory was given to them late."""

import pytest
import torch

from quickvit.group import act_on_features
from quickvit.layers import INVARIANTS, OcticInvariant
from quickvit.layers.invariant import Canonical, PowerSpectrum
from quickvit.testing import randomize


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_power_spectrum_has_the_range_of_its_input(size, dtype):
    torch.manual_seed(0)
    x = (size * torch.randn(50, 64)).to(dtype)
    layer = PowerSpectrum(64)
    exact = layer(x.double())
    error = (layer(x) - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("autocast", [False, True])
def test_a_canonical_pose_does_not_depend_on_rounding(autocast):
    torch.manual_seed(0)
    layer = randomize(Canonical(64))
    x = torch.randn(4000, 64).bfloat16()
    layer = layer if autocast else layer.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        upright = layer(x)
        for g in layer.layout.group.elements:
            assert (layer(act_on_features(x, g)) - upright).abs().max() < 0.1


@pytest.mark.parametrize("name", INVARIANTS)
def test_weights_are_all_that_is_to_be_loaded(name):
    layer, x = randomize(OcticInvariant(32, name)), torch.randn(3, 32)
    with torch.device("meta"):
        late = OcticInvariant(32, name)
    late.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(late(x), layer(x))
