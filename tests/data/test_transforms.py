"""Augmentation is that of timm and torchvision for the same random draws, and depends on its seed alone."""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from timm.data import create_transform
from torchvision import transforms
from torchvision.transforms import functional

from quickvit.data import EvalTransform, deit3_transform, eval_transform
from quickvit.data.colors import draw_jitter, paint_image
from quickvit.data.crops import Crop, crop_image, draw_box
from quickvit.data.transforms import draw_three_augment


@pytest.fixture
def image():
    noise = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((60, 45), Image.Resampling.BICUBIC)


def same(a, b):
    return (np.asarray(a) == np.asarray(b)).all()


def test_three_augment_is_one_of_three_with_equal_odds(image):
    found = {"gray": 0, "solarized": 0, "blurred": 0}
    gray, solarized = functional.rgb_to_grayscale(image, 3), ImageOps.solarize(image, 128)
    for seed in range(600):
        draws = random.Random(seed)
        out = paint_image(image, [draw_three_augment(draws)])
        if same(out, gray):
            found["gray"] += 1
        elif same(out, solarized):
            found["solarized"] += 1
        else:
            again = random.Random(seed)
            again.randrange(3)
            radius = again.uniform(0.1, 2.0)
            assert same(out, image.filter(ImageFilter.GaussianBlur(radius)))
            found["blurred"] += 1
    # Four standard deviations of a third of 600.
    assert all(abs(count - 200) < 4 * (600 * 2 / 9) ** 0.5 for count in found.values()), found


@pytest.mark.parametrize("strengths", [(0.3, 0.3, 0.3), (0.4, 0.4, 0.2, 0.1)], ids=str)
def test_jitter_is_that_of_torchvision(image, monkeypatch, strengths):
    orders = set()
    for seed in range(40):
        draws = random.Random(seed)
        order = list(range(len(strengths)))
        draws.shuffle(order)
        centres = [1, 1, 1, 0]
        factors = {n: draws.uniform(centres[n] - strengths[n], centres[n] + strengths[n]) for n in order}
        orders.add(tuple(order))
        parameters = (torch.tensor(order), *(factors.get(number) for number in range(4)))
        monkeypatch.setattr(transforms.ColorJitter, "get_params", lambda *_, p=parameters: p)
        expected = transforms.ColorJitter(*strengths)(image)
        assert same(paint_image(image, draw_jitter(random.Random(seed), *strengths)), expected)
    assert len(orders) >= 6


def test_the_recipe_is_its_parts_in_order(image):
    transform = deit3_transform((24, 32))
    for seed in range(10):
        draws = random.Random(seed)
        expected = crop_image(image, Crop(*draw_box(45, 60, draws)), (24, 32), "bicubic")
        if draws.random() < 0.5:
            expected = functional.hflip(expected)
        expected = paint_image(expected, [draw_three_augment(draws), *draw_jitter(draws, 0.3, 0.3, 0.3)])
        torch.testing.assert_close(
            transform(image, seed),
            functional.normalize(functional.to_tensor(expected), transform.mean, transform.std),
            rtol=0,
            atol=1e-6,
        )


def test_parts_can_be_left_out(image):
    plain = deit3_transform(
        32, scale=(1.0, 1.0), ratio=(4 / 3, 4 / 3), flip=0, three_augment=False, color_jitter=0
    )
    expected = image.resize((32, 32), Image.Resampling.BICUBIC)
    assert same(plain.pixels(image, 3).permute(1, 2, 0), expected)


def test_only_the_seed_decides(image):
    transform = deit3_transform(16)
    state = random.getstate(), torch.get_rng_state()
    first = transform(image, 7)
    random.seed(1)
    torch.manual_seed(1)
    assert torch.equal(transform(image, 7), first)
    assert not torch.equal(transform(image, 8), first)
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    transform(image, 7)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


