"""What users put into a model, override or hook takes part, in the place of what it replaced."""

import pytest
import torch
from tiny_models import images, tiny
from torch import nn
from torch.fx import symbolic_trace
from torch.nn.modules.module import register_module_forward_hook

from quickvit import QuickVisionTransformer, act_on_image
from quickvit.layers import OcticDropout, OcticLinear
from quickvit.testing import assert_invariant

LAYERS = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
PARTS = [*LAYERS, "attn", "mlp", "norm1", "norm2", "ls1", "ls2", "attn.proj_drop", "mlp.drop1"]


class Adapter(nn.Module):
    """Scales what a layer computes by a learned number."""

    def __init__(self, inner, gain=1.0):
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.tensor(gain, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x) * self.gain


class Doubled(OcticLinear):
    """A layer that says itself how it is applied."""

    def forward(self, x):
        return 2 * super().forward(x)


def wrap(model, path, gain=1.0):
    adapter = Adapter(model.get_submodule(path), gain)
    model.set_submodule(path, adapter)
    return adapter


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "path", [*(f"blocks.1.{part}" for part in PARTS), "blocks.0", "blocks.1", "blocks.2"]
)
@pytest.mark.parametrize("family", ["d8", "i8"])
def test_adapters_are_called(family, path, training):
    net = tiny(family).double().train(training)
    x = images(net)
    expected = net(x)
    adapter = wrap(net, path)
    torch.testing.assert_close(net(x), expected)
    net(x).square().sum().backward()
    assert adapter.gain.grad.abs() > 1e-6
    with torch.no_grad():
        adapter.gain.fill_(2)
        assert not torch.allclose(net(x), expected)


