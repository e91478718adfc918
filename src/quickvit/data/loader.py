"""Batches that depend on seed and step alone: not on the number of workers or ranks, nor on a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from quickvit.data.images import Unreadable
from quickvit.data.mixing import Mixing
from quickvit.data.seeds import derived_seed
from quickvit.data.sources import Source
from quickvit.data.transforms import PixelTransform, Transform

logger = logging.getLogger(__name__)

# Samples that are tried in place of an unreadable one, before a batch is given up.
REPLACEMENTS = 16
# Batches that each worker prepares ahead.
AHEAD = 2


class Batch(NamedTuple):
    """Images [B, 3, H, W], normalised; targets [B], or [B, classes] once mixed; indices [B] of the samples."""

    images: Tensor
    targets: Tensor
    indices: Tensor


class TooManyUnreadable(ValueError):
    """More images could not be read than the limit allows; `unreadable` has their paths and reasons."""

    def __init__(self, message: str, unreadable: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.unreadable = list(unreadable)


@dataclass
class Losses:
    """The unreadable images of a source that were met so far, and how many are too many.

    limit: a number of images, or below 1 a fraction of the source.
    """

    source: Source
    limit: float
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(
                f"max_unreadable must be a fraction below 1 or a number of images, got {self.limit}"
            )

    def note(self, unreadable: Sequence[tuple[str, str]]) -> None:
        """Log each image once, and stop when there are too many."""
        for path, reason in unreadable:
            if path not in self.reasons:
                self.reasons[path] = reason
                logger.warning("cannot read %s: %s", path, reason)
        allowed = self.limit * len(self.source) if self.limit < 1 else self.limit
        if len(self.reasons) > allowed:
            self.stop(f"more than max_unreadable={self.limit:g} allows")

    def stop(self, why: str) -> None:
        """Raise `TooManyUnreadable` with the list."""
        listed = "\n".join(f"  {path}: {reason}" for path, reason in self.reasons.items())
        share = f"{len(self.reasons)} of the {len(self.source)} images of {self.source.name}"
        raise TooManyUnreadable(f"{share} cannot be read, {why}:\n{listed}", list(self.reasons.items()))


class TrainLoader:
    """Shuffled, augmented batches; batch `step` of a run is a function of the seed and the step alone.

    An epoch takes the samples in an order that (seed, epoch) decides. With `repeats`, each sample comes so many
    times in a row in that order, differently augmented, and an epoch ends after as many images as before, having
    seen a fraction of the samples (repeated augmentation, as in DeiT). Within a batch the repetitions lie far
    apart. The ranks hold consecutive slices of the global batch.

    An image that cannot be read is replaced by another one that (seed, epoch, sample) decides; it is logged and
    kept in `unreadable`. Each rank counts its own.

    batch_size: of all ranks together. steps_per_epoch: by default as many whole batches as there are samples.
    mixing: applied last. max_unreadable: a number of images, or below 1 a fraction of the source.
    device: where the batches are wanted; they are normalised there.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        batch_size: int,
        seed: int = 0,
        steps_per_epoch: int | None = None,
        repeats: int = 1,
        mixing: Mixing | None = None,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        max_unreadable: float = 0.05,
        device: torch.device | str = "cpu",
    ) -> None:
        _check(batch_size=batch_size, repeats=repeats, world_size=world_size, rank=rank, workers=workers)
        if batch_size % world_size:
            raise ValueError(f"batch_size must be a multiple of the {world_size} ranks, got {batch_size}")
        if steps_per_epoch is None:
            steps_per_epoch = len(source) // batch_size
            if not steps_per_epoch:
                raise ValueError(
                    f"batch_size must be at most the {len(source)} images of {source.name}, got {batch_size}; "
                    "or set steps_per_epoch"
                )
        _check(steps_per_epoch=steps_per_epoch)
        self.steps_per_epoch = steps_per_epoch
        self.mixing, self.seed, self.workers, self.device = mixing, seed, workers, torch.device(device)
        self.transform = transform
        self.first = rank * (batch_size // world_size)
        self._steps = _Steps(
            source,
            transform,
            seed,
            batch_size,
            steps_per_epoch,
            repeats,
            self.first,
            batch_size // world_size,
        )
        self._losses = Losses(source, max_unreadable)

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """Path and reason of each image that could not be read so far."""
        return list(self._losses.reasons.items())

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of the steps start … stop − 1 of the run.

        Ask for all at once: workers start anew each time.
        """
        for step, loaded in zip(
            range(start, stop), _load(self._steps, range(start, stop), self.workers, self.device), strict=True
        ):
            self._losses.note(loaded.unreadable)
            if loaded.batch is None:
                self._losses.stop(f"and {REPLACEMENTS} others in place of one neither")
                return
            batch = _finish(loaded.batch, self.transform, self.device)
            if self.mixing is not None:
                mixed = self.mixing(
                    batch.images, batch.targets, derived_seed(self.seed, step, "mixing"), self.first
                )
                batch = Batch(*mixed, batch.indices)
            yield batch


class EvalLoader:
    """All samples in order, each once over all ranks; a rank has one part of the source.

    Unreadable images are left out, logged, and kept in `unreadable`. batch_size: of each rank.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        seed: int = 0,
        max_unreadable: float = 0.05,
        device: torch.device | str = "cpu",
    ) -> None:
        _check(batch_size=batch_size, world_size=world_size, rank=rank, workers=workers)
        self.transform, self.workers, self.device = transform, workers, torch.device(device)
        part = range(rank * len(source) // world_size, (rank + 1) * len(source) // world_size)
        self._parts = _Parts(source, transform, seed, part, batch_size)
        self._losses = Losses(source, max_unreadable)

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """Path and reason of each image that could not be read so far."""
        return list(self._losses.reasons.items())

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Batch]:
        for loaded in _load(self._parts, range(len(self)), self.workers, self.device):
            self._losses.note(loaded.unreadable)
            if loaded.batch is not None:
                yield _finish(loaded.batch, self.transform, self.device)


