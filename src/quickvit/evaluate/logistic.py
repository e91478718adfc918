"""Multinomial logistic regression by L-BFGS, over features of any number in pieces of bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Rows whose logits exist at one time.
ROWS = 2**16
# Steps that L-BFGS remembers.
HISTORY = 20


@dataclass(frozen=True)
class LogisticRegression:
    """A linear classifier: weight [K, D], bias [K], the labels [K] that it tells apart, and how its fit ended.

    converged: whether the gradient fell below the tolerance, or no step made progress any more, before the
    iterations were used up.
    """

    weight: Tensor
    bias: Tensor
    labels: Tensor
    iterations: int
    converged: bool

    @torch.inference_mode()
    def predict(self, features: Tensor) -> Tensor:
        """The label [n] of each row of features [n, D], on the device of the classifier."""
        best = [
            (piece.to(self.weight) @ self.weight.T + self.bias).argmax(1) for piece in features.split(ROWS)
        ]
        return self.labels[torch.cat(best)]


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    c: float = 1.0,
    *,
    max_iterations: int = 1000,
    tolerance: float | None = None,
) -> LogisticRegression:
    """The minimum of mean cross-entropy + ‖W‖² / (2·c·n), scikit-learn's objective with C = c; the bias is free.

    For two classes that is its binomial model: W is the difference of their two weights.
    Computes on the device of the features [n, D], in their type or in float32 if that is shorter. `tolerance` is
    for the largest entry of the gradient in scaled coordinates; the default is what rounding allows.
    """
    if len(features) != len(labels) or not len(labels):
        raise ValueError(
            f"{len(features)} rows of features have {len(labels)} labels; expected equally many, and some"
        )
    if not c > 0:
        raise ValueError(f"c must be positive, got {c}")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
    dtype = torch.promote_types(features.dtype, torch.float32)
    if tolerance is None:
        tolerance = torch.finfo(dtype).eps ** 0.75
    # A class without samples would have no minimum: its bias could always be lower.
    known, labels = labels.to(features.device).unique(return_inverse=True)
    classes = len(known)
    number, width = features.shape
    # The weights of two classes are ±w/2, whose squares add up to half of ‖w‖².
    decay = (2 if classes == 2 else 1) / (c * number)
    mean, variance = moments(features.split(ROWS))
    # In coordinates in which the Hessian has about ones on its diagonal L-BFGS needs far fewer steps. The free
    # bias absorbs the mean of the features.
    curvature = (1 - 1 / classes) / classes or 1.0
    scale = (curvature * variance + decay).rsqrt().to(dtype)
    bias_scale, mean = curvature**-0.5, mean.to(dtype)
    scaled_weight = nn.Parameter(torch.zeros(classes, width, dtype=dtype, device=features.device))
    scaled_bias = nn.Parameter(torch.zeros(classes, dtype=dtype, device=features.device))
    optimizer = torch.optim.LBFGS(
        [scaled_weight, scaled_bias],
        max_iter=max_iterations,
        max_eval=2 * max_iterations,
        tolerance_grad=tolerance,
        tolerance_change=torch.finfo(dtype).eps ** 2,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def closure() -> Tensor:
        """The objective; leaves its gradient in the parameters."""
        weight, bias = scaled_weight * scale, scaled_bias * bias_scale
        loss = weight.square().sum() * decay / 2
        weight_grad, bias_grad = weight * decay, torch.zeros_like(bias)
        for rows, targets in zip(features.split(ROWS), labels.split(ROWS), strict=True):
            x = rows.to(weight) - mean
            log_likelihood = (x @ weight.T + bias).log_softmax(1)
            loss -= log_likelihood.gather(1, targets[:, None]).sum() / number
            residual = log_likelihood.exp_()
            residual[torch.arange(len(targets), device=targets.device), targets] -= 1
            weight_grad.addmm_(residual.T, x, alpha=1 / number)
            bias_grad += residual.sum(0) / number
        scaled_weight.grad, scaled_bias.grad = weight_grad * scale, bias_grad * bias_scale
        return loss

    optimizer.step(closure)
    iterations = optimizer.state[scaled_weight]["n_iter"]
    weight = scaled_weight.detach() * scale
    bias = scaled_bias.detach() * bias_scale - weight @ mean
    return LogisticRegression(weight, bias, known, iterations, iterations < max_iterations)


def moments(pieces: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of each column of a matrix that comes in pieces, in double precision."""
    number, total, squares = 0, torch.zeros(()), torch.zeros(())
    for piece in pieces:
        wide = piece.double()
        number += len(piece)
        total, squares = total.to(wide) + wide.sum(0), squares.to(wide) + wide.square().sum(0)
    mean = total / number
    return mean, (squares / number - mean.square()).clamp(min=0)
