"""Competitors take turns, failures stay alone, and settings say what is wrong with them."""

import pytest
import torch

from quickvit.bench import timing
from quickvit.bench.timing import (
    Case,
    Failure,
    Settings,
    Timing,
    attempt,
    measure,
    measure_ceilings,
    summary,
    threads,
)

CPU = torch.device("cpu")


def settings(**changes):
    return Settings(**{"device": CPU, "dtype": torch.float32, "batch": 1, "repeats": 3, **changes})


def case(name, log=None, fail_at=None, **options):
    """A case whose job notes its name, and fails at its n-th call."""
    calls = []

    def job():
        calls.append(name)
        if log is not None:
            log.append(name)
        if len(calls) == fail_at:
            raise RuntimeError(f"{name} broke\nin its second line")
        return name

    return Case(name, lambda: job, (), **options)


def test_rounds_alternate():
    sampled = []

    def clock(job, calls):
        sampled.append((job(), calls))
        return 20.0

    outcomes = measure([case("a"), case("b")], settings(), clock=clock)
    # One sample each to find its number of calls, here three of 20 ms; then A B A B A B.
    assert sampled == [("a", 1), ("b", 1), *[("a", 3), ("b", 3)] * 3]
    assert outcomes == {"a": Timing(20.0, 0.0, 20.0), "b": Timing(20.0, 0.0, 20.0)}


def test_a_drift_hits_all_competitors():
    now = iter(range(100))
    outcomes = measure(
        [case("a"), case("b")], settings(repeats=9), clock=lambda job, calls: 100.0 + next(now)
    )
    assert outcomes["b"].ms - outcomes["a"].ms == 1


def test_jobs_are_warmed_up_before_the_clock_runs():
    log = []
    measure([case("a", log)], settings(repeats=1), clock=lambda job, calls: log.append("clock") or 1.0)
    assert log == ["a", "clock", "clock"]


def test_the_time_is_that_of_one_call():
    outcomes = measure([case("a", calls=10)], settings(), clock=lambda job, calls: 30.0)
    assert outcomes["a"].ms == 3.0


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_failure_stops_only_its_own_case(fail_at):
    def clock(job, calls):
        job()
        return 60.0

    outcomes = measure([case("bad", fail_at=fail_at), case("good")], settings(), clock=clock)
    assert outcomes["bad"] == Failure("RuntimeError: bad broke")
    assert outcomes["good"] == Timing(60.0, 0.0, 60.0)


def test_only_failures_of_the_device_are_caught():
    def out_of_memory():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")

    def silent():
        raise RuntimeError

    def wrong():
        raise ValueError("a wrong argument")

    assert attempt(lambda: 3) == 3
    assert attempt(out_of_memory).reason.startswith("OutOfMemoryError: CUDA out of memory")
    assert attempt(silent).reason == "RuntimeError: no message"
    with pytest.raises(ValueError, match="a wrong argument"):
        attempt(wrong)


def test_median_and_spread():
    assert summary([3.0, 1.0, 100.0, 2.0, 4.0]) == Timing(3.0, 2 / 3, 1.0)
    assert summary([5.0]) == Timing(5.0, None, 5.0)


def test_the_clock_of_the_processor_runs():
    outcomes = measure([Case("sum", lambda: lambda: torch.ones(1000).sum(), ())], settings())
    assert outcomes["sum"].ms > 0


def test_ceilings_are_the_best_rates(monkeypatch):
    slowness = iter([9.0, 9.0, *[4.0, 8.0] * 4, 2.0, 6.0])
    monkeypatch.setattr(timing, "cpu_clock", lambda job, calls: next(slowness))
    ceilings = measure_ceilings(settings(repeats=1, compile="default"))
    assert ceilings.bytes_per_s == pytest.approx(2 * 2**26 / 2e-3)
    assert ceilings.flops_per_s == pytest.approx(2 * 1024**3 / 6e-3)


def test_without_ceilings_there_is_no_floor(monkeypatch):
    def no_memory(job, calls):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(timing, "cpu_clock", no_memory)
    with pytest.raises(ValueError, match="cannot measure the copy rate of cpu: RuntimeError: can't allocate"):
        measure_ceilings(settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"repeats": -1}, "repeats must be at least 1, got -1"),
        ({"compile": "most"}, "compile must be one of none, default, reduce-overhead, blocks; got 'most'"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"), threads(0):
        pass


def test_modules_are_compiled_as_asked(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.nn.Identity, "compile", lambda module, **options: seen.append(options))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: seen.append("step"))
    module = torch.nn.Identity()
    for mode in ("none", "default", "reduce-overhead", "blocks"):
        assert settings(compile=mode).compiled(module) is module
        settings(compile=mode).begin_step()
    shared = {"fullgraph": True, "dynamic": False}
    graphs = [{**shared, "mode": "reduce-overhead"}, "step"]
    assert seen == [{**shared, "mode": None}, *graphs, *graphs]


@pytest.mark.parametrize(
    ("device", "ms", "calls"), [("cuda", 1000.0, 5), ("cuda", 1.0, 50), ("cpu", 1000.0, 1)]
)
def test_samples_on_a_gpu_have_several_calls_however_long(device, ms, calls):
    given = settings(device=torch.device(device))
    assert timing._prepare(case("job"), given, lambda job, number: ms)[1] == calls
