"""Signs of collapse: what the features and targets of a batch look like, and what it means."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quickvit.recipes.dino.losses import unit

# Relative to equal use of the prototypes: at most a handful is left of tens of thousands.
FEW_PROTOTYPES = 0.1
# Relative to a target that says nothing.
SAYS_NOTHING = 0.999
# Relative to features that point in all directions.
SAME_FEATURES = 0.01


@torch.no_grad()
def feature_std(features: Tensor) -> Tensor:
    """The mean standard deviation of the channels of features [n, C] of unit length, times √C.

    1 where they point in all directions, 0 where all are the same. Of few features it is smaller, so the mean over
    the parts of a batch, which is logged, depends a little on how many ranks and backward passes there are.
    """
    return unit(features).std(0, correction=0).mean() * math.sqrt(features.shape[-1])


@torch.no_grad()
def target_entropy(targets: Tensor) -> Tensor:
    """The mean entropy of targets [n, K], relative to that of a target without preference."""
    return torch.special.entr(targets).sum(-1).mean() / math.log(targets.shape[-1])


@torch.no_grad()
def agreement(student: Tensor, targets: Tensor) -> Tensor:
    """How often student and teacher prefer the same prototype for different views; logits and targets [B, G, K]."""
    return (student.argmax(-1) == targets.roll(1, dims=1).argmax(-1)).to(targets.dtype).mean()


def diagnose(numbers: Mapping[str, float], centering: str) -> str | None:
    """What is wrong, and its likely cause; None if the numbers of a step show no collapse."""
    if numbers["prototype_entropy"] < FEW_PROTOTYPES:
        cause = (
            "nothing centres the teacher's targets; use --centering softmax or sinkhorn"
            if centering == "none"
            else "the centre does not keep up with the teacher; use --centering sinkhorn, a lower learning rate or a "
            "longer warm-up"
        )
        return f"all images are assigned to the same prototypes: {cause}"
    if numbers["target_entropy"] > SAYS_NOTHING:
        return (
            "the teacher's targets have no preference for any prototype: its temperature is too high for what its "
            "features tell apart; lower --teacher-temperature, or lengthen its warm-up"
        )
    if numbers["feature_std"] < SAME_FEATURES:
        return (
            "the class tokens of different images are the same: the learning rate is too high, or the images are too "
            "much alike; lower --learning-rate, raise --koleo-weight, or look for duplicates in the data"
        )
    return None
