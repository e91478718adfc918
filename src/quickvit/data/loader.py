"""Batches that depend on seed and step alone: not on the number of workers or ranks, nor on a restart."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from quickvit.data.crops import Uncropped
from quickvit.data.images import Unreadable
from quickvit.data.mixing import Mixing
from quickvit.data.seeds import derived_seed
from quickvit.data.sources import CachedSource, Source
from quickvit.data.transforms import AnyTransform, Transform, TwoSteps

logger = logging.getLogger(__name__)

# Samples that are tried in place of an unreadable one, before a batch is given up.
REPLACEMENTS = 16
# Batches that each worker prepares ahead.
AHEAD = 2
# Images that may be unreadable before a run stops: a number, or below 1 a fraction of all.
MAX_UNREADABLE = 0.05


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


class StepLoader:
    """What loaders for training share: batch `step` of a run is a function of the seed and the step alone.

    An epoch takes the samples in an order that (seed, epoch) decides. With `repeats`, each sample comes so many
    times in a row in that order, differently augmented, and an epoch ends after as many images as before, having
    seen a fraction of the samples (repeated augmentation, as in DeiT). Within a batch the repetitions lie far
    apart. The ranks hold consecutive slices of the global batch.

    An image that cannot be read is replaced by another one that (seed, epoch, sample) decides; it is logged and
    kept in `unreadable`. Each rank counts its own.

    collate: makes a batch of what the transform gave of each sample, with the step and the first sample's place.
    batch_size: of all ranks together. steps_per_epoch: by default as many whole batches as there are samples.
    max_unreadable: a number of images, or below 1 a fraction of the source.
    device: where the batches are wanted; they are normalised there.
    """

    def __init__(
        self,
        source: Source,
        transform: AnyTransform,
        collate: Collate,
        *,
        batch_size: int,
        seed: int = 0,
        steps_per_epoch: int | None = None,
        repeats: int = 1,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        max_unreadable: float = MAX_UNREADABLE,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_ranks(rank, world_size)
        _check_least(1, batch_size=batch_size, repeats=repeats)
        if batch_size % world_size:
            raise ValueError(f"batch_size must be a multiple of the {world_size} ranks, got {batch_size}")
        if steps_per_epoch is None and batch_size > len(source):
            raise ValueError(
                f"batch_size must be at most the {len(source)} images of {source.name}, got {batch_size}; "
                "or set steps_per_epoch"
            )
        self.seed = seed
        self.steps_per_epoch = len(source) // batch_size if steps_per_epoch is None else steps_per_epoch
        _check_least(1, steps_per_epoch=self.steps_per_epoch)
        share = batch_size // world_size
        self.part = slice(rank * share, (rank + 1) * share)
        self._steps = _Steps(
            source,
            transform,
            collate,
            seed,
            order=_Order(len(source), seed, self.steps_per_epoch * batch_size, repeats),
            batch_size=batch_size,
            part=self.part,
        )
        self._pipeline = _Pipeline(source, transform, workers, max_unreadable, torch.device(device))

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """Path and reason of each image that could not be read so far."""
        return list(self._pipeline.unreadable.items())

    def load(self, start: int, stop: int) -> Iterator[Any]:
        """What `collate` makes of the steps start … stop − 1 of the run, on the device."""
        for batch in self._pipeline.run(self._steps, range(start, stop)):
            if batch is None:
                why = f"and neither can {REPLACEMENTS} others in place of one"
                raise _too_many(self._pipeline.source, self._pipeline.unreadable, why)
            yield batch


class TrainLoader(StepLoader):
    """Shuffled, augmented and mixed images with their targets; `options` are those of `StepLoader`."""

    def __init__(
        self, source: Source, transform: Transform, *, mixing: Mixing | None = None, **options: Any
    ) -> None:
        super().__init__(source, transform, _collate, **options)
        self._mixing = mixing

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of the steps start … stop − 1 of the run.

        Ask for all at once: workers start anew each time.
        """
        for step, batch in enumerate(self.load(start, stop), start):
            if self._mixing is None:
                yield batch
                continue
            seed = derived_seed(self.seed, step, "mixing")
            images, targets = self._mixing(batch.images, batch.targets, seed, self.part.start)
            yield Batch(images, targets, batch.indices)


