"""Turned images: exact quarter turns, the rest like torchvision's, random ones functions of the image."""

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as reference

from quickvit import D8, act_on_image
from quickvit.evaluate import POSES, Pose, cut_circle, rotate
from quickvit.evaluate.equivariance import random_images


@pytest.fixture
def images():
    return random_images((6, 3, 20, 20))


def test_quarter_turns_are_exact(images):
    for turns in range(-4, 5):
        assert torch.equal(rotate(images, 90.0 * turns), torch.rot90(images, turns, (-2, -1)))
    wide = random_images((2, 3, 10, 30))
    assert torch.equal(rotate(wide, 90), act_on_image(wide, D8.elements[1]))


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [(angle, (side, side)) for angle in (45, 10.5, 89, 135, 300, -30) for side in (20, 21)]
    # A quarter turn of these has another shape, which torchvision does not make.
    + [(angle, (16, 24)) for angle in (10.5, 45, 89)],
)
def test_other_angles_are_those_of_torchvision(degrees, shape):
    images = random_images((2, 3, *shape))
    expected = reference.rotate(images, degrees, InterpolationMode.BILINEAR)
    torch.testing.assert_close(rotate(images, degrees), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("degrees", [45.0, [10.5, 300.0]])
def test_short_numbers_are_turned_like_long_ones(dtype, degrees):
    images = random_images((2, 3, 224, 224)).to(dtype)
    turned = rotate(images, degrees)
    assert turned.dtype == dtype
    assert torch.equal(turned, rotate(images.float(), degrees).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotate(images, degrees), turned)


def test_a_turn_and_a_quarter_is_the_quarter_of_the_turn(images):
    for turns in range(1, 4):
        expected = torch.rot90(rotate(images, 45), turns, (-2, -1))
        assert torch.equal(rotate(images, 45 + 90 * turns), expected)


def test_each_image_has_its_own_angle(images):
    degrees = [0.0, 90.0, 45.0, 300.5, 180.0, -45.0]
    turned = rotate(images, degrees)
    for i, angle in enumerate(degrees):
        torch.testing.assert_close(turned[i : i + 1], rotate(images[i : i + 1], angle), rtol=0, atol=0)
    with pytest.raises(ValueError, match="an angle for each of the 6 images, got 2"):
        rotate(images, [0.0, 1.0])
    with pytest.raises(ValueError, match="images must be square to be turned by an angle each, got 10×20"):
        rotate(random_images((1, 3, 10, 20)), [45.0])


def test_random_poses_are_functions_of_seed_and_image(images):
    for pose in (Pose("quarter"), Pose("any")):
        indices = torch.arange(100, 106)
        whole = pose.show(images, indices)
        for i in range(6):
            assert torch.equal(pose.show(images[i : i + 1], indices[i : i + 1]), whole[i : i + 1])
        assert not torch.equal(pose.show(images, indices, seed=1), whole)
    image = images[:1]
    poses = [Pose("quarter").show(image, torch.tensor([i])) for i in range(400)]
    counts = [sum(torch.equal(shown, rotate(image, 90 * turns)) for shown in poses) for turns in range(4)]
    assert sum(counts) == 400
    # Four standard deviations of a quarter of 400.
    assert all(abs(count - 100) < 4 * 75**0.5 for count in counts)


def test_poses_have_names():
    assert [str(pose) for pose in POSES] == [
        "upright",
        "90°",
        "180°",
        "270°",
        "mirrored",
        "random quarter turn",
        "45°",
        "random angle",
    ]
    assert str(Pose(45.0, mirror=True)) == "mirrored 45°"


def test_mirroring_comes_before_the_turn(images):
    expected = torch.rot90(images.flip(-1), 1, (-2, -1))
    assert torch.equal(Pose(90.0, mirror=True).show(images, torch.arange(6)), expected)


@pytest.mark.parametrize("size", [20, 21])
def test_a_circle_hides_what_a_turn_would_lose(size):
    ones = torch.ones(1, 1, size, size)
    circle = cut_circle(ones)
    for g in D8.elements:
        assert torch.equal(act_on_image(circle, g), circle)
    # The octagon in which a square and its turn by 45° overlap, and the circle, as shares of the square.
    assert rotate(ones, 45).mean() == pytest.approx(2 * (2**0.5 - 1), abs=0.03)
    assert circle.mean() == pytest.approx(torch.pi / 4, abs=0.03)
    # Inside the circle, away from its edge, a turn loses nothing.
    inside = cut_circle(rotate(ones, 45)) == 1
    assert (inside == (circle == 1)).float().mean() > 0.8


@pytest.mark.parametrize("pose", [Pose(90.0), Pose("quarter", mirror=True), Pose(30.0), Pose("any")])
def test_masks_move_with_their_images(pose):
    masks = torch.randint(1, 200, (6, 20, 20), dtype=torch.uint8)
    indices = torch.arange(6)
    turned = pose.show_masks(masks, indices, seed=3, outside=255)
    assert turned.dtype == torch.uint8
    exact = pose.rotate in (90.0, "quarter")
    expected = pose.show(masks[:, None].float(), indices, 3, "nearest")[:, 0].to(torch.uint8)
    assert torch.equal(turned, expected.masked_fill(expected == 0, 255))
    assert (turned == 255).any() != exact
    assert set(turned.unique().tolist()) <= {*masks.unique().tolist(), 255}
