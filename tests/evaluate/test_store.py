"""Arrays on disk: the right rows, resumption, damage that is noticed, and disks that are full."""

import shutil

import pytest
import torch

from quickvit.evaluate import store as module
from quickvit.evaluate.store import ArrayStore, Spec

SPECS = {"vector": Spec((3,), torch.bfloat16), "flag": Spec((), torch.uint8)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)


def values(rows):
    rows = torch.as_tensor(rows)
    return {"vector": rows[:, None] + torch.tensor([0.0, 0.25, 0.5]), "flag": (rows % 2).to(torch.uint8)}


def fill(store, chunks):
    store.prepare()
    for number in chunks:
        rows = store.chunk(number)
        store.write(rows, values(rows))
        store.commit(number, rows)


@pytest.fixture
def store(tmp_path):
    """Ten rows in three chunks, all of them whole."""
    store = ArrayStore(tmp_path, "a model/with a name", {"weights": "abc"}, 10, SPECS)
    fill(store, range(3))
    return store


def reopened(store):
    return ArrayStore(store.folder.parent, "a model/with a name", {"weights": "abc"}, 10, SPECS)


def test_rows_come_back(store):
    again = reopened(store)
    assert again.folder == store.folder
    assert again.folder.name.startswith("a_model_with_a_name-")
    assert again.missing() == []
    for name, expected in values(range(10)).items():
        assert torch.equal(again.read(name), expected.to(SPECS[name].dtype))


def test_what_is_written_to_an_array_stays_in_memory(store):
    store.read("vector").zero_()
    assert store.missing() == []
    assert store.read("vector")[1, 2] == 1.5


def test_filling_asks_for_what_is_missing_only(tmp_path):
    store = ArrayStore(tmp_path, "a model/with a name", {"weights": "abc"}, 10, SPECS)
    fill(store, [1])
    asked = []

    def produce(rows):
        asked.extend(rows)
        # Batches that end inside of chunks, and two rows that there is nothing to say about.
        for batch in ([0, 2], [3, 8], [9]):
            yield batch, values(batch)

    store.fill(produce)
    assert asked == [0, 1, 2, 3, 8, 9]
    assert store.missing() == []
    assert store.read(module.PRESENT).tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert store.read("vector")[[0, 2, 3, 4, 8], 0].tolist() == [0, 2, 3, 4, 8]


def test_absent_rows_are_tried_again_and_no_others(store):
    store.commit(0, [0, 3])
    store.commit(2, [8])
    store.write([4], values([9]))
    assert store.wanted() == {0: [1, 2], 1: range(4, 8), 2: [9]}
    asked = []

    def produce(rows):
        asked.append(rows)
        for batch in ([1, 4], [5, 6, 7]):
            yield batch, values(batch)

    store.fill(produce)
    assert store.read(module.PRESENT).tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1, 0]
    assert store.missing() == []
    assert store.read("vector")[[0, 1, 3, 4], 0].tolist() == [0, 1, 3, 4]
    store.fill(produce)
    assert asked == [[1, 2, 4, 5, 6, 7, 9], [2, 9]]
    present = store.folder / f"{module.PRESENT}.bin"
    present.write_bytes(present.read_bytes()[:5])
    assert store.wanted() == {0: [2], 1: range(4, 8), 2: range(8, 10)}


def test_rows_with_gaps(store):
    store.write(torch.tensor([0, 1, 3, 7]), {k: v + 1 for k, v in values([0, 1, 3, 7]).items()})
    assert store.read("vector")[:, 0].tolist() == [1, 2, 2, 4, 4, 5, 6, 8, 8, 9]


@pytest.mark.parametrize(
    "change",
    [{"key": {"weights": "abd"}}, {"rows": 11}, {"specs": {**SPECS, "flag": Spec((), torch.int64)}}],
)
def test_another_key_is_another_folder(store, change):
    given = {"key": {"weights": "abc"}, "rows": 10, "specs": SPECS, **change}
    assert ArrayStore(store.folder.parent, "a model/with a name", **given).folder != store.folder


def test_an_interrupted_store_resumes(tmp_path):
    store = ArrayStore(tmp_path, "a model/with a name", {"weights": "abc"}, 10, SPECS)
    assert store.missing() == [0, 1, 2]
    fill(store, [1])
    # Written, and interrupted before it was declared whole.
    store.write(store.chunk(2), values(store.chunk(2)))
    assert reopened(store).missing() == [0, 2]
    fill(reopened(store), [0, 2])
    assert reopened(store).missing() == []
    assert torch.equal(store.read("flag"), values(range(10))["flag"])


def test_a_ledger_that_was_cut_off(store):
    ledger = store.folder / "ledger.0"
    ledger.write_text(ledger.read_text().rstrip()[:-3])
    assert store.missing() == [2]
    fill(store, [2])
    assert store.missing() == []


def test_several_writers(store):
    for path in store.folder.glob("ledger.*"):
        path.unlink()
    for number in range(3):
        store.commit(number, range(10), writer=number % 2)
    assert store.missing() == []


@pytest.mark.parametrize("name", SPECS)
def test_a_changed_byte_is_noticed(store, name):
    path = store.folder / f"{name}.bin"
    content = bytearray(path.read_bytes())
    content[SPECS[name].row_bytes * 5] ^= 1
    path.write_bytes(content)
    assert store.missing() == [1]
    fill(store, [1])
    assert store.missing() == []


def test_a_file_that_was_cut_off_or_lost_is_noticed(store):
    path = store.folder / "vector.bin"
    path.write_bytes(path.read_bytes()[: 5 * 6])
    assert store.missing() == [1, 2]
    fill(store, [1, 2])
    assert store.missing() == []
    path.unlink()
    assert store.missing() == [0, 1, 2]


def test_a_full_disk_is_an_error_before_the_work(tmp_path, monkeypatch):
    store = ArrayStore(tmp_path, "model", {}, 10, SPECS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 50, 50))
    with pytest.raises(OSError, match="choose another folder for the cache"):
        store.prepare()


def test_nothing_to_keep(tmp_path):
    store = ArrayStore(tmp_path, "model", {}, 0, SPECS)
    store.fill(lambda rows: pytest.fail("nothing is missing"))
    assert store.missing() == []
    assert store.read("vector").shape == (0, 3)
