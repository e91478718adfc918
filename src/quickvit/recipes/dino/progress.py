"""How good a teacher's features have become, while it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quickvit.data import EvalLoader, EvalTransform, Source
from quickvit.data.loader import MAX_UNREADABLE, require_readable
from quickvit.evaluate.classification import Classifier
from quickvit.evaluate.extract import Features
from quickvit.evaluate.metrics import LABEL_METRICS
from quickvit.train import World


@torch.no_grad()
def collect(
    encode: Callable[[Tensor], Tensor],
    source: Source,
    transform: EvalTransform,
    world: World,
    *,
    batch_size: int,
    workers: int = 0,
    most: int | None = None,
) -> Features:
    """What `encode` makes of images [B, 3, H, W], of all samples of a source or of evenly spaced ones.

    Unlike `extract` it keeps nothing on disk, and calls a model whose weights are spread over the ranks on all of
    them equally often.
    """
    step = 1 if most is None else -(-len(source) // most)
    loader = EvalLoader(
        source,
        transform,
        batch_size=batch_size,
        indices=range(0, len(source), step),
        rank=world.rank,
        world_size=world.size,
        workers=workers,
        device=world.device,
    )
    nothing = torch.zeros(1, 3, *transform.size, device=world.device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in world.together(loader):
        vectors = encode(nothing if batch is None else batch.images)
        if batch is not None:
            found.append((vectors.float().cpu(), batch.targets.cpu(), batch.indices.cpu()))
    ranks = world.gather((found, loader.unreadable))
    require_readable(source, dict(entry for _, unreadable in ranks for entry in unreadable), MAX_UNREADABLE)
    everything = [part for parts, _ in ranks for part in parts]
    vectors, targets, indices = (torch.cat(tensors) for tensors in zip(*everything, strict=True))
    return Features({"class_1": vectors}, targets, indices, source)


def scores(classifier: Classifier, features: Features) -> dict[str, float]:
    """All scores of all answers of a classifier, by names like "20-NN/accuracy"."""
    return {
        f"{answer}/{name}": score(features.confusion(labels))
        for answer, labels in classifier.predict(features).items()
        for name, score in LABEL_METRICS.items()
    }
