"""The slower of data and model decides the throughput of both."""

import json
import time
from dataclasses import dataclass

import pytest
import torch
from PIL import Image

from quickvit.bench import feeding, suite
from quickvit.bench.timing import Settings
from quickvit.bench.work import Shape
from quickvit.cli import main
from quickvit.data import Sample

SHAPE = Shape("tiny", 16, 32, 1)


@dataclass(frozen=True)
class Slow:
    """Images of which each takes some seconds to read."""

    seconds: float
    name: str = "slow images"
    classes: tuple = ("a", "b")

    def __len__(self):
        return 100

    def read(self, index):
        time.sleep(self.seconds)
        return Sample(Image.new("RGB", (8, 8)), index % 2)

    def describe(self, index):
        return str(index)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(feeding, "SAMPLE_MS", 0.0)
    monkeypatch.setattr("quickvit.bench.timing.SAMPLE_MS", 0.0)


def rates(source, **options):
    settings = Settings(torch.device("cpu"), torch.float32, batch=4, repeats=2)
    rows = feeding.bench_feeding(settings, [SHAPE], ["h8"], source, **options)
    assert all(row.case == f"{SHAPE.label} slow images" for row in rows)
    return {row.name: row.images_per_s for row in rows}


def test_slow_data_holds_back_the_model():
    found = rates(Slow(0.02))
    assert list(found) == ["data", "vit", "vit with data", "h8", "h8 with data"]
    assert found["data"] <= 50
    assert found["vit with data"] <= 50
    # Without its data the model does not wait.
    assert found["vit"] > found["vit with data"]


def test_workers_read_at_the_same_time():
    assert rates(Slow(0.05), workers=2)["data"] > 1.3 * 20


def test_a_model_that_cannot_be_built_is_named_and_the_others_go_on(monkeypatch):
    original = feeding.create_model

    def broken(name, *arguments, **options):
        if name == "h8":
            raise RuntimeError("no such kernel")
        return original(name, *arguments, **options)

    monkeypatch.setattr(feeding, "create_model", broken)
    settings = Settings(torch.device("cpu"), torch.float32, batch=4, repeats=1)
    rows = {row.name: row for row in feeding.bench_feeding(settings, [SHAPE], ["h8"], Slow(0.0))}
    assert rows["vit with data"].failure is None
    assert rows["h8 with data"].failure == "RuntimeError: no such kernel"


def test_the_command_prints_all_three(capsys, monkeypatch):
    monkeypatch.setattr(suite, "measure_ceilings", lambda _: pytest.fail("no row has a floor"))
    small = ["--sizes", "tiny", "--img-size", "32", "--depth", "1", "--device", "cpu", "--repeats", "1"]
    command = [
        "bench",
        "train",
        *small,
        "--batch",
        "2",
        "--families",
        "i8",
        "--data",
        "digits",
        "--cache",
        "true",
    ]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["name"] for row in rows] == ["data", "vit", "vit with data", "i8", "i8 with data"]
    assert all(row["images_per_s"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2}, "^--workers and --cache are about data"),
        ({"cache": True}, "^--workers and --cache are about data"),
        ({"data": "digits", "recipe": "dinov2"}, "data comes as in deit3, not as in dinov2"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        suite.Request(torch.device("cpu"), **options)
