"""Batches are functions of seed and step: not of workers, ranks or restarts; and broken images do not stop them."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler

from quickvit.data import (
    Batch,
    EvalLoader,
    Mixing,
    Sample,
    TooManyUnreadable,
    TrainLoader,
    Unreadable,
    deit3_transform,
    derived_seed,
    eval_transform,
    open_source,
)
from quickvit.data.loader import _leave_signals_to_parent

# PyTorch warns of more workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@dataclass(frozen=True)
class Numbers:
    """Sample i is an image of i everywhere; those in `broken` cannot be read."""

    count: int = 50
    broken: frozenset = frozenset()
    name: str = "numbers"
    classes: tuple = ("even", "odd")

    def __len__(self):
        return self.count

    def read(self, index):
        if index in self.broken:
            raise Unreadable(self.describe(index), "OSError: broken")
        return Sample(Image.new("RGB", (8, 8), (index,) * 3), index % 2)

    def describe(self, index):
        return f"number {index}"


def plain(image, seed):
    """The image's value and the seed that it got."""
    return torch.tensor([float(np.asarray(image)[0, 0, 0]), float(seed)], dtype=torch.float64)


def train_loader(source=None, transform=plain, **options):
    return TrainLoader(source or Numbers(), transform, **{"batch_size": 12, "seed": 3, **options})


def assert_same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------- training


@pytest.fixture
def recipe():
    """The whole of DeiT III's data: augmentation, repetition, mixing; and some broken images."""
    source = Numbers(100, frozenset({3, 50, 51}))
    mixing = Mixing(classes=2, group=4)
    return lambda **options: train_loader(source, deit3_transform(16), mixing=mixing, repeats=3, **options)


def test_workers_and_restarts_change_nothing(recipe):
    whole = list(recipe().batches(0, 20))
    for workers, start in ((2, 0), (4, 7), (0, 15)):
        loader = recipe(workers=workers)
        assert_same(loader.batches(start, 20), whole[start:])
        assert loader.unreadable
    assert len({batch.images.double().sum().item() for batch in whole}) == 20
    assert not torch.equal(next(recipe(seed=4).batches(0, 1)).images, whole[0].images)


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_hold_slices_of_the_global_batch(recipe, world_size):
    whole = list(recipe().batches(5, 10))
    ranks = [list(recipe(rank=rank, world_size=world_size).batches(5, 10)) for rank in range(world_size)]
    joined = [Batch(*map(torch.cat, zip(*batches, strict=True))) for batches in zip(*ranks, strict=True)]
    assert_same(joined, whole)


