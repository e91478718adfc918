"""Accuracy of a classifier, in one pose or in several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from quickvit.data import Batch, EvalLoader, PixelTransform, Source
from quickvit.data.loader import MAX_UNREADABLE, require_readable
from quickvit.data.sources.base import UNLABELLED
from quickvit.evaluate.labels import class_names, class_numbers
from quickvit.evaluate.rotation import UPRIGHT, Pose, cut_circle
from quickvit.train.distributed import World

# The k of the second accuracy.
SEVERAL = 5


@dataclass(frozen=True)
class Accuracy:
    """The shares of images whose class is the model's first answer, and among its first five.

    top5 is None where there are no more than five classes.
    """

    pose: Pose
    top1: float
    top5: float | None


@dataclass(frozen=True)
class AccuracyReport:
    """Accuracies over the same images; those that could not be read count nowhere."""

    rows: tuple[Accuracy, ...]
    images: int
    unreadable: tuple[tuple[str, str], ...]


# Not in inference mode: weights that FSDP gathers in it would be unfit for training afterwards.
@torch.no_grad()
def measure_accuracy(
    model: nn.Module,
    source: Source,
    transform: PixelTransform,
    poses: Sequence[Pose] = (UPRIGHT,),
    *,
    world: World | None = None,
    batch_size: int = 64,
    workers: int = 0,
    dtype: torch.dtype = torch.float32,
    circle: bool = False,
    seed: int = 0,
    max_unreadable: float = MAX_UNREADABLE,
    progress: bool = False,
) -> AccuracyReport:
    """The accuracies of a model, wherever it is, over all ranks together; every image is read once and counts once.

    Classes are brought together by their names, see `class_numbers`.
    dtype: bfloat16 for autocast. circle: hide what lies outside of the largest circle. seed: of random poses.
    max_unreadable: a number of images, or below 1 a fraction of the source.
    """
    if not source.classes:
        raise ValueError(f"{source.name} has no classes to be right about")
    world = world or World()
    weight = next(model.parameters())
    device = weight.device
    numbers = torch.tensor(class_numbers(model, source.classes, source.name), device=device)
    answers = len(class_names(model)) or len(source.classes)
    loader = EvalLoader(
        source,
        transform,
        batch_size=batch_size,
        rank=world.rank,
        world_size=world.size,
        workers=workers,
        device=device,
        max_unreadable=max_unreadable,
    )
    # For each pose the right first answers, the right ones among five, and answers that are no numbers.
    counts = torch.zeros(len(poses), 3, dtype=torch.int64, device=device)
    images = 0
    # For a rank that has none left: a model whose weights are spread over the ranks needs them all in every pass.
    idle = Batch(torch.zeros(1, 3, *transform.size), torch.tensor([UNLABELLED]), torch.tensor([0]))
    idle = Batch(*(tensor.to(device) for tensor in idle))
    training = model.training
    model.eval()
    try:
        quiet = not (progress and world.main)
        for batch in world.together(tqdm(loader, f"accuracy on {source.name}", unit="batch", disable=quiet)):
            images += 0 if batch is None else len(batch.images)
            shown, targets, indices = batch or idle
            if batch is not None and (missing := indices[targets == UNLABELLED]).numel():
                raise ValueError(
                    f"{source.describe(int(missing[0]))} has no label to be compared with an answer"
                )
            targets = torch.where(targets == UNLABELLED, UNLABELLED, numbers[targets])
            shown = cut_circle(shown) if circle else shown
            for row, pose in zip(counts, poses, strict=True):
                turned = pose.show(shown, indices, seed).to(weight.dtype)
                with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                    logits = model(turned)
                row += _count(logits, targets, answers)
    finally:
        model.train(training)
    parts = world.gather((counts.tolist(), images, loader.unreadable))
    require_readable(source, dict(entry for part in parts for entry in part[2]), max_unreadable)
    return _report(parts, poses, source, answers)


def _count(logits: Tensor, targets: Tensor, classes: int) -> Tensor:
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise ValueError(
            f"the model's outputs are {tuple(logits.shape[1:])}, expected one for each of the {classes} classes "
            "of the data"
        )
    first = (logits.argmax(1) == targets).sum()
    among = (logits.topk(min(SEVERAL, classes)).indices == targets[:, None]).any(1).sum()
    return torch.stack([first, among, (~logits.isfinite()).any(1).sum()])


def _report(
    parts: Sequence[tuple[list[list[int]], int, list[tuple[str, str]]]],
    poses: Sequence[Pose],
    source: Source,
    answers: int,
) -> AccuracyReport:
    """The sum of what the ranks counted."""
    counts = torch.tensor([part[0] for part in parts]).sum(0).tolist()
    images = sum(part[1] for part in parts)
    unreadable = [entry for part in parts for entry in part[2]]
    if not images:
        raise ValueError(f"none of the {len(source)} images of {source.name} can be read")
    if wrong := max(row[2] for row in counts):
        raise ValueError(
            f"the model's outputs are not finite for {wrong} of the {images} images of {source.name}"
        )
    several = answers > SEVERAL
    rows = [
        Accuracy(pose, first / images, among / images if several else None)
        for pose, (first, among, _) in zip(poses, counts, strict=True)
    ]
    return AccuracyReport(tuple(rows), images, tuple(unreadable))
