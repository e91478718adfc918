"""Runs that are interrupted at any moment end as those that are not."""

import os
import signal
import time

import pytest
import tiny_runs

EPOCHS = 8


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """The run that nobody disturbs."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert tiny_runs.run(tiny_runs.config(images, out, epochs=EPOCHS)) == 0
    return out


def killed_and_resumed(images, out, workers, kills):
    """Kill a run at random moments, then let it end; how many of the moments lay within a save."""
    config = tiny_runs.config(images, out, {"workers": workers}, epochs=EPOCHS)
    return tiny_runs.killed_and_resumed(config, EPOCHS * tiny_runs.STEPS_PER_EPOCH, kills, seed=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed(images, whole, tmp_path, workers):
    killed_and_resumed(images, tmp_path / "run", workers, kills=4)
    tiny_runs.assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_killed_at_twenty_moments_and_resumed(images, whole, tmp_path, workers):
    within = killed_and_resumed(images, tmp_path / "run", workers, kills=20)
    tiny_runs.assert_same_run(tmp_path / "run", whole)
    assert within > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_asks_to_be_started_again(images, whole, tmp_path, number):
    out = tmp_path / "run"
    config = tiny_runs.config(images, out, {"save_every": 1000}, epochs=EPOCHS)
    process = tiny_runs.start(config)
    tiny_runs.wait_for(out, 3, process)
    os.kill(process.pid, number)
    process.join()
    assert tiny_runs.finished(process, config) == 75
    (saved,) = (out / "checkpoints").iterdir()
    assert 3 <= int(saved.name.removeprefix("step-")) == tiny_runs.last_step(out) < 40
    assert not (out / "model.safetensors").exists()
    assert tiny_runs.run(config) == 0
    tiny_runs.assert_same_run(out, whole)


def work_in_a_group(config):
    """Train in a process group of its own, with the loader's workers."""
    os.setpgid(0, 0)
    tiny_runs.work(config)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_whole_group_saves_too(images, whole, tmp_path, number):
    out = tmp_path / "run"
    config = tiny_runs.config(images, out, {"save_every": 1000, "workers": 2}, epochs=EPOCHS)
    process = tiny_runs.processes.Process(target=work_in_a_group, args=(config,))
    process.start()
    tiny_runs.wait_for(out, 3, process)
    os.killpg(process.pid, number)
    process.join(60)
    assert tiny_runs.finished(process, config) == 75
    assert list((out / "checkpoints").glob("step-*"))
    deadline = time.monotonic() + 20
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_lives(process.pid)
    assert tiny_runs.run(config) == 0
    tiny_runs.assert_same_run(out, whole)


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_finished_run_stays_as_it_is(images, whole):
    before = tiny_runs.metrics(whole)
    assert tiny_runs.run(tiny_runs.config(images, whole, epochs=EPOCHS)) == 0
    assert tiny_runs.metrics(whole) == before
    assert len((whole / "starts.jsonl").read_text().splitlines()) == 2