class EvalLoader:
    """All samples in order, each once over all ranks: the source is cut into one part for each.

    Unreadable images are left out, logged, and kept in `unreadable`. Each rank counts its own: who gathers them must
    `require_readable`. batch_size: of each rank. indices: some of the samples, by default all; what becomes of a
    sample does not depend on the others.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        batch_size: int,
        indices: Sequence[int] | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        max_unreadable: float = MAX_UNREADABLE,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_ranks(rank, world_size)
        _check_least(1, batch_size=batch_size)
        indices = range(len(source)) if indices is None else indices
        first, last = (number * len(indices) // world_size for number in (rank, rank + 1))
        self._parts = _Parts(source, transform, seed, indices[first:last], batch_size)
        self._pipeline = _Pipeline(source, transform, workers, max_unreadable, torch.device(device))

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """Path and reason of each image that could not be read so far."""
        return list(self._pipeline.unreadable.items())

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._pipeline.run(self._parts, range(len(self)))
        return (batch for batch in batches if batch is not None)


def require_readable(source: Source, unreadable: Mapping[str, str], limit: float) -> None:
    """Refuse to go on if these images with their reasons, of one rank or of all, are more than `max_unreadable`."""
    if len(unreadable) > limit * (_images(source) if limit < 1 else 1):
        raise _too_many(source, unreadable, f"more than max_unreadable={limit:g} allows")


def _too_many(source: Source, unreadable: Mapping[str, str], why: str) -> TooManyUnreadable:
    """An error with the list of what could not be read."""
    lines = [f"{len(unreadable)} of the {_images(source)} images of {source.name} cannot be read, {why}:"]
    lines += [f"  {path}: {reason}" for path, reason in unreadable.items()]
    return TooManyUnreadable("\n".join(lines), list(unreadable.items()))


def _images(source: Source) -> int:
    return getattr(source, "distinct", len(source))


def _check_ranks(rank: int, world_size: int) -> None:
    _check_least(1, world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")


def _check_least(least: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


# ---------------------------------------------------------------------- in the workers


class Loaded(NamedTuple):
    """A sample: what the transform gave, the number of its class and its own."""

    images: Any
    target: int
    number: int


# The samples of a rank, the step, and the place of the first of them in the global batch → a named tuple: what the
# transform gave, stacked, and further tensors.
Collate = Callable[[Sequence[Loaded], int, int], Any]


class _Loaded(NamedTuple):
    """What a worker hands over: a batch, if there is one, and the images that it could not read."""

    batch: Any
    unreadable: list[tuple[str, str]]


@dataclass
class _Order:
    """The samples of each epoch, in as many passes over the source as its images need."""

    samples: int
    seed: int
    images: int
    repeats: int
    _epoch: int = -1
    _order: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __call__(self, epoch: int, place: int) -> tuple[int, int]:
        """The sample at a place of an epoch, and how many times the epoch had it before."""
        if epoch != self._epoch:
            passes = range(-(-self.images // (self.samples * self.repeats)))
            # An array gives single numbers faster than a tensor does.
            self._order = torch.cat([self._shuffled(epoch, number) for number in passes]).numpy()
            self._epoch = epoch
        number, inside = divmod(place, self.samples * self.repeats)
        sample = self._order[number * self.samples + inside // self.repeats]
        return int(sample), number * self.repeats + inside % self.repeats

    def _shuffled(self, epoch: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, epoch, "order", number))
        return torch.randperm(self.samples, generator=generator)


@dataclass
class _Steps(Dataset[_Loaded]):
    """One rank's part of each training batch, by step."""

    source: Source
    transform: AnyTransform
    collate: Collate
    seed: int
    order: _Order
    batch_size: int
    part: slice

    def __getitem__(self, step: int) -> _Loaded:
        epoch, first = divmod(step * self.batch_size, self.order.images)
        places = range(first, first + self.batch_size)
        # Repetitions of a sample go to different ranks, and are not mixed with each other.
        places_apart = sorted(places, key=lambda place: place % self.order.repeats)
        samples: list[Loaded] = []
        unreadable: list[tuple[str, str]] = []
        load = _reader(self.source, self.transform, unreadable)
        for place in places_apart[self.part]:
            index, view = self.order(epoch, place)
            seed = derived_seed(self.seed, epoch, index, view)
            others = (derived_seed(seed, "replacement", i) % len(self.source) for i in range(REPLACEMENTS))
            candidates = (load(i, seed) for i in chain([index], others))
            sample = next((found for found in candidates if found is not None), None)
            if sample is None:
                return _Loaded(None, unreadable)
            samples.append(sample)
        return _Loaded(self.collate(samples, step, self.part.start), unreadable)


