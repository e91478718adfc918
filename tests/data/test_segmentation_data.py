"""Masks: the readers find them, and what does not fit is named."""

import numpy as np
import pytest
from PIL import Image

from quickvit.data.segmentation import VOC_NAMES, open_segmentation


def save(path, values, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, dtype=np.uint8))
    if mode == "P":
        image.putpalette([i % 256 for i in range(768)])
    elif mode is not None:
        image = image.convert(mode)
    image.save(path)


@pytest.fixture
def folder(tmp_path):
    """Two training images and a validation image with masks of the labels 0, 1, 2 and 255."""
    for split, names in (("train", ("a", "sub/b")), ("val", ("c",))):
        for name in names:
            save(tmp_path / "images" / split / f"{name}.jpg", np.zeros((6, 8, 3)))
            mask = np.arange(48).reshape(6, 8) % 3
            mask[0] = 255
            save(tmp_path / "annotations" / split / f"{name}.png", mask)
    return tmp_path


def test_a_folder(folder):
    source = open_segmentation(folder)
    assert len(source) == 2
    assert source.ignored == (255,)
    assert source.labels == source.classes == ()
    assert source.describe(1) == str(folder / "images" / "train" / "sub" / "b.jpg")
    image, target = source.read(1)
    assert (image.size, target) == ((8, 6), -1)
    mask = source.read_mask(1)
    assert mask.dtype == np.uint8
    assert mask[0].tolist() == [255] * 8
    assert mask[1:].flatten().tolist() == [i % 3 for i in range(8, 48)]
    assert len(open_segmentation(folder, "val")) == 1


def test_masks_are_resized_to_the_nearest(folder):
    save(folder / "annotations" / "train" / "a.png", np.kron([[1, 2], [0, 1]], np.ones((3, 4))))
    assert open_segmentation(folder).read_mask(0, (2, 4)).tolist() == [[1, 1, 2, 2], [0, 0, 1, 1]]


@pytest.mark.parametrize("mode", ["P", "I;16"])
def test_modes_of_masks(folder, mode):
    save(folder / "annotations" / "train" / "a.png", np.full((6, 8), 2), mode)
    assert (open_segmentation(folder).read_mask(0) == 2).all()


@pytest.mark.parametrize("size", [None, (3, 4)])
def test_masks_of_one_bit_hold_0_and_1(folder, size):
    save(folder / "annotations" / "train" / "a.png", np.kron([[0, 255]], np.ones((6, 4))), "1")
    mask = open_segmentation(folder).read_mask(0, size)
    assert mask.dtype == np.uint8
    assert mask[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1][:: 1 if size is None else 2]


@pytest.mark.parametrize("void", [256, 65535])
def test_ignored_labels_that_a_byte_cannot_hold_are_read_as_255(folder, void):
    path, mask = folder / "annotations" / "train" / "a.png", np.full((6, 8), 2, np.uint16)
    mask[0] = void
    Image.fromarray(mask).save(path)
    source = open_segmentation(folder, ignored=(0, void))
    assert source.void == (0, 255)
    assert source.read_mask(0).tolist() == [[255] * 8, *5 * [[2] * 8]]
    mask[1] = 255
    Image.fromarray(mask).save(path)
    with pytest.raises(ValueError, match=rf"has the label 255; .* one that is ignored \(0, {void}\)"):
        source.read_mask(0)


def test_more_labels_than_a_byte_can_hold(folder):
    (folder / "classes.txt").write_text("\n".join(f"label {i}" for i in range(256)))
    with pytest.raises(ValueError, match="has 256 named labels; expected at most 255"):
        open_segmentation(folder)


def test_a_mask_is_no_program(folder, monkeypatch):
    """Pillow would have Ghostscript run it."""
    Image.new("L", (8, 6)).save(folder / "annotations" / "train" / "a.png", "EPS")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=r"cannot read .*a\.png: UnidentifiedImageError"):
        open_segmentation(folder).read_mask(0)


