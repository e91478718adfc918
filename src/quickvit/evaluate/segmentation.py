"""Segmentation with frozen patch features: nearest neighbours and logistic regression, CAPI's protocol.

Images and masks are squeezed to the size that the model sees. A sample is a patch of P × P pixels: its feature,
standardised, and its P² labels. A pixel of a new patch gets the label that is commonest at its place among the k
nearest patches; or all its pixels get the label that logistic regression takes for the patch's commonest. Patches
whose commonest label is ignored are not learned from. Hyper-parameters are chosen by mean IoU on a tenth of the
training images, then the classifier is fitted to all of them (Darcet et al., 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from quickvit.data import EvalTransform
from quickvit.data.segmentation import SegmentationSource
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.extract import Extraction, describe_source, extract
from quickvit.evaluate.knn import Metric, nearest
from quickvit.evaluate.logistic import LogisticRegression, fit_logistic, moments
from quickvit.evaluate.metrics import accuracy, confusion_matrix, iou, mean_iou
from quickvit.evaluate.rotation import UPRIGHT, Pose, cut_circle
from quickvit.evaluate.selection import FRACTION, Trial, best, hold_out
from quickvit.evaluate.store import ArrayStore, Rows, Spec
from quickvit.train.distributed import World

# Images whose patches are handled, and votes that are counted, at one time.
IMAGES, VOTES = 64, 2**27
# Values that a pixel of a mask can have.
VALUES = 256
# The label of what a turn brings in, and of what lies outside of a circle.
OUTSIDE = 255
MASK = "mask"


@dataclass(frozen=True)
class SegmentationProtocol:
    """CAPI's values.

    neighbours, metrics: what k-NN chooses from; cs: what logistic regression chooses its C from.
    fraction: of the training images, for choosing; seed: decides which.
    """

    neighbours: tuple[int, ...] = (1, 3, 10, 30)
    metrics: tuple[Metric, ...] = ("cosine", "l2")
    cs: tuple[float, ...] = tuple(10 ** (-6 + 11 * i / 7) for i in range(8))
    max_iterations: int = 1000
    fraction: float = FRACTION
    seed: int = 0


@dataclass(frozen=True)
class SegmentationScores:
    """How well the pixels of the test images that are not ignored were labelled.

    confusion [256, 256]: of all values that a pixel can have. tried: what `chosen` was chosen from.
    """

    confusion: Tensor
    ignored: tuple[int, ...]
    chosen: dict[str, Any]
    tried: tuple[Trial, ...]

    @property
    def mean_iou(self) -> float:
        """Over all labels that occur or were predicted, as in CAPI.

        k-NN can predict an ignored label, which then counts as a class that is never right.
        """
        return mean_iou(self.confusion)

    @property
    def mean_iou_of_classes(self) -> float:
        """Over the labels that occur or were predicted and are not ignored."""
        return iou(self.confusion)[[v for v in range(VALUES) if v not in self.ignored]].nanmean().item()

    @property
    def pixel_accuracy(self) -> float:
        """The share of pixels with the right label."""
        return accuracy(self.confusion)


@dataclass(frozen=True)
class SegmentationData:
    """Features [n, H, W, C] of the patches of images and their masks [n, H·P, W·P], both maybe memory-mapped.

    indices [n]: the numbers of the images in their source.
    """

    features: Tensor
    masks: Tensor
    ignored: tuple[int, ...]
    indices: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.features.shape[1], self.features.shape[2]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the masks."""
        return self.masks.shape[1], self.masks.shape[2]

    def patches(self, images: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Features [m, C] and labels of the pixels [m, P²] of the patches of some images, a few images at a time."""
        for some in images.split(IMAGES):
            features = self.features[some].to(device).flatten(0, 2)
            yield features, to_patches(self.masks[some].to(device), self.grid)


def squeezed(backbone: Backbone) -> EvalTransform:
    """Whole images at the size that the model sees, whatever their shape: masks are squeezed alike."""
    return backbone.transform(crop_mode="squash")


def load_segmentation(
    backbone: Backbone,
    source: SegmentationSource,
    extraction: Extraction | None = None,
    *,
    pose: Pose = UPRIGHT,
    circle: bool = False,
) -> SegmentationData:
    """Features and masks of a source, from the cache or computed into it; in a pose, masks turn with their images.

    What a turn brings in, or lies outside of the circle, has the label 255 and is ignored.
    """
    extraction = extraction or Extraction()
    transform = squeezed(backbone)
    found = extract(backbone, source, transform, extraction, dense=True, pose=pose, circle=circle)
    masks_of = describe_source(source, source.describe_mask)
    key = {"masks": masks_of, "labels": source.labels, "ignored": source.ignored, "void": source.void}
    specs = {MASK: Spec(transform.size, torch.uint8)}
    store = ArrayStore(extraction.root, "masks", key, len(source), specs)
    store.fill(partial(_read_masks, source, transform.size, extraction), extraction.world)
    stored = store.read(MASK)
    if pose == UPRIGHT and not circle:
        masks = stored[found.indices] if found.unreadable else stored
        return SegmentationData(found.arrays["patches"], masks, source.void, found.indices)

    def shown(indices: Tensor) -> Tensor:
        some = cut_circle(stored[indices], OUTSIDE) if circle else stored[indices]
        return pose.show_masks(some, indices, extraction.seed, OUTSIDE)

    masks = torch.cat([shown(part) for part in found.indices.split(IMAGES)])
    ignored = tuple(sorted({*source.void, OUTSIDE}))
    return SegmentationData(found.arrays["patches"], masks, ignored, found.indices)


@dataclass(frozen=True)
class Segmenter:
    """Both classifiers, fitted to the training patches with the hyper-parameters that were chosen for them."""

    keys: _Patches
    linear: LogisticRegression
    scaler: _Scaler
    chosen: dict[str, dict[str, Any]]
    tried: dict[str, tuple[Trial, ...]]
    world: World

    def label(self, patches: Tensor) -> dict[str, Tensor]:
        """The labels [n, P²] that "knn" and "linear" give the pixels of patches with these features [n, C]."""
        return self._label(self.scaler(patches.to(self.scaler.mean.device)), progress=False)

    def evaluate(self, test: SegmentationData, *, progress: bool = False) -> dict[str, SegmentationScores]:
        """The scores of "knn" and "linear"; the processes share the images, and all know the result."""
        mine = torch.arange(len(test.masks))[self.world.rank :: self.world.size]
        queries = _gather(test, mine, self.scaler)
        scores = {}
        for name, pixels in self._label(queries.features, progress=progress).items():
            confusion = _confusion(queries, pixels, test.ignored, self.world)
            scores[name] = SegmentationScores(confusion, test.ignored, self.chosen[name], self.tried[name])
        return scores

    def _label(self, features: Tensor, *, progress: bool) -> dict[str, Tensor]:
        k, metric = self.chosen["knn"]["k"], self.chosen["knn"]["metric"]
        return {
            "knn": next(_knn(features, self.keys, metric, [k], progress)),
            "linear": _linear(features, self.keys, self.linear),
        }


def fit_segmentation(
    train: SegmentationData,
    protocol: SegmentationProtocol | None = None,
    *,
    device: str | torch.device = "cpu",
    world: World | None = None,
    progress: bool = False,
) -> Segmenter:
    """Choose hyper-parameters on the images held out, then fit to all; the processes of `world` share the trials."""
    protocol, world, device = protocol or SegmentationProtocol(), world or World(), torch.device(device)
    _require_labels(train)
    if len(train.masks) < 2:
        raise ValueError(
            "nothing can be held out for choosing: there is one training image; expected at least two"
        )
    fitted_on, chosen_on = hold_out(torch.zeros(len(train.masks)), protocol.fraction, protocol.seed)
    scaler = _Scaler.of(train, fitted_on, device)
    keys = _gather(train, fitted_on, scaler, learnable=True)
    held = _gather(train, chosen_on, scaler)
    tried = {
        "knn": _try_knn(held, keys, train.ignored, protocol, world, progress),
        "linear": _try_linear(held, keys, train.ignored, protocol, world, progress),
    }
    chosen = {name: best(trials) for name, trials in tried.items()}
    del keys, held
    keys = _gather(train, torch.arange(len(train.masks)), scaler, learnable=True)
    linear = fit_logistic(
        keys.features, keys.label, chosen["linear"]["c"], max_iterations=protocol.max_iterations
    )
    return Segmenter(keys, linear, scaler, chosen, tried, world)


# ---------------------------------------------------------------------- patches and labels


def to_patches(masks: Tensor, grid: tuple[int, int]) -> Tensor:
    """Labels [n, H·P, W·P] → those of each patch [n·H·W, P²]."""
    rows, columns = masks.shape[1] // grid[0], masks.shape[2] // grid[1]
    cut = masks.unflatten(2, (grid[1], columns)).unflatten(1, (grid[0], rows))
    return cut.transpose(2, 3).flatten(0, 2).flatten(1)


def from_patches(pixels: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """The labels of each patch [n·H·W, P²] → [n, H·P, W·P]; undoes `to_patches`."""
    rows, columns = size[0] // grid[0], size[1] // grid[1]
    cut = pixels.unflatten(1, (rows, columns)).unflatten(0, (-1, *grid))
    return cut.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def commonest(labels: Tensor) -> Tensor:
    """The commonest [n, m] of k labels [n, k, m], uint8; of equally common ones the smallest."""
    if labels.shape[1] == 1:
        return labels[:, 0]
    known = torch.bincount(labels.flatten(), minlength=VALUES).nonzero().flatten()
    codes = torch.zeros(VALUES, dtype=torch.int64, device=labels.device)
    codes[known] = torch.arange(len(known), device=labels.device)
    rows = max(1, VOTES // (len(known) * labels.shape[2]))
    parts = []
    for part in labels.split(rows):
        votes = torch.zeros(len(part), len(known), part.shape[2], dtype=torch.int32, device=labels.device)
        one = torch.ones((), dtype=torch.int32, device=labels.device)
        votes.scatter_add_(1, codes[part.long()], one.expand(part.shape))
        parts.append(known[votes.argmax(1)].to(torch.uint8))
    return torch.cat(parts)


class _Patches(NamedTuple):
    """Standardised features [n, C] of patches, the labels of their pixels [n, P²] and the commonest of those [n]."""

    features: Tensor
    pixels: Tensor
    label: Tensor


@dataclass(frozen=True)
class _Scaler:
    """Subtracts the mean of each channel and divides by its standard deviation."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, data: SegmentationData, images: Tensor, device: torch.device) -> _Scaler:
        mean, variance = moments(features for features, _ in data.patches(images, device))
        return cls(mean.float(), variance.sqrt().where(variance > 0, 1).float())

    def __call__(self, features: Tensor) -> Tensor:
        return ((features - self.mean) / self.scale).to(features.dtype)


def _require_labels(data: SegmentationData) -> None:
    """Raise a ValueError unless there is something to tell apart: one label alone is always right."""
    found: set[int] = set()
    for some in data.masks.split(IMAGES):
        found |= set(some.flatten().bincount().nonzero().flatten().tolist()) - set(data.ignored)
        if len(found) > 1:
            return
    only = f"only the label {found.pop()}" if found else "no label"
    ignored = ", ".join(map(str, data.ignored)) or "none"
    raise ValueError(
        f"the masks to learn from have {only} beside those that are ignored ({ignored}); expected at least two. Save "
        "masks of 0 and 255 as 0 and 1, or choose with --ignore what is ignored"
    )


def _gather(data: SegmentationData, images: Tensor, scaler: _Scaler, *, learnable: bool = False) -> _Patches:
    """The patches of some images; with `learnable` only those whose commonest label is not ignored."""
    device, total = scaler.mean.device, len(images) * data.grid[0] * data.grid[1]
    ignored = torch.tensor(data.ignored, device=device)
    patches: _Patches | None = None
    end = 0
    for features, pixels in data.patches(images, device):
        parts = [scaler(features), pixels, commonest(pixels[..., None])[:, 0]]
        if learnable:
            keep = ~torch.isin(parts[2], ignored)
            parts = [part[keep] for part in parts]
        # One piece of memory: joining the parts later would take twice as much.
        patches = patches or _Patches(*(part.new_empty(total, *part.shape[1:]) for part in parts))
        start, end = end, end + len(parts[0])
        for whole, part in zip(patches, parts, strict=True):
            whole[start:end] = part
    if patches is None or not end:
        raise ValueError(
            f"there is nothing to learn from: the labels {data.ignored} are ignored, and each of the {total} patches "
            "consists mostly of them"
            if learnable
            else "there are more processes than images; start fewer"
        )
    return _Patches(*(whole[:end] for whole in patches))


# ---------------------------------------------------------------------- classifiers


def _knn(
    features: Tensor, keys: _Patches, metric: Metric, ks: Sequence[int], progress: bool
) -> Iterator[Tensor]:
    """For each number of neighbours the label of every pixel [n, P²]."""
    found = nearest(features, keys.features, max(ks), metric=metric, progress=progress).indices
    rows = max(1, VOTES // (max(ks) * keys.pixels.shape[1]))
    for k in ks:
        yield torch.cat([commonest(keys.pixels[part[:, :k]]) for part in found.split(rows)])


def _linear(features: Tensor, keys: _Patches, fitted: LogisticRegression) -> Tensor:
    """The label of every pixel [n, P²]: within a patch all the same."""
    return fitted.predict(features)[:, None].expand(-1, keys.pixels.shape[1])


def _try_knn(
    held: _Patches,
    keys: _Patches,
    ignored: Sequence[int],
    protocol: SegmentationProtocol,
    world: World,
    progress: bool,
) -> tuple[Trial, ...]:
    """Every metric and number of neighbours; the processes share the queries."""
    mine = _Patches(*(part[world.rank :: world.size] for part in held))
    ks = [k for k in protocol.neighbours if k <= len(keys.label)]
    if not ks or min(ks) < 1:
        raise ValueError(
            f"numbers of neighbours must lie between 1 and the {len(keys.label)} patches to learn from, got "
            f"{protocol.neighbours}"
        )
    trials = []
    for metric in protocol.metrics:
        for k, pixels in zip(ks, _knn(mine.features, keys, metric, ks, progress), strict=True):
            score = mean_iou(_confusion(mine, pixels, ignored, world))
            trials.append(Trial({"k": k, "metric": metric}, score))
    return tuple(trials)


def _try_linear(
    held: _Patches,
    keys: _Patches,
    ignored: Sequence[int],
    protocol: SegmentationProtocol,
    world: World,
    progress: bool,
) -> tuple[Trial, ...]:
    """Every C; the processes share them."""
    mine = protocol.cs[world.rank :: world.size]
    scores = {}
    for c in tqdm(mine, "logistic regression", unit="fit", disable=not (progress and world.main)):
        fitted = fit_logistic(keys.features, keys.label, c, max_iterations=protocol.max_iterations)
        scores[c] = mean_iou(_confusion(held, _linear(held.features, keys, fitted), ignored))
    for others in world.gather(scores):
        scores |= others
    return tuple(Trial({"c": c}, scores[c]) for c in protocol.cs)


def _confusion(
    patches: _Patches, predicted: Tensor, ignored: Sequence[int], world: World | None = None
) -> Tensor:
    """The confusion of the pixels that are not ignored, added up over the processes."""
    counted = ~torch.isin(patches.pixels, torch.tensor(ignored, device=patches.pixels.device))
    confusion = confusion_matrix(patches.pixels[counted], predicted[counted], VALUES).cpu()
    return confusion if world is None else torch.stack(world.gather(confusion)).sum(0)


# ---------------------------------------------------------------------- masks


@dataclass(frozen=True)
class _Masks(Dataset[Tensor]):
    source: SegmentationSource
    size: tuple[int, int]

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.source.read_mask(index, self.size))


def _read_masks(
    source: SegmentationSource, size: tuple[int, int], extraction: Extraction, indices: Sequence[int]
) -> Iterator[Rows]:
    shown = extraction.progress and extraction.world.main
    masks = DataLoader(_Masks(source, size), batch_size=None, sampler=indices, num_workers=extraction.workers)
    for index, mask in zip(indices, tqdm(masks, "masks", unit="mask", disable=not shown), strict=True):
        yield [index], {MASK: mask[None]}
