"""What two models make of images in eight poses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import CLASSES, small

from quickvit.data import preprocessing
from quickvit.group import D8, Layout, act_on_image
from quickvit.report.exploration import POSES, act_on_copy, describe, explore, symbol


def test_features_are_those_of_the_turned_images(exploration, octic, images):
    assert [copy.irrep.name for copy in exploration.copies] == [
        "A1",
        "A1",
        "A2",
        "A2",
        "B1",
        "B1",
        "B2",
        "B2",
        "E",
    ]
    pixels = torch.stack([preprocessing(octic)(image) for image in images])
    for pose, g in enumerate(POSES):
        with torch.no_grad():
            steerable = octic.forward_steerable(act_on_image(pixels, g))
        maps = steerable.tokens[:, steerable.prefix :].unflatten(1, steerable.grid).movedim(-1, 1)
        for copy, found in zip(exploration.copies, exploration.features, strict=True):
            torch.testing.assert_close(found[:, pose], maps[:, list(copy.channels)], atol=1e-5, rtol=1e-5)


def test_copies_are_whole_and_of_their_irrep(exploration):
    blocks = Layout(64).blocks
    for copy in exploration.copies:
        own = [block for block in blocks if block.irrep == copy.irrep]
        places = {channel - block.start for channel, block in zip(copy.channels, own, strict=True)}
        assert len(places) == 1
        assert 0 <= places.pop() < own[0].width


def test_the_features_of_an_equivariant_model_follow_the_image(exploration):
    assert exploration.difference < 1e-5


def test_the_features_of_a_broken_one_do_not(baseline, images):
    broken = small("quickvit_h8_tiny_patch16_224", lift="free")
    assert explore(broken, baseline, images, CLASSES).difference > 0.1


def test_the_difference_sees_a_single_wrong_value(exploration):
    wrong = [maps.clone() for maps in exploration.features]
    wrong[-1][1, 3, 1, 2, 0] += 0.5 * wrong[-1].abs().max()
    assert replace(exploration, features=tuple(wrong)).difference == pytest.approx(0.5, rel=0.5)


def test_the_action_on_a_copy_is_a_representation(exploration):
    copy, maps = exploration.copies[-1], exploration.features[-1][:, 0]
    for g in POSES:
        for h in POSES:
            twice = act_on_copy(act_on_copy(maps, copy.irrep, h), copy.irrep, g)
            torch.testing.assert_close(twice, act_on_copy(maps, copy.irrep, D8.product(g, h)))


def test_answers(exploration, octic, baseline, images):
    ours, theirs = exploration.answers
    assert (ours.model, theirs.model) == ("i8", "ViT")
    assert (ours.labels == ours.labels[:, :1]).all()
    assert (theirs.labels != theirs.labels[:, :1]).any()
    turned = act_on_image(preprocessing(baseline)(images[1]), POSES[5])[None]
    expected = baseline(turned).softmax(-1)[0]
    torch.testing.assert_close(theirs.probabilities[1, 5], expected.detach(), atol=1e-5, rtol=1e-4)


def test_models_may_see_images_of_different_sizes(octic, images):
    found = explore(octic, small("vit_tiny_patch16_224", img_size=48, patch_size=16), images, CLASSES)
    assert np.array_equal(found.images[0].permute(1, 2, 0).numpy(), np.asarray(images[0]))


@pytest.mark.parametrize("family", ["h8", "d8"])
def test_other_octic_families(family, baseline, images):
    found = explore(small(f"quickvit_{family}_tiny_patch16_224"), baseline, images, CLASSES, channels=1)
    assert found.answers[0].model == family
    assert found.difference < 1e-5
    assert [len(copy.channels) for copy in found.copies] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": small("quickvit_h2_tiny_patch16_224")}, "only features of i8, h8 and d8 turn.*got h2"),
        ({"model": small("baseline_tiny_patch16_224")}, "got ViT"),
        ({"model": small("quickvit_i8_tiny_patch16_224", img_size=(32, 64))}, "square.*32×64"),
        ({"baseline": small("baseline_tiny_patch16_224", img_size=(32, 64))}, "square"),
        ({"classes": ["cat"]}, "i8 tells 3 classes apart, but 1 names are given"),
        ({"images": []}, "at least one image"),
        ({"targets": [1]}, "2 images but 1 targets"),
        ({"targets": [1, 3]}, "from 0 to 2, or -1 if it is not known; got 3"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_explored(change, message, octic, baseline, images):
    arguments = {"model": octic, "baseline": baseline, "images": images, "classes": CLASSES, **change}
    with pytest.raises(ValueError, match=message):
        explore(**arguments)


def test_words():
    assert [symbol(g) for g in POSES] == ["e", "r", "r²", "r³", "s", "sr", "sr²", "sr³"]
    assert describe(POSES[0]) == "upright"
    assert describe(POSES[7]) == "three quarter turns, then mirrored"
