"""Explorations in files, which are not trusted."""

import base64
import io
import json

import pytest
import torch
from PIL import Image

from quickvit.group import D8
from quickvit.report import exploration_file
from quickvit.report.exploration_file import read_exploration, save_exploration
from quickvit.report.explorer import explorer_page


@pytest.fixture
def path(add_exploration):
    return add_exploration()


def picture(width=8, height=8, kind="png"):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def test_what_was_saved_is_read(exploration, path):
    found = read_exploration(path)
    for name in ("pictures", "classes", "targets", "copies"):
        assert getattr(found, name) == getattr(exploration, name)
    for ours, theirs in zip(found.features, exploration.features, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=theirs.abs().max().item() / 2**15)
    for ours, theirs in zip(found.answers, exploration.answers, strict=True):
        assert ours.model == theirs.model
        torch.testing.assert_close(ours.probabilities, theirs.probabilities, rtol=0, atol=1e-4)
        assert torch.equal(ours.labels, theirs.labels)
    assert list(found.filters) == list(exploration.filters)
    for name, filters in exploration.filters.items():
        torch.testing.assert_close(found.filters[name].double(), filters, rtol=0, atol=0.01)
    assert found.difference < 1e-3
    assert found.credit == "Images by nobody."
    assert found.source.command == "quickvit some command"


def test_a_file_gives_the_same_page_every_time(path):
    assert explorer_page(read_exploration(path)) == explorer_page(read_exploration(path))


def test_a_model_with_a_free_lift_has_no_filters(path):
    record = json.loads(path.read_text()) | {"filters": {}}
    path.write_text(json.dumps(record))
    assert read_exploration(path).filters == {}


def at(record, place):
    """The object that holds the last of these keys, and that key."""
    *before, last = place
    for key in before:
        record = record[key]
    return record, last


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("models",), ["a"], "models is .*expected the names of two models"),
        (("models",), "ab", "models is 'ab'; expected a list of texts"),
        (("classes",), [], "expected at least one name"),
        (("classes",), [1], "expected a list of texts"),
        (("credit",), ["<b>"], "expected a text"),
        (("copies", 0, "irrep"), "Z9", r"copies\[0\].irrep is 'Z9'; expected one of A1"),
        (("copies", 0, "channels"), [1, 2], "the numbers of 1 channels"),
        (("copies", 0, "channels"), ["1"], "a list of integers"),
        (("copies",), [{"irrep": "A1", "channels": [0]}], "at least one of each of A1, A2"),
        (("images",), [], "images is '\\[\\]'; expected at least one"),
        (("images", 0, "target"), 3, "one of 3 classes, or -1"),
        (
            ("images", 1, "picture"),
            "no base64!",
            r"images\[1\].picture is 'no base64!'; expected a PNG or JPEG",
        ),
        (("images", 1, "picture"), "ä", "expected a PNG or JPEG"),
        (("images", 1, "picture"), base64.b64encode(b"<svg onload=x>").decode(), "expected a PNG or JPEG"),
        (("images", 1, "picture"), picture(kind="gif"), "expected a PNG or JPEG"),
        (("images", 1, "picture"), picture()[:60], "expected a PNG or JPEG"),
        (("images", 1, "picture"), picture(8, 9), "a square image of at most 1024"),
        (("images", 1, "picture"), picture(2000, 2000), "a square image of at most 1024"),
        (("images", 0, "answers", "scale"), -1, "a positive number"),
        (("images", 0, "answers", "scale"), 1e400, "a finite number"),
        (("images", 0, "answers", "scale"), 7, "probabilities, which add up to 1"),
        (("images", 0, "answers", "bits"), 64, "bits is '64'; expected one of 8, 16"),
        (("images", 0, "answers", "shape"), [2, 8, 4], "that of 2 × 8 × 3 numbers"),
        (("images", 0, "features"), [], "those of 9 copies"),
        (("images", 0, "features", 0, "shape"), [8, 1, 10**9, 10**9], "numbers of 16 bits in base64"),
        (("images", 0, "features", 0, "shape"), [8, 1, 0, 4], "that of 8 × 1 × n × n numbers"),
        (("images", 0, "features", 0, "shape"), [8, 1, 2, 8], "square maps"),
        (("images", 0, "features", 0, "values"), "<script>", "base64"),
        (("filters",), {"A1": {}}, "filters.A1.shape is missing"),
        (("filters", "E₁", "values"), "AAAA", "filters.E₁.values"),
    ],
)
def test_what_is_wrong_is_refused(path, place, value, message):
    record = json.loads(path.read_text())
    holder, key = at(record, place)
    holder[key] = value
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message) as caught:
        read_exploration(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("key", ["models", "classes", "copies", "images"])
def test_what_is_missing_is_named(path, key):
    record = json.loads(path.read_text())
    del record[key]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"{key} is missing"):
        read_exploration(path)


def test_files_that_are_too_large(exploration, path, monkeypatch):
    monkeypatch.setattr(exploration_file, "LARGEST", 10_000)
    with pytest.raises(ValueError, match=r"expected at most 0\.01 MB"):
        read_exploration(path)
    with pytest.raises(ValueError, match=r"explore fewer than 2 images, or fewer channels"):
        save_exploration(exploration, path, {})


def test_maps_of_different_sizes(path):
    record = json.loads(path.read_text())
    image = record["images"][0]
    for packed, irrep in zip(image["features"], [copy["irrep"] for copy in record["copies"]], strict=True):
        dim = 2 if irrep == "E" else 1
        packed |= {"shape": [8, dim, 1, 1], "values": base64.b64encode(bytes(16 * dim)).decode()}
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="features of the same size"):
        read_exploration(path)


def test_filters_are_named_by_component():
    assert exploration_file.FILTERS == ["A1", "A2", "B1", "B2", "E₁", "E₂"]
    assert len(exploration_file.FILTERS) == sum(irrep.dim for irrep in D8.irreps)
