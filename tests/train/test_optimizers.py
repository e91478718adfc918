"""LAMB against timm's, groups of parameters, and state that is complete from the start."""

import copy

import pytest
import timm
import torch
from timm.optim import Lamb as TimmLamb
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quickvit import QuickVisionTransformer
from quickvit.layers import OcticLift, OcticLinear
from quickvit.train import Lamb, build_optimizer, constant, parameter_groups
from quickvit.train.norms import clip_
from quickvit.train.optimizers import set_schedules


def small_model(**arguments):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return QuickVisionTransformer(**{**sizes, "family": "i8", "init_values": 0.1, **arguments})


def with_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lamb_is_timms(weight_decay, clip):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (3,), (2, 3, 4), (1,))]
    ours.append(nn.Parameter(torch.zeros(4, 4)))  # no norm, so the ratio is 1
    theirs = copy.deepcopy(ours)
    optimizer = Lamb(ours, lr=1e-2, weight_decay=weight_decay)
    reference = TimmLamb(theirs, lr=1e-2, weight_decay=weight_decay, max_grad_norm=clip)
    for step in range(20):
        with_gradients(ours, step)
        with_gradients(theirs, step)
        clip_([p.grad for p in ours], clip)
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_stacked_matrices_are_updated_like_separate_ones():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(4, 6, 5) * torch.tensor([1.0, 2, 3, 4])[:, None, None])
    parts = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    together = nn.Parameter(stack.detach().clone())
    optimizers = [
        Lamb([{"params": [stack], "stacked": True}], lr=0.1, weight_decay=0.1),
        Lamb(parts, lr=0.1, weight_decay=0.1),
        Lamb([together], lr=0.1, weight_decay=0.1),
    ]
    for step in range(3):
        with_gradients([stack, together], step)
        with_gradients([together], step)
        for part, gradient in zip(parts, stack.grad, strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack, torch.stack(list(parts)), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(stack, together, rtol=1e-3)


def test_lamb_leaves_parameters_without_gradient_alone():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lamb([used, unused], lr=0.1)
    used.grad = torch.ones(3)
    assert optimizer.step(lambda: 2.5) == 2.5
    assert (used != 1).all()
    assert (unused == 1).all()


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'; expected lamb or adamw"):
        build_optimizer("sgd", [])


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_the_state_is_there_before_the_first_step(name):
    def build():
        torch.manual_seed(0)
        model = small_model()
        return model, build_optimizer(name, parameter_groups(model, constant(1e-3), 0.1))

    model, optimizer = build()
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(optimizer.state)
    with_gradients(model.parameters(), 0)
    before = {p: set(state) for p, state in optimizer.state.items()}
    optimizer.step()
    assert {p: set(state) for p, state in optimizer.state.items()} == before
    assert all(state["step"] == 1 for state in optimizer.state.values())

    # The state is all there is: put into a new optimiser, the next step is the same.
    other, resumed = build()
    other.load_state_dict(model.state_dict())
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[q].items():
            resumed.state[p][key].copy_(value)
    for m, o in ((model, optimizer), (other, resumed)):
        with_gradients(m.parameters(), 1)
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("layer_decay", [None, 0.75])
@pytest.mark.parametrize(
    "model",
    [
        small_model(reg_tokens=2, mask_token=True),
        small_model(family="h8", octic_depth=0, lift="free"),
        small_model(family="d8", class_token=False, global_pool="avg", invariant="max_filter"),
        timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2),
    ],
    ids=["i8", "h8", "d8", "timm"],
)
def test_groups_cover_every_parameter_once(model, layer_decay):
    groups = parameter_groups(model, constant(1.0), 0.05, layer_decay)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, p in model.named_parameters():
        excluded = p.ndim <= 1 or name in model.no_weight_decay()
        assert decay[id(p)] == (0.0 if excluded else 0.05), name


def test_frozen_parameters_are_in_no_group():
    model = small_model()
    model.patch_embed.requires_grad_(False)
    groups = parameter_groups(model, constant(1.0), 0.05)
    grouped = {id(p) for group in groups for p in group["params"]}
    assert not grouped & {id(p) for p in model.patch_embed.parameters()}


def test_layer_decay_falls_from_the_head_to_the_stem():
    model = small_model(octic_depth=2)
    optimizer = build_optimizer("adamw", parameter_groups(model, lambda step: 10.0 + step, 0.05, 0.5))
    set_schedules(optimizer, 6)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: rates[id(p)] / 16 for name, p in model.named_parameters()}
    assert by_name["head.weight"] == 1
    assert by_name["blocks.2.attn.qkv.weight"] == 0.5
    # The invariant is what the data meets after the second block, and belongs to it.
    assert by_name["invariant.proj.weight"] == by_name["blocks.1.attn.qkv.weight_1"] == 0.25
    assert by_name["blocks.0.attn.qkv.weight_1"] == 0.125
    assert by_name["patch_embed.weight"] == by_name["cls_token.weight"] == 0.0625


def test_weight_decay_and_chosen_learning_rates_have_schedules():
    model = small_model()
    groups = parameter_groups(
        model, lambda step: 1.0, lambda step: 0.04 + step, 0.5, {"patch_embed": lambda step: 0.2 * step}
    )
    optimizer = build_optimizer("adamw", groups)
    set_schedules(optimizer, 3)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: found[id(p)] for name, p in model.named_parameters()}
    assert by_name["patch_embed.weight"]["lr"] == pytest.approx(0.6)
    assert by_name["cls_token.weight"]["lr"] == 0.0625
    assert by_name["blocks.2.attn.qkv.weight"]["weight_decay"] == 3.04
    assert by_name["blocks.2.attn.qkv.bias"]["weight_decay"] == 0
    assert sorted(map(id, model.parameters())) == sorted(found)


def test_the_matrices_of_irreps_are_stacked():
    model = small_model()
    groups = parameter_groups(model, constant(1.0), 0.05)
    stacked = {id(p) for group in groups if group["stacked"] for p in group["params"]}
    expected = {id(p) for m in model.modules() if isinstance(m, OcticLinear) for p in m.weights}
    assert stacked == expected | {id(m.weight) for m in model.modules() if isinstance(m, OcticLift)}


def test_clipping():
    gradients = [torch.full((3, 4), 2.0), torch.full((4,), -2.0)]
    assert clip_(gradients, None) == 8
    assert clip_(gradients, 4.0) == 8
    assert clip_(gradients, 4.0) == 4
    assert (gradients[0] == 1).all()
    assert clip_(gradients, 100.0) == 4
    assert (gradients[1] == -1).all()


class Operations(TorchDispatchMode):
    """Counts what a device would be asked for: neither views nor reads of the counters, which are on the CPU."""

    FREE = (torch.ops.aten.unbind.int, torch.ops.aten._local_scalar_dense.default)

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function not in self.FREE
        return function(*args, **(kwargs or {}))


def test_lamb_asks_for_as_much_of_many_tensors_as_of_few():
    numbers = []
    for depth in (2, 8):
        model = QuickVisionTransformer(embed_dim=64, depth=depth, num_heads=2, img_size=32)
        optimizer = build_optimizer("lamb", parameter_groups(model, constant(1e-3), 0.05))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with Operations() as operations:
            optimizer.step()
        numbers.append(operations.number)
    assert numbers[0] == numbers[1] < 100
