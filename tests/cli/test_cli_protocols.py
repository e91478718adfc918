"""`quickvit eval knn`, `linear`, `hematology`, `segmentation`, `all`, and `rotation` of frozen features."""

import csv
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from quickvit import QuickVisionTransformer, save_checkpoint
from quickvit.data import Unreadable
from quickvit.data.sources.digits import DigitsSource
from quickvit.report.evaluation_figure import draw_confusion, draw_predictions
from quickvit.testing import randomize

OPTIONS = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}
TURNS = ("90°", "180°", "270°", "mirrored", "random quarter turn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of an i8 and an h8."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("i8", "h8"):
        save_checkpoint(
            randomize(QuickVisionTransformer(family=family, **OPTIONS)), folder / f"{family}.safetensors"
        )
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for all tests: most of them ask the same features."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def ask(run, folder, cache):
    """Run a protocol on the i8: exit code, standard output, standard error."""

    def call(protocol, *options, model=folder / "i8.safetensors"):
        where = ("--cache", cache, "--device", "cpu", "--batch-size", 360)
        return run("eval", protocol, model, *where, *options)

    return call


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Blood cells of three colours, listed in files."""
    root = tmp_path_factory.mktemp("cells")
    generator = np.random.default_rng(0)
    for split, number in (("train", 12), ("test", 6)):
        rows = []
        for i in range(number):
            pixels = generator.integers(0, 80, (20, 30, 3))
            pixels[..., i % 3] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"{split}{i}.png")
            rows.append(f"{split}{i}.png,{'ABC'[i % 3]}")
        (root / f"{split}.csv").write_text("\n".join(["Image Path,Label", *rows]))
    return root


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Images of two halves, with masks."""
    root = tmp_path_factory.mktemp("scenes")
    generator = np.random.default_rng(0)
    for split, number in (("train", 12), ("val", 4)):
        for i in range(number):
            mask = np.zeros((40, 40), np.uint8)
            mask[:, 10 * (1 + i % 3) :] = 1
            pixels = 40 + 150 * mask[..., None] + generator.integers(0, 30, (40, 40, 3))
            for kind, values in (("images", pixels), ("annotations", mask)):
                path = root / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values.astype(np.uint8)).save(path)
    return root


def test_knn(ask):
    code, out, err = ask("knn", "--json")
    result = json.loads(out)
    assert code == 0
    assert "features of digits (train)" in err
    assert list(result["answers"]) == ["1-NN", "10-NN", "20-NN", "100-NN", "200-NN"]
    assert result["answer"] == f"{result['chosen']['k']}-NN"
    assert result["accuracy"] == result["answers"][result["answer"]]["accuracy"] > 0.5
    assert (result["tested_on"], result["images"], result["unreadable"]) == ("digits (test)", 360, 0)
    assert result["img_size"] == [32, 32]
    code, out, err = ask("knn", "--neighbours", 1, 3)
    assert code == 0
    assert "features of" not in err
    assert out.count("\n") == 1
    assert "1-NN" in out
    assert "3-NN" in out
    assert out.endswith("; 360 images of digits (test), 0 could not be read\n")


def test_images_that_cannot_be_read_are_counted(ask, monkeypatch, tmp_path):
    def holey(self, index):
        if index == 7:
            raise Unreadable(self.describe(index), "torn")
        return read(self, index)

    read = DigitsSource.read
    monkeypatch.setattr(DigitsSource, "read", holey)
    code, out, _ = ask("knn", "--neighbours", 1, "--cache", tmp_path)
    assert code == 0
    assert out.endswith("; 359 images of digits (test), 1 could not be read\n")
    monkeypatch.setattr(DigitsSource, "read", read)
    assert ask("knn", "--neighbours", 1, "--cache", tmp_path)[1].endswith("(test), 0 could not be read\n")


@pytest.mark.parametrize("protocol", ["knn", "accuracy"])
def test_how_many_images_may_be_unreadable(run, folder, tmp_path, monkeypatch, protocol):
    def torn(self, index):
        if index % 10 == 0:
            raise Unreadable(self.describe(index), "torn")
        return read(self, index)

    read = DigitsSource.read
    monkeypatch.setattr(DigitsSource, "read", torn)
    cache = ("--cache", tmp_path) if protocol == "knn" else ()
    command = ("eval", protocol, folder / "i8.safetensors", *cache)
    code, _, err = run(*command)
    assert code == 2
    assert "cannot be read, more than max_unreadable=0.05 allows" in err
    assert run(*command, "--max-unreadable", 0.2)[0] == 0


