"""Blocks with hooks inside compute layer by layer what they compute without."""

import pytest
import torch
from torch.nn.utils import prune

from quickvit.layers import OcticBlock
from quickvit.layers.hooks import are_called
from quickvit.testing import randomize

LINEAR = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]


def block(**options):
    return randomize(OcticBlock(32, 2, init_values=1.0, **options))


def nothing(*arguments):
    """A hook that changes nothing."""


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_pre_hook",
        "register_full_backward_hook",
    ],
)
def test_hooks_of_all_kinds_and_depths_are_seen(register):
    net = block()
    assert not are_called(net, None)
    hook = getattr(net.attn.qkv, register)(nothing)
    assert are_called(None, net)
    assert not are_called(net.mlp)
    hook.remove()
    assert not are_called(net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LINEAR)
def test_layers_are_called_whatever_kernels_there_are(name, dtype):
    net, x, calls = block().to(dtype).eval(), torch.randn(2, 5, 32, dtype=dtype), []
    with torch.no_grad():
        expected = net(x)
        net.get_submodule(name).register_forward_hook(lambda module, args, result: calls.append(result))
        torch.testing.assert_close(net(x), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("name", LINEAR)
def test_weights_that_a_hook_computes_are_those_of_this_call(name):
    net, x = block().double(), torch.randn(2, 5, 32, dtype=torch.float64)
    layer = net.get_submodule(name)
    prune.identity(layer, "weight_1")
    net(x)
    with torch.no_grad():
        layer.weight_1_orig.mul_(3)
    changed = net(x)
    prune.remove(layer, "weight_1")
    torch.testing.assert_close(net(x), changed)


@pytest.mark.parametrize("shapes", [None, ((2, 3), (4, 2))])
@pytest.mark.parametrize("subset", [False, True])
def test_stochastic_depth_stays(subset, shapes):
    net = block(drop_path=0.5).double()
    net.drop_path_subset = subset
    x = torch.randn(*((14, 32) if shapes else (6, 5, 32)), dtype=torch.float64)
    results = []
    for watched in (False, True):
        if watched:
            net.mlp.register_forward_hook(nothing)
        torch.manual_seed(0)
        results.append(net(x, shapes=shapes))
    torch.testing.assert_close(*results)
    torch.manual_seed(1)
    assert not torch.allclose(net(x, shapes=shapes), results[0])


def test_attention_is_dropped_in_training_only():
    net, x = block().double(), torch.randn(2, 5, 32, dtype=torch.float64)
    net.attn.attn_drop = 0.5
    assert torch.equal(net.eval()(x), net(x))
    assert not torch.equal(net.train()(x), net(x))
