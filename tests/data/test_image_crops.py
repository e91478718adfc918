"""Crops are those of timm, and a whole batch is cropped as Pillow crops each of its images."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation

from quickvit.data import (
    BlockMasking,
    Sample,
    TrainLoader,
    ViewLoader,
    cache,
    deit3_transform,
    dinobloom_views,
    dinov2_views,
    mix,
    open_source,
)
from quickvit.data.crops import FILTERS, Crop, Uncropped, crop_batch, crop_image, draw_box
from quickvit.data.views import MultiCrop, ViewTransform

# PyTorch warns of more workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
UNPAINTED = {"jitter": 0.0, "grayscale": 0.0, "blur": 0.0}
# Levels of 255, of colours that were normalised.
STD = 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def picture(seed, height, width):
    """Smooth, as photographs are, and neither black nor white, beyond which bicubic filters reach."""
    noise = np.random.default_rng(seed).integers(
        40, 216, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8
    )
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


class Pictures:
    """A source of such images, whose sizes repeat."""

    name, classes = "pictures", ("all",)

    def __init__(self, *sizes):
        self.sizes = sizes

    def __len__(self):
        return 24

    def read(self, index):
        return Sample(picture(index, *self.sizes[index % len(self.sizes)]), 0)

    def describe(self, index):
        return str(index)


def as_bytes(image):
    return torch.from_numpy(np.array(image))


# ---------------------------------------------------------------------- by Pillow


@pytest.mark.parametrize("size", [(60, 45), (400, 3), (3, 400), (8, 8)], ids=str)
def test_crops_are_those_of_timm(size):
    image = picture(0, *size)
    reference = RandomResizedCropAndInterpolation((24, 32), interpolation="bicubic")
    for seed in range(20):
        random.seed(seed)
        crop = Crop(*draw_box(*size, random.Random(seed)))
        assert crop_image(image, crop, (24, 32), "bicubic") == reference(image), seed


def test_crops_have_pixels_even_of_a_single_one():
    image = Image.new("RGB", (1, 1), (9, 8, 7))
    for seed in range(20):
        crop = Crop(*draw_box(1, 1, random.Random(seed)))
        assert (np.asarray(crop_image(image, crop, (2, 2), "bicubic")) == (9, 8, 7)).all()


@pytest.mark.parametrize(("size", "ratio"), [((20, 1), (2.0, 3.0)), ((1, 20), (0.2, 0.4))], ids=str)
def test_crops_have_pixels_whatever_their_ratio(size, ratio):
    assert all(min(draw_box(*size, random.Random(seed), ratio=ratio)[2:]) > 0 for seed in range(20))


# ---------------------------------------------------------------------- on a device


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("size", [(32, 32), (11, 11), (97, 97), (24, 31)], ids=str)
@pytest.mark.parametrize("shape", [(32, 32), (45, 61), (96, 70)], ids=str)
def test_a_batch_is_cropped_as_pillow_crops(shape, size, interpolation):
    """In all poses, up and down, of several parts of each image."""
    draws = random.Random(0)
    poses = list(product((False, True), repeat=3 if size[0] == size[1] else 2))
    images = [picture(seed, *shape) for seed in range(3)]
    crops = [[Crop(*draw_box(*shape, draws, (0.05, 1.0)), *pose) for pose in poses] for _ in images]
    ours = crop_batch(torch.stack([*map(as_bytes, images)]), torch.tensor(crops).float(), size, interpolation)
    assert ours.shape == (3, len(poses), 3, *size)
    theirs = torch.stack(
        [
            torch.stack([as_bytes(crop_image(image, crop, size, interpolation)) for crop in parts])
            for image, parts in zip(images, crops, strict=True)
        ]
    ).permute(0, 1, 4, 2, 3)
    errors = ours - theirs
    assert errors.abs().max() <= 1
    assert errors.mean().abs() < 0.05


def test_nothing_outside_of_a_crop_is_seen():
    image = np.full((20, 30, 3), 255, np.uint8)
    image[5:12, 8:17] = 100
    part = crop_batch(torch.from_numpy(image), torch.tensor([5, 8, 7, 9, 0, 0, 0.0]), (16, 16), "bicubic")
    assert (part == 100).all()


def test_the_whole_image_stays_as_it_is():
    image = torch.randint(256, (20, 30, 3), dtype=torch.uint8)
    same = crop_batch(image, torch.tensor([0, 0, 20, 30, 0, 0, 0.0]), (20, 30), "bicubic")
    assert torch.equal(same, image.permute(2, 0, 1).float())


# ---------------------------------------------------------------------- transforms


@pytest.mark.parametrize("size", [32, 13, (24, 40)], ids=str)
def test_deit3_draws_the_same(size):
    plain = {"three_augment": False, "color_jitter": 0}
    in_workers, on_device = (deit3_transform(size, crops=where, **plain) for where in ("workers", "device"))
    for seed in range(30):
        image = picture(seed, 37, 41)
        assert isinstance(on_device.pixels(image, seed), Uncropped)
        errors = (STD * (on_device(image, seed) - in_workers(image, seed))).abs()
        assert errors.max() < 1.01, seed


@pytest.mark.parametrize("colors", ["workers", "device"])
def test_a_device_that_crops_changes_colours_too(colors):
    """As it does if it changes colours alone."""
    alone = deit3_transform(24, colors="device")
    both = deit3_transform(24, colors=colors, crops="device")
    for seed in range(20):
        image = picture(seed, 37, 41)
        errors = (STD * (both(image, seed) - alone(image, seed))).abs()
        assert errors.mean() < 0.3, seed


def views(where, squeeze=None, locals_=3):
    poses = {"mirror": 0.5, "flip": 0.5, "turn": 0.5, **UNPAINTED}
    whole = ViewTransform(32, crops=where, **poses)
    local = ViewTransform(13, scale=(0.05, 0.32), crops=where, **poses)
    return MultiCrop((whole, whole), (local,) * locals_, squeeze)


@pytest.mark.parametrize("squeeze", [None, 40])
@pytest.mark.parametrize("local", [0, 3])
def test_batches_of_views_are_the_same(squeeze, local):
    both = [
        next(
            ViewLoader(
                Pictures((37, 41)), views(where, squeeze, local), BlockMasking((4, 4), group=2), batch_size=12
            ).batches(0, 1)
        )
        for where in ("workers", "device")
    ]
    for name, theirs, ours in zip(both[0]._fields, *both, strict=True):
        assert theirs.shape == ours.shape, name
        if "views" in name and theirs.numel():
            assert (STD * (ours - theirs)).abs().max() < 1.01, name
        elif "views" not in name:
            assert torch.equal(theirs, ours), name


@pytest.mark.parametrize("make", [dinov2_views, dinobloom_views])
def test_the_recipes_views_are_nearly_the_same(make):
    image = picture(0, 37, 41)
    made = [
        views.normalize(views.pixels(image, 3))
        for views in (make(24, 16, 4, colors="device", crops=where) for where in ("workers", "device"))
    ]
    for theirs, ours in zip(*made, strict=True):
        assert (STD * (ours - theirs)).abs().mean() < 0.3


def test_an_image_is_sent_once():
    sent = dinov2_views(24, 16, 8, crops="device").pixels(picture(0, 37, 41), 3)
    assert sent.pixels.shape == (37, 41, 3)
    assert [drawn.crops.shape for drawn in sent.drawn] == [(2, 7), (8, 7)]
    assert [drawn.changes.shape for drawn in sent.drawn] == [(2, 7, 2), (8, 7, 2)]


# ---------------------------------------------------------------------- loaders


def batches(start, stop, source=None, **options):
    options = {"batch_size": 12, "seed": 3, **options}
    transform = deit3_transform(16, crops="device")
    return list(TrainLoader(source or Pictures((20, 24)), transform, **options).batches(start, stop))


def test_workers_and_restarts_change_nothing():
    whole = batches(0, 4)
    for others, expected in ((batches(0, 4, workers=2), whole), (batches(2, 4), whole[2:])):
        for ours, theirs in zip(others, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_kept_and_mixed_images_are_the_same():
    source = Pictures((20, 24))
    expected = batches(0, 1)[0]
    assert torch.equal(batches(0, 1, cache(source))[0].images, expected.images)
    assert torch.equal(batches(0, 1, mix({cache(source): 1.0}))[0].images, expected.images)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_different_sizes_are_named(workers):
    message = "must have one size, got 20 × 24 and 24 × 20 pixels; leave crops to the workers"
    with pytest.raises(ValueError, match=message):
        batches(0, 1, Pictures((20, 24), (24, 20)), workers=workers)


def test_digits():
    loader = TrainLoader(open_source("digits"), deit3_transform(16, crops="device"), batch_size=8)
    assert next(loader.batches(0, 1)).images.shape == (8, 3, 16, 16)
