"""Segmentation with frozen features: equal to the same protocol written with scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, jaccard_score
from sklearn.neighbors import KNeighborsClassifier

from quickvit import QuickVisionTransformer
from quickvit.data.segmentation import open_segmentation
from quickvit.evaluate import segmentation as module
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.extract import Extraction
from quickvit.evaluate.rotation import Pose, cut_circle
from quickvit.evaluate.segmentation import (
    SegmentationData,
    SegmentationProtocol,
    commonest,
    fit_segmentation,
    from_patches,
    load_segmentation,
    to_patches,
)
from quickvit.evaluate.selection import hold_out
from quickvit.testing import randomize

GRID, PATCH, WIDTH = (3, 2), 4, 6
IGNORED = (0, 255)
PROTOCOL = SegmentationProtocol(neighbours=(1, 3, 5), cs=(1e-2, 1.0), fraction=0.25)


def data(images, seed):
    """Images of patches with a label each, some noise, and features that know the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([1, 2, 5, 0])[torch.randint(4, (images, *GRID), generator=generator)]
    masks = labels.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    noise = torch.tensor([1, 2, 5, 0, 255])[torch.randint(5, masks.shape, generator=generator)]
    masks = torch.where(torch.rand(masks.shape, generator=generator) < 0.4, noise, masks).to(torch.uint8)
    centres = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    spread = torch.randn(images, *GRID, WIDTH, generator=generator, dtype=torch.float64)
    return SegmentationData(3 * centres[labels] + 4 * spread + 7, masks, IGNORED, torch.arange(images))


@pytest.fixture(scope="module")
def train():
    return data(16, 0)


@pytest.fixture(scope="module")
def test_data():
    return data(9, 1)


def test_patches_of_masks():
    masks = torch.arange(2 * 12 * 8).view(2, 12, 8)
    patches = to_patches(masks, GRID)
    assert patches.shape == (12, 16)
    assert torch.equal(patches[0].view(4, 4), masks[0, :4, :4])
    assert torch.equal(patches[3].view(4, 4), masks[0, 4:8, 4:])
    assert torch.equal(patches[6].view(4, 4), masks[1, :4, :4])
    assert torch.equal(from_patches(patches, (12, 8), GRID), masks)


@pytest.mark.parametrize("votes", [2**27, 30])
def test_the_commonest_label(votes, monkeypatch):
    monkeypatch.setattr(module, "VOTES", votes)
    labels = torch.tensor([3, 9, 255])[torch.randint(3, (40, 5, 2))].to(torch.uint8)
    expected = [[np.bincount(labels[i, :, j]).argmax() for j in range(2)] for i in range(40)]
    assert commonest(labels).tolist() == expected
    assert torch.equal(commonest(labels[:, :1]), labels[:, 0])


class Oracle:
    """The protocol with scikit-learn's parts."""

    def __init__(self, train, test):
        fitted, held = hold_out(torch.zeros(len(train.masks)), PROTOCOL.fraction)
        mean, std = (
            getattr(train.features[fitted].flatten(0, 2).numpy(), name)(0) for name in ("mean", "std")
        )
        self.parts = {}
        for name, source, images in (
            ("fitted", train, fitted),
            ("held", train, held),
            ("all", train, torch.arange(len(train.masks))),
            ("test", test, torch.arange(len(test.masks))),
        ):
            features = (source.features[images].flatten(0, 2).numpy() - mean) / std
            self.parts[name] = features, to_patches(source.masks[images], GRID).numpy()

    def learnable(self, name):
        features, pixels = self.parts[name]
        label = np.array([np.bincount(row).argmax() for row in pixels])
        keep = ~np.isin(label, IGNORED)
        return features[keep], pixels[keep], label[keep]

    def score(self, name, predicted):
        truth = self.parts[name][1]
        keep = ~np.isin(truth, IGNORED)
        truth, predicted = truth[keep], np.broadcast_to(predicted, keep.shape)[keep]
        return jaccard_score(truth, predicted, average="macro"), accuracy_score(truth, predicted)

    def knn(self, fit, name, k, metric):
        features, pixels, _ = self.learnable(fit)
        metric = {"l2": "euclidean"}.get(metric, metric)
        return KNeighborsClassifier(k, metric=metric).fit(features, pixels).predict(self.parts[name][0])

    def linear(self, fit, name, c):
        features, _, label = self.learnable(fit)
        model = LogisticRegression(C=c, tol=1e-10, solver="newton-cholesky").fit(features, label)
        return model.predict(self.parts[name][0])[:, None]


