"""Checkpoints of a run: whole or not there, and refused with a reason where they are not sound."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import time
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import save_file

from quickvit import CheckpointError
from quickvit.train import Store, World, checkpoint
from quickvit.train.checkpoint import MANIFEST


def state(value=0.0):
    return {
        "matrix": torch.arange(12.0).view(3, 4) + value,
        "number": torch.tensor(float(value)),
        "half": torch.full((2,), float(value), dtype=torch.bfloat16),
        "count": torch.tensor([1, 2, int(value)]),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "checkpoints", World(), keep=2)


def save(store, step, value=None):
    store.begin(step, state(step if value is None else value), {"recipe": "test"})
    return store.settle()


def rewrite_manifest(path, change):
    """A manifest that is changed and has a right checksum again, as somebody could make one."""
    content = json.loads((path / MANIFEST).read_text())["manifest"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps({"manifest": content, "sha256": digest}))


def test_round_trip(store):
    tensors = state(5)
    store.begin(7, tensors, {"recipe": "test"})
    tensors["matrix"].zero_()  # the copy is made before begin() returns
    assert store.settle()
    loaded = state()
    path, manifest = store.newest(loaded)
    assert (path.name, manifest.step, manifest.about) == ("step-00000007", 7, {"recipe": "test"})
    store.load(path, loaded)
    for name, tensor in state(5).items():
        assert torch.equal(loaded[name], tensor), name


def test_nothing_there(store):
    assert store.newest(state()) is None
    assert store.settle()


def test_the_newest_are_kept(store):
    for step in (1, 2, 10):
        assert save(store, step)
    assert [path.name for path in store.paths()] == ["step-00000010", "step-00000002"]
    assert save(store, 10, value=3)  # again, over the old one
    loaded = state()
    store.load(store.newest(loaded)[0], loaded)
    assert loaded["number"] == 3
    assert sorted(os.listdir(store.folder)) == ["step-00000002", "step-00000010"]


def test_an_unsound_newer_one_does_not_cost_the_one_just_written(tmp_path):
    store = Store(tmp_path / "checkpoints", World(), keep=1)
    assert save(store, 8)
    truncated(store.path(8))
    assert save(store, 4)
    assert store.newest(state())[1].step == 4
    assert save(store, 6)
    assert store.newest(state())[1].step == 6
    assert [path.name for path in store.paths()] == ["step-00000008", "step-00000006"]


def test_an_old_one_that_cannot_be_removed_does_not_cost_the_new_one(store, monkeypatch, caplog):
    def fail(path):
        raise PermissionError(f"cannot remove {path.name}")

    assert save(store, 1)
    assert save(store, 2)
    monkeypatch.setattr("quickvit.train.checkpoint._remove", fail)
    assert save(store, 3)
    assert store.newest(state())[1].step == 3
    assert "could not be removed" in caplog.text
    assert "cannot remove step-00000001" in caplog.text


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Store(tmp_path, World(), keep=0)


def test_writing_goes_on_in_the_background(store, monkeypatch):
    write, waiting = checkpoint._write, Future()

    def slow(*arguments):
        waiting.result(timeout=60)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "_write", slow)
    store.begin(1, state())
    assert store.writing
    assert store.unsettled
    assert store.paths() == []
    waiting.set_result(None)
    while store.writing:
        time.sleep(0.01)
    assert store.paths() == []
    assert store.settle()
    assert not store.unsettled
    assert len(store.paths()) == 1


def test_what_a_killed_process_left_is_removed(store):
    assert save(store, 1)
    left = store.folder / ".step-00000002.partial"
    shutil.copytree(store.paths()[0], left)
    assert store.newest(state())[1].step == 1
    assert not left.exists()


def truncated(path):
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flipped(path):
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def missing(path):
    (path / "rank-00000.safetensors").unlink()


def without_manifest(path):
    (path / MANIFEST).unlink()


def half_a_manifest(path):
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text[: len(text) // 2])


def flipped_manifest(path):
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"step": 2', '"step": 3'))


def other_format(path):
    rewrite_manifest(path, lambda content: content.update(format="torch"))


def other_step(path):
    rewrite_manifest(path, lambda content: content.update(step=7))


def no_step(path):
    rewrite_manifest(path, lambda content: content.update(step="two"))


def files_in_a_list(path):
    rewrite_manifest(path, lambda content: content.update(files=["rank-00000.safetensors"]))


def foreign_manifest(path):
    (path / MANIFEST).write_text("[]")


def unknown_key(path):
    rewrite_manifest(path, lambda content: content.update(run="rm -rf /"))


def escaping(path):
    rewrite_manifest(path, lambda content: content["files"].update({"../../secret": {}}))


def without_checksum(path):
    rewrite_manifest(path, lambda content: content["files"].update({"rank-00000.safetensors": {}}))


def replaced(path, tensors, metadata=None):
    """Put other tensors into a checkpoint, with checksums that agree."""
    file = path / "rank-00000.safetensors"
    save_file(tensors, file, metadata)
    adopt(path, file)


def adopt(path, file):
    entry = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    rewrite_manifest(path, lambda content: content["files"].update({file.name: entry}))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def pickled(path):
    file = path / "rank-00000.safetensors"
    file.write_bytes(pickle.dumps(Bomb()))
    adopt(path, file)


def pieces(tensors, **changes):
    table = {
        name: {"shape": list(t.shape), "first": [0] * t.ndim, "dtype": str(t.dtype)}
        for name, t in tensors.items()
    }
    for name, change in changes.items():
        table[name].update(change)
    return {"pieces": json.dumps(table)}


def other_shape(path):
    tensors = {**state(), "matrix": torch.zeros(4, 4)}
    replaced(path, tensors, pieces(tensors))


def other_type(path):
    tensors = {**state(), "count": torch.zeros(3)}
    replaced(path, tensors, pieces(tensors))


def other_names(path):
    tensors = {**state(), "more": torch.zeros(3)}
    del tensors["number"]
    replaced(path, tensors, pieces(tensors))


def incomplete(path):
    tensors = {**state(), "matrix": torch.zeros(2, 4)}
    replaced(path, tensors, pieces(tensors, matrix={"shape": [3, 4]}))


def outside(path):
    replaced(path, state(), pieces(state(), matrix={"first": [1, 0]}))


def without_pieces(path):
    replaced(path, state())


def with_other_pieces(path):
    replaced(path, state(), pieces({"matrix": state()["matrix"]}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, r"rank-00000.safetensors has \d+ bytes, \d+ were written"),
        (flipped, "rank-00000.safetensors does not have the checksum that it had when written"),
        (missing, "rank-00000.safetensors cannot be read: No such file"),
        (without_manifest, "its manifest cannot be read: No such file"),
        (half_a_manifest, "its manifest is damaged or foreign"),
        (flipped_manifest, "its manifest does not have the checksum that it had when written"),
        (foreign_manifest, "its manifest is damaged or foreign"),
        (other_format, "its format is 'torch', expected 'quickvit training state 1'"),
        (unknown_key, "its manifest is damaged or foreign: .* 'run'"),
        (other_step, "it is of step 7"),
        (no_step, "its manifest is damaged or foreign: step, files and about are of other types"),
        (files_in_a_list, "its manifest is damaged or foreign: step, files and about are of other types"),
        (escaping, "names files that no rank writes: .*secret"),
        (without_checksum, "its manifest is damaged or foreign: 'bytes'"),
        (pickled, "rank-00000.safetensors is not a safetensors file"),
        (other_shape, r"of another run: it has matrix \(4, 4\) torch.float32 for \(3, 4\) torch.float32"),
        (other_type, r"count \(3,\) torch.float32 for \(3,\) torch.int64"),
        (other_names, "it has no number, also more"),
        (incomplete, "8 of the 12 values of matrix"),
        (outside, r"matrix \(3, 4\) at \(1, 0\) is no part of \(3, 4\)"),
        (without_pieces, "it does not say where its tensors belong"),
        (with_other_pieces, "it does not say of all its tensors where they belong"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_unsound_checkpoint_is_refused_and_the_one_before_used(
    store, damage, reason, caplog, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert save(store, 1)
    assert save(store, 2)
    newest, previous = store.paths()
    damage(newest)
    with pytest.raises(CheckpointError, match=reason):
        store.check(newest, state())
    path, _ = store.newest(state())
    assert path == previous
    assert f"{newest} is not used: " in caplog.text
    assert not (tmp_path / "exploded").exists()
    loaded = state()
    store.load(path, loaded)
    assert loaded["number"] == 1

    missing(previous)
    with pytest.raises(CheckpointError, match="can be resumed from; move them away to start anew:\n"):
        store.newest(state())


def test_every_bit_of_a_checkpoint_counts(store):
    assert save(store, 1)
    (path,) = store.paths()
    for name in ("rank-00000.safetensors", MANIFEST):
        content = (path / name).read_bytes()
        for place in range(0, len(content), 37):
            damaged = bytearray(content)
            damaged[place] ^= 1 << place % 8
            (path / name).write_bytes(damaged)
            with pytest.raises(CheckpointError):
                store.check(path, state())
        (path / name).write_bytes(content)
    assert store.check(path, state()).step == 1


@pytest.mark.parametrize("call", ["save_file", "write", "_flush", "rename"])
def test_a_full_disk_leaves_the_checkpoint_before(store, call, monkeypatch, caplog):
    assert save(store, 1)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = {"save_file": checkpoint, "_flush": checkpoint, "write": checkpoint.Manifest}.get(call)
    monkeypatch.setattr(owner or checkpoint.Path, call, full)
    assert not save(store, 2)
    monkeypatch.undo()
    assert "no checkpoint of step 2" in caplog.text
    assert "No space left on device" in caplog.text
    assert os.listdir(store.folder) == ["step-00000001"]
    assert store.newest(state())[1].step == 1
    assert save(store, 3)
    assert store.newest(state())[1].step == 3


def test_a_file_that_really_cannot_grow(store, caplog):
    """The limit on file sizes stops safetensors itself in the middle of a file."""
    resource = pytest.importorskip("resource")
    assert save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        store.begin(2, {**state(2), "large": torch.zeros(2**17)})
        assert not store.settle()
        # Also when it is asked again: who asks first may not be the one who ends the run.
        assert not store.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "no checkpoint of step 2" in caplog.text
    assert os.listdir(store.folder) == ["step-00000001"]
    assert store.newest(state())[1].step == 1


def test_a_mistake_is_not_taken_for_a_full_disk(store, monkeypatch):
    def wrong(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "save_file", wrong)
    store.begin(1, state())
    with pytest.raises(ZeroDivisionError):
        store.settle()


def test_what_a_rank_alone_has(store):
    store.begin(1, state(), own={"images": torch.ones(2)})
    assert store.settle()
    path, _ = store.newest(state())
    assert torch.equal(store.load_own(path, 0)["images"], torch.ones(2))
    with pytest.raises(CheckpointError, match="has nothing of rank 3"):
        store.load_own(path, 3)
