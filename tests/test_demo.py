"""The demonstration, cut short."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quickvit import D8, act_on_image
from quickvit.demo import (
    MODELS,
    DemoConfig,
    DemoRecipe,
    create_model,
    format_table,
    learning_rate,
    load_digits,
    predict,
    run_demo,
    shift,
    transform,
)
from quickvit.report.weights import principal_filters

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

SHORT = DemoConfig(
    epochs=2,
    batch_size=16,
    image_size=16,
    patch_size=4,
    width=32,
    depth=2,
    heads=2,
    test_images=80,
    train_images=160,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_demo(replace(SHORT, out=tmp_path_factory.mktemp("runs") / "demo"))


def without_times(results):
    rows = [
        {k: v for k, v in row.items() if k not in ("images_per_second", "train_seconds")}
        for row in results["rows"]
    ]
    keys = ("curves", "confusion_upright", "confusion_transformed", "lookalikes", "images")
    return {"rows": rows, **{key: results[key] for key in keys}}


def test_results_are_complete_and_written(results):
    assert [row["model"] for row in results["rows"]] == list(MODELS)
    vit, h8, i8 = results["rows"]
    assert h8["parameters"] < i8["parameters"] < vit["parameters"]
    assert h8["macs"] < i8["macs"] < vit["macs"]
    for row in results["rows"]:
        assert row["images_per_second"] > 0
        assert row["train_seconds"] > 0
        assert len(results["curves"][row["model"]]) == SHORT.epochs
        assert row["accuracy_upright"] == results["curves"][row["model"]][-1]
    assert results["images"] == {"train": 160, "test": 80}
    assert results["hardware"]["threads"] == 1
    assert "torch" in results["versions"]

    out = Path(results["config"]["out"])
    assert json.loads((out / "results.json").read_text()) == results
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_i8_gives_a_transformed_image_the_same_answer(results):
    vit, h8, i8 = results["rows"]
    assert i8["same_answer"] == 1
    assert i8["accuracy_upright"] == i8["accuracy_transformed"]
    assert results["confusion_upright"]["i8"] == results["confusion_transformed"]["i8"]
    assert vit["same_answer"] < 1
    assert h8["same_answer"] < 1


def test_confusions_add_up(results):
    for name in MODELS:
        counts = torch.tensor(results["confusion_upright"][name])
        assert counts.sum() == SHORT.test_images
        row = results["rows"][MODELS.index(name)]
        assert counts.trace() / counts.sum() == pytest.approx(row["accuracy_upright"])
    six_nine = results["lookalikes"][0]
    counts = torch.tensor(results["confusion_upright"]["i8"])
    assert six_nine["pair"] == [6, 9]
    assert six_nine["confused"]["i8"] == counts[6, 9] + counts[9, 6]
    assert six_nine["images"] == counts[[6, 9]].sum()


def test_table_shows_every_model_and_the_lookalikes(results):
    lines = format_table(results).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == list(MODELS)
    assert len({len(line) for line in lines[:5]}) == 1
    assert any(line.startswith("6 and 9 are a half turn apart.") for line in lines)
    assert any(line.startswith("Hardest for i8: ") for line in lines)


def test_same_seed_same_results(results, tmp_path):
    before = torch.get_num_threads()
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = run_demo(replace(SHORT, out=tmp_path))
    assert without_times(again) == without_times(results)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == before


def test_another_seed_gives_other_images_and_weights():
    other = replace(SHORT, seed=1)
    assert not torch.equal(load_digits(SHORT).test_labels, load_digits(other).test_labels)


def test_train_and_test_images_do_not_overlap():
    digits = load_digits(replace(SHORT, train_images=None))
    assert len(digits.train_images) + len(digits.test_images) == 1797
    train = {image.numpy().tobytes() for image in digits.train_images}
    assert not train & {image.numpy().tobytes() for image in digits.test_images}


@pytest.mark.parametrize("name", MODELS)
def test_only_i8_is_invariant_on_all_eight_elements(name):
    torch.manual_seed(0)
    model = create_model(name, SHORT).eval()
    images = load_digits(SHORT).test_images[:8]
    with torch.no_grad():
        upright = model(images)
        errors = [(model(act_on_image(images, g)) - upright).abs().max() / upright.std() for g in D8.elements]
    assert errors[0] == 0
    assert (max(errors) < 1e-4) == (name == "i8")
    assert predict(model, images).shape == (8,)


def test_transform_applies_each_element_to_its_images():
    images = torch.randn(16, 1, 8, 8)
    poses = torch.arange(16) % 8
    for image, pose, result in zip(images, poses.tolist(), transform(images, poses), strict=True):
        assert torch.equal(result, act_on_image(image, D8.elements[pose]))


def test_shift_moves_whole_images():
    images = torch.zeros(64, 1, 8, 8)
    images[:, 0, 3, 4] = 1
    moved = shift(images, 2, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert (moved.flatten(1).sum(1) == 1).all()
    places = {tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert {y for y, _ in places} == {1, 2, 3, 4, 5}
    assert {x for _, x in places} == {2, 3, 4, 5, 6}
    assert torch.equal(shift(images, 0, torch.Generator()), images)


def test_learning_rate_warms_up_and_falls_to_zero():
    config = DemoConfig(epochs=4, warmup_epochs=1, learning_rate=1.0)
    rates = [learning_rate(step, 10, config) for step in range(40)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01


@pytest.mark.parametrize("name", ["epochs", "batch_size"])
def test_settings_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        DemoConfig(**{name: 0})


def test_a_batch_larger_than_the_training_set_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at most the 160 training images, got 161"):
        run_demo(replace(SHORT, out=tmp_path, batch_size=161))


def test_a_signal_ends_the_demo_and_nothing_is_written(monkeypatch, tmp_path):
    started = []
    batches = DemoRecipe.batches

    def interrupted(self, start, world):
        started.append(self)
        for batch in batches(self, start, world):
            yield batch
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(DemoRecipe, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(replace(SHORT, out=tmp_path / "demo"))
    assert len(started) == 1
    assert not (tmp_path / "demo").exists()


def test_a_file_in_place_of_the_folder_is_found_before_training(monkeypatch, tmp_path):
    out = tmp_path / "demo"
    out.touch()
    monkeypatch.setattr("quickvit.demo.train", lambda *arguments: pytest.fail("this takes time"))
    with pytest.raises(NotADirectoryError, match=f"{out} is a file"):
        run_demo(replace(SHORT, out=out))


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")])
def test_missing_extra_is_named(monkeypatch, tmp_path, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ModuleNotFoundError, match=rf'needs {package}: pip install "quickvit\[demo\]"'
    ) as error:
        run_demo(replace(SHORT, out=tmp_path / "demo"))
    assert error.value.name == package
    assert not (tmp_path / "demo").exists()


def test_shown_filters_have_the_symmetry_of_their_irrep():
    torch.manual_seed(0)
    rows = principal_filters(create_model("h8", SHORT), load_digits(SHORT).test_images, 3)
    assert list(rows) == ["A1", "A2", "B1", "B2", "E₁", "E₂"]
    r, s = D8.elements[1], D8.elements[4]
    for name, turned, mirrored in (("A1", 1, 1), ("A2", 1, -1), ("B1", -1, 1), ("B2", -1, -1)):
        torch.testing.assert_close(act_on_image(rows[name], r), turned * rows[name])
        torch.testing.assert_close(act_on_image(rows[name], s), mirrored * rows[name])
    torch.testing.assert_close(act_on_image(rows["E₁"], r), rows["E₂"])
    torch.testing.assert_close(act_on_image(rows["E₂"], r), -rows["E₁"])
    torch.testing.assert_close(act_on_image(rows["E₁"], s), -rows["E₁"])
    torch.testing.assert_close(act_on_image(rows["E₂"], s), rows["E₂"])
