"""Floors: their FLOPs are those that are counted, their bytes those of the paper's formulas."""

import pytest
import torch

from quickvit.bench import Variant, count
from quickvit.bench.work import (
    CLASSES,
    Ceilings,
    Shape,
    Storage,
    Work,
    attention,
    block,
    floor_ms,
    linear,
    model,
    product,
)
from quickvit.group import D8

HALF, FULL = Storage.inference(torch.float16), Storage.inference(torch.float32)


@pytest.mark.parametrize("family", [None, "d8", "i8", "h8", "h2"])
def test_flops_of_a_model_are_those_counted(family):
    shape = Shape("tiny", 16, img_size=32, depth=3)
    with torch.device("meta"):
        built = Variant(family or "vit", "tiny", 16).create(img_size=32, depth=3)
    steps = model(shape, family, 5, FULL)
    assert sum(step.flops for step in steps) == pytest.approx(5 * count(built).flops)


def test_features_need_no_head():
    shape = Shape("tiny", 16, img_size=32, depth=3)
    with torch.device("meta"):
        built = Variant("vit", "tiny", 16).create(img_size=32, depth=3, num_classes=0)
    steps = model(shape, None, 5, FULL, features=True)
    assert sum(step.flops for step in steps) == pytest.approx(5 * count(built).flops)
    both = model(shape, None, 5, FULL, features=True, backward=True)
    assert not any(step.flops == 2 * 5 * 192 * CLASSES for step in both)


def test_bytes_by_hand():
    rows, inputs, outputs = 10, 16, 64
    assert linear(rows, inputs, outputs, HALF).bytes == 2 * (160 + 1024 + 640)
    assert linear(rows, inputs, outputs, HALF, D8).bytes == 2 * (160 + 128 + 640)
    autocast = linear(rows, inputs, outputs, Storage.training(torch.bfloat16), D8)
    assert autocast.bytes == 2 * (160 + 640) + 4 * 128
    assert attention(3, 5, 16, HALF) == Work(4 * 3 * 25 * 16, 2 * 4 * 3 * 5 * 16)


def test_folded_blocks_move_fewer_bytes():
    """Of eight passes of two norms and sums only the stream is read, twice, to be added to."""
    size, rows = Shape("large", 16).dims, 3 * 5
    apart, folded = (block(size, 3, 5, HALF, D8, folded=state) for state in (False, True))
    saved = sum(step.bytes for step in apart) - sum(step.bytes for step in folded)
    assert saved == (8 - 2) * 2 * rows * 1024
    assert sum(step.flops for step in apart) == sum(step.flops for step in folded)
    assert block(size, 3, 5, HALF, folded=True) == block(size, 3, 5, HALF)


def test_training_does_three_times_the_products_of_inference():
    shape = Shape("large", 16)
    forward, both = (model(shape, "h8", 4, HALF, backward=backward) for backward in (False, True))
    # Attention's backward pass computes the logits again, and images need no gradient.
    assert sum(s.flops for s in both) / sum(s.flops for s in forward) == pytest.approx(3, rel=0.02)


# The paper's table of linear layers C → 4C on 64 · 196 tokens: FLOPs per byte, to two digits.
@pytest.mark.parametrize(
    ("width", "storage", "standard", "octic", "eight"),
    [
        (1024, HALF, 770, 150, 100),
        (8192, HALF, 4300, 1200, 770),
        (1024, FULL, 380, 80, 50),
        (8192, FULL, 2200, 580, 380),
    ],
)
def test_published_intensities(width, storage, standard, octic, eight):
    shape = (64 * 196, width, 4 * width, storage)
    assert linear(*shape).intensity == pytest.approx(standard, rel=0.06)
    assert linear(*shape, D8).intensity == pytest.approx(octic, rel=0.06)
    assert product(*shape, 1 / 8, 1 / 8).intensity == pytest.approx(eight, rel=0.06)


def test_octic_layers_have_the_higher_intensity_beyond_the_published_width():
    def gain(width):
        shape = (196, width, 4 * width, HALF)
        return linear(*shape, D8).intensity / linear(*shape).intensity

    assert gain(3100) < 1 < gain(3300)


def test_the_floor_is_the_sum_of_the_larger_times():
    ceilings = Ceilings(bytes_per_s=1e9, flops_per_s=1e12)
    steps = [Work(flops=1e12, bytes=1e6), Work(flops=0, bytes=1e9)]
    assert floor_ms(steps, ceilings) == pytest.approx(2000)


def test_shapes():
    assert Shape("huge", 14).tokens == 257
    assert Shape("22b", 14, depth=2).label == "ViT-22b/14, 2 blocks"
    assert Shape("tiny", 16, 32, 1).label == "ViT-Tiny/16 32px, 1 block"
    assert Shape("large", 16).blocks == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vast", 16), "unknown size 'vast'; expected one of tiny, small"),
        (("tiny", 8), "unknown patch size 8; expected one of 14, 16"),
        (("tiny", 16, 100), "100×100 pixels has no whole patches of 16"),
        (("tiny", 16, 224, 0), "depth must be at least 1, got 0"),
    ],
)
def test_wrong_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shape(*arguments)
