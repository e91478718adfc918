"""Optimisers, and the groups of parameters that they treat differently."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from quickvit.layers import OcticLift, OcticLinear
from quickvit.train.norms import Parts, local
from quickvit.train.schedules import Schedule, constant, scaled

OptimizerName = Literal["lamb", "adamw"]


class Lamb(Optimizer):
    """LAMB by timm's rule, with one launch for many tensors and norms over all ranks of a sharded tensor.

    u = m̂ / (√v̂ + ε) + λw and w ← w − lr · (‖w‖ / ‖u‖) u; the ratio is 1 where a norm is 0 or λ is. Clipping is
    left to the caller. A group with `stacked=True` holds tensors of independent matrices along their first axis,
    such as those of the irreps of an octic layer, and each matrix has a ratio of its own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "stacked": False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] = adam_state(p)
        states = [self.state[p] for p in parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = [state["step"].item() for state in states]
        weights = [local(p) for p in parameters]
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        means = [local(state["exp_avg"]) for state in states]
        squares = [local(state["exp_avg_sq"]) for state in states]

        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(means, [1 - beta1**step for step in steps])
        torch._foreach_div_(updates, divisors)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            self._adapt(parameters, updates, group["stacked"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    @staticmethod
    def _adapt(parameters: list[nn.Parameter], updates: Sequence[Tensor], stacked: bool) -> None:
        """Scale each update to the norm of its weight."""
        parts = Parts(parameters, stacked=stacked)
        weight_norms = parts.norms()
        parts.views = [view for u in updates for view in (u.unbind(0) if stacked else (u,))]
        update_norms = parts.norms()
        both = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(both, weight_norms / update_norms, 1.0).tolist()
        torch._foreach_mul_(parts.views, [ratios[place] for place in parts.places])


def adam_state(parameter: nn.Parameter, step_device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """What LAMB and AdamW keep of a parameter, before the first step."""
    return {
        "step": torch.zeros((), device=step_device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def build_optimizer(name: OptimizerName, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """An optimiser whose state is complete from the start, so that it can be compared with a saved one."""
    if name == "lamb":
        optimizer: Optimizer = Lamb(groups, **options)
    elif name == "adamw":
        optimizer = AdamW(groups, fused=True, **options)
    else:
        raise ValueError(f"unknown optimizer {name!r}; expected lamb or adamw")
    for group in optimizer.param_groups:
        for p in group["params"]:
            # The fused AdamW counts its steps where the parameter is.
            optimizer.state[p] = adam_state(p, p.device if name == "adamw" else "cpu")
    return optimizer


def parameter_groups(
    model: nn.Module,
    lr: Schedule,
    weight_decay: float | Schedule,
    layer_decay: float | None = None,
    rates: Mapping[str, Schedule] | None = None,
    undecayed: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Groups of a model's trained parameters, each once, with a schedule for what changes in them.

    Vectors and `undecayed`, by default what the model names in `no_weight_decay`, are not decayed. With
    `layer_decay`, the learning rate of a layer is multiplied by it once for every layer above. Both by timm's rules.
    rates: those of parameters whose names begin so, whatever their layer.
    """
    excluded = getattr(model, "no_weight_decay", set)() if undecayed is None else undecayed
    if layer_decay is None:
        groups = param_groups_weight_decay(model, 1.0, no_weight_decay_list=excluded)
    else:
        groups = param_groups_layer_decay(model, 1.0, excluded, layer_decay=layer_decay)
    decay = weight_decay if callable(weight_decay) else constant(weight_decay)
    stacks = {id(p) for p in _stacked_parameters(model)}
    special = {
        id(p): prefix
        for prefix in rates or {}
        for name, p in model.named_parameters()
        if name.startswith(prefix)
    }
    result: list[dict[str, Any]] = []
    for group in groups:
        kinds: dict[tuple[bool, str | None], list[nn.Parameter]] = {}
        for p in group["params"]:
            kinds.setdefault((id(p) in stacks, special.get(id(p))), []).append(p)
        for (stacked, prefix), parameters in kinds.items():
            rate = scaled(lr, group.get("lr_scale", 1.0)) if prefix is None else (rates or {})[prefix]
            result.append(parameter_group(parameters, rate, scaled(decay, group["weight_decay"]), stacked))
    return result


def parameter_group(
    parameters: list[nn.Parameter], lr: Schedule, weight_decay: Schedule, stacked: bool = False
) -> dict[str, Any]:
    """One group of parameters; see `Lamb` for those that are stacked."""
    schedules = {"lr": lr, "weight_decay": weight_decay}
    initial = {name: schedule(0) for name, schedule in schedules.items()}
    return {"params": parameters, "stacked": stacked, "schedules": schedules, **initial}


def set_schedules(optimizer: Optimizer, step: int) -> None:
    """Give every scheduled value of every group the value of this step."""
    for group in optimizer.param_groups:
        for name, schedule in group["schedules"].items():
            group[name] = schedule(step)


def _stacked_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    """Parameters that hold one matrix or kernel per irrep."""
    for module in model.modules():
        if isinstance(module, OcticLinear):
            yield from (weight for weight in (module.weight_1, module.weight_2) if weight is not None)
        elif isinstance(module, OcticLift):
            yield module.weight
