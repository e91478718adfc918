"""Benchmarks on a GPU: CUDA graphs, compiled models, peak memory."""

import pytest
import torch

from quickvit.bench import Request, run
from quickvit.bench.timing import GraphedCalls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Compilers warn about what they choose.
    pytest.mark.filterwarnings("default"),
]
CUDA = torch.device("cuda")
SMALL = {"sizes": ("tiny",), "depth": 2, "batch": 2, "repeats": 2}


@pytest.mark.parametrize("name", ["linear", "gelu"])
def test_layers(name):
    rows = run(name, Request(CUDA, widths=(64,), tokens=8, batch=2, repeats=2)).rows
    assert [row.failure for row in rows] == [None] * len(rows)


def test_operators():
    rows = run("ops", Request(CUDA, sizes=("large",), batch=2, repeats=2)).rows
    assert [row.failure for row in rows] == [None] * len(rows)


@pytest.mark.parametrize("mode", ["none", "default", "reduce-overhead", "blocks"])
def test_models(mode):
    rows = run("model", Request(CUDA, compile=mode, **SMALL)).rows
    assert [row.failure for row in rows] == [None] * len(rows)
    weighed = [row.memory_mib for row in rows if "forward" in row.case]
    assert all(mib is None for mib in weighed) == (mode in ("reduce-overhead", "blocks"))


@pytest.mark.parametrize("mode", ["none", "default", "reduce-overhead", "blocks"])
@pytest.mark.parametrize("recipe", ["deit3", "dinov2"])
def test_training(mode, recipe):
    rows = run("train", Request(CUDA, compile=mode, recipe=recipe, **SMALL)).rows
    assert [row.failure for row in rows] == [None] * len(rows)


def test_peak_memory_is_that_of_the_model_alone():
    rows = run("memory", Request(CUDA, compile="none", **SMALL)).rows
    in_company = run("model", Request(CUDA, compile="none", views=False, **SMALL)).rows
    for alone, together in zip(rows, in_company, strict=True):
        assert together.memory_mib == pytest.approx(alone.memory_mib, rel=0.05)


def test_a_graph_makes_all_its_calls_on_all_its_jobs():
    counts = [torch.zeros(1, device=CUDA) for _ in range(2)]
    calls = GraphedCalls([lambda c=c: lambda: c.add_(1) for c in counts], 5)
    for count in counts:
        count.zero_()
    calls()
    torch.cuda.synchronize()
    assert [count.item() for count in counts] == [3, 2]
