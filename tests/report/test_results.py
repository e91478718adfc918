"""Reading what was measured, and refusing what cannot have been."""

import json

import pytest

from quickvit.report.results import QUARTER, Results, read_results
from quickvit.report.sample import Sample, number, uncertainty


def test_a_run(bench, add_run):
    add_run(name="h8", seed=3, top1=91.0)
    (run,) = read_results(bench).runs
    assert (run.study, run.dataset, run.name, run.seed) == ("families", "cifar10", "h8", 3)
    assert run.score("top1") == 91
    assert run.change("top1", QUARTER) == -20
    assert run.curve[0] == (200, {"eval/top1": pytest.approx(45.5)})
    assert run.memory_mib is None
    source = run.source
    assert (source.file, source.hardware, source.gpu) == ("results/cifar10-families/h8-3.json", "A GPU", True)
    assert (source.date, source.command) == ("2026-01-02", "quickvit some command")


def test_frozen_features_are_shares(bench, add_run):
    poses = [{"pose": "upright", "scores": {"20-NN": 0.5}}, {"pose": QUARTER, "scores": {"20-NN": 0.4}}]
    answers = {"1-NN": {"weighted_f1": 0.25}}
    progress = [{"step": 0, "poses": poses}, {"step": 9, "poses": [{"pose": "upright", "answers": answers}]}]
    add_run("dinov2", poses=poses, progress=progress)
    (run,) = read_results(bench).runs
    assert run.score("20-NN") == 50
    assert run.change("20-NN", QUARTER) == pytest.approx(-10)
    assert run.answers() == {"1-NN": {"weighted_f1": 25}}
    assert run.answers(step=0) == run.answers(QUARTER) == run.answers(step=5) == {}


def test_what_a_file_does_not_say_is_none(bench, add_run):
    keys = ("model", "gmacs", "parameters", "training", "curve", "poses", "provenance")
    add_run(**dict.fromkeys(keys))
    (run,) = read_results(bench).runs
    assert run.gmacs is run.images_per_s is run.score("top1") is run.change("top1", QUARTER) is None
    assert run.source.hardware == "unknown hardware"


def test_no_study_has_been_run(bench):
    assert read_results(bench) == Results()


def test_a_measurement(bench, add_bench):
    add_bench("gpu_model", "model", ("ViT-Large/16 forward", "d8", 1.9))
    results = read_results(bench)
    ((measurement, row),) = results.measured("model")
    assert (row.name, row.ratio, row.memory_mib) == ("d8", 1.9, None)
    assert (measurement.batch, measurement.compile) == ("64", "default")
    assert not list(results.measured("train"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "0"}, "seed is '0'; expected an integer"),
        ({"seed": True}, "seed is 'True'; expected an integer"),
        ({"study": None}, "study is missing; expected a text"),
        ({"gmacs": "many"}, "gmacs is 'many'; expected a finite number"),
        ({"gmacs": float("nan")}, "gmacs is 'nan'; expected a finite number"),
        ({"parameters": 10**400}, "expected a finite number"),
        ({"training": [1]}, r"training is '\[1\]'; expected an object"),
        ({"poses": {"upright": 1}}, "poses is .*; expected a list of objects"),
        ({"poses": [{"pose": "upright", "top1": "high"}]}, r"poses\[0\]\.top1 is 'high'; expected a finite"),
        ({"poses": [{"top1": 1.0}]}, r"poses\[0\]\.pose is missing"),
        ({"curve": [{"step": 1, "eval/top1": []}]}, r"curve\[0\]\.eval/top1 is"),
        (
            {"progress": [{"step": 1, "poses": [{"pose": "upright", "answers": {"1-NN": 3}}]}]},
            r"progress\[0\]\.poses\[0\]\.answers\.1-NN is '3'; expected an object",
        ),
        ({"progress": [{"step": 0.5}]}, r"progress\[0\]\.step is '0.5'; expected an integer"),
        ({"provenance": {"hardware": {"gpu": 1}}}, r"provenance\.hardware\.gpu is '1'; expected a text"),
    ],
)
def test_wrong_values_are_told_with_their_file(bench, add_run, changes, message):
    path = add_run(**changes)
    with pytest.raises(ValueError, match=message) as error:
        read_results(bench)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"a": ' + "9" * 10_000 + "}"])
def test_what_is_not_json(bench, text):
    (bench / "gpu_model.json").write_text(text)
    with pytest.raises(ValueError, match=r"gpu_model\.json: not JSON"):
        read_results(bench)


def test_what_is_not_a_record(bench):
    (bench / "list.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"list\.json: expected an object with what was measured, got list"):
        read_results(bench)
    (bench / "list.json").write_text(json.dumps({"benchmark": "model"}))
    with pytest.raises(ValueError, match="results is missing; expected a list of objects"):
        read_results(bench)


def test_a_seed_counts_once(bench, add_run):
    path = add_run()
    (path.parent / "copy.json").write_text(path.read_text())
    with pytest.raises(ValueError, match=r"vit-0\.json: seed 0 of 'vit' .* is also in .*copy\.json"):
        read_results(bench)


def test_missing_folders(bench, tmp_path):
    with pytest.raises(
        ValueError, match=r"there is no folder .*nowhere; expected one with the JSON files of bench"
    ):
        read_results(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"there is no folder .*nothing; expected one with the JSON files of resul"
    ):
        read_results(bench, tmp_path / "nothing")


def test_a_sample():
    sample = Sample.of([1.0, None, 2.0, 6.0])
    assert sample.mean == 3
    assert sample.spread == pytest.approx(7**0.5)
    assert sample.text(2) == "3.00 ± 2.65"
    assert Sample((1000.0, 9000.0)).text(0) == "5,000 ± 5,657"
    assert Sample((1.0,)).text(1, sign=True) == "+1.0"
    assert Sample.of([None]) is None
    assert uncertainty(sample, sample) == pytest.approx(2 * (2 * 7 / 3) ** 0.5)
    assert uncertainty(sample, Sample((1.0,))) is None
    with pytest.raises(ValueError, match="at least one value"):
        Sample(())


@pytest.mark.parametrize(
    ("value", "digits", "sign", "text"),
    [
        (-0.001, 2, True, "0.00"),
        (-12.34, 1, False, "−12.3"),
        (1234.5, 0, False, "1,234"),
        (0.5, 1, True, "+0.5"),
    ],
)
def test_numbers(value, digits, sign, text):
    assert number(value, digits, sign) == text
