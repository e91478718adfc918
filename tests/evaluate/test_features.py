"""Features of image files: the right numbers in the right order, and unreadable files skipped by name."""

import numpy as np
import pytest
import torch
from PIL import Image

from quickvit import QuickVisionTransformer, create_baseline
from quickvit.data import find_images, input_size, preprocessing, read_image
from quickvit.evaluate import embed_images
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.equivariance import verify_symmetry
from quickvit.evaluate.predict import predict_images
from quickvit.testing import randomize


@pytest.fixture
def model():
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 0}
    return randomize(QuickVisionTransformer(family="i8", **options))


@pytest.fixture
def folder(tmp_path):
    """Five readable images of several modes and sizes, in two folders."""
    generator = np.random.default_rng(0)
    (tmp_path / "more").mkdir()
    for i, (mode, name) in enumerate(
        [("RGB", "a.png"), ("L", "b.jpg"), ("RGBA", "c.png"), ("P", "more/d.gif"), ("RGB", "more/E.PNG")]
    ):
        pixels = generator.integers(0, 256, (20 + 10 * i, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_images_are_found_once_and_in_order(folder):
    found = find_images([folder / "more" / "d.gif", folder, folder / "a.png"])
    assert [str(p.relative_to(folder)) for p in found] == [
        "more/d.gif",
        "a.png",
        "b.jpg",
        "c.png",
        "more/E.PNG",
    ]
    assert find_images([folder / "notes.txt"]) == [folder / "notes.txt"]


def test_features_are_those_of_the_model_whatever_the_batch_size(model, folder):
    paths = find_images([folder])
    results = [embed_images(model, paths, batch_size=size) for size in (1, 2, 8)]
    assert results[0].features.shape == (5, 64)
    assert results[0].features.dtype == np.float32
    assert results[0].paths == tuple(map(str, paths))
    for result in results[1:]:
        np.testing.assert_allclose(result.features, results[0].features, rtol=1e-4, atol=1e-5)
    with Image.open(paths[0]) as image, torch.no_grad():
        expected = model.eval()(preprocessing(model)(image.convert("RGB"))[None])[0]
    np.testing.assert_allclose(results[0].features[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_wrapped_models(model, folder, wrap):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 3}
    model, files = randomize(QuickVisionTransformer(family="i8", **options)), find_images([folder])
    wrapped = wrap(model, backend="eager") if wrap is torch.compile else wrap(model)
    expected = predict_images(model, files).shares
    torch.testing.assert_close(predict_images(wrapped, files).shares, expected)
    assert verify_symmetry(wrapped) == verify_symmetry(model)
    x = torch.randn(2, 3, 32, 32)
    found = Backbone(wrapped, "wrapped").pooled(x)
    for name, feature in Backbone(model, "model").pooled(x).items():
        torch.testing.assert_close(found[name], feature)


def test_a_single_file(model, folder):
    for path in (folder / "a.png", str(folder / "a.png")):
        assert embed_images(model, path).paths == (str(folder / "a.png"),)


def test_the_model_keeps_its_mode(model, folder):
    assert embed_images(model.train(), find_images([folder])).paths
    assert model.training


def test_the_model_keeps_its_mode_when_it_fails(model, folder):
    model.train().head = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        embed_images(model, find_images([folder]))
    assert model.training


def test_tokens_are_no_features_of_images(model, folder):
    model.train().reset_classifier(0, "")
    with pytest.raises(ValueError, match=r"gives \(17, 64\) for an image, expected one vector"):
        embed_images(model, find_images([folder]))
    assert model.training


def test_unreadable_images_are_skipped_and_named(model, folder, monkeypatch):
    whole = (folder / "a.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").touch()
    Image.new("RGB", (60, 60)).save(folder / "bomb.png")
    # Between Pillow's limit and its double, where it only warns.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 60 - 1)
    result = embed_images(
        model, [*find_images([folder]), folder / "missing.png", folder / "notes.txt"], batch_size=3
    )
    assert len(result.paths) == len(result.features) == 5
    reasons = {path.rsplit("/", 1)[1]: reason for path, reason in result.skipped.items()}
    assert reasons.keys() == {"cut.png", "empty.jpg", "bomb.png", "missing.png", "notes.txt"}
    assert "DecompressionBomb" in reasons["bomb.png"]
    assert "FileNotFound" in reasons["missing.png"]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_outputs_that_are_not_finite_name_the_image(model, folder, batch_size):
    (folder / "a.png").write_bytes(b"no image")
    broken = preprocessing(model)(read_image(folder / "c.png"))
    model.register_forward_hook(
        lambda _, given, output: output / (given[0] - broken).abs().sum((1, 2, 3))[:, None]
    )
    with pytest.raises(ValueError, match=r"gives .*c\.png outputs that are not finite"):
        embed_images(model, find_images([folder]), batch_size=batch_size)


def test_nothing_readable_gives_no_features(model, folder):
    result = embed_images(model, [folder / "notes.txt"])
    assert result.features.shape == (0, 64)
    assert len(result.skipped) == 1


def test_features_survive_the_file(model, folder, tmp_path):
    result = embed_images(model, find_images([folder]))
    result.save(tmp_path / "new" / "features.npz")
    with np.load(tmp_path / "new" / "features.npz") as file:
        np.testing.assert_array_equal(file["features"], result.features)
        assert tuple(file["paths"]) == result.paths


def test_the_whole_image_is_seen_at_the_size_of_the_model(model):
    transform = preprocessing(model)
    assert transform(Image.new("RGB", (50, 40))).shape == (3, 32, 32)
    model.set_input_size((24, 48))
    assert input_size(model) == (3, 24, 48)
    assert preprocessing(model)(Image.new("RGB", (50, 40))).shape == (3, 24, 48)
    baseline = create_baseline("tiny", depth=1, img_size=48)
    assert input_size(baseline) == (3, 48, 48)


def test_wrong_arguments_name_the_value(model):
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        embed_images(model, [], batch_size=0)
    grey = QuickVisionTransformer(img_size=32, embed_dim=64, depth=1, num_heads=2, in_chans=1)
    with pytest.raises(ValueError, match="wants 1 channels"):
        embed_images(grey, [])
    with pytest.raises(ValueError, match="got Linear"):
        embed_images(torch.nn.Linear(2, 2), [])
