"""Colours of a whole batch change as torchvision changes them, and as Pillow does up to rounding."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional

from quickvit.data import TrainLoader, deit3_transform, dinov2_views, open_source
from quickvit.data.colors import Kind, Unpainted, paint_batch, paint_image
from quickvit.data.views import ViewTransform


@pytest.fixture
def images():
    noise = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
    return [Image.fromarray(pixels).resize((40, 32), Image.Resampling.BICUBIC) for pixels in noise]


def as_bytes(images):
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


TORCHVISION = {
    Kind.BRIGHTNESS: functional.adjust_brightness,
    Kind.CONTRAST: functional.adjust_contrast,
    Kind.SATURATION: functional.adjust_saturation,
    Kind.HUE: functional.adjust_hue,
    Kind.SOLARIZE: lambda x, threshold: functional.solarize(x, threshold / 255),
}
AMOUNTS = {
    Kind.BRIGHTNESS: (0.5, 1.0, 1.4),
    Kind.CONTRAST: (0.0, 0.7, 1.3),
    Kind.SATURATION: (0.0, 0.8, 1.5),
    Kind.HUE: (-0.4, 0.0, 0.1),
    Kind.SOLARIZE: (128.0, 30.0, 200.0),
}


@pytest.mark.parametrize("kind", TORCHVISION)
def test_a_change_is_that_of_torchvision(images, kind):
    pixels = as_bytes(images)[:3]
    changes = torch.tensor([[(kind, amount)] for amount in AMOUNTS[kind]])
    ours = paint_batch(pixels, changes)
    for image, amount, found in zip(pixels, AMOUNTS[kind], ours, strict=True):
        expected = 255 * TORCHVISION[kind](image / 255, amount)
        # Contrast: torchvision has four digits of the weights, we three, as Pillow.
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05 if kind in (2, 3) else 1e-3)


def test_the_blur_is_gaussian(images):
    pixels = as_bytes(images)[:3]
    ours = paint_batch(pixels, torch.tensor([[(Kind.BLUR, 0.1)], [(Kind.BLUR, 1.0)], [(Kind.BLUR, 2.0)]]))
    for image, sigma, found in zip(pixels, (0.1, 1.0, 2.0), ours, strict=True):
        expected = 255 * functional.gaussian_blur(image.double() / 255, 13, sigma)
        inside = slice(6, -6)
        torch.testing.assert_close(
            found[:, inside, inside], expected[:, inside, inside].float(), rtol=0, atol=1e-2
        )


def test_nothing_is_nothing(images):
    pixels = as_bytes(images)
    assert torch.equal(paint_batch(pixels, torch.zeros(6, 3, 2)), pixels.float())
    assert torch.equal(paint_batch(pixels, torch.zeros(6, 0, 2)), pixels.float())


def test_images_of_a_batch_do_not_see_each_other(images):
    pixels = as_bytes(images)
    draws = random.Random(0)
    kinds = list(Kind)
    changes = torch.tensor(
        [[(draws.choice(kinds), draws.uniform(0.1, 1.4)) for _ in range(4)] for _ in images]
    )
    together = paint_batch(pixels, changes)
    for number in range(len(images)):
        alone = paint_batch(pixels[number], changes[number])
        torch.testing.assert_close(alone, together[number], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("in_workers", "on_device"),
    [
        (deit3_transform(24), deit3_transform(24, colors="device")),
        (ViewTransform(24, solarize=0.5), ViewTransform(24, solarize=0.5, colors="device")),
    ],
    ids=["deit3", "view"],
)
def test_both_ways_give_nearly_the_same_image(images, in_workers, on_device):
    errors = []
    for seed, image in enumerate(images * 20):
        assert isinstance(on_device.pixels(image, seed), Unpainted)
        ours, theirs = ((255 * t(image, seed) * 0.225) for t in (on_device, in_workers))
        errors.append((ours - theirs).abs().mean().item())
    # Levels of 255. Pillow rounds after each change, near the threshold of solarising to the other side, and turns
    # hues by whole 255ths.
    assert np.median(errors) < 1.5
    assert np.mean(errors) < 3


def test_the_mean_error_is_small_because_the_changes_are_the_same(images):
    """The comparison above is sharp: another seed is far away."""
    transform = deit3_transform(24, colors="device")
    errors = [
        (255 * (transform(image, seed) - transform(image, seed + 1)) * 0.225).abs().mean().item()
        for seed, image in enumerate(images * 5)
    ]
    assert np.mean(errors) > 20


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_paint(workers):

    transform = deit3_transform(16, colors="device")
    loader = TrainLoader(open_source("digits"), transform, batch_size=8, workers=workers)
    batch = next(loader.batches(0, 1))
    assert batch.images.shape == (8, 3, 16, 16)
    assert batch.images.dtype == torch.float32
    again = next(TrainLoader(open_source("digits"), transform, batch_size=8).batches(0, 1))
    assert torch.equal(batch.images, again.images)


def test_views_are_painted_together(images):
    made = [
        views.normalize(views.pixels(images[0], 3))
        for views in (dinov2_views(24, 16, 2, colors=where) for where in ("workers", "device"))
    ]
    for theirs, ours in zip(*made, strict=True):
        assert ours.shape == theirs.shape
        assert (255 * 0.225 * (ours - theirs)).abs().mean() < 3


def test_pillow_leaves_what_is_not_to_change(images):
    assert paint_image(images[0], [(Kind.NOTHING, 0.0)]) is images[0]


def test_pillow_turns_hues_and_changes_contrast_as_torchvision_does_to_the_bit():
    """Colours in steps of five."""
    steps = np.arange(0, 256, 5, dtype=np.uint8)
    image = Image.fromarray(np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(len(steps), -1, 3))
    cases = [(Kind.HUE, turns) for turns in (-0.5, -0.1, -0.003, 0.0, 0.05, 0.1, 0.5)]
    cases += [(Kind.CONTRAST, factor) for factor in (0.0, 0.6, 1.0, 1.4)]
    for kind, amount in cases:
        assert paint_image(image, [(kind, amount)]) == TORCHVISION[kind](image, amount), (kind, amount)
