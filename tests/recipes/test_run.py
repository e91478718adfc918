"""What run folders say of themselves."""

import json
import logging
import os
import shutil
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import tiny_runs

from quickvit.provenance import write
from quickvit.recipes import deit3, run
from quickvit.recipes.run import CONFIG, STARTS, carry_out, trained_by
from quickvit.train import Outcome, World


def test_the_last_start_says_how_a_model_was_trained(tmp_path):
    assert trained_by(tmp_path) is None
    assert trained_by("quickvit_i8_tiny_patch16_224") is None
    starts = [{"command": "quickvit train deit3"}, {"command": "quickvit train deit3 --epochs 3"}]
    (tmp_path / STARTS).write_text("".join(json.dumps(start) + "\n" for start in starts))
    assert trained_by(tmp_path) == "quickvit train deit3 --epochs 3"


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"command": 3}\n'])
def test_a_damaged_record_of_starts_says_nothing(tmp_path, text):
    (tmp_path / STARTS).write_text(text)
    assert trained_by(tmp_path) is None


def test_a_start_is_noted_once_nothing_speaks_against_it(tmp_path):
    config = replace(tiny_runs.config("digits", tmp_path / "run"), epochs=1, steps_per_epoch=2)
    deit3.train(config, "first")
    before = (config.out / CONFIG).read_text()
    with pytest.raises(ValueError, match=r"asked for learning_rate 0\.5"):
        deit3.train(replace(config, learning_rate=0.5), "refused")
    assert trained_by(config.out) == "first"
    assert (config.out / CONFIG).read_text() == before
    # Resumed, it is the run that it was; without its checkpoints, the one that begins now.
    deit3.train(replace(config, run=replace(config.run, keep=1)), "second")
    assert trained_by(config.out) == "second"
    assert (config.out / CONFIG).read_text() == before
    shutil.rmtree(config.out / "checkpoints")
    deit3.train(replace(config, learning_rate=0.5), "third")
    assert json.loads((config.out / CONFIG).read_text())["learning_rate"] == 0.5


def test_shared_modules_are_gone_before_the_connection(tmp_path, monkeypatch):
    models = []

    def build(config):
        recipe = deit3.Deit3(config)
        models.append(weakref.ref(recipe.modules["model"]))
        return recipe

    @contextmanager
    def connected(device):
        yield World()
        assert [model() for model in models] == [None]

    monkeypatch.setattr(run, "connected", connected)
    config = replace(tiny_runs.config("digits", tmp_path), epochs=1, steps_per_epoch=1)
    assert carry_out(config, deit3.resolve, build).steps == 1


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_speaks_for_all(tmp_path, monkeypatch, caplog, rank, stopped):
    monkeypatch.setattr(run, "connected", lambda device: nullcontext(World(rank=rank)))
    monkeypatch.setattr(run.Trainer, "fit", lambda self, begins: begins(0) or Outcome(7, stopped, [], 0.0))
    with caplog.at_level(logging.INFO, "quickvit"):
        carry_out(tiny_runs.config("digits", tmp_path), deit3.resolve, deit3.Deit3)
    end = "stopped, and ready to go on by the same command" if stopped else "done"
    said = [f"{end} after 7 updates in {tmp_path}"]
    assert [record.getMessage() for record in caplog.records] == said * (rank == 0)
    assert [name for name in (CONFIG, STARTS) if (tmp_path / name).exists()] == [CONFIG, STARTS] * (rank == 0)


def test_records_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "record.json"
    write({"number": 1}, path)
    (tmp_path / "link.json").symlink_to(path)
    write({"number": 2}, tmp_path / "link.json")
    assert json.loads(path.read_text()) == {"number": 2}
    assert (tmp_path / "link.json").is_symlink()

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write({"number": 3}, path)
    assert json.loads(path.read_text()) == {"number": 2}
    assert os.listdir(path.parent) == ["record.json"]


def test_a_record_goes_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write({"number": 1}, pipe)
    assert json.loads(os.read(reader, 100)) == {"number": 1}
    os.close(reader)
