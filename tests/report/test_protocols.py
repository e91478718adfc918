"""Tables of frozen features: what `quickvit eval … --json` wrote is what they show."""

import json

import pytest

from quickvit.report.results import read_results
from quickvit.report.table import NOT_RUN, markdown
from quickvit.report.tables.protocols import image_labels, masks, turned_answers


@pytest.fixture
def add(bench):
    def add(name, **record):
        folder = bench / "frozen"
        folder.mkdir(exist_ok=True)
        about = {"data": "somewhere/pbc", "command": "quickvit eval", "date": "2026-01-02", "hardware": {}}
        (folder / f"{name}.json").write_text(json.dumps({**about, **record}))

    return add


def test_answers_of_all_protocols(bench, add):
    scores = {"accuracy": 0.9, "weighted_f1": 0.8, "balanced_accuracy": 0.7}
    add("pbc-i8-trained-hematology", protocol="hematology", answers={"1-NN": scores, "logistic": scores})
    add("pbc-i8-trained-knn", protocol="knn", answers={"20-NN": scores})
    answers = {"knn": {"mean_iou": 0.5, "pixel_accuracy": 0.75, "chosen": {"k": 3}, "tried": []}}
    add("camvid-i8-segmentation", protocol="segmentation", data="camvid", answers=answers)
    results = read_results(bench)
    assert image_labels(results).rows == (
        ("pbc", "i8-trained", "1-NN, hematology", "90.00", "80.00", "70.00"),
        ("pbc", "i8-trained", "logistic", "90.00", "80.00", "70.00"),
        ("pbc", "i8-trained", "20-NN, knn", "90.00", "80.00", "70.00"),
    )
    assert masks(results).rows == (("camvid", "i8", "knn", "50.00", "75.00"),)


def test_rows_of_the_papers_table_are_a_data_set_each(bench, add):
    """What `quickvit eval all` prints."""
    found = {"imagenet linear": 0.5, "imagenet knn": 0.25, "places365 linear": None, "voc2012 knn": 0.125}
    add("any-i8-all", protocol="all", data=None, gmacs=1.0, **found)
    results = read_results(bench)
    assert image_labels(results).rows == (
        ("imagenet", "i8", "linear, all", "50.00", "–", "–"),
        ("imagenet", "i8", "knn, all", "25.00", "–", "–"),
    )
    assert masks(results).rows == (("voc2012", "i8", "knn, all", "12.50", "–"),)


def test_classifiers_in_poses(bench, add):
    """What `quickvit eval rotation` prints without a protocol."""
    rows = [{"pose": "upright", "top1": 90.0, "top5": None}, {"pose": "90°", "top1": 80.0, "top5": None}]
    add("pbc-vit-accuracy", protocol="accuracy", rows=rows)
    assert turned_answers(read_results(bench)).rows == (
        ("pbc", "vit", "top1", "90.00", "−10.00", NOT_RUN, NOT_RUN, NOT_RUN),
    )


def test_changes_are_those_of_the_poses(bench, add):
    poses = {"upright": 0.9, "90°": 0.85, "mirrored": 0.9, "45°": 0.95}
    rows = [{"pose": pose, "scores": {"1-NN": score}} for pose, score in poses.items()]
    add("pbc-vit-rotation", protocol="hematology", rows=rows)
    assert turned_answers(read_results(bench)).rows == (
        ("pbc", "vit", "1-NN", "90.00", "−5.00", "0.00", NOT_RUN, "+5.00"),
    )


def test_how_a_model_was_trained_is_told(bench, add):
    add("pbc-i8-knn", protocol="knn", trained_by="quickvit train deit3", answers={"1-NN": {"accuracy": 0.5}})
    (source,) = image_labels(read_results(bench)).sources
    assert source.command == "quickvit train deit3 && quickvit eval"


def test_a_remark_is_shown_with_its_source(bench, add):
    add("pbc-i8-knn", protocol="knn", remark="on a Monday", answers={"1-NN": {"accuracy": 0.5}})
    assert "on a Monday" in markdown(image_labels(read_results(bench)))


def test_gaps_are_told(bench):
    for table in (image_labels, masks, turned_answers):
        found = table(read_results(bench))
        assert found.gaps
        assert "frozen.sh" in found.commands[0]


@pytest.mark.parametrize(
    "wrong", [{"answers": []}, {"answers": {"1-NN": {"accuracy": "high"}}}, {"protocol": 3}]
)
def test_a_wrong_file_is_named(bench, add, wrong):
    add("pbc-i8-knn", **{"protocol": "knn", **wrong})
    with pytest.raises(ValueError, match=r"pbc-i8-knn\.json"):
        read_results(bench)
