"""Assertions that a function commutes with the group, and weights with which passing them proves something.

    model = randomize(timm.create_model("quickvit_i8_tiny_patch16_224")).double().eval()
    assert_invariant(model, torch.randn(4, 3, 224, 224, dtype=torch.float64), act_on_image)

An error is the root mean square of f(g·x) − g·f(x), relative to the spread of f over the batch: the root
mean square of f(x) minus its mean over the inputs. Against the size of f(x) alone, a function that hardly
looks at its input would pass as equivariant; here a constant function is refused. What rounding may cost is allowed
for, by the dtype and the size of f(x).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from timm.layers.layer_scale import LayerScale
from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Element
from quickvit.layers import InvariantTokens, OcticLayerNorm, OcticLayerScale, OcticLift, OcticPosition

Action = Callable[[Tensor, Element], Tensor]
Model = TypeVar("Model", bound=nn.Module)

# What rounding alone may cost, by the dtype of the outputs: a whole model in evaluation stays within.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}
# Errors of rounding follow the size of outputs, which can be many times their spread. As many ε of that are allowed
# in every dtype as in the coarsest, but never more of the spread than there: that would prove nothing.
LIMIT = TOLERANCES[torch.bfloat16]
ROUNDINGS = LIMIT / torch.finfo(torch.bfloat16).eps


def equivariance_error(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    act_in: Action,
    act_out: Action,
    group: DihedralGroup = D8,
) -> dict[Element, float]:
    """‖f(g·x) − g·f(x)‖ for every element g, relative to the spread of f over the inputs [B, ...], B ≥ 2.

    Raises ValueError where the answer would prove nothing: a constant function, outputs that are not finite,
    or inputs that an element leaves as they are.
    """
    return errors_and_tolerance(function, inputs, act_in, act_out, group)[0]


def errors_and_tolerance(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    act_in: Action,
    act_out: Action,
    group: DihedralGroup = D8,
) -> tuple[dict[Element, float], float]:
    """`equivariance_error`, and what rounding alone may cost in the dtype of the outputs."""
    if inputs.ndim < 2 or len(inputs) < 2:
        raise ValueError(f"the spread needs a batch of at least two inputs, got shape {tuple(inputs.shape)}")
    outputs = function(inputs).detach()
    if outputs.dtype not in TOLERANCES:
        raise ValueError(
            f"the function gives {outputs.dtype}, expected one of {', '.join(map(str, TOLERANCES))}"
        )
    wide = _finite(outputs, group.identity)
    size, spread, eps = _rms(wide), _rms(wide - wide.mean(0)), torch.finfo(outputs.dtype).eps
    if spread <= 8 * eps * size:
        raise ValueError(
            f"the function gives the same output for all {len(inputs)} inputs (spread {spread:.1e}), "
            f"so that it commutes with the group proves nothing"
        )
    errors = {}
    for g in group.elements:
        moved = act_in(inputs, g)
        if g != group.identity and moved.shape == inputs.shape and torch.equal(moved, inputs):
            raise ValueError(f"the element {g} leaves the inputs as they are, so they prove nothing about it")
        actual = _finite(function(moved).detach(), g)
        expected = act_out(outputs, g).double()
        if actual.shape != expected.shape:
            raise ValueError(
                f"f(g·x) has shape {tuple(actual.shape)} for g = {g}, g·f(x) {tuple(expected.shape)}"
            )
        errors[g] = _rms(actual - expected) / spread
    return errors, max(TOLERANCES[outputs.dtype], min(ROUNDINGS * eps * size / spread, LIMIT))


def assert_equivariant(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    act_in: Action,
    act_out: Action,
    group: DihedralGroup = D8,
    tolerance: float | None = None,
) -> None:
    """Fail unless f(g·x) = g·f(x) for every element, within `tolerance`; None is what rounding may cost."""
    _assert("equivariant", *errors_and_tolerance(function, inputs, act_in, act_out, group), tolerance)


def assert_invariant(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    act_in: Action,
    group: DihedralGroup = D8,
    tolerance: float | None = None,
) -> None:
    """Fail unless f(g·x) = f(x) for every element, within `tolerance`; None is what rounding may cost."""
    _assert("invariant", *errors_and_tolerance(function, inputs, act_in, unmoved, group), tolerance)


def unmoved(x: Tensor, g: Element) -> Tensor:  # noqa: ARG001
    """The trivial action, under which equivariance is invariance."""
    return x


def randomize(model: Model, seed: int = 0) -> Model:
    """Give every parameter a random value of ordinary size, in place, as a function of the seed alone.

    A fresh model hides mistakes: its layer scale nearly removes the blocks, its biases are zero and its gains
    equal. Here gains and layer scales lie around 1, biases, positions and tokens are random, and weights keep
    unit variance.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    gains = (OcticLayerNorm, OcticLayerScale, LayerScale, nn.LayerNorm)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.randn(parameter.shape, generator=generator, device="cpu")
            if isinstance(module, gains) and name != "bias":
                value = 1 + value.clamp(-2, 2) / 4
            elif parameter.ndim == 1:
                value = value / 2
            elif not (
                isinstance(module, (OcticPosition, InvariantTokens)) or name.endswith(("_embed", "_token"))
            ):
                value = value * _fan_in(module, parameter) ** -0.5
            with torch.no_grad():
                parameter.copy_(value)
    return model


def _fan_in(module: nn.Module, weight: Tensor) -> int:
    """Number of inputs that a weight sums over."""
    if isinstance(module, OcticLift):
        return weight[0, 0].numel()
    return weight[0].numel() if isinstance(module, nn.Conv2d) else weight.shape[-1]


def _assert(word: str, errors: dict[Element, float], rounding: float, tolerance: float | None) -> None:
    if tolerance is None:
        tolerance = rounding
    worst = max(errors, key=lambda g: errors[g])
    if not errors[worst] <= tolerance:
        listed = ", ".join(f"{g} {error:.1e}" for g, error in errors.items())
        raise AssertionError(
            f"not {word} under {worst}: relative error {errors[worst]:.3e} exceeds {tolerance:.0e} ({listed})"
        )


def _finite(outputs: Tensor, g: Element) -> Tensor:
    if not outputs.isfinite().all():
        raise ValueError(f"the function gives values that are not finite, for g = {g}")
    return outputs.double()


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