def test_ade20k(tmp_path):
    root = tmp_path / "ADEChallengeData2016"
    save(root / "images" / "training" / "x.jpg", np.zeros((4, 4, 3)))
    save(root / "annotations" / "training" / "x.png", np.full((4, 4), 150))
    rows = [f"{i}\t0.1\t1\t1\tname {i}, other name" for i in range(1, 151)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]))
    for given in (tmp_path, root):
        source = open_segmentation(given)
        assert source.ignored == (0, 255)
        assert len(source.labels) == 151
        assert source.labels[150] == "name 150"
        assert (source.read_mask(0) == 150).all()
    save(root / "annotations" / "training" / "x.png", np.full((4, 4), 151))
    with pytest.raises(
        ValueError, match=r"x\.png has the label 151; expected 0 … 150, or one that is ignored \(0, 255\)"
    ):
        source.read_mask(0)


def test_voc2012(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for name in ("2007_1", "2007_2"):
        save(root / "JPEGImages" / f"{name}.jpg", np.zeros((4, 4, 3)))
        save(root / "SegmentationClass" / f"{name}.png", np.full((4, 4), 20), "P")
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_2\n", encoding="utf-8-sig")
    for given in (tmp_path, root):
        source = open_segmentation(given)
        assert source.labels == VOC_NAMES
        assert source.ignored == (255,)
        assert source.describe(0).endswith("2007_2.jpg")
        assert (source.read_mask(0) == 20).all()
    with pytest.raises(FileNotFoundError, match="has no val split"):
        open_segmentation(tmp_path, "val")
    (lists / "val.txt").write_text("../../../etc/passwd\n")
    with pytest.raises(ValueError, match="without folder and suffix"):
        open_segmentation(tmp_path, "val")


def test_names_and_ignored_labels(folder):
    (folder / "classes.txt").write_text("road\ncar\nvoid\n")
    source = open_segmentation(folder, ignored=(2, 255))
    assert source.labels == ("road", "car", "void")
    assert source.ignored == (2, 255)
    (folder / "classes.txt").write_text("road\ncar\n")
    with pytest.raises(
        ValueError, match=r"a\.png has the label 2; expected 0 … 1, or one that is ignored \(255\)"
    ):
        open_segmentation(folder).read_mask(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: save(mask, np.zeros((6, 9))), r"a\.png has 9×6 pixels, its image .*a\.jpg 8×6"),
        (lambda mask: save(mask, np.zeros((6, 8, 3))), r"a\.png has mode RGB, which holds colours"),
        (lambda mask: mask.write_bytes(b"no mask"), r"cannot read .*a\.png: UnidentifiedImageError"),
        (
            lambda mask: Image.fromarray(np.full((6, 8), 300, np.uint16)).save(mask),
            r"a\.png has the label 300",
        ),
    ],
    ids=["size", "mode", "damage", "label"],
)
def test_wrong_masks_are_named(folder, change, message):
    change(folder / "annotations" / "train" / "a.png")
    with pytest.raises(ValueError, match=message):
        open_segmentation(folder).read_mask(0)


def test_a_mask_is_read_whether_its_image_can_be_or_not(folder):
    source = open_segmentation(folder)
    expected = source.read_mask(0)
    (folder / "images" / "train" / "a.jpg").write_bytes(b"no image")
    assert (source.read_mask(0) == expected).all()


def test_missing_parts_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        open_segmentation(tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"has no test split with masks: expected one of .*images/test"
    ):
        open_segmentation(folder, "test")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        open_segmentation(folder, "dev")
    (folder / "images" / "test").mkdir()
    with pytest.raises(ValueError, match=r"no images in .*images/test"):
        open_segmentation(folder, "test")
    (folder / "annotations" / "val" / "c.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"c\.jpg has no mask: expected .*annotations/val/c\.png"):
        open_segmentation(folder, "val")
