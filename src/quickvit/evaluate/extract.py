"""Features of all images of a source, computed once and kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from quickvit.data import EvalLoader, EvalTransform, Source, Transform
from quickvit.data.loader import MAX_UNREADABLE, require_readable
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.metrics import confusion_matrix
from quickvit.evaluate.rotation import UPRIGHT, Pose, cut_circle
from quickvit.evaluate.store import PRESENT, ArrayStore, Rows, Spec
from quickvit.ops.storage import cache_folder
from quickvit.train.distributed import World

# The array of the classes, beside the features.
TARGET = "target"

# Images and their numbers → arrays by name.
Compute = Callable[[Tensor, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Extraction:
    """How features are computed, and where they are kept.

    cache: folder of the features; None is the user's cache. seed: of transforms with random choices.
    max_unreadable: a number of images, or below 1 a fraction of the source. world: the processes that share the
    work.
    """

    cache: Path | None = None
    batch_size: int = 64
    workers: int = 0
    seed: int = 0
    max_unreadable: float = MAX_UNREADABLE
    progress: bool = False
    world: World = field(default_factory=World)

    @property
    def root(self) -> Path:
        """The folder of the cache."""
        return cache_folder("features") if self.cache is None else self.cache


@dataclass(frozen=True)
class Features:
    """Arrays [n, ...] by name, as `Backbone.pooled` or `Backbone.dense` gives them, of a source's readable samples.

    targets [n]: their classes. indices [n]: their numbers in the source.
    """

    arrays: dict[str, Tensor]
    targets: Tensor
    indices: Tensor
    source: Source

    @property
    def unreadable(self) -> int:
        """How many images of the source could not be read."""
        return len(self.source) - len(self.indices)

    @property
    def vector(self) -> Tensor:
        """What stands for an image."""
        return image_vector(self.arrays)

    def confusion(self, labels: Tensor) -> Tensor:
        """The confusion matrix of labels [n] that were given to the samples."""
        return confusion_matrix(self.targets, labels, len(self.source.classes))


def image_vector(arrays: Mapping[str, Tensor]) -> Tensor:
    """What stands for an image: the last class token, or without one the average of the patches."""
    return arrays["class_1"] if "class_1" in arrays else arrays["average"]


def extract(
    backbone: Backbone,
    source: Source,
    transform: Transform,
    extraction: Extraction | None = None,
    *,
    dense: bool = False,
    pose: Pose = UPRIGHT,
    circle: bool = False,
) -> Features:
    """The features of a source's images: vectors, or with `dense` those of the patches.

    pose: how the images are shown. circle: hide what lies outside of the largest circle.

    They are found in the cache, or computed there by all processes of torchrun together; after an interruption or
    damage only what is missing.
    """
    extraction = extraction or Extraction()
    compute = backbone.dense if dense else backbone.pooled

    def show(images: Tensor, indices: Tensor) -> dict[str, Tensor]:
        return compute(pose.show(cut_circle(images) if circle else images, indices, extraction.seed))

    trial = show(torch.zeros(1, 3, *backbone.img_size, device=backbone.device), torch.arange(1))
    specs = {name: Spec(tuple(value.shape[1:]), value.dtype) for name, value in trial.items()}
    drawn = pose.random or not isinstance(transform, EvalTransform)
    key = {
        **backbone.identity,
        "source": describe_source(source),
        "transform": repr(transform),
        "pose": f"{pose} in a circle" if circle else str(pose),
        "seed": extraction.seed if drawn else None,
    }
    specs[TARGET] = Spec((), torch.int64)
    store = ArrayStore(extraction.root, backbone.architecture, key, len(source), specs)
    store.fill(partial(_compute, backbone, source, transform, extraction, show), extraction.world)
    arrays = {name: store.read(name) for name in store.specs}
    present, targets = arrays.pop(PRESENT).bool(), arrays.pop(TARGET)
    indices = present.nonzero().flatten()
    absent = map(source.describe, (~present).nonzero().flatten().tolist())
    require_readable(source, dict.fromkeys(absent, "see the log"), extraction.max_unreadable)
    if not present.all():
        arrays, targets = {name: array[indices] for name, array in arrays.items()}, targets[indices]
    return Features(arrays, targets, indices, source)


def describe_source(source: Source, name: Callable[[int], str] | None = None) -> str:
    """A digest of what a source holds, by which its features are found again.

    All names (by default of the samples) and, where the source has them at hand, targets and a fingerprint of its
    own. Of its files, which are those names or what the source says, also size and time of change.
    """
    files = getattr(source, "files", ()) if name is None else ()
    name = name or source.describe
    digest = blake2b(repr((source.name, source.classes, len(source))).encode(), digest_size=16)
    digest.update(getattr(source, "fingerprint", "").encode())
    targets = getattr(source, "targets", None)
    digest.update(b"" if targets is None else repr(list(map(int, targets))).encode())
    for path in chain(map(name, range(len(source))), files):
        digest.update(os.fsencode(path) + b"\0" + _state(path) + b"\0")
    return digest.hexdigest()


def _state(path: str) -> bytes:
    """Size and time of change of a file, nothing where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return b""
    return f"{status.st_size} {status.st_mtime_ns}".encode()


def _compute(
    backbone: Backbone,
    source: Source,
    transform: Transform,
    extraction: Extraction,
    compute: Compute,
    indices: Sequence[int],
) -> Iterator[Rows]:
    """The features and targets of these samples, batch by batch."""
    loader = EvalLoader(
        source,
        transform,
        batch_size=extraction.batch_size,
        indices=indices,
        seed=extraction.seed,
        workers=extraction.workers,
        max_unreadable=extraction.max_unreadable,
        device=backbone.device,
    )
    shown = extraction.progress and extraction.world.main
    with tqdm(total=len(indices), desc=f"features of {source.name}", unit="image", disable=not shown) as bar:
        for batch in loader:
            features = compute(batch.images, batch.indices)
            rows = batch.indices.tolist()
            for values in features.values():
                if not values.isfinite().all():
                    broken = source.describe(rows[int((~values.isfinite()).flatten(1).any(1).nonzero()[0])])
                    raise ValueError(f"{backbone.name} gives {broken} features that are not finite")
            yield rows, {**features, TARGET: batch.targets}
            bar.update(len(rows))