@dataclass
class _Parts(Dataset[_Loaded]):
    """Consecutive samples of a part of the source, by batch."""

    source: Source
    transform: Transform
    seed: int
    part: Sequence[int]
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.part) // self.batch_size)

    def __getitem__(self, number: int) -> _Loaded:
        unreadable: list[tuple[str, str]] = []
        indices = self.part[number * self.batch_size : (number + 1) * self.batch_size]
        seeds = (derived_seed(self.seed, index) for index in indices)
        load = _reader(self.source, self.transform, unreadable)
        samples = [
            sample
            for index, seed in zip(indices, seeds, strict=True)
            if (sample := load(index, seed)) is not None
        ]
        return _Loaded(_collate(samples) if samples else None, unreadable)


def _leave_signals_to_parent(_worker: int) -> None:
    """Outlive what is sent to a whole group of processes: a worker that dies of it takes the run with it."""
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # By SIGTERM the parent ends its workers too. A handler is not told who sent it; whoever waits for it is.
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_if_parent_asks, daemon=True).start()


def _end_if_parent_asks() -> None:
    # Where a server forks the workers it is not their parent.
    parent = multiprocessing.parent_process()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != (os.getppid() if parent is None else parent.pid):
        pass
    os._exit(0)


def _reader(
    source: Source, transform: AnyTransform, unreadable: list[tuple[str, str]]
) -> Callable[[int, int], Loaded | None]:
    """What workers do with the number of a sample and a seed; or nothing, and they note why."""
    # Bytes are a quarter of the traffic between processes; and those in memory need not become an image first.
    make = transform.pixels if isinstance(transform, TwoSteps) else transform
    read: Callable[[int], tuple[Any, int]] = source.read
    if isinstance(source, CachedSource) and getattr(transform, "takes_bytes", False):
        read = source.read_bytes

    def load(index: int, seed: int) -> Loaded | None:
        try:
            image, target = read(index)
        except Unreadable as error:
            unreadable.append((error.path, error.reason))
            return None
        return Loaded(make(image, seed), target, index)

    return load


def stack(items: Sequence[Any]) -> Any:
    """Tensors, or named tuples of tensors, stacked."""
    if isinstance(items[0], Tensor):
        return torch.stack(list(items))
    return type(items[0])(*map(stack, zip(*items, strict=True)))


def collate(images: Sequence[Any]) -> Any:
    """The same for what a transform gave of each sample, where a worker shares it with the training process."""
    if isinstance(images[0], Uncropped):
        sizes = sorted({tuple(image.pixels.shape) for image in images})
        if len(sizes) > 1:
            some = " and ".join(f"{height} × {width}" for height, width, _ in sizes[:2])
            raise ValueError(
                f"images that the device crops must have one size, got {some} pixels; leave crops to the workers"
            )
    return default_collate(list(images))


def _collate(samples: Sequence[Loaded], step: int = 0, first: int = 0) -> Batch:  # noqa: ARG001
    images, targets, indices = zip(*samples, strict=True)
    return Batch(collate(images), torch.tensor(targets), torch.tensor(indices))


# ---------------------------------------------------------------------- in the training process


@dataclass
class _Pipeline:
    """From batches that workers load to batches on a device, and a record of what could not be read."""

    source: Source
    transform: AnyTransform
    workers: int
    max_unreadable: float
    device: torch.device
    unreadable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_least(0, workers=self.workers)
        if self.max_unreadable < 0:
            raise ValueError(
                f"max_unreadable is a number of images, or below 1 a fraction of all; got {self.max_unreadable}"
            )

    def run(self, dataset: Dataset[_Loaded], keys: range) -> Iterator[Any]:
        """The batches with these keys, in their order."""
        options: dict[str, Any] = {"prefetch_factor": AHEAD} if self.workers else {}
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=keys,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_leave_signals_to_parent,
            **options,
        )
        for loaded in loader:
            self._note(loaded.unreadable)
            yield None if loaded.batch is None else self._finish(loaded.batch)

    def _note(self, unreadable: Sequence[tuple[str, str]]) -> None:
        """Log each image once, and stop if there are too many."""
        for path, reason in unreadable:
            if path not in self.unreadable:
                self.unreadable[path] = reason
                logger.warning("cannot read %s: %s", path, reason)
        require_readable(self.source, self.unreadable, self.max_unreadable)

    def _finish(self, batch: Any) -> Any:
        """The images of a batch, normalised, and its other tensors, on the device."""
        images, *others = batch
        if isinstance(self.transform, TwoSteps):
            images = self.transform.normalize(self._send_bytes(images))
        else:
            images = self._send(images)
        return type(batch)(images, *map(self._send, others))

    def _send_bytes(self, images: Any) -> Any:
        """Images on the device. What is to be done with them stays behind: the host must know it to ask for it."""
        if isinstance(images, Tensor):
            return self._send(images) if images.dtype == torch.uint8 else images
        return type(images)(*map(self._send_bytes, images))

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)
