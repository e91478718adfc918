"""Protocols of classification: what is chosen on what, and i8 features that lose exactly nothing in a turn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from quickvit import QuickVisionTransformer
from quickvit.data import open_source
from quickvit.evaluate import classification
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.classification import (
    fit_hematology,
    fit_knn,
    fit_linear,
    fit_logistic_grid,
    open_splits,
    require_known_classes,
)
from quickvit.evaluate.extract import Extraction, Features, extract
from quickvit.evaluate.linear import ProbeTraining
from quickvit.evaluate.metrics import accuracy
from quickvit.evaluate.poses import classify_in_poses, feature_errors
from quickvit.evaluate.rotation import POSES, UPRIGHT, Pose
from quickvit.evaluate.selection import hold_out
from quickvit.testing import randomize

OPTIONS = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 0}
SHORT = ProbeTraining(steps=60, batch_size=64)


class Named:
    """A source of which only names are asked."""

    def __init__(self, number, name="train", classes=("a", "b", "c")):
        self.number, self.name, self.classes = number, name, classes

    def __len__(self):
        return self.number

    def describe(self, index):
        return f"{self.name}/{index}.png"


def features(number, seed, **names):
    """Features of three imbalanced, overlapping classes."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.tensor([0.6, 0.3, 0.1]).multinomial(number, True, generator=generator)
    centres = torch.randn(3, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    arrays = {
        name: centres[targets] + 0.8 * torch.randn(number, 5, generator=generator, dtype=torch.float64)
        for name in ("class_1", "class_2", "class_3", "class_4", "average")
    }
    return Features(arrays, targets, torch.arange(number), Named(number, **names))


@pytest.fixture(scope="module")
def train():
    return features(300, 0)


@pytest.fixture(scope="module")
def test_set():
    return features(120, 1, name="test")


def scores(classifier, test):
    return {name: accuracy(test.confusion(labels)) for name, labels in classifier.predict(test).items()}


def test_the_number_of_neighbours_is_chosen_on_what_is_held_out(train, test_set):
    knn = fit_knn(train, ks=(1, 10, 250, 1000))
    assert [trial.choice["k"] for trial in knn.tried] == [1, 10, 250]
    rows, held = hold_out(train.targets)
    oracle = KNeighborsClassifier(10, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    oracle.fit(train.vector[rows], train.targets[rows])
    assert knn.tried[1].score == pytest.approx(oracle.score(train.vector[held], train.targets[held]))
    best = max(knn.tried, key=lambda trial: trial.score)
    assert knn.chosen == best.choice
    assert knn.main == f"{best.choice['k']}-NN"
    oracle.fit(train.vector, train.targets)
    assert scores(knn, test_set)["10-NN"] == pytest.approx(oracle.score(test_set.vector, test_set.targets))


def test_numbers_of_neighbours_are_positive(train, monkeypatch):
    # Said before anything is computed.
    monkeypatch.setattr(classification, "hold_out", None)
    for ks in ((0,), (5, -3)):
        with pytest.raises(ValueError, match=f"must be at least 1, got {min(ks)}"):
            fit_knn(train, ks=ks)


def test_nothing_to_choose_from(train):
    with pytest.raises(ValueError, match="ks is empty; give at least one number of neighbours"):
        fit_knn(train, ks=())
    with pytest.raises(ValueError, match="nothing to choose from; give at least one value"):
        fit_linear(train, learning_rates=())
    with pytest.raises(ValueError, match="nothing to choose from; give at least one value"):
        fit_logistic_grid(train, cs=())


def test_a_validation_split_is_used_where_there_is_one(train, test_set):
    knn = fit_knn(train, test_set, ks=(1, 10))
    assert [trial.score for trial in knn.tried] == list(scores(knn, test_set).values())
    probe = fit_linear(train, test_set, training=SHORT, learning_rates=(0.01, 0.1))
    assert max(trial.score for trial in probe.tried) == scores(probe, test_set)["linear"]
    logistic = fit_logistic_grid(train, test_set, cs=(1e-3, 1.0))
    assert max(trial.score for trial in logistic.tried) == scores(logistic, test_set)["logistic"]


def test_the_best_probe_of_the_grid_is_trained_on_everything(train, test_set):
    from quickvit.evaluate.linear import Probe, train_probes

    probe = fit_linear(train, training=SHORT, learning_rates=(1e-4, 0.1))
    assert len(probe.tried) == 8
    assert probe.chosen == max(probe.tried, key=lambda trial: trial.score).choice
    assert probe.chosen["learning_rate"] == 0.1
    again = train_probes(train.arrays, train.targets, 3, [Probe(**probe.chosen)], SHORT)
    assert torch.equal(probe.predict(test_set)["linear"], again.predict(test_set.arrays)[0])
    assert scores(probe, test_set)["linear"] > 0.7


def test_logistic_regression_chooses_as_scikit_learn_would(train, test_set):
    cs = (1e-4, 1e-2, 1.0)
    fitted = fit_logistic_grid(train, cs=cs)
    rows, held = hold_out(train.targets)
    for trial, c in zip(fitted.tried, cs, strict=True):
        oracle = LogisticRegression(C=c, tol=1e-10, solver="newton-cholesky")
        oracle.fit(train.vector[rows], train.targets[rows])
        assert trial.score == pytest.approx(oracle.score(train.vector[held], train.targets[held]))
    oracle = LogisticRegression(C=fitted.chosen["c"], tol=1e-10, solver="newton-cholesky")
    oracle.fit(train.vector, train.targets)
    assert fitted.predict(test_set)["logistic"].tolist() == oracle.predict(test_set.vector).tolist()


def test_blood_cells_are_classified_as_in_dinobloom(train, test_set):
    found = fit_hematology(train).predict(test_set)
    assert list(found) == ["1-NN", "20-NN", "logistic"]
    for k in (1, 20):
        oracle = KNeighborsClassifier(k).fit(train.vector, train.targets)
        assert found[f"{k}-NN"].tolist() == oracle.predict(test_set.vector).tolist()
    oracle = LogisticRegression(C=5 * 3 / 100, tol=1e-10, solver="newton-cholesky")
    oracle.fit(train.vector, train.targets)
    assert found["logistic"].tolist() == oracle.predict(test_set.vector).tolist()


def test_classes_that_cannot_be_learned_are_named(train, test_set):
    require_known_classes(train, [test_set])
    few = Features(train.arrays, train.targets.clamp(max=1), train.indices, train.source)
    place = int((test_set.targets == 2).nonzero()[0])
    with pytest.raises(
        ValueError, match=rf"test/{place}\.png is of the class 'c', of which train has no readable"
    ):
        require_known_classes(few, [test_set])
    for number in (-1, 3):
        targets = test_set.targets.clone()
        targets[7] = number
        numbered = Features(test_set.arrays, targets, test_set.indices, test_set.source)
        with pytest.raises(ValueError, match=rf"test/7\.png has the class number {number}; expected 0 … 2"):
            require_known_classes(train, [numbered])
    other = Features(test_set.arrays, test_set.targets, test_set.indices, Named(120, "other", ("a", "b")))
    with pytest.raises(ValueError, match="other has 2 classes, train has 3"):
        require_known_classes(train, [other])
    nothing = Features(train.arrays, train.targets, train.indices, Named(300, "none", ()))
    with pytest.raises(ValueError, match="none has 0 classes"):
        require_known_classes(nothing, [])


class TestSplits:
    @pytest.fixture
    def folder(self, tmp_path):
        def make(*splits):
            for split in splits:
                for name in "ab":
                    path = tmp_path / split / name / f"{split}.png"
                    path.parent.mkdir(parents=True)
                    Image.new("RGB", (4, 4), (len(split), 0, 0)).save(path)
            return tmp_path

        return make

    def test_all_three(self, folder):
        splits = open_splits(folder("train", "val", "test"))
        assert [source.name.rsplit("/", 1)[1] for source in splits] == ["train", "val", "test"]

    @pytest.mark.parametrize("other", ["val", "test", "validation"])
    def test_two(self, folder, other):
        splits = open_splits(folder("train", other))
        assert splits.val is None
        assert splits.test.name.endswith(other)

    def test_a_test_split_of_two_names_is_one(self, monkeypatch):
        def open_named(spec, split):
            return replace(open_source(spec, split), name=split, numbers=np.arange(2000))

        monkeypatch.setattr("quickvit.evaluate.classification.open_source", open_named)
        assert open_splits("digits").val is None

    def test_the_test_can_be_named(self, folder):
        splits = open_splits(folder("train", "val", "test"), "val")
        assert splits.val is None
        assert splits.test.name.endswith("val")
        assert open_splits("digits").val is None

    def test_one_is_too_few(self, folder):
        with pytest.raises(FileNotFoundError, match="has no val split"):
            open_splits(folder("train"))


class TestPoses:
    """Handwritten digits through small backbones with random weights."""

    TURNS = (*POSES[:6], *(Pose(turn, mirror=True) for turn in (90.0, 180.0, 270.0)))

    @pytest.fixture(params=["i8", "h8"])
    def backbone(self, request):
        return Backbone(randomize(QuickVisionTransformer(family=request.param, **OPTIONS)), request.param)

    @pytest.fixture
    def load(self, backbone, tmp_path):
        transform, how = backbone.transform(), Extraction(tmp_path / "cache", batch_size=360)
        sources = {split: open_source("digits", split) for split in ("train", "val")}
        return lambda split, pose=UPRIGHT: extract(backbone, sources[split], transform, how, pose=pose)

    def test_invariant_features_lose_exactly_nothing(self, backbone, load):
        train = load("train")
        classifiers = {
            "knn": fit_knn(train, ks=(1, 20, 200)),
            "linear": fit_linear(train, training=SHORT, learning_rates=(0.01, 0.1)),
            "logistic": fit_logistic_grid(train, cs=(1.0,), max_iterations=100),
            "hematology": fit_hematology(train),
        }
        for name, classifier in classifiers.items():
            rows = classify_in_poses(classifier, lambda pose: load("val", pose), self.TURNS)
            upright = rows[0].scores
            assert max(upright.values()) > 0.3, name
            changes = [row.scores[key] - upright[key] for row in rows for key in upright]
            assert (set(changes) == {0.0}) == (backbone.name == "i8"), name
            same = min(value for row in rows for value in row.same.values())
            assert (same == 1.0) == (backbone.name == "i8"), name

    def test_features_move_as_the_family_promises(self, backbone):
        images = torch.stack([backbone.transform()(open_source("digits").read(i).image) for i in range(4)])
        errors = feature_errors(backbone, images)
        for name in ("vector", "patches"):
            assert list(errors[name]) == ["e", "r", "r2", "r3", "s", "sr", "sr2", "sr3"]
            assert errors[name]["e"] == 0
            assert (max(errors[name].values()) < 1e-4) == (backbone.name == "i8")
            if backbone.name == "h8":
                assert errors[name]["r"] > 0.1
