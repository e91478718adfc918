"""Whole models: what each family promises, in every mode, size and precision."""

import copy
import re
import shutil
from functools import partial

import numpy as np
import pytest
import timm
import torch
from tiny_models import TINY, images, tiny

import quickvit
from quickvit import QuickVisionTransformer, act_on_image
from quickvit.group import D8, act_on_tokens
from quickvit.layers import INVARIANTS, OcticMlp, attention, norm
from quickvit.models import FAMILIES
from quickvit.models.checkpoints import load_weights
from quickvit.testing import assert_equivariant, assert_invariant, equivariance_error, randomize

INVARIANT_FAMILIES = [name for name, family in FAMILIES.items() if family.invariant]


def assert_promises(model, x, function=None):
    """Steerable tokens before the break are equivariant, and the output invariant where the family says so."""
    group = model.group
    act_in = partial(act_on_image, group=group)
    grid = (x.shape[-2] // model.patch_size, x.shape[-1] // model.patch_size)

    def act_out(tokens, g):
        return act_on_tokens(tokens, g, grid, group, prefix=model.num_prefix_tokens)

    assert_equivariant(lambda x: model.forward_steerable(x).tokens, x, act_in, act_out, group)
    if model.family in INVARIANT_FAMILIES:
        assert_invariant(function or model, x, act_in, group)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [224, 96])
def test_promises_of_the_named_models(family, size, dtype):
    model = timm.create_model(f"quickvit_{family}_tiny_patch16_224", img_size=size, depth=4, init_values=1.0)
    model = randomize(model).to(dtype).eval()
    with torch.no_grad():
        assert_promises(model, images(model, batch=2, dtype=dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(52, 52), (40, 56), (56, 40)])
@pytest.mark.parametrize("extras", [{}, {"reg_tokens": 3}, {"class_token": False, "global_pool": "avg"}])
def test_promises_on_odd_and_oblong_grids(family, size, extras):
    """13×13 and 10×14 grids, with registers, and without a class token."""
    model = tiny(family, dynamic_img_size=True, **extras).double().eval()
    with torch.no_grad():
        assert_promises(model, images(model, *size))


