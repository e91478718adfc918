"""Views: torchvision's operations from explicit seeds, and batches that are functions of seed and step."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional

from quickvit.data import (
    BlockMasking,
    ViewLoader,
    ViewTransform,
    derived_seed,
    dinobloom_views,
    dinov2_views,
    open_source,
)
from quickvit.data.colors import draw_jitter, paint_image
from quickvit.data.crops import Crop, crop_image, draw_box

# PyTorch warns of more workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
NEVER = dict.fromkeys(("mirror", "flip", "turn", "jitter", "grayscale", "blur", "solarize"), 0.0)


@pytest.fixture
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))


def crop(image, draws):
    """The crop with which every view begins."""
    return crop_image(image, Crop(*draw_box(40, 50, draws, (0.32, 1.0))), (16, 16), "bicubic")


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("mirror", functional.hflip),
        ("flip", functional.vflip),
        ("turn", lambda x: functional.rotate(x, 90)),
        ("grayscale", lambda x: functional.to_grayscale(x, 3)),
        ("solarize", lambda x: functional.solarize(x, 128)),
    ],
)
def test_each_operation_is_that_of_torchvision(image, name, operation):
    view = ViewTransform(16, **{**NEVER, name: 1.0})
    for seed in range(5):
        expected = functional.pil_to_tensor(operation(crop(image, random.Random(seed))))
        assert torch.equal(view.pixels(image, seed), expected)


def test_jitter_and_blur_change_colours_and_details(image):
    base = ViewTransform(16, **NEVER)
    jittered, blurred = (ViewTransform(16, **{**NEVER, name: 1.0}) for name in ("jitter", "blur"))
    draws = random.Random(3)
    cropped = crop(image, draws)
    for _ in range(4):
        draws.random()
    expected = paint_image(cropped, draw_jitter(draws, 0.4, 0.4, 0.2, 0.1))
    assert torch.equal(jittered.pixels(image, 3), functional.pil_to_tensor(expected))
    spread = [view.pixels(image, 3).float().diff(dim=-1).abs().mean() for view in (base, blurred)]
    assert spread[1] < spread[0] * 0.9


@pytest.mark.parametrize(
    ("views", "mirror", "flip", "gray", "jitter"),
    [(dinov2_views, 0.5, 0, 0.2, 0.8), (dinobloom_views, 0.5, 0.5, 0, 0.8)],
)
def test_probabilities_are_those_of_the_recipe(views, mirror, flip, gray, jitter):
    multi = views(32, 16, 8)
    assert [v.blur for v in multi.global_views] == ([1.0, 0.1] if views is dinov2_views else [0.1, 0.1])
    assert [v.solarize for v in multi.global_views] == ([0.0, 0.2] if views is dinov2_views else [0.0, 0.0])
    assert {v.blur for v in multi.local_views} == {0.5}
    for view in (*multi.global_views, *multi.local_views):
        assert (view.mirror, view.flip, view.turn, view.grayscale, view.jitter) == (
            mirror,
            flip,
            flip,
            gray,
            jitter,
        )
        assert view.scale == ((0.05, 0.32) if view in multi.local_views else (0.32, 1.0))


def test_the_views_of_a_sample_have_seeds_of_their_own(image):
    multi = dinov2_views(32, 16, 3)
    global_views, local_views = multi.pixels(image, 7)
    assert global_views.shape == (2, 3, 32, 32)
    assert local_views.shape == (3, 3, 16, 16)
    for number, view in enumerate((*global_views, *local_views)):
        transform = (*multi.global_views, *multi.local_views)[number]
        assert torch.equal(view, transform.pixels(image, derived_seed(7, number)))
    assert not torch.equal(local_views[0], local_views[1])


def test_without_local_views(image):
    global_views, local_views = dinobloom_views(24).pixels(image, 0)
    assert global_views.shape == (2, 3, 24, 24)
    assert local_views.shape[0] == 0


def test_cells_are_squeezed_before_they_are_cropped(image):
    multi = dinobloom_views(24)
    squeezed = image.resize((24, 24), Image.Resampling.LANCZOS)
    expected = multi.global_views[1].pixels(squeezed, derived_seed(5, 1))
    assert torch.equal(multi.pixels(image, 5)[0][1], expected)


# ---------------------------------------------------------------------- batches


def loader(**options):
    options = {"batch_size": 12, "seed": 3, **options}
    return ViewLoader(open_source("digits"), dinov2_views(16, 8, 2), BlockMasking((4, 4), group=2), **options)


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_workers_and_restarts_change_nothing():
    whole = list(loader().batches(0, 6))
    assert_same(loader(workers=2).batches(0, 6), whole)
    assert_same(loader().batches(4, 6), whole[4:])


def test_ranks_hold_slices():
    whole = list(loader().batches(118, 121))
    parts = zip(*(loader(rank=r, world_size=3).batches(118, 121) for r in range(3)), strict=True)
    joined = [type(p[0])(*(torch.cat(t) for t in zip(*p, strict=True))) for p in parts]
    assert_same(joined, whole)


def test_a_batch_is_normalised_views_and_masks():
    source, transform = open_source("digits"), dinov2_views(16, 8, 2)
    (batch,) = loader().batches(5, 6)
    index = int(batch.indices[4])
    seed = derived_seed(3, 0, index, 0)
    expected = transform.normalize(transform.pixels(source.read(index).image, seed))
    assert torch.equal(batch.global_views[4], expected.global_views)
    assert torch.equal(batch.local_views[4], expected.local_views)
    assert torch.equal(batch.masks, BlockMasking((4, 4), group=2)(derived_seed(3, 5, "masks"), 0, 12))
    assert batch.global_views.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.5, 1.5)}, "scale must be two rising numbers above 0 and at most 1"),
        ({"blur": -0.1}, "blur must be from 0 to 1, got -0.1"),
        ({"turn": 0.5, "img_size": (16, 8)}, r"only squares can be turned, got img_size \(16, 8\)"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ViewTransform(**{"img_size": 16, **options})
