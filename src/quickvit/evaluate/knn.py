"""k nearest neighbours: exact, in pieces of bounded memory, and the votes of their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

Metric = Literal["cosine", "l2"]

# DINOv2's temperature of the votes, and its numbers of neighbours with 1 in addition.
TEMPERATURE = 0.07
NEIGHBOURS = (1, 10, 20, 100, 200)

# Bytes of the similarities that exist at one time, and of the keys that they are computed from.
SCORE_BYTES = 2**31
KEY_BYTES = 2**28
# Queries whose neighbours so far are kept on the device while all keys pass by.
QUERY_BLOCK = 2**18
# Keeps rows of zeros, which are near to nothing, from a division by zero.
SMALLEST = torch.finfo(torch.float32).tiny
# Similarities of which only the largest is looked at first.
GROUP = 32


class Neighbours(NamedTuple):
    """The k best keys of each query, best first.

    scores [Q, k]: cosine, or minus the squared distance; indices [Q, k]: rows of the keys.
    """

    scores: Tensor
    indices: Tensor


@torch.inference_mode()
def nearest(
    queries: Tensor,
    keys: Tensor,
    k: int,
    *,
    metric: Metric = "cosine",
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Neighbours:
    """The k nearest of `keys` [n, D] for each of `queries` [Q, D], found on `device`, by default the queries' own.

    Every key is looked at. Similarities of float32 features are computed in float64, so that features which differ
    by rounding have the same neighbours; those of 16-bit features, which for the cosine are rounded again after the
    division by their length, are summed and kept in float32. The keys may be memory-mapped; they are read once for
    every 262,144 queries. Equally near keys come in no certain order.
    """
    if metric not in get_args(Metric):
        raise ValueError(f"metric must be one of {', '.join(get_args(Metric))}, got {metric!r}")
    if queries.ndim != 2 or keys.ndim != 2 or queries.shape[1] != keys.shape[1]:
        shapes = f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        raise ValueError(f"queries and keys must be matrices with rows of equal length, got {shapes}")
    if not 1 <= k <= len(keys):
        raise ValueError(f"k must lie between 1 and the {len(keys)} keys, got {k}")
    device = queries.device if device is None else torch.device(device)
    found = []
    blocks = queries.split(QUERY_BLOCK)
    with tqdm(total=len(blocks) * len(keys), desc="neighbours", unit="key", disable=not progress) as bar:
        for block in blocks:
            found.append(_nearest_of_block(_operand(block, metric, device), keys, k, metric, bar))
    scores, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Neighbours(scores, indices)


def vote(neighbours: Neighbours, labels: Tensor, classes: int, k: int, temperature: float | None) -> Tensor:
    """Votes [Q, classes] of the first k neighbours for their labels.

    A vote weighs exp(score / temperature), up to a factor that all votes for one query share; without a
    temperature all votes are equal.
    """
    scores, indices = (part[:, :k] for part in neighbours)
    weights = torch.ones_like(scores)
    if temperature is not None:
        weights = ((scores - scores[:, :1]) / temperature).exp()
    found = labels.to(indices.device)[indices]
    return torch.zeros(len(scores), classes, dtype=scores.dtype, device=scores.device).scatter_add_(
        1, found, weights
    )


@torch.inference_mode()
def knn_predict(
    queries: Tensor,
    keys: Tensor,
    labels: Tensor,
    classes: int,
    ks: Sequence[int] = NEIGHBOURS,
    *,
    metric: Metric = "cosine",
    temperature: float | None = TEMPERATURE,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> dict[int, Tensor]:
    """The label [Q] that the nearest keys give each query, for every number of neighbours in `ks`.

    Among labels with equally many votes the first is taken.
    """
    if not ks:
        raise ValueError("ks is empty; give at least one number of neighbours")
    if min(ks) < 1:
        raise ValueError(f"numbers of neighbours must be at least 1, got {min(ks)}")
    if len(labels) != len(keys):
        raise ValueError(f"{len(keys)} keys have {len(labels)} labels")
    neighbours = nearest(queries, keys, max(ks), metric=metric, device=device, progress=progress)
    labels = labels.to(neighbours.indices.device)
    # All votes at once would take queries × classes numbers.
    rows = max(1, SCORE_BYTES // (8 * classes))
    parts = [
        Neighbours(*part)
        for part in zip(neighbours.scores.split(rows), neighbours.indices.split(rows), strict=True)
    ]
    return {k: torch.cat([vote(p, labels, classes, k, temperature).argmax(1) for p in parts]) for k in ks}


# ---------------------------------------------------------------------- pieces


def _nearest_of_block(queries: Tensor, keys: Tensor, k: int, metric: Metric, bar: tqdm[None]) -> Neighbours:
    """Neighbours of queries that are on the device, while the keys pass by piece by piece."""
    best: Neighbours | None = None
    key_rows = max(GROUP, KEY_BYTES // (keys.shape[1] * queries.element_size()))
    query_rows = max(1, SCORE_BYTES // (max(4, queries.element_size()) * min(key_rows, len(keys))))
    for start in range(0, len(keys), key_rows):
        piece = _operand(keys[start : start + key_rows], metric, queries.device)
        offset = _squared_norms(piece) / 2 if metric == "l2" else None
        found = [_best_columns(_scores(rows, piece, offset), k) for rows in queries.split(query_rows)]
        scores, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
        indices += start
        best = Neighbours(scores, indices) if best is None else _merge(best, Neighbours(scores, indices), k)
        bar.update(len(piece))
    assert best is not None
    if metric == "l2":
        return Neighbours(2 * best.scores - _squared_norms(queries)[:, None], best.indices)
    return Neighbours(best.scores / queries.shape[1], best.indices)


def _operand(rows: Tensor, metric: Metric, device: torch.device) -> Tensor:
    """Rows on the device, in a type that it multiplies with sums of at least twice as many bits; for the cosine of
    length √D, which one kernel does."""
    if rows.element_size() == 4:
        rows = rows.to(device, torch.float64)
    else:
        short = rows.element_size() < 4 and device.type != "cuda"
        rows = rows.to(device, torch.float32 if short else rows.dtype)
    return functional.rms_norm(rows, rows.shape[1:], eps=SMALLEST) if metric == "cosine" else rows


def _scores(queries: Tensor, keys: Tensor, offset: Tensor | None) -> Tensor:
    """What is the larger, the nearer a key: q·k, for the distance less the offset ½‖k‖²."""
    short = queries.element_size() < 4
    scores = torch.mm(queries, keys.T, out_dtype=torch.float32) if short else queries @ keys.T
    return scores if offset is None else scores.sub_(offset)


def _best_columns(scores: Tensor, k: int) -> Neighbours:
    """The k largest entries of each row and their columns.

    The k largest lie in the k groups of columns with the largest maxima, so one pass for the maxima replaces the
    several passes of a selection over everything. A group is every n-th column, n being the number of groups:
    neighbouring threads of a GPU then read neighbouring numbers.
    """
    columns = scores.shape[1]
    groups = columns // GROUP
    if groups < 4 * k:
        return Neighbours(*scores.topk(min(k, columns)))
    whole, rest = scores[:, : groups * GROUP].unflatten(1, (GROUP, groups)), scores[:, groups * GROUP :]
    chosen = whole.amax(1).topk(k, sorted=False).indices
    candidates = whole.gather(2, chosen[:, None].expand(-1, GROUP, -1)).flatten(1)
    top = (torch.cat([candidates, rest], 1) if rest.shape[1] else candidates).topk(k)
    row, place = top.indices // k, top.indices % k
    found = row * groups + chosen.gather(1, place)
    return Neighbours(top.values, found.where(row < GROUP, top.indices + GROUP * (groups - k)))


def _merge(first: Neighbours, second: Neighbours, k: int) -> Neighbours:
    scores = torch.cat([first.scores, second.scores], 1)
    top = scores.topk(min(k, scores.shape[1]))
    return Neighbours(top.values, torch.cat([first.indices, second.indices], 1).gather(1, top.indices))


def _squared_norms(rows: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide).square()