# ---------------------------------------------------------------------- in the workers


class _Loaded(NamedTuple):
    """What a worker hands over: a batch, if there is one, and the images that it could not read."""

    batch: Batch | None
    unreadable: list[tuple[str, str]]


class _Steps(Dataset[_Loaded]):
    """One rank's slice of each training batch, by step."""

    def __init__(
        self,
        source: Source,
        transform: Transform,
        seed: int,
        batch_size: int,
        steps_per_epoch: int,
        repeats: int,
        first: int,
        number: int,
    ) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.batch_size, self.steps_per_epoch, self.repeats = batch_size, steps_per_epoch, repeats
        self.first, self.number = first, number
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __getitem__(self, step: int) -> _Loaded:
        epoch, step = divmod(step, self.steps_per_epoch)
        # Repetitions of a sample go to different ranks, and are not mixed with each other.
        places = sorted(
            range(step * self.batch_size, (step + 1) * self.batch_size),
            key=lambda place: place % self.repeats,
        )[self.first : self.first + self.number]
        order = self._get_order(epoch)
        samples, unreadable = [], []
        for place in places:
            index = int(order[place])
            view = place // (len(self.source) * self.repeats) * self.repeats + place % self.repeats
            seed = derived_seed(self.seed, epoch, index, view)
            for attempt in range(REPLACEMENTS + 1):
                if attempt:
                    index = derived_seed(seed, "replacement", attempt) % len(self.source)
                try:
                    samples.append(_sample(self.source, self.transform, index, seed))
                    break
                except Unreadable as error:
                    unreadable.append((error.path, error.reason))
            else:
                return _Loaded(None, unreadable)
        return _Loaded(_collate(samples), unreadable)

    def _get_order(self, epoch: int) -> Tensor:
        """The samples of an epoch, in as many passes over the source as its steps need."""
        if epoch != self._epoch:
            count = len(self.source)
            needed = self.steps_per_epoch * self.batch_size
            passes = []
            for number in range(-(-needed // (count * self.repeats))):
                generator = torch.Generator().manual_seed(derived_seed(self.seed, epoch, "order", number))
                passes.append(torch.randperm(count, generator=generator).repeat_interleave(self.repeats))
            self._epoch, self._order = epoch, torch.cat(passes)[:needed]
        return self._order


class _Parts(Dataset[_Loaded]):
    """Consecutive samples of a part of a source, by batch."""

    def __init__(self, source: Source, transform: Transform, seed: int, part: range, batch_size: int) -> None:
        self.source, self.transform, self.seed, self.part, self.batch_size = (
            source,
            transform,
            seed,
            part,
            batch_size,
        )

    def __len__(self) -> int:
        return -(-len(self.part) // self.batch_size)

    def __getitem__(self, number: int) -> _Loaded:
        samples, unreadable = [], []
        for index in self.part[number * self.batch_size : (number + 1) * self.batch_size]:
            try:
                samples.append(
                    _sample(self.source, self.transform, index, derived_seed(self.seed, 0, index, 0))
                )
            except Unreadable as error:
                unreadable.append((error.path, error.reason))
        return _Loaded(_collate(samples) if samples else None, unreadable)


def _sample(source: Source, transform: Transform, index: int, seed: int) -> tuple[Tensor, int, int]:
    sample = source.read(index)
    make = transform.pixels if isinstance(transform, PixelTransform) else transform
    return make(sample.image, seed), sample.target, index


def _collate(samples: list[tuple[Tensor, int, int]]) -> Batch:
    images, targets, indices = zip(*samples, strict=True)
    return Batch(torch.stack(images), torch.tensor(targets), torch.tensor(indices))


# ---------------------------------------------------------------------- in the training process


def _load(dataset: Dataset[_Loaded], keys: range, workers: int, device: torch.device) -> Iterator[_Loaded]:
    """The entries of a dataset in order, made by worker processes."""
    options: dict[str, Any] = {"prefetch_factor": AHEAD} if workers else {}
    return iter(
        DataLoader(
            dataset,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            **options,
        )
    )


def _finish(batch: Batch, transform: Transform, device: torch.device) -> Batch:
    images, targets, indices = (tensor.to(device, non_blocking=True) for tensor in batch)
    return Batch(
        transform.normalize(images) if isinstance(transform, PixelTransform) else images, targets, indices
    )


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        least = int(name not in ("rank", "workers"))
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if "rank" in numbers and numbers["rank"] >= numbers["world_size"]:
        raise ValueError(f"rank must be below the world size {numbers['world_size']}, got {numbers['rank']}")
