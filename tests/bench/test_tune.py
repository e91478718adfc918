"""The search for tiles, on a made-up clock; the kernels run in Triton's interpreter."""

import json
import logging

import pytest
import torch

pytest.importorskip("triton")

from quickvit.bench import tune
from quickvit.bench.operators import Operator
from quickvit.bench.timing import Failure, Settings, Timing
from quickvit.bench.work import Ceilings, Work
from quickvit.ops import tiles
from quickvit.ops.triton.gelu import gelu_forward

SETTINGS = Settings(torch.device("cpu"), torch.float32, batch=1)
NAME = "gelu forward 8x4"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles.stored.cache_clear()
    yield tmp_path
    tiles.stored.cache_clear()


def operator():
    return Operator("GELU", "octic", Work(1, 1), lambda x: gelu_forward(x, None), ((3, 64),))


def made_up_clock(best, launched):
    """Times that grow with the distance from the best tile; tiles of 8 warps do not compile."""

    def measure(cases, settings, label):
        outcomes = {}
        for case in cases:
            with tiles.requests() as asked:
                case.build()()
            assert list(asked) == [NAME]
            tile = tuple(map(int, case.name.strip("()").split(",")))
            launched.append(tile)
            distance = sum(abs(a - b) / b for a, b in zip(tile, best, strict=True))
            failed = tile[1] == 8
            outcomes[case.name] = Failure("too many warps") if failed else Timing(1 + distance, 0, 1)
        return outcomes

    return measure


def test_the_search_walks_to_the_best_tile(monkeypatch):
    launched = []
    monkeypatch.setattr(tune, "operators", lambda *_: [operator()])
    monkeypatch.setattr(tune, "measure", made_up_clock((128, 2), launched))
    (found,) = tune.tune(SETTINGS, Ceilings(1, 1), [None])
    assert (found.kernel, found.before, found.after) == (NAME, (512, 4), (128, 2))
    assert found.after_ms < found.before_ms
    assert len(launched) == len(set(launched))


def test_a_tile_on_trial_reaches_the_kernel():
    x = torch.randn(3, 64)
    expected = gelu_forward(x, None)
    with tiles.trying({NAME: (2, 1)}):
        torch.testing.assert_close(gelu_forward(x, None), expected)
        assert tiles.tile("gelu forward", (8, 4), x.device, (512, 4)) == (2, 1)
    assert tiles.tile("gelu forward", (8, 4), x.device, (512, 4)) == (512, 4)


def test_neighbours_differ_in_one_number():
    found = tune.neighbours((128, 1))
    assert found == [(64, 1), (256, 1), (128, 2)]


def test_the_search_starts_at_the_tile_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    tiles.store("GPU", {"a 1": (4, 2)})
    device = torch.device("cuda", 0)
    with tiles.requests() as asked:
        tiles.tile("a", (1,), device, (1, 1))
        tiles.tile("b", (1,), device, (1, 1))
        with tiles.trying({"b 1": (2, 2)}):
            tiles.tile("b", (1,), device, (1, 1))
    assert asked == {"a 1": (4, 2), "b 1": (2, 2)}


def only(running):
    """A clock on which all other tiles fail."""

    def measure(cases, settings, label):
        return {case.name: running.get(case.name, Failure("does not fit")) for case in cases}

    return measure


def test_a_tile_that_does_not_run_is_left_for_one_that_does(monkeypatch):
    monkeypatch.setattr(tune, "operators", lambda *_: [operator()])
    monkeypatch.setattr(tune, "measure", only({"(256, 4)": Timing(2.0, 0.0, 2.0)}))
    (found,) = tune.tune(SETTINGS, Ceilings(1, 1), [None])
    assert found == tune.Tuned(NAME, (512, 4), (256, 4), None, 2.0)


def test_a_kernel_that_does_not_run_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(tune, "operators", lambda *_: [operator()])
    monkeypatch.setattr(tune, "measure", only({}))
    with caplog.at_level(logging.WARNING):
        assert list(tune.tune(SETTINGS, Ceilings(1, 1), [None])) == []
    assert f"{NAME} runs neither with the tile (512, 4)" in caplog.text


def test_what_was_found_is_kept_for_the_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    device = torch.device("cuda", 0)
    tiles.store("NVIDIA H200", {"a 1": (4, 2)})
    file = tiles.store("NVIDIA H200", {"b 1": (8, 2)})
    assert file == folder / "quickvit" / "tiles" / "nvidia-h200.json"
    assert tiles.tile("a", (1,), device, (1, 1)) == (4, 2)
    assert tiles.tile("b", (1,), device, (1, 1)) == (8, 2)
    assert tiles.tile("c", (1,), device, (1, 1)) == (1, 1)
    # A tile of another length is from another version of the kernel.
    assert tiles.tile("a", (1,), device, (1, 1, 1)) == (1, 1, 1)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"tiles": 3}', '{"tiles": {"a 1": [0]}}', '{"tiles": {"a": ["x"]}}']
)
def test_a_damaged_file_is_ignored(content, caplog):
    file = tiles.path("GPU")
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert tiles.stored("GPU") == {}
    assert str(file) in caplog.text
    tiles.store("GPU", {"a 1": (2,)})
    assert json.loads(file.read_text())["tiles"] == {"a 1": [2]}


def test_tuning_needs_a_gpu():
    with pytest.raises(ValueError, match="got the device cpu"):
        tune.require_gpu(torch.device("cpu"))