@pytest.mark.parametrize("part", [None, "attn", "mlp"])
def test_adapters_meet_packed_sequences(part):
    net = tiny("d8", dynamic_img_size=True).double().eval()
    crops = [images(net), images(net, 8, 12)]

    class Packed(Adapter):
        def forward(self, x, **options):
            return self.inner(x, **options) * self.gain

    with torch.no_grad():
        expected = net.forward_crops(crops)
        path = "blocks.1" if part is None else f"blocks.1.{part}"
        net.set_submodule(path, Packed(net.get_submodule(path)))
        for a, b in zip(net.forward_crops(crops), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_overrides_are_called(name):
    net = tiny("d8").double().eval()
    x = images(net)
    with torch.no_grad():
        before = net(x)
        layer = net.blocks[1].get_submodule(name)
        layer.__class__ = Doubled
        by_class = net(x)
        layer.__class__ = OcticLinear
        torch.testing.assert_close(net(x), before)
        layer.forward = lambda x: 2 * OcticLinear.forward(layer, x)
        torch.testing.assert_close(net(x), by_class)
    assert not torch.allclose(by_class, before)


def test_compiled_blocks_still_leave_sums_to_each_other():
    net = tiny("d8").double().eval()
    x, calls = images(net), []
    with torch.no_grad():
        expected = net(x)

        def backend(graph, _):
            calls.append(len(graph.graph.output_node().args[0]))
            return graph.forward

        net.blocks[1] = torch.compile(net.blocks[1], backend=backend)
        torch.testing.assert_close(net(x), expected)
    assert calls[0] > 1


def gradients(net, x):
    net.zero_grad()
    net(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("training", [False, True])
def test_hooks_of_blocks_hold_all_of_the_gradient(register, training):
    """A gradient that a hook makes zero is zero in all that comes before."""
    net = tiny("d8").double().train(training)
    x = images(net)
    without = gradients(net, x)
    getattr(net.blocks[2], register)(lambda module, *grads: tuple(0 * grad for grad in grads[0]))
    hooked = gradients(net, x)
    stopped = [f"blocks.{i}." for i in ((0, 1, 2) if "pre" in register else (0, 1))]
    for name, gradient in hooked.items():
        if name.startswith(tuple(stopped)):
            assert without[name].abs().sum() > 0
            assert gradient.abs().sum() == 0, name
        elif name.startswith("blocks."):
            torch.testing.assert_close(gradient, without[name])


@pytest.mark.parametrize("part", ["attn.proj_drop", "mlp.drop1", "mlp.drop2"])
def test_dropout_that_is_switched_on_in_evaluation_drops(part):
    net = tiny("d8", proj_drop_rate=0.5).double().eval()
    x = images(net)
    with torch.no_grad():
        assert torch.equal(net(x), net(x))
        dropout = net.blocks[1].get_submodule(part)
        assert isinstance(dropout, OcticDropout)
        dropout.train()
        assert not torch.allclose(net(x), net(x))


def test_dropout_that_is_switched_off_in_training_does_not_drop():
    net = tiny("d8", proj_drop_rate=0.5).double().train()
    for module in net.modules():
        if isinstance(module, OcticDropout):
            module.eval()
    x = images(net)
    torch.testing.assert_close(net(x), net.eval()(x))


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_computed_weights_are_differentiated(name):
    net = tiny("d8").eval().requires_grad_(False)
    layer = net.blocks[0].mlp.get_submodule(name)
    weight, gain = layer.weight_1.clone(), torch.ones((), requires_grad=True)
    del layer.weight_1
    layer.weight_1 = weight * gain
    net(images(net, dtype=torch.float32)).square().sum().backward()
    assert gain.grad.abs() > 0


def test_checkpointing_saves_memory_in_evaluation_too():
    net = tiny("d8").eval()
    x = images(net, dtype=torch.float32)

    def saved():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            net(x)
        return sum(sizes)

    without = saved()
    net.set_grad_checkpointing()
    assert saved() < without / 3


class TwoPools(QuickVisionTransformer):
    """Pools the class token and the patches."""

    def pool(self, x, pool_type=None):
        return super().pool(x, pool_type) + x[:, self.num_prefix_tokens :].mean(1)


class LastPatch(QuickVisionTransformer):
    """Its head takes the last patch."""

    def forward_head(self, x, pre_logits=False):
        return super().forward_head(x[:, -1:], pre_logits)


@pytest.mark.parametrize("subclass", [TwoPools, LastPatch])
@pytest.mark.parametrize("family", ["d8", "i8"])
def test_subclasses_pool_all_tokens(family, subclass):
    net = tiny(family).double().eval()
    net.__class__ = subclass
    x = images(net)
    torch.testing.assert_close(net(x), net.forward_head(net.forward_features(x)))


@pytest.mark.parametrize("method", ["forward_features", "forward_head", "pool"])
def test_methods_that_are_replaced_are_called(method):
    net = tiny("d8").double().eval()
    x = images(net)
    original = getattr(net, method)
    setattr(net, method, lambda *args: 2 * original(*args))
    torch.testing.assert_close(net(x), net.forward_head(net.forward_features(x)))


@pytest.mark.parametrize("path", ["norm", "invariant", "invariant.proj"])
def test_hooks_behind_the_last_block_see_all_tokens(path):
    net = tiny("d8").double().eval()
    x, seen = images(net), []
    expected = net(x)
    net.get_submodule(path).register_forward_hook(lambda module, args, result: seen.append(result.shape[1]))
    torch.testing.assert_close(net(x), expected)
    assert seen == [net.num_prefix_tokens + 16]


def test_a_norm_over_tokens_sees_them_all():
    net = tiny("d8").double().eval()

    class OverTokens(nn.Module):
        def forward(self, x):
            return x - x.mean(1, keepdim=True)

    net.norm = OverTokens()
    x = images(net)
    torch.testing.assert_close(net(x), net.forward_head(net.forward_features(x)))
    assert net(x).std() > 0


@pytest.mark.parametrize(("family", "left"), [("d8", 3), ("d8", 1), ("i8", 3), ("i8", 1)])
def test_fewer_blocks_are_still_invariant(family, left):
    net = tiny(family).double().eval()
    net.blocks = net.blocks[:left]
    assert_invariant(net, images(net), act_on_image)


def test_blocks_that_are_not_octic_where_they_should_be_are_named():
    net = tiny("i8").double().eval()
    net.blocks = net.blocks[1:]
    with pytest.raises(ValueError, match="block 1 is a standard one, but octic_depth says 2 octic ones"):
        net(images(net))


def test_hooks_of_all_modules_see_all_of_them():
    net = tiny("i8").double().eval()
    x, seen = images(net), {}
    names = {module: name for name, module in net.named_modules()}

    def note(module, args, result):
        seen[names[module]] = result

    expected = net(x)
    handle = register_module_forward_hook(note)
    try:
        torch.testing.assert_close(net(x), expected)
    finally:
        handle.remove()
    assert {
        f"blocks.{i}.{part}" for i in range(4) for part in (*LAYERS, "attn", "mlp", "norm2")
    } <= seen.keys()
    assert all(seen[f"blocks.{i}"].shape == (4, 17, 32) for i in range(4))


def test_overrides_behind_the_last_block_see_all_tokens():
    net = tiny("i8").double().eval()
    x, seen, forward = images(net), [], net.norm.forward
    net.norm.forward = lambda tokens: seen.append(tokens.shape) or forward(tokens)
    net(x)
    assert seen == [(4, 17, 32)]


def test_generated_code_inside_blocks_runs():
    net = tiny("d8").double().eval()
    x = images(net)
    net.blocks[0].mlp = nn.Sequential(nn.Linear(32, 32), nn.GELU()).double()
    expected = net(x)
    net.blocks[0].mlp = symbolic_trace(net.blocks[0].mlp)
    torch.testing.assert_close(net(x), expected)
