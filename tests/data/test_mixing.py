"""Mixing is timm's for the same draws, whatever slice of the global batch a rank holds."""

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup

from quickvit.data import Mixing, derived_seed

CLASSES = 5


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 20, 14, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


def timm_mixed(images, targets, seed, **options):
    """timm mixes the first image with the last: our neighbours, put there and back."""
    there = torch.cat([torch.arange(0, len(images), 2), torch.arange(1, len(images), 2).flip(0)])
    np.random.seed(derived_seed(seed, 0) % 2**32)  # noqa: NPY002
    mixed, hot = Mixup(num_classes=CLASSES, **options)(images[there].clone(), targets[there])
    return mixed[there.argsort()], hot[there.argsort()]


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 1.0), (0.8, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixing_is_that_of_timm(batch, mixup, cutmix, smoothing):
    images, targets = batch
    mixing = Mixing(CLASSES, mixup, cutmix, smoothing=smoothing, probability=0.8)
    for seed in range(30):
        ours = mixing(images.clone(), targets, seed)
        options = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "label_smoothing": smoothing, "prob": 0.8}
        theirs = timm_mixed(images, targets, seed, **options)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_any_even_slice_mixes_the_same(batch):
    images, targets = batch
    mixing = Mixing(CLASSES, group=6)
    for seed in range(10):
        whole = mixing(images.clone(), targets, seed)
        for size in (2, 4):
            parts = [
                mixing(images[i : i + size].clone(), targets[i : i + size], seed, i)
                for i in range(0, 8, size)
            ]
            for a, b in zip(whole, zip(*parts, strict=True), strict=True):
                torch.testing.assert_close(torch.cat(b), a, rtol=0, atol=0)


def test_groups_draw_for_themselves_and_odds_are_equal():
    mixing = Mixing(CLASSES)
    draws = [mixing.draw(seed, 32, 32) for seed in range(1000)]
    boxes = [mix for mix in draws if mix.box is not None]
    # Four standard deviations of a half of 1000.
    assert abs(len(boxes) - 500) < 4 * 250**0.5
    shares = [mix.share for mix in draws if mix.box is None]
    assert len(set(shares)) == len(shares)
    # The variance of Beta(α, α) is 1 / (8α + 4); five standard deviations.
    assert np.mean(shares) == pytest.approx(0.5, abs=5 * (1 / (8 * 0.8 + 4) / len(shares)) ** 0.5)
    images = torch.stack([torch.full((3, 8, 8), float(i % 2)) for i in range(8)])
    mixed, hot = Mixing(2, cutmix=0, group=4)(images, torch.arange(8) % 2, seed=0)
    assert mixed[0, 0, 0, 0] != mixed[4, 0, 0, 0]
    # The target of an image is the share of the pixels that it has of each class.
    torch.testing.assert_close(hot[:, 1], mixed.mean((1, 2, 3)))


def test_without_mixing_targets_are_one_hot(batch):
    images, targets = batch
    mixed, hot = Mixing(CLASSES, 0, 0)(images.clone(), targets, 0)
    assert torch.equal(mixed, images)
    assert torch.equal(hot.argmax(-1), targets)
    assert torch.equal(hot.sum(-1), torch.ones(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 1}, "at least 2 classes, got 1"),
        ({"mixup": -1.0}, "mixup must be at least 0, got -1.0"),
        ({"switch": 2.0}, "switch must be from 0 to 1, got 2.0"),
        ({"smoothing": 2.0}, "smoothing must be from 0 to 1, got 2.0"),
        ({"group": 3}, "group must be even and at least 2, got 3"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Mixing(**{"classes": CLASSES, **options})


def test_odd_batches_are_refused_where_something_is_mixed(batch):
    images, targets = batch
    _, hot = Mixing(CLASSES, 0, 0, smoothing=0.1)(images[:7], targets[:7], 0, first=7)
    assert torch.equal(hot.argmax(-1), targets[:7])
    with pytest.raises(ValueError, match="even number of images, got 7 from number 0 on"):
        Mixing(CLASSES)(images[:7], targets[:7], 0)
    with pytest.raises(ValueError, match="got 4 from number 3 on"):
        Mixing(CLASSES)(images[:4], targets[:4], 0, first=3)