def test_an_epoch_has_every_sample_once_in_another_order():
    loader = train_loader(Numbers(48))
    assert loader.steps_per_epoch == 4
    epochs = [
        torch.cat([batch.indices for batch in loader.batches(4 * e, 4 * e + 4)]).tolist() for e in range(3)
    ]
    assert all(sorted(epoch) == list(range(48)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    batch = next(loader.batches(0, 1))
    assert batch.images[:, 0].tolist() == batch.indices.tolist()
    assert torch.equal(batch.targets, batch.indices % 2)


def test_seeds_of_samples_are_functions_of_epoch_sample_and_view():
    loader = train_loader(Numbers(48), repeats=2)
    for step, batch in enumerate(loader.batches(0, 8)):
        # Float64 rounds the seeds, but not differently.
        views = Counter()
        for index, seed in zip(batch.indices.tolist(), batch.images[:, 1].tolist(), strict=True):
            assert seed == float(derived_seed(3, step // 4, index, views[index]))
            views[index] += 1


def test_repeated_augmentation_takes_the_samples_of_timm(monkeypatch):
    count, batch_size, world_size = 512, 256, 2
    loader = train_loader(Numbers(count), batch_size=batch_size, repeats=3)
    order = loader._steps.order
    order(5, 0)
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: torch.from_numpy(order._order))
    ranks = [list(RepeatAugSampler(range(count), world_size, rank)) for rank in range(world_size)]
    each = batch_size // world_size
    assert len(ranks[0]) == loader.steps_per_epoch * each
    for step, batch in enumerate(loader.batches(10, 12)):
        theirs = [index for rank in ranks for index in rank[step * each : (step + 1) * each]]
        assert sorted(batch.indices.tolist()) == sorted(theirs)
        # Copies lie in different halves or thirds, so that ranks and mixed neighbours have different ones.
        neighbours = batch.indices.view(-1, 2)
        assert (neighbours[:, 0] != neighbours[:, 1]).all()
        assert Counter(batch.indices[:80].tolist()).most_common(1)[0][1] == 1


def test_epochs_may_be_longer_or_shorter_than_the_source():
    long = train_loader(Numbers(7), steps_per_epoch=2)
    batches = list(long.batches(0, 4))
    for epoch in (batches[:2], batches[2:]):
        counts = Counter(torch.cat([batch.indices for batch in epoch]).tolist())
        assert sorted(counts.values()) == [3, 3, 3, 3, 4, 4, 4]
        seeds = torch.cat([batch.images[:, 1] for batch in epoch]).tolist()
        assert len(set(seeds)) == 24
    short = train_loader(Numbers(48), steps_per_epoch=1)
    assert short.steps_per_epoch == 1
    assert set(next(short.batches(0, 1)).indices.tolist()) != set(next(short.batches(1, 2)).indices.tolist())


def test_pixels_are_normalised_after_the_workers():
    transform = deit3_transform(16)
    source = Numbers()
    batch = next(TrainLoader(source, transform, batch_size=4, seed=1).batches(0, 1))
    index = int(batch.indices[2])
    expected = transform(source.read(index).image, derived_seed(1, 0, index, 0))
    torch.testing.assert_close(batch.images[2], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (
            {"batch_size": 51},
            "batch_size must be at most the 50 images of numbers, got 51; or set steps_per_epoch",
        ),
        ({"world_size": 5}, "batch_size must be a multiple of the 5 ranks, got 12"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, got 2"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, got 0"),
        (
            {"max_unreadable": -1},
            "max_unreadable is a number of images, or below 1 a fraction of all; got -1",
        ),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        train_loader(**options)


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("world_size", [1, 3, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_sample_once_in_order(world_size, workers):
    seen = []
    for rank in range(world_size):
        loader = EvalLoader(
            Numbers(50), plain, batch_size=4, rank=rank, world_size=world_size, workers=workers
        )
        batches = list(loader)
        assert len(batches) == len(loader)
        seen += [index for batch in batches for index in batch.indices.tolist()]
    assert seen == list(range(50))


def test_some_samples_are_what_they_are_among_all():
    whole = torch.cat([batch.images for batch in EvalLoader(Numbers(20), plain, batch_size=7)])
    some = [2, 3, 11, 17, 19]
    for world_size in (1, 2):
        loaders = [
            EvalLoader(Numbers(20), plain, batch_size=2, indices=some, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        batches = [batch for loader in loaders for batch in loader]
        assert torch.cat([batch.indices for batch in batches]).tolist() == some
        assert torch.equal(torch.cat([batch.images for batch in batches]), whole[some])


def test_evaluation_leaves_out_what_it_cannot_read():
    loader = EvalLoader(Numbers(12, frozenset({1, 4, 5, 6, 7})), plain, batch_size=4, max_unreadable=5)
    assert [batch.indices.tolist() for batch in loader] == [[0, 2, 3], [8, 9, 10, 11]]
    assert [path for path, _ in loader.unreadable] == [f"number {i}" for i in (1, 4, 5, 6, 7)]
    # A second pass does not count them twice.
    assert len(list(loader)) == 2
    assert len(loader.unreadable) == 5


def test_more_ranks_than_samples():
    loaders = [EvalLoader(Numbers(2), plain, batch_size=4, rank=rank, world_size=5) for rank in range(5)]
    assert sorted(index for loader in loaders for batch in loader for index in batch.indices.tolist()) == [
        0,
        1,
    ]


# ---------------------------------------------------------------------- broken images


@pytest.fixture
def damaged(tmp_path, write_images, huge_png):
    """400 images of which one in a hundred is broken: empty, cut, of floats, with a huge header."""
    write_images(tmp_path, *(f"train/{name}/{i:03}.png" for name in "ab" for i in range(200)))
    broken = [tmp_path / f"train/{name}" for name in ("a/007.png", "a/150.png", "b/000.png", "b/199.png")]
    broken[0].write_bytes(b"")
    broken[1].write_bytes(broken[1].read_bytes()[:100])
    Image.fromarray(np.zeros((4, 4), np.float32)).save(broken[2], format="TIFF")
    broken[3].write_bytes(huge_png())
    return tmp_path, {str(path) for path in broken}


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_replaced_and_listed(damaged, workers, caplog):
    folder, broken = damaged
    source = open_source(folder)
    loader = train_loader(source, deit3_transform(16), batch_size=40, workers=workers)
    with caplog.at_level(logging.WARNING, logger="quickvit.data.loader"):
        batches = list(loader.batches(0, 2 * loader.steps_per_epoch))
    assert all(len(batch.images) == 40 for batch in batches)
    assert {path for path, _ in loader.unreadable} == broken
    assert len(caplog.messages) == 4
    seen = {source.describe(int(i)) for batch in batches for i in batch.indices}
    assert not seen & broken
    for batch in batches:
        assert batch.targets.tolist() == [source.read(i).target for i in batch.indices.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", [3, 0.0075])
def test_too_many_broken_images_stop_with_the_list(damaged, workers, limit):
    folder, broken = damaged
    loader = train_loader(open_source(folder), deit3_transform(16), workers=workers, max_unreadable=limit)
    with pytest.raises(TooManyUnreadable) as caught:
        list(loader.batches(0, loader.steps_per_epoch))
    assert {path for path, _ in caught.value.unreadable} == broken
    assert all(path in str(caught.value) for path in broken)
    assert f"4 of the 400 images of {folder}/train cannot be read, more than max_unreadable={limit:g}" in str(
        caught.value
    )


def test_limits_are_exact():
    few = Numbers(50, frozenset(range(5)))
    for limit, stops in ((5, False), (4, True), (0.1, False), (0.09, True)):
        loader = train_loader(few, batch_size=50, max_unreadable=limit)
        if stops:
            with pytest.raises(TooManyUnreadable):
                list(loader.batches(0, 1))
        else:
            assert len(list(loader.batches(0, 1))) == 1


def test_a_source_of_broken_images_stops_at_once():
    loader = train_loader(Numbers(50, frozenset(range(50))), max_unreadable=50)
    with pytest.raises(TooManyUnreadable, match="and neither can 16 others in place of one"):
        next(loader.batches(0, 1))


def test_evaluation_has_the_same_limit(damaged):
    folder, broken = damaged
    loader = EvalLoader(open_source(folder), eval_transform(16), batch_size=40)
    assert sum(len(batch.images) for batch in loader) == 396
    assert {path for path, _ in loader.unreadable} == broken
    with pytest.raises(TooManyUnreadable):
        list(EvalLoader(open_source(folder), eval_transform(16), batch_size=40, max_unreadable=0))


def idle(ready):
    _leave_signals_to_parent(0)
    ready.set()
    time.sleep(60)


def test_a_worker_whose_process_a_server_forked_is_ended_by_its_parent(monkeypatch):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    # The worker's word for who forked it.
    monkeypatch.setattr(os, "getppid", lambda: 1)
    worker = context.Process(target=idle, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(30)
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


def test_a_worker_is_ended_by_its_parent_alone():
    """Python ends the workers that are left at its exit by SIGTERM, and waits for them."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=idle, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(30)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        subprocess.run([sys.executable, "-c", f"import os; os.kill({worker.pid}, {int(number)})"], check=True)
        worker.join(0.2)
        assert worker.is_alive()
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(30)
    assert worker.exitcode == 0