def test_linear(ask):
    code, out, _ = ask("linear", "--steps", 50, "--learning-rates", 0.001, 0.1, "--json")
    result = json.loads(out)
    assert code == 0
    assert len(result["tried"]) == 4
    assert result["chosen"]["learning_rate"] == 0.1
    assert result["accuracy"] > 0.3
    code, out, _ = ask("linear", "--steps", 50, "--learning-rates", 0.1)
    assert code == 0
    assert out.startswith(f"linear {result['accuracy']:.2%} (inputs class_1")


def test_logistic_regression(ask):
    code, out, _ = ask("linear", "--solver", "lbfgs", "--cs", 0.01, 1, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["answer"] == "logistic"
    assert [trial["choice"] for trial in result["tried"]] == [{"c": 0.01}, {"c": 1.0}]
    assert result["accuracy"] > 0.5


@pytest.mark.parametrize("options", [("linear",), ("rotation", "--protocol", "linear")])
def test_options_of_the_other_solver_are_refused(ask, monkeypatch, options):
    for command in ("protocols", "rotation"):
        monkeypatch.setattr(f"quickvit.cli.{command}.freeze", lambda _: pytest.fail("work began"))
    for given, message in (
        (("--solver", "lbfgs", "--steps", 3), "--steps is for --solver sgd, got lbfgs"),
        (("--solver", "lbfgs", "--learning-rates", 3), "--learning-rates is for --solver sgd, got lbfgs"),
        (("--cs", 3), "--cs is for --solver lbfgs, got sgd"),
    ):
        code, out, err = ask(*options, *given)
        assert (code, out) == (2, "")
        assert message in err


def test_hematology_with_lists(ask, cells, tmp_path):
    lists = ("--data", cells, "--train-list", cells / "train.csv", "--test-list", cells / "test.csv")
    table = tmp_path / "new" / "confusion.csv"
    code, out, _ = ask("hematology", *lists, "--confusion", table)
    assert code == 0
    assert out.startswith("1-NN wF1 100.00%, acc 100.00%, bAcc 100.00%; logistic wF1 ")
    with table.open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["true class", "A", "B", "C"]
    assert [sum(map(int, row[1:])) for row in rows[1:]] == [2, 2, 2]
    code, _, err = ask("hematology", "--data", cells, "--train-list", cells / "train.csv")
    assert code == 2
    assert "--train-list and --test-list belong together" in err


def test_segmentation(ask, scenes, tmp_path):
    code, out, _ = ask("segmentation", "--data", scenes, "--picture", tmp_path / "masks.png", "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["images"], result["unreadable"]) == (4, 0)
    for name in ("knn", "linear"):
        assert result["answers"][name]["mean_iou"] == result["answers"][name]["mean_iou_of_classes"] > 0.8
    assert [len(result["answers"][name]["tried"]) for name in ("knn", "linear")] == [8, 8]
    with Image.open(tmp_path / "masks.png") as picture:
        assert min(picture.size) > 500
    other = ("--ignore", 2, 65535, "--picture", tmp_path / "masks.png")
    code, out, _ = ask("segmentation", "--data", scenes, *other)
    assert code == 0
    assert out.startswith(f"knn mIoU {result['answers']['knn']['mean_iou']:.2%}, pixel accuracy ")
    assert out.endswith("; 4 images, 0 could not be read\n")


def test_one_label_is_nothing_to_learn(ask, scenes):
    code, out, err = ask("segmentation", "--data", scenes, "--ignore", 0, 255)
    assert (code, out) == (2, "")
    assert (
        "have only the label 1 beside those that are ignored (0, 255); expected at least two. Save masks of"
        in err
    )


def test_pictures(ask, tmp_path):
    files = [tmp_path / "confusion.png", tmp_path / "new" / "digits.png"]
    assert ask("knn", "--confusion", files[0], "--picture", files[1])[0] == 0
    for file in files:
        with Image.open(file) as picture:
            assert min(picture.size) > 500


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        (
            "--confusion",
            "a.txt",
            "a.txt: expected the name of a CSV file or a picture, which ends in one of .",
        ),
        ("--confusion", "folder", "folder: it is a folder; expected the name of a file"),
        ("--picture", "a.csv", "a.csv: expected the name of a picture, which ends in one of ."),
        ("--picture", "name", "name: expected the name of a picture, which ends in one of ."),
        ("--picture", "file/a.png", "file is a file"),
    ],
)
def test_places_of_pictures_are_checked_before_the_work(ask, tmp_path, monkeypatch, option, name, message):
    monkeypatch.setattr("quickvit.cli.protocols.freeze", lambda _: pytest.fail("work began"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for protocol in ("linear", "segmentation") if option == "--picture" else ("linear",):
        code, out, err = ask(protocol, option, tmp_path / name)
        assert (code, out) == (2, "")
        assert message in err


@pytest.mark.parametrize("option", ["--confusion", "--picture"])
def test_a_result_is_printed_before_its_picture_is_drawn(ask, tmp_path, monkeypatch, option):
    def fail(*_):
        raise OSError("the disk is full")

    for name in ("draw_confusion", "draw_predictions"):
        monkeypatch.setattr(f"quickvit.report.evaluation_figure.{name}", fail)
    code, out, err = ask("knn", "--neighbours", 1, option, tmp_path / "a.png")
    assert code == 2
    assert out.startswith("1-NN ")
    assert "the disk is full" in err


def test_names_of_classes_may_have_dollars_in_them(tmp_path):
    confusion, classes = torch.eye(2, dtype=torch.int64), (r"$\foo$", "b")
    draw_confusion(confusion, classes, tmp_path / "confusion.png")
    draw_predictions([Image.new("RGB", (4, 4))], [(classes[0], "b")], tmp_path / "predictions.png")
    assert (tmp_path / "predictions.png").exists()


def test_pictures_need_an_extra(ask, monkeypatch):
    monkeypatch.setattr("quickvit.cli.protocols.find_spec", lambda name: None)
    code, _, err = ask("knn", "--picture", "p.png")
    assert code == 2
    assert 'pictures need matplotlib: pip install "quickvit[demo]"' in err
    assert ask("knn", "--neighbours", 1)[0] == 0


def test_a_row_of_the_table(ask, scenes, monkeypatch):
    monkeypatch.setattr("quickvit.cli.frozen.ProbeTraining.steps", 20)
    code, out, _ = ask("all", "--imagenet", "digits", "--voc2012", scenes)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split("  ")[0].split() == ["model"]
    cells = lines[2].split()
    assert cells[4:10] == 6 * ["–"]
    assert all(float(cell) > 30 for cell in (*cells[2:4], *cells[10:12]))
    result = json.loads(ask("all", "--imagenet", "digits", "--json")[1])
    assert result["protocol"] == "all"
    assert f"{100 * result['imagenet linear']:.1f}" == cells[2]
    code, _, err = ask("all")
    assert code == 2
    assert "give at least one of --imagenet, --inaturalist, --places365, --ade20k, --voc2012" in err


@pytest.mark.parametrize("protocol", ["knn", "hematology"])
def test_rotation_of_frozen_features(ask, folder, protocol):
    for family in ("i8", "h8"):
        code, out, _ = ask(
            "rotation", "--protocol", protocol, "--json", model=folder / f"{family}.safetensors"
        )
        result = json.loads(out)
        rows = {row["pose"]: row for row in result["rows"]}
        assert code == 0
        turned = [change for pose in TURNS for change in rows[pose]["changes"].values()]
        assert (set(turned) == {0.0}) == (family == "i8")
        assert any(rows["45°"]["changes"].values())
        errors = {name: max(found.values()) for name, found in result["feature_errors"].items()}
        assert (max(errors.values()) < 1e-4) == (family == "i8")
    # Upright they are what the protocol says of them, turned something else.
    _, out, _ = ask(protocol, "--dtype", "float32", "--json", model=folder / "h8.safetensors")
    assert rows["upright"]["answers"] == json.loads(out)["answers"]
    assert rows["90°"]["answers"] != rows["upright"]["answers"]
    code, out, _ = ask("rotation", "--protocol", protocol)
    assert code == 0
    assert out.splitlines()[0].startswith("pose")
    assert "relative to their spread: vector " in out


def test_scores_are_not_lost_with_the_errors_of_the_features(ask, monkeypatch):
    monkeypatch.setattr("quickvit.cli.rotation.COMPARED", 1)
    code, out, _ = ask("rotation", "--protocol", "knn", "--neighbours", 1)
    words = "no errors of the features: the spread needs a batch of at least two inputs"
    assert code == 0
    assert out.startswith("pose")
    assert out.splitlines()[-1].startswith(words)
    result = json.loads(ask("rotation", "--protocol", "knn", "--neighbours", 1, "--json")[1])
    assert len(result["rows"]) == 8
    assert result["feature_errors"] == {}
    assert result["remark"].startswith(words)


@pytest.mark.parametrize("circle", [False, True])
def test_errors_of_the_features_are_those_of_the_images_that_are_scored(ask, monkeypatch, circle):
    seen = []
    monkeypatch.setattr("quickvit.cli.rotation.feature_errors", lambda _, images: seen.append(images) or {})
    ask("rotation", "--protocol", "knn", "--neighbours", 1, *["--circle"] * circle)
    assert (seen[0][..., 0, 0] == 0).all() == circle
    assert (seen[0] != 0).any()


def test_rotation_has_the_options_of_its_protocols(ask, run, folder, cells, scenes):
    lists = ("--data", cells, "--train-list", cells / "train.csv", "--test-list", cells / "test.csv")
    _, out, _ = ask("rotation", "--protocol", "hematology", *lists, "--json")
    _, alone, _ = ask("hematology", *lists, "--dtype", "float32", "--json")
    assert json.loads(out)["rows"][0]["answers"] == json.loads(alone)["answers"]
    code, _, err = ask("rotation", "--protocol", "segmentation", "--data", scenes, "--ignore", 0, 1)
    assert code == 2
    assert "ignore" in err or "label" in err
    for options, message in (
        (("--protocol", "knn", "--ignore", 11), "--ignore is for --protocol segmentation, got knn"),
        (("--neighbours", 3), "--neighbours is for --protocol knn, got accuracy"),
        (("--train-list", "a.csv"), "--train-list is for --protocol knn, linear, hematology"),
        (("--protocol", "knn", *lists, "--split", "val"), "--split is for splits in folders"),
        (
            ("--data", "digits"),
            "--cache is for --protocol knn, linear, hematology, segmentation, got accuracy",
        ),
        (("--protocol", "knn", "--img-size", "32x64"), "random turns need square images"),
    ):
        code, _, err = ask("rotation", *options)
        assert code == 2
        assert message in err
    code, _, err = run("eval", "rotation", folder / "i8.safetensors", "--img-size", "32x64")
    assert code == 2
    assert "random turns need square images, the model's are 32×64" in err


def test_weights_with_a_head_of_their_own(ask, tmp_path):
    """Or with none, of timm's ViTs and of Quick ViTs."""
    small = ("--img-size", 32, "--neighbours", 1)
    for name in ("vit_tiny_patch16_224", "quickvit_h8_tiny_patch16_224"):
        for classes in (0, 5):
            model = timm.create_model(name, num_classes=classes)
            torch.save(model.state_dict(), tmp_path / "weights.pth")
            code, _, _ = ask("knn", *small, "--checkpoint", tmp_path / "weights.pth", model=name)
            assert code == 0


def test_rotation_of_segmentation(ask, scenes):
    code, out, _ = ask("rotation", "--protocol", "segmentation", "--data", scenes, "--json")
    rows = {row["pose"]: row for row in json.loads(out)["rows"]}
    assert code == 0
    assert {rows[pose]["changes"]["linear"] for pose in TURNS} == {0.0}
    assert rows["90°"]["same"] is None


def test_names_of_models(ask, tmp_path):
    small = ("--img-size", 32, "--neighbours", 1)
    code, _, err = ask("knn", *small, model="quickvit_h8_tiny_patch16_224")
    assert code == 0
    assert "the weights are random" in err
    weights = tmp_path / "vit.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=2).state_dict(), weights)
    code, _, err = ask("knn", *small, "--checkpoint", weights, model="vit_tiny_patch16_224")
    assert code == 2
    assert "does not fit the model: missing blocks.2" in err
    code, _, err = ask("knn", *small, model="eva02_tiny_patch14_224")
    assert code == 2
    assert "32×32 pixels has no whole patches of 14" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "/nowhere"), "no data at '/nowhere'"),
        (("--split", "dev"), "unknown split 'dev'"),
        (("--img-size", "33"), "33×33 pixels has no whole patches of 8"),
        (("--pretrained",), "has weights already; --checkpoint and --pretrained are for names of models"),
        (("--neighbours", "5000"), "fewer images to learn from (1295) than neighbours"),
    ],
)
def test_wrong_arguments_are_named(ask, options, message):
    code, out, err = ask("knn", *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere.safetensors", "no checkpoint at nowhere.safetensors"),
        ("runs/nowhere", "no checkpoint at runs/nowhere"),
        ("resnet18", "resnet18 is no vision transformer"),
        ("quickvit_i9_tiny", "unknown model 'quickvit_i9_tiny'"),
    ],
)
def test_wrong_models_are_named(ask, model, message):
    code, out, err = ask("knn", model=model)
    assert (code, out) == (2, "")
    assert message in err