@pytest.mark.parametrize("family", FAMILIES)
def test_promises_of_a_model_for_oblong_images(family):
    model = tiny(family, img_size=(40, 56)).double().eval()
    with torch.no_grad():
        assert_promises(model, images(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_promises_in_training(family):
    model = tiny(family, drop_path_rate=0.3, attn_drop_rate=0.0).double().train()
    x = images(model, batch=8)

    def seeded(function, x):
        torch.manual_seed(0)
        return function(x)

    forward_steerable, forward = model.forward_steerable, model.forward
    model.forward_steerable = partial(seeded, forward_steerable)
    assert_promises(model, x, partial(seeded, forward))


@pytest.mark.parametrize("family", FAMILIES)
def test_promises_after_a_hundred_steps(family):
    torch.manual_seed(0)
    model = tiny(family, reg_tokens=1, drop_path_rate=0.1).double()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        optimiser.zero_grad()
        x, target = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.randint(7, (4,))
        torch.nn.functional.cross_entropy(model(x), target).backward()
        optimiser.step()
    with torch.no_grad():
        assert_promises(model.eval(), images(model))


@pytest.mark.parametrize("invariant", INVARIANTS)
@pytest.mark.parametrize("family", INVARIANT_FAMILIES)
def test_promises_of_every_invariant(family, invariant):
    model = tiny(family, invariant=invariant).double().eval()
    with torch.no_grad():
        assert_promises(model, images(model))


@pytest.mark.parametrize("octic_depth", [0, 1, 4])
@pytest.mark.parametrize("family", ["i8", "h8", "h2"])
def test_promises_at_every_depth(family, octic_depth):
    model = tiny(family, octic_depth=octic_depth).double().eval()
    with torch.no_grad():
        assert_promises(model, images(model))


def test_hybrids_do_not_promise_invariance():
    """The assertion is sharp: the same test must fail where equivariance is broken."""
    model = tiny("h8").double().eval()
    with torch.no_grad():
        errors = equivariance_error(model, images(model), act_on_image, lambda y, g: y)
    assert all(error > 0.1 for g, error in errors.items() if g != D8.identity)


@pytest.mark.parametrize(
    "path", ["patch_embed", "blocks.0.attn.qkv", "blocks.1.mlp.fc1", "blocks.0.norm1", "pos_embed"]
)
def test_one_broken_part_breaks_the_promise(path):
    """Each part in turn adds its input-independent mistake to A2, which no invariant may see."""
    model = tiny("i8").double().eval()
    part = model.get_submodule(path)
    forward = part.forward

    def broken(*args, **kwargs):
        y = forward(*args, **kwargs).clone()
        y[..., y.shape[-1] // 8] += 0.3
        return y

    part.forward = broken
    x = images(model)
    with torch.no_grad():
        errors = equivariance_error(model, x, act_on_image, lambda y, g: y)
    assert max(errors.values()) > 1e-4


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("d8", torch.float32), ("i8", torch.float64), ("h8", torch.float32), ("h2", torch.float64)],
)
def test_compiled_models_compute_the_same(family, dtype):
    torch.compiler.reset()
    model = tiny(family, depth=2, reg_tokens=1).to(dtype)
    x = images(model, dtype=dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    loss = compiled(x).square().mean()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        if family in INVARIANT_FAMILIES:
            assert_invariant(compiled, x, act_on_image, D8)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for actual, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_inductor_keeps_the_promise():
    torch.compiler.reset()
    model = tiny("i8", depth=2).eval()
    x = images(model, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
        assert_invariant(compiled, x, act_on_image, D8)


def test_exported_models_compute_the_same():
    model = tiny("i8").eval()
    x = images(model, dtype=torch.float32)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_the_number_of_images_of_an_exported_model_is_free():
    model = tiny("i8", mask_token=True).eval()
    x = images(model, dtype=torch.float32)
    mask = torch.rand(4, 16) < 0.5
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program.module()(x[:3]), model(x[:3]))
    torch.compiler.reset()
    features = torch.compile(model.forward_features, fullgraph=True, backend="eager", dynamic=True)
    for size in (4, 3, 2):
        expected = model.forward_features(x[:size], mask[:size])
        torch.testing.assert_close(features(x[:size], mask[:size]), expected)


def test_export_in_standard_operators():
    from quickvit.ops import plain

    model = tiny("h8").eval()
    x = images(model, dtype=torch.float32)
    with plain():
        program = torch.export.export(model, (x,))
    assert not [n for n in program.graph.nodes if "quickvit" in str(n.target)]
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_nothing():
    model = tiny("i8").double()
    x = images(model)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model.set_grad_checkpointing()
    for a, b in zip(torch.autograd.grad(model(x).sum(), list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_checkpointing_of_steerable_features(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "quickvit.models.quick_vit.checkpoint", lambda block, x, **_: (calls.append(block), block(x))[1]
    )
    model = tiny("i8")
    model.set_grad_checkpointing()
    model.forward_steerable(images(model).float())
    assert calls == list(model.blocks[: model.octic_depth])


def test_masked_patches_are_hidden_and_keep_the_symmetry():
    model = tiny("i8", mask_token=True).double().eval()
    x = images(model)
    mask = torch.zeros(4, 4, 4, dtype=torch.bool)
    mask[:, :2, 1:3] = True
    hidden = x.clone()
    hidden[..., :8, 4:12] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            model.forward_features(x, mask.flatten(1)), model.forward_features(hidden, mask.flatten(1))
        )
        for g in D8.elements:
            moved = model.forward_features(act_on_image(x, g), act_on_image(mask, g).flatten(1))
            torch.testing.assert_close(moved[:, 0], model.forward_features(x, mask.flatten(1))[:, 0])
    with pytest.raises(ValueError, match="mask_token"):
        tiny("i8").forward_features(x.float(), mask.flatten(1))


def test_free_lift_is_the_hybrids_ablation():
    model = tiny("h8", lift="free").double().eval()
    x = images(model)
    with torch.no_grad(), pytest.raises(AssertionError, match="not equivariant"):
        assert_promises(model, x)


def test_autocast_runs_forward_and_backward():
    model = tiny("i8")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images(model, dtype=torch.float32)).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 36}, "36"),
        ({"num_heads": 3}, "num_heads 3"),
        ({"img_size": 18}, "18×18"),
        ({"family": "d9"}, "d9"),
        ({"invariant": "spectrum"}, "spectrum"),
        ({"octic_depth": 9}, "9"),
        ({"family": "d8", "octic_depth": 2}, "use i8"),
        ({"family": "i8", "lift": "free"}, "free lift"),
        ({"lift": "square"}, "square"),
        ({"global_pool": "map"}, "map"),
        ({"class_token": False}, "class_token"),
        ({"patch_size": 0}, "patch_size must be 1 or more, got 0"),
        ({"in_chans": 0}, "in_chans must be 1 or more, got 0"),
        ({"embed_dim": 0}, "embed_dim must be 1 or more, got 0"),
        ({"depth": -1}, "depth must be 0 or more, got -1"),
        ({"num_heads": 0}, "num_heads must be 1 or more, got 0"),
        ({"pos_grid": -2}, "pos_grid must be 1 or more, got -2"),
        ({"reg_tokens": -1}, "reg_tokens must be 0 or more, got -1"),
        ({"num_classes": -1}, "num_classes must be 0 or more, got -1"),
        ({"drop_path_rate": -0.1}, r"drop_path_rate must lie between 0 and 1, got -0\.1"),
        ({"drop_path_rate": 1.5}, r"drop_path_rate must lie between 0 and 1, got 1\.5"),
        ({"drop_path_rate": float("nan")}, "drop_path_rate must lie between 0 and 1, got nan"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        QuickVisionTransformer(**{**TINY, "img_size": 16, "family": "i8", **options})


def test_wrong_images_are_named():
    model = tiny("h8")
    with pytest.raises(ValueError, match="20×20 pixels, expected 16×16"):
        model(torch.randn(1, 3, 20, 20))
    dynamic = tiny("h8", dynamic_img_size=True)
    with pytest.raises(ValueError, match="18×16"):
        dynamic(torch.randn(1, 3, 18, 16))
    for shape in ((2, 1, 16, 16), (3, 16, 16), (1, 1, 3, 16, 16)):
        with pytest.raises(ValueError, match=rf"shape {re.escape(str(shape))}, expected \[B, 3, H, W\]"):
            model(torch.randn(shape))


@pytest.mark.parametrize("shape", [(4, 1), (1, 16), (16,), (4, 4, 4), (4, 15)])
def test_masks_of_another_shape_are_refused(shape):
    model = tiny("i8", mask_token=True)
    message = rf"mask of shape {re.escape(str(shape))}, expected one value per patch, \(4, 16\)"
    with pytest.raises(ValueError, match=message):
        model.forward_features(images(model, dtype=torch.float32), torch.ones(shape, dtype=torch.bool))


def test_a_drop_path_rate_of_one_trains():
    model = tiny("h8", drop_path_rate=1.0, uniform_drop_path=True)
    assert model(images(model, dtype=torch.float32)).isfinite().all()


def test_numbers_of_numpy_make_models_that_are_saved(tmp_path):
    model = tiny("h8", depth=np.int64(4), img_size=np.int64(16), drop_path_rate=np.float32(0.5))
    assert (model.img_size, type(model.config["depth"])) == ((16, 16), int)
    quickvit.save_checkpoint(model, tmp_path / "model.safetensors")
    assert quickvit.load_checkpoint(tmp_path / "model.safetensors").config == model.config


def test_names_of_invariants_are_right_where_none_is_built():
    with pytest.raises(ValueError, match="unknown invariant 'nonsense'; expected one of"):
        tiny("h8", invariant="nonsense")


def test_no_parameter_is_empty():
    """Optimisers and FSDP stumble over those; earlier checkpoints of an h2 have them."""
    model = tiny("h2").double()
    assert all(parameter.numel() for parameter in model.parameters())
    state = model.state_dict()
    empty = {
        name.replace("weight_1", "weight_2"): torch.empty(0, 2, 2) for name in state if "weight_1" in name
    }
    other = tiny("h2").double()
    load_weights(other, {**state, **empty})
    x = images(model)
    torch.testing.assert_close(other.eval()(x), model.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("number", [np.int64(4), torch.tensor([0, 3]).max() + 1])
def test_models_with_numbers_of_classes_of_other_types_are_saved(number, tmp_path):
    model = tiny("h8", num_classes=number)
    assert type(model.config["num_classes"]) is int
    model.reset_classifier(number + 1)
    assert type(model.num_classes) is type(model.config["num_classes"]) is int
    model.save_pretrained(tmp_path)
    assert QuickVisionTransformer.from_pretrained(tmp_path).head.out_features == 5
    with pytest.raises(ValueError, match="num_classes must be 0 or more, got -1"):
        model.reset_classifier(-1)
    with pytest.raises(TypeError, match="float"):
        model.reset_classifier(2.5)


def test_a_new_head_is_where_the_model_is():
    model = tiny("h8").bfloat16()
    model.patch_embed.kernel = None
    model.reset_classifier(3)
    assert model.head.weight.dtype == torch.bfloat16


def test_a_model_that_was_pruned_in_its_octic_part_is_steerable_to_the_end():
    whole = tiny("i8", octic_depth=3).eval()
    x = images(whole, dtype=torch.float32)
    expected = whole.forward_steerable(x, 2).tokens
    pruned = copy.deepcopy(whole)
    pruned.prune_intermediate_layers([0, 1])
    assert (pruned.octic_depth, len(pruned.blocks)) == (2, 2)
    torch.testing.assert_close(pruned.forward_steerable(x).tokens, expected)
    (tokens,) = pruned.forward_intermediates(x, [1], output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(tokens, expected[:, 1:])
    with pytest.raises(ValueError, match="depth must be between 0 and 2, got 3"):
        pruned.forward_steerable(x, 3)
    with pytest.raises(ValueError, match="the 2 blocks that pruning left are all steerable"):
        pruned.forward_intermediates(x, [1], norm=True)
    with pytest.raises(ValueError, match="block 1 is steerable, take blocks from 2 on"):
        whole.forward_intermediates(x, [1], norm=True)
    # What leaves the octic part still does after pruning behind it.
    whole.prune_intermediate_layers([2])
    assert whole.octic_depth == 3
    whole.forward_intermediates(x, [2], norm=True)


def test_octic_weights_start_matched_or_as_released():
    torch.manual_seed(0)
    weights = {
        released: QuickVisionTransformer(
            embed_dim=256, num_heads=4, depth=2, octic_depth=1, released_init=released
        )
        .blocks[0]
        .mlp.fc1
        for released in (False, True)
    }
    assert weights[True].weight_1.std().item() == pytest.approx(0.02, rel=0.05)
    assert weights[True].weight_2.std().item() == pytest.approx(0.02, rel=0.05)
    assert weights[False].weight_1.std().item() == pytest.approx(0.02 * 8**0.5, rel=0.05)
    assert weights[False].weight_2.std().item() == pytest.approx(0.02 * 4**0.5, rel=0.05)


@pytest.mark.parametrize("family", ["d8", "i8"])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_see_the_tokens_between_blocks(family, before):
    net = tiny(family).double().eval()
    x, seen = images(net), []
    expected = net.forward_intermediates(
        x, indices=[0], norm=False, intermediates_only=True, output_fmt="NLC"
    )
    result = net(x)
    if before:
        net.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    else:
        net.blocks[0].register_forward_hook(lambda module, args, result: seen.append(result))
    torch.testing.assert_close(net(x), result)
    torch.testing.assert_close(seen[0][:, net.num_prefix_tokens :], expected[0])


def spoiling(function, count):
    """The function, which makes the worst of what it may overwrite: its first tensors, so many."""

    def call(*arguments, overwrite=False, **options):
        result = function(*arguments, **options)
        if overwrite:
            for tensor in [a for a in arguments if isinstance(a, torch.Tensor)][:count]:
                tensor.fill_(float("nan"))
        return result

    return call


@pytest.mark.parametrize("family", ["d8", "h8"])
@torch.no_grad()
def test_nobody_reads_what_a_block_may_overwrite(family, monkeypatch):
    net = tiny(family).double().eval()
    x, seen = images(net), []
    tokens = torch.randn(2, 5, 32, dtype=torch.float64)
    inputs = x.clone(), tokens.clone()

    def results():
        return [
            net(x),
            *net.forward_intermediates(x, norm=False, intermediates_only=True),
            net.blocks[0](tokens),
        ]

    expected = results()
    monkeypatch.setattr(norm, "octic_residual_norm", spoiling(norm.octic_residual_norm, 2))
    monkeypatch.setattr(attention, "octic_attention", spoiling(attention.octic_attention, 1))
    monkeypatch.setattr(OcticMlp, "deferred", spoiling(OcticMlp.deferred, 1))
    torch.testing.assert_close(results(), expected)
    net.blocks[0].register_forward_hook(lambda module, args, result: seen.append(result))
    torch.testing.assert_close(net(x), expected[0])
    assert seen[0].isfinite().all()
    assert torch.equal(x, inputs[0])
    assert torch.equal(tokens, inputs[1])


@pytest.mark.parametrize(
    "part", [name for name, _ in tiny("d8", init_values=1.0).blocks[1].named_modules() if name]
)
@pytest.mark.parametrize("training", [False, True])
def test_hooks_see_into_octic_blocks(part, training, monkeypatch):
    """The result stays, what a hook keeps is not overwritten, and what it returns counts."""
    net = tiny("d8", init_values=1.0).double().train(training)
    x, seen = images(net), []
    with torch.set_grad_enabled(training):
        expected = net(x)
        monkeypatch.setattr(
            norm, "octic_residual_norm", spoiling(norm.octic_residual_norm, 0 if training else 2)
        )
        monkeypatch.setattr(
            attention, "octic_attention", spoiling(attention.octic_attention, 0 if training else 1)
        )
        monkeypatch.setattr(OcticMlp, "deferred", spoiling(OcticMlp.deferred, 0 if training else 1))
        module = net.blocks[1].get_submodule(part)
        hook = module.register_forward_hook(lambda module, args, result: seen.extend([args[0], result]))
        torch.testing.assert_close(net(x), expected)
        assert len(seen) == 2
        assert all(tensor.isfinite().all() for tensor in seen)
        hook.remove()
        module.register_forward_hook(lambda module, args, result: 2 * result)
        assert not torch.allclose(net(x), expected)


def test_gradients_are_hooked_inside_octic_blocks():
    net, seen = tiny("d8").double(), []
    net.blocks[0].attn.register_full_backward_hook(lambda module, before, after: seen.append(after[0]))
    net(images(net)).sum().backward()
    assert seen[0].abs().sum() > 0


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("family", ["d8", "i8", "h8"])
def test_only_the_tokens_that_the_head_takes_leave(family, pool, monkeypatch):
    net = tiny(family, global_pool=pool, num_classes=3).double().eval()
    x, normed = images(net), {}
    forward = type(net.norm).forward

    def norm(module, tokens):
        normed[module] = tokens.shape[1]
        return forward(module, tokens)

    monkeypatch.setattr(type(net.norm), "forward", norm)
    expected = net.forward_head(net.forward_features(x))
    all_tokens = normed[net.norm]
    torch.testing.assert_close(net(x), expected)
    assert normed[net.norm] == (1 if pool == "token" else all_tokens)
