"""Folded blocks compute what the blocks did of which they were made."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from timm.utils import reparameterize_model
from tiny_models import images, tiny
from torch._inductor.utils import run_and_get_code
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

from quickvit.group import D2, D8, act_on_features, act_on_image
from quickvit.layers import OcticBlock, OcticFoldedBlock
from quickvit.layers.block import Pending, hands_over
from quickvit.layers.folded import OWNED
from quickvit.models import FAMILIES
from quickvit.models.checkpoints import CheckpointError, save_checkpoint
from quickvit.ops import gelu, mlp, octic_linear
from quickvit.ops.linear import linear_onto
from quickvit.ops.mlp import mlp_onto
from quickvit.testing import assert_equivariant, assert_invariant, randomize
from quickvit.train.compiling import compile_module

OPTIONS = [{}, {"init_values": None}, {"qkv_bias": False}, {"released_norm": True}]
D8_FAMILIES = [name for name, family in FAMILIES.items() if family.group == D8]


def block(**options):
    return randomize(OcticBlock(32, 2, **{"init_values": 1.0, **options})).double().eval()


def tokens(seed=0, width=32):
    """Not centred, as the stream of a model is not."""
    return 1 + torch.randn(3, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.fixture
def in_place(monkeypatch):
    """The path of a GPU on the CPU, with definitions in place of kernels; a list of the blocks that took it."""
    taken = []
    heads = OcticFoldedBlock._heads

    def watched(self, x, shapes):
        taken.append(self)
        return heads(self, x, shapes)

    def gelu_forward(x, bias, out, row_scale):
        return out.copy_(gelu.definition(row_scale[:, None] * x, bias))

    monkeypatch.setattr("quickvit.layers.folded._has_kernels", lambda x, group: group == D8)
    monkeypatch.setattr(mlp, "kernels", lambda x, name: SimpleNamespace(gelu_forward=gelu_forward))
    monkeypatch.setattr(OcticFoldedBlock, "_heads", watched)
    return taken


# ---------------------------------------------------------------------- one block


@pytest.mark.parametrize("options", [*OPTIONS, {"group": D2}], ids=str)
def test_it_is_the_block(options):
    net, x = block(**options), tokens()
    folded = net.fuse()
    with torch.no_grad():
        assert_same(folded(x), net(x))
    assert folded.fuse() is folded


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_in_place_it_is_the_block(options, in_place):
    net, x = block(**options), tokens()
    folded, before = net.fuse(), x.clone()
    with torch.no_grad():
        assert_same(folded(x), net(x))
        assert_same(folded(x.mT.contiguous().mT), net(x))
        packed = x.flatten(0, 1)
        shapes = ((1, 4), (1, 11))
        assert_same(folded(packed, shapes=shapes), net(packed, shapes=shapes))
    assert torch.equal(x, before)
    assert in_place == 3 * [folded]


def test_neither_gains_nor_layer_scales_are_left():
    net = block()
    folded = net.fuse()
    names = {name for name, _ in folded.named_parameters()}
    expected = {
        f"{layer}.{name}"
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        for name in ("weight_1", "weight_2", "bias")
    }
    assert names == expected
    assert set(folded.state_dict()) == expected
    assert not any(p.requires_grad for p in folded.parameters())
    # The block itself is as it was.
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), block().parameters(), strict=True))
    assert all(p.requires_grad for p in net.parameters())


def test_products_of_folded_weights_are_centred():
    """So that the mean over the channels of a block, which can be large, does nothing but round."""
    qkv = block().fuse().attn.qkv
    with torch.no_grad():
        assert octic_linear(torch.ones(1, 32, dtype=torch.float64), *qkv.weights).abs().max() < 1e-12


@pytest.mark.parametrize("path", ["in place", "layers"])
def test_it_is_equivariant(path, request):
    if path == "in place":
        request.getfixturevalue("in_place")
    with torch.no_grad():
        assert_equivariant(block().fuse(), tokens(), act_on_features, act_on_features)


def test_who_needs_what_is_between_gets_it(in_place):
    """Gradients, training, autocast, hooks, other precisions of the stream, `plain`."""
    net = block()
    folded, x = net.fuse(), tokens()
    y = folded(x.requires_grad_())
    expected = net(x)
    assert_same(y, expected)
    assert_same(*(torch.autograd.grad(of.square().sum(), x)[0] for of in (y, expected)))
    with torch.no_grad():
        assert_same(folded.train()(x), expected)
        folded.eval()
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(folded(x), folded.train()(x))
        folded.eval()
        seen = []
        folded.mlp.fc1.register_forward_hook(lambda *arguments: seen.append(arguments))
        assert_same(folded(x), expected)
        assert len(seen) == 1
    assert in_place == []


def test_any_other_folded_block_takes_what_one_leaves(in_place):
    """Also one that does not work in place, and after one that does not."""
    nets = [block(), block()]
    randomize(nets[1], seed=1)
    folded, x = [net.fuse() for net in nets], tokens()
    with torch.no_grad():
        expected = nets[1](nets[0](x))
        y, left = folded[0](x, defer=True)
        assert left == OWNED
        result = folded[1](y.clone(), left)
        assert_same(result, expected)
        folded[1].train()
        assert_same(folded[1](y, left), expected)
        folded[0].train()
        y, left = folded[0](x, defer=True)
        assert isinstance(left, Pending)
        assert_same(folded[1].eval()(y, left), expected)


def test_blocks_hand_over_to_their_kind_alone():
    net = block()
    folded = net.fuse()
    assert hands_over(folded, block().fuse())
    assert hands_over(torch.compile(folded), folded)
    assert not hands_over(net, folded)
    assert not hands_over(folded, net)


def test_what_cannot_be_folded_is_refused():
    hooked, pruned, normed, replaced = (block() for _ in range(4))
    hooked.mlp.register_forward_hook(lambda *arguments: None)
    prune.identity(pruned.mlp.fc1, "weight_1")
    parametrizations.weight_norm(normed.mlp.fc1, "weight_1")
    replaced.mlp.fc1 = torch.nn.Identity()
    for net, reason in (
        (hooked, "hook"),
        (pruned, "hook"),
        (normed, "parametrization"),
        (replaced, "replaced"),
    ):
        with pytest.raises(ValueError, match=f"cannot fold this block.*{reason}"):
            net.fuse()


# ---------------------------------------------------------------------- whole models


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", ["in place", "layers"])
def test_models_compute_the_same(family, path, request):
    if path == "in place":
        request.getfixturevalue("in_place")
    model = tiny(family).double().eval()
    folded, x = reparameterize_model(model), images(model)
    octic = [isinstance(net, OcticFoldedBlock) for net in folded.blocks]
    assert octic == [i < model.octic_depth for i in range(4)]
    with torch.no_grad():
        assert_same(folded(x), model(x))
        for ours, theirs in zip(
            folded.forward_intermediates(x, indices=[0, 1, 3]),
            model.forward_intermediates(x, indices=[0, 1, 3]),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        if FAMILIES[family].invariant:
            assert_invariant(folded, x, act_on_image, model.group)


def test_in_a_model_each_block_works_in_place(in_place):
    model = tiny("d8").double().eval()
    folded = reparameterize_model(model)
    with torch.no_grad():
        folded(images(model))
    assert in_place == [*folded.blocks]


def test_some_blocks_may_be_folded(in_place):
    model = tiny("d8").double().eval()
    mixed = copy.deepcopy(model)
    mixed.blocks[1] = mixed.blocks[1].fuse()
    mixed.blocks[2] = mixed.blocks[2].fuse()
    with torch.no_grad():
        assert_same(mixed(images(model)), model(images(model)))
    assert in_place == [*mixed.blocks[1:3]]


def test_a_folded_model_moves_as_others_do():
    """Copies, dtypes, state dicts of the same kind."""
    model = reparameterize_model(tiny("i8").eval())
    other = copy.deepcopy(model).double()
    assert all(
        t.dtype == torch.float64 for t in (*other.parameters(), *other.buffers()) if t.is_floating_point()
    )
    other.load_state_dict(model.state_dict())
    x = images(model)
    with torch.no_grad():
        torch.testing.assert_close(other(x), model.double()(x))


def test_a_checkpoint_of_a_folded_model_is_refused(tmp_path):
    model = reparameterize_model(tiny("d8").eval())
    with pytest.raises(CheckpointError, match=r"folded.*save the model that it was made of"):
        save_checkpoint(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_compiled_code_has_one_stream(in_place):
    """What is added to in place is the same memory from the first block to the last, and nobody else's."""
    model = tiny("d8").eval()
    folded, x = reparameterize_model(model), images(model, dtype=torch.float32)
    compiled, before = torch.compile(folded, fullgraph=True), x.clone()
    with torch.no_grad():
        result, (code,) = run_and_get_code(compiled, x)
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before)
    streams = re.findall(r"octic_(?:linear|mlp)_onto\.default\((.*?buf\d+)", code)
    assert len(streams) == 8
    assert len(set(streams)) == 1


def test_blocks_may_be_compiled_one_by_one(in_place):
    """Each then writes to what the one before has handed over."""
    model = tiny("d8").eval()
    folded, x = reparameterize_model(model), images(model, dtype=torch.float32)
    compile_module(folded, "blocks", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-4)


def test_flops_are_those_of_the_layers():
    """Counted operator by operator: a counter of a module's FLOPs watches its layers, so that they are called."""
    net, x = block().fuse(), tokens().flatten(0, 1)
    qkv, fc1, fc2 = net.attn.qkv, net.mlp.fc1, net.mlp.fc2

    def count(function, *arguments):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            function(*arguments)
        return counter.get_total_flops()

    x, *of_mlp = (t.float() for t in (x, *fc1.weights, fc1.bias, *fc2.weights, fc2.bias))
    assert count(mlp_onto, x, 1e-6, 1.0, *of_mlp) == count(net.mlp.float(), x)
    assert count(linear_onto, torch.zeros(15, 96), x, *(w.float() for w in qkv.weights), None) == count(
        qkv.float(), x
    )