@pytest.mark.parametrize("images", [64, 3])
def test_the_protocol_is_that_of_scikit_learns_parts(train, test_data, images, monkeypatch):
    monkeypatch.setattr(module, "IMAGES", images)
    scores = fit_segmentation(train, PROTOCOL).evaluate(test_data)
    oracle = Oracle(train, test_data)
    for name in ("knn", "linear"):
        predict = getattr(oracle, name)
        for trial in scores[name].tried:
            expected = oracle.score("held", predict("fitted", "held", **trial.choice))[0]
            assert trial.score == pytest.approx(expected, abs=1e-6)
        best = max(scores[name].tried, key=lambda trial: trial.score)
        assert scores[name].chosen == best.choice
        mean_iou, accuracy = oracle.score("test", predict("all", "test", **best.choice))
        assert scores[name].mean_iou == pytest.approx(mean_iou, abs=1e-6)
        assert scores[name].pixel_accuracy == pytest.approx(accuracy, abs=1e-6)
    assert len(scores["knn"].tried) == 6
    assert len(scores["linear"].tried) == 2
    assert scores["linear"].pixel_accuracy > 0.4


def test_ignored_labels_count_only_as_classes_that_are_never_right(train, test_data):
    scores = fit_segmentation(train, PROTOCOL).evaluate(test_data)
    # Logistic regression has never seen an ignored label, the pixels of the neighbours have some.
    assert scores["linear"].mean_iou == scores["linear"].mean_iou_of_classes
    assert scores["knn"].mean_iou < scores["knn"].mean_iou_of_classes
    assert scores["knn"].confusion.sum(1)[[0, 255]].tolist() == [0, 0]


def test_too_little_to_learn_from(train):
    one = SegmentationData(train.features[:1], train.masks[:1], IGNORED, torch.arange(1))
    with pytest.raises(
        ValueError, match="held out for choosing: there is one training image; expected at least two"
    ):
        fit_segmentation(one, PROTOCOL)
    for ignored, labels in {(0, 1, 2, 5, 255): "no label", (0, 1, 2, 255): "only the label 5"}.items():
        with pytest.raises(
            ValueError, match=rf"{labels} beside those that are ignored \(0, 1, 2, .*at least two"
        ):
            fit_segmentation(replace(train, ignored=ignored), PROTOCOL)
    masks = torch.full_like(train.masks, 255)
    masks[:, 0, :2] = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="consists mostly of them"):
        fit_segmentation(replace(train, masks=masks), PROTOCOL)
    for neighbours in ((300,), (0, 3)):
        with pytest.raises(
            ValueError, match=rf"between 1 and the \d+ patches to learn from, got .{neighbours[0]}"
        ):
            fit_segmentation(train, SegmentationProtocol(neighbours=neighbours))


@pytest.fixture
def folder(tmp_path):
    """Images whose left and right halves are of different brightness, and masks that say so."""
    generator = np.random.default_rng(0)
    for split, number in (("train", 12), ("val", 4)):
        for i in range(number):
            mask = np.zeros((40, 48), np.uint8)
            mask[:, 10 * (1 + i % 4) :] = 1
            pixels = 40 + 150 * mask[..., None] + generator.integers(0, 30, (40, 48, 3))
            for kind, values in (("images", pixels), ("annotations", mask)):
                path = tmp_path / "data" / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values.astype(np.uint8)).save(path)
    return tmp_path / "data"


def test_from_a_folder_to_scores(folder, tmp_path):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    backbone = Backbone(randomize(QuickVisionTransformer(family="i8", **options)), "tiny")
    how = Extraction(tmp_path / "cache")
    train, val = (
        load_segmentation(backbone, open_segmentation(folder, split), how) for split in ("train", "val")
    )
    assert train.features.shape == (12, 4, 4, 64)
    assert train.masks.shape == (12, 32, 32)
    assert train.masks.unique().tolist() == [0, 1]
    scores = fit_segmentation(train, PROTOCOL).evaluate(val)
    assert scores["knn"].mean_iou > 0.8
    assert scores["linear"].mean_iou > 0.8