@pytest.mark.parametrize("size", [32, (24, 48)], ids=str)
@pytest.mark.parametrize("ratio", [1.0, 0.875])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_evaluation_is_that_of_timm(image, size, ratio, interpolation):
    options = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": interpolation}
    ours = eval_transform(size, ratio, **options)
    shape = (3, *((size, size) if isinstance(size, int) else size))
    theirs = create_transform(shape, crop_pct=ratio, **options)
    torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1e-6)
    assert torch.equal(ours(image, 1), ours(image, 2))


@pytest.mark.parametrize("shape", [(4, 400), (401, 4)], ids=str)
@pytest.mark.parametrize("size", [16, (8, 16)], ids=str)
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_a_very_long_image_is_cut_where_nobody_sees_it(shape, size, mode):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    target = (3, *((size, size) if isinstance(size, int) else size))
    options = {"crop_pct": 1.0, "crop_mode": mode, "interpolation": "bicubic", "normalize": False}
    theirs = create_transform(target, **options)
    assert torch.equal(EvalTransform(size, crop_mode=mode).pixels(image), theirs(image))


@pytest.mark.parametrize("shape", [(1, 60_000), (60_000, 1)], ids=str)
def test_a_very_long_image_fits_into_memory(shape, monkeypatch):
    sizes = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *a, **k: sizes.append(size) or resize(self, size, *a, **k)
    )
    image = Image.fromarray(np.zeros((*shape, 3), np.uint8))
    assert eval_transform(32).pixels(image).shape == (3, 32, 32)
    assert max(max(size) for size in sizes) <= 32 * 17


@pytest.mark.parametrize("shape", [(1, 3000), (5000, 3), (2, 40)], ids=str)
def test_of_a_very_long_image_a_line_is_left_between_borders(shape):
    white = Image.fromarray(np.full((*shape, 3), 255, np.uint8))
    shown = (EvalTransform((16, 8), crop_mode="border").pixels(white) == 255).all(0)
    assert shown.shape == (16, 8)
    assert (shown.sum(int(shape[0] > shape[1])) == 1).all()


@pytest.mark.parametrize("mode", ["squash", "border"])
def test_other_crops_are_those_of_timm(image, mode):
    theirs = create_transform((3, 32, 32), crop_pct=0.9, crop_mode=mode, interpolation="bicubic")
    ours = EvalTransform(32, crop_ratio=0.9, crop_mode=mode)
    torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1e-6)


def test_a_batch_is_normalised_like_its_images(image):
    transform = deit3_transform(16)
    pixels = torch.stack([transform.pixels(image, seed) for seed in range(3)])
    assert pixels.dtype == torch.uint8
    assert torch.equal(transform.normalize(pixels)[1], transform(image, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 0}, "img_size must be at least 1, got 0"),
        ({"interpolation": "magic"}, "unknown interpolation 'magic'; expected one of"),
        ({"scale": (0.5, 0.1)}, r"scale must be two rising numbers above 0, got \(0.5, 0.1\)"),
        ({"ratio": (0.0, 1.0)}, r"ratio must be two rising numbers above 0, got \(0.0, 1.0\)"),
        ({"scale": (0.5, 2.0)}, "scale must be at most 1, got 2.0"),
        ({"std": (1.0, 0.0, 1.0)}, r"std must be above 0, got \(1.0, 0.0, 1.0\)"),
        ({"flip": 1.5}, "flip must be from 0 to 1, got 1.5"),
        ({"colors": "gpu"}, "colors must be workers or device, got 'gpu'"),
        ({"crops": "gpu"}, "crops must be workers or device, got 'gpu'"),
        (
            {"crops": "device", "interpolation": "lanczos"},
            "a device crops by bilinear or bicubic interpolation, got 'lanczos'; leave crops to the workers",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        deit3_transform(**{"img_size": 32, **options})


def test_wrong_crops_are_named():
    with pytest.raises(ValueError, match=r"crop_ratio must be above 0 and at most 1, got 1.5"):
        eval_transform(32, 1.5)
    with pytest.raises(
        ValueError, match="unknown crop_mode 'corner'; expected one of center, squash, border"
    ):
        EvalTransform(32, crop_mode="corner")
