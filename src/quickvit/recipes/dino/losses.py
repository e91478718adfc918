"""DINOv2's losses, in float32 or wider whatever the precision of what they are given.

B samples, G global and L local views, K prototypes, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# DINO's temperature of the student.
STUDENT_TEMPERATURE = 0.1
# Features this close, or this short, have no direction but that of rounding.
CLOSEST = 1e-4


def wide(x: Tensor) -> Tensor:
    """A tensor in float32, or as it is if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """Vectors [..., C] of length 1; those that are too short to have a direction stay short, and gradients finite."""
    return functional.normalize(wide(x), dim=-1, eps=CLOSEST)


def cross_entropy(student: Tensor, targets: Tensor, temperature: float, mass: float = 1.0) -> Tensor:
    """−Σ_k t_k log softmax(s / τ)_k of logits s [..., K], for targets t [..., K] that add up to `mass`."""
    scores = wide(student) / temperature
    return mass * scores.logsumexp(-1) - (targets * scores).sum(-1)


def dino_loss(
    student_global: Tensor,
    student_local: Tensor,
    targets: Tensor,
    temperature: float = STUDENT_TEMPERATURE,
) -> Tensor:
    """The mean cross-entropy of all pairs of a student's view and another view of the teacher.

    student_global [B, G, K] and student_local [B, L, K] are logits, targets [B, G, K] the teacher's of global views.
    Without local views one pair too many is counted, as in DINOv2's code, for the loss's weight to mean the same.
    """
    views, local = student_global.shape[1], student_local.shape[1]
    together = targets.sum(1, keepdim=True)
    total = cross_entropy(student_global, together - targets, temperature, views - 1).sum()
    if local:
        total = total + cross_entropy(student_local, together, temperature, views).sum()
    return total / (len(targets) * (views * (views - 1) + max(views * local, 1)))


def ibot_loss(
    student: Tensor, targets: Tensor, weights: Tensor, views: int, temperature: float = STUDENT_TEMPERATURE
) -> Tensor:
    """The cross-entropy of hidden patches, averaged over those of a view, then over all `views`, also unmasked ones.

    student and targets [n, K] belong to hidden patches; weights [n] are 1 / (hidden patches of the same view).
    """
    return (cross_entropy(student, targets, temperature) * weights).sum() / views


def koleo_loss(features: Tensor) -> Tensor:
    """KoLeo: −log of the distance to the nearest neighbour, of features [..., n, C] of unit length, averaged.

    Neighbours are sought among the n. Duplicates have no direction to part in, and no gradient.
    """
    with torch.autocast(features.device.type, enabled=False):
        points = unit(features)
        with torch.no_grad():
            cosines = points @ points.mT
            cosines.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
            nearest = cosines.argmax(-1, keepdim=True).expand_as(points)
        squares = (points - points.gather(-2, nearest)).square().sum(-1)
        return -squares.clamp(min=CLOSEST**2).log().mean() / 2