def test_a_second_time_everything_comes_from_the_cache(folder, tmp_path, monkeypatch):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
    backbone = Backbone(randomize(QuickVisionTransformer(family="h8", **options)), "tiny")
    source, how = open_segmentation(folder), Extraction(tmp_path / "cache")
    first = load_segmentation(backbone, source, how)
    monkeypatch.setattr(type(source), "read", lambda self, index: pytest.fail("an image was read"))
    monkeypatch.setattr(type(source), "read_mask", lambda *given: pytest.fail("a mask was read"))
    again = load_segmentation(backbone, source, how)
    assert torch.equal(first.features, again.features)
    assert torch.equal(first.masks, again.masks)


def test_a_mask_that_changed_is_read_again(folder, tmp_path):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
    backbone, how = (
        Backbone(QuickVisionTransformer(family="h8", **options), "tiny"),
        Extraction(tmp_path / "cache"),
    )
    first = load_segmentation(backbone, open_segmentation(folder), how).masks
    Image.new("L", (48, 40), 9).save(folder / "annotations" / "train" / "0.png")
    again = load_segmentation(backbone, open_segmentation(folder), how).masks
    assert (again[0] == 9).all()
    assert torch.equal(first[1:], again[1:])


def test_masks_turn_with_their_images(folder, tmp_path):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    backbone = Backbone(randomize(QuickVisionTransformer(family="i8", **options)), "tiny")
    source, how = open_segmentation(folder), Extraction(tmp_path / "cache")
    upright = load_segmentation(backbone, source, how)
    turned = load_segmentation(backbone, source, how, pose=Pose(90.0, mirror=True))
    assert torch.equal(turned.masks, upright.masks.flip(2).rot90(1, (1, 2)))
    torch.testing.assert_close(
        turned.features, upright.features.flip(2).rot90(1, (1, 2)), rtol=1e-3, atol=1e-3
    )
    tilted = load_segmentation(backbone, source, how, pose=Pose(45.0))
    assert (tilted.masks[:, 0, 0] == 255).all()
    assert tilted.ignored == (255,)


def test_what_a_circle_hides_is_not_scored(folder, tmp_path):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
    backbone = Backbone(QuickVisionTransformer(family="h8", **options), "tiny")
    source, how = open_segmentation(folder), Extraction(tmp_path / "cache")
    visible = cut_circle(torch.ones(32, 32)).bool()
    scored = []
    for pose in (Pose(), Pose(90.0), Pose(45.0)):
        data = load_segmentation(backbone, source, how, pose=pose, circle=True)
        assert data.ignored == (255,)
        scored.append((data.masks != 255).float().mean(0))
        assert not scored[-1][~visible].any()
    assert scored[0][visible].all()
    assert torch.equal(scored[1], scored[0])
    assert scored[2][visible].mean() > 0.95


@pytest.mark.parametrize("pose", [Pose(), Pose(45.0)], ids=str)
def test_void_of_16_bits_is_void(folder, tmp_path, pose):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
    backbone = Backbone(QuickVisionTransformer(family="h8", **options), "tiny")
    found = []
    for void, dtype in ((255, np.uint8), (65535, np.uint16)):
        mask = np.zeros((40, 48), dtype)
        mask[20:] = void
        Image.fromarray(mask).save(folder / "annotations" / "train" / "0.png")
        source = open_segmentation(folder, ignored=(void,))
        found.append(load_segmentation(backbone, source, Extraction(tmp_path / "cache"), pose=pose))
    short, wide = found
    assert wide.ignored == short.ignored == (255,)
    assert torch.equal(wide.masks, short.masks)


def test_an_unreadable_image_that_is_tolerated_costs_only_itself(folder, tmp_path):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
    backbone = Backbone(QuickVisionTransformer(family="h8", **options), "tiny")
    whole = load_segmentation(backbone, open_segmentation(folder), Extraction(tmp_path / "whole"))
    # Images come in the order of their names: 0, 1, 10, 11, 2.
    (folder / "images" / "train" / "2.png").write_bytes(b"no image")
    how = Extraction(tmp_path / "cache", max_unreadable=3)
    data = load_segmentation(backbone, open_segmentation(folder), how)
    left = [i for i in range(12) if i != 4]
    assert data.indices.tolist() == left
    assert data.ignored == whole.ignored
    assert torch.equal(data.masks, whole.masks[left])


def test_a_mask_that_does_not_fit_names_the_file(folder, tmp_path):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2}
    backbone = Backbone(QuickVisionTransformer(family="h8", **options), "tiny")
    Image.new("L", (5, 5)).save(folder / "annotations" / "train" / "3.png")
    with pytest.raises(ValueError, match=r"3\.png has 5×5 pixels"):
        load_segmentation(backbone, open_segmentation(folder), Extraction(tmp_path / "cache"))
