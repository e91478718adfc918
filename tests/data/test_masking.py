"""Masks of blocks: DINOv2's draws, the exact number in a group, and the same for any cut of a batch."""

import math
import random

import pytest
import torch

from quickvit.data import BlockMasking, derived_seed


def plain_mask(rows, columns, number, draws):
    """A mask as a list of rows, hidden patch by patch."""
    mask = [[False] * columns for _ in range(rows)]
    hidden = 0
    while hidden < number:
        most = min(number - hidden, rows * columns // 2)
        for _ in range(10):
            area = draws.uniform(4, most)
            aspect = math.exp(draws.uniform(math.log(0.3), math.log(1 / 0.3)))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if width >= columns or height >= rows:
                continue
            top, left = draws.randint(0, rows - height), draws.randint(0, columns - width)
            cells = [(i, j) for i in range(top, top + height) for j in range(left, left + width)]
            fresh = [(i, j) for i, j in cells if not mask[i][j]]
            if 0 < len(fresh) <= most:
                for i, j in fresh:
                    mask[i][j] = True
                hidden += len(fresh)
                break
        else:
            break
    return mask


def plain_masks(masking, seed, places):
    """The masks of a batch from a plain reading of the rule."""
    rows, columns = masking.grid
    crops = masking.group * masking.views
    number = int(crops * masking.probability)
    step = (masking.ratio[1] - masking.ratio[0]) / max(number, 1)
    result = []
    for place in places:
        order = list(range(crops))
        random.Random(derived_seed(seed, place // masking.group)).shuffle(order)
        for view in range(masking.views):
            interval = order[place % masking.group * masking.views + view]
            draws = random.Random(derived_seed(seed, place, view))
            hidden = 0
            if interval < number:
                low = masking.ratio[0] + step * interval
                hidden = int(rows * columns * draws.uniform(low, low + step))
            result.append(plain_mask(rows, columns, hidden, draws))
    return torch.tensor(result).view(len(places), masking.views, rows * columns)


@pytest.mark.parametrize(
    "masking",
    [
        BlockMasking((14, 14), group=8),
        BlockMasking((4, 6), group=4, probability=0.8, ratio=(0.0, 0.9)),
        BlockMasking((5, 5), group=3, views=3),
    ],
    ids=["dinov2", "wide", "three views"],
)
def test_masks_are_those_of_the_plain_rule(masking):
    for seed in range(20):
        assert torch.equal(masking(seed, 0, 16), plain_masks(masking, seed, range(16)))


def test_a_group_has_the_exact_number_of_masked_views_and_hardly_varies():
    masking = BlockMasking((14, 14))
    for seed in range(10):
        hidden = masking(seed, 0, 64).sum(-1).flatten()
        assert (hidden > 0).sum() == 64
        assert 0.95 * masking.most < hidden.sum() <= masking.most
        shares = hidden[hidden > 0].double().sort().values / 196
        # One in each of 64 intervals from 0.1 to 0.5, less the few patches for which no block found a place.
        uppermost = 0.1 + 0.4 * torch.arange(1, 65) / 64
        assert (shares <= uppermost).all()
        assert (shares > uppermost - 0.05).all()


def test_any_cut_of_a_batch_has_the_same_masks():
    masking = BlockMasking((6, 6), group=4)
    whole = masking(5, 0, 12)
    assert torch.equal(torch.cat([masking(5, 0, 3), masking(5, 3, 8), masking(5, 11, 1)]), whole)
    assert not torch.equal(masking(6, 0, 12), whole)


def test_nothing_is_hidden_where_nothing_shall_be():
    masking = BlockMasking((4, 4), probability=0.0, group=2)
    assert not masking(0, 0, 4).any()
    assert masking.most == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": (0.5, 0.1)}, r"ratio must be two rising numbers from 0 to 1, got \(0.5, 0.1\)"),
        ({"probability": 1.5}, "probability must be from 0 to 1, got 1.5"),
        ({"group": 0}, "grid, group and views must be at least 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BlockMasking((4, 4), **options)
