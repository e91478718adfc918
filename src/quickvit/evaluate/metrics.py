"""Scores of predicted labels, all of them functions of one confusion matrix.

A confusion matrix counts the samples of each true label (row) that were given each label (column), so it adds up
over parts of a dataset and over processes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def confusion_matrix(targets: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Counts [classes, classes] of labels 0 … classes − 1, true ones in the rows; on the device of the labels."""
    if targets.shape != predictions.shape:
        shapes = f"{tuple(targets.shape)} and {tuple(predictions.shape)}"
        raise ValueError(f"targets and predictions must be of the same shape, got {shapes}")
    for name, labels in (("targets", targets), ("predictions", predictions)):
        low, high = (int(bound) for bound in labels.aminmax()) if labels.numel() else (0, 0)
        if low < 0 or high >= classes:
            raise ValueError(f"{name} must lie between 0 and {classes - 1}, got {low} … {high}")
    cells = targets.flatten().long() * classes + predictions.flatten().long()
    return cells.bincount(minlength=classes**2).view(classes, classes)


def accuracy(confusion: Tensor) -> float:
    """The share of samples that were given their label."""
    return _ratio(confusion.diagonal().sum(), confusion.sum()).item()


def balanced_accuracy(confusion: Tensor) -> float:
    """The mean over the labels that occur of the share of their samples that were recognised."""
    support = confusion.sum(1)
    return _ratio(confusion.diagonal(), support)[support > 0].mean().item()


def weighted_f1(confusion: Tensor) -> float:
    """F1 = 2 · hits / (samples + predictions) of each label, averaged with its number of samples as weight."""
    support = confusion.sum(1)
    f1 = _ratio(2 * confusion.diagonal(), support + confusion.sum(0))
    return ((f1 * support).sum() / support.sum()).item()


# What is said of labelled images, as DinoBloom does.
LABEL_METRICS = {"weighted_f1": weighted_f1, "accuracy": accuracy, "balanced_accuracy": balanced_accuracy}


def iou(confusion: Tensor) -> Tensor:
    """hits / (samples + predictions − hits) of each label; NaN if it neither occurs nor was predicted."""
    hits = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - hits
    return _ratio(hits, union).where(union > 0, torch.nan)


def mean_iou(confusion: Tensor) -> float:
    """The mean over the labels that occur or were predicted of their IoU."""
    return iou(confusion).nanmean().item()


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole in double precision, 0 where both are."""
    return part.double() / whole.double().clamp(min=1)
