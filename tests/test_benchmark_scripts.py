"""The scripts in benchmarks/ ask for what the commands have."""

import re
import runpy
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from quickvit.bench import models
from quickvit.cli import parse

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
PIECES = re.findall(r'^ +(\w+)\) bench "\$piece" (.*) ;;$', (SCRIPTS / "gpu.sh").read_text(), re.M)


@pytest.mark.parametrize(("piece", "arguments"), PIECES, ids=[piece for piece, _ in PIECES])
def test_measurements_can_be_asked_for(piece, arguments):
    arguments = arguments.replace('"${graphs[@]}"', "--compile reduce-overhead --repeats 7")
    arguments = arguments.replace('"${blocks[@]}"', "--compile blocks --repeats 7")
    arguments = arguments.replace('"${fewer[@]}"', "--depth 8")
    parse(["bench", *shlex.split(arguments), "--out", f"{piece}.json"])


@pytest.mark.parametrize("step", ["forward", "folded", "train", "dinov2"])
def test_kernels_of_a_block_are_counted(step, monkeypatch, capsys):
    """Of models of 2 and 4 blocks, whose kernels take 10 µs for a block and 5 beside them."""
    script = runpy.run_path(str(SCRIPTS / "kernels.py"))

    def build(family, shape, settings):
        return family, shape.depth, settings.compile

    def kernels(job):
        family, depth, mode = job
        assert (family, mode) == ("h8", "reduce-overhead")
        return Counter(norm=10 * depth + 5, head=7), Counter(norm=2 * depth, head=1)

    names = script["main"].__globals__
    monkeypatch.setitem(names, "kernels", kernels)
    monkeypatch.setitem(names["KINDS"], step, build)
    arguments = ["kernels.py", "h8", "--step", step, "--compile", "reduce-overhead"]
    monkeypatch.setattr("sys.argv", arguments)
    script["main"]()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [
        ["10.0", "2.0", "12.0", "together"],
        ["10.0", "2.0", "5.0", "norm"],
        ["0.0", "0.0", "7.0", "head"],
    ]


def test_kernels_are_those_of_the_step_that_was_asked_for(monkeypatch):
    names = runpy.run_path(str(SCRIPTS / "kernels.py"))["main"].__globals__
    monkeypatch.setitem(names, "dinov2_step", lambda *arguments: arguments)
    kinds = names["KINDS"]
    assert (kinds["forward"], kinds["train"]) == (models.inference, models.training)
    assert (kinds["folded"].func, kinds["folded"].keywords) == (models.inference, {"folded": True})
    assert kinds["dinov2"]("h8", "a shape", "settings") == ("a shape", "settings", "h8")


@pytest.mark.parametrize("dim", [80, 104])
def test_attention_is_timed_by_name(dim, monkeypatch, capsys):
    """Heads of 80 alone have gradients."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Gluon")
    script = runpy.run_path(str(SCRIPTS / "attention.py"))
    names = script["main"].__globals__
    monkeypatch.setitem(names, "jobs", lambda images, tokens, dim: {"ours": images, "theirs": dim})
    monkeypatch.setitem(names, "graded_jobs", lambda images, tokens: {"gradient": tokens})
    monkeypatch.setitem(names, "microseconds", float)
    monkeypatch.setattr("sys.argv", ["attention.py", "--tokens", "197", "--dim", str(dim)])
    script["main"]()
    expected = [["64.0", "ours"], [f"{dim}.0", "theirs"], ["197.0", "gradient"]]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == (expected if dim == 80 else expected[:2])


def test_pieces_are_found():
    assert {"model", "train_large", "memory", "dinov2_large"} <= {piece for piece, _ in PIECES}


@pytest.mark.parametrize("protocol", ["hematology", "knn", "linear", "rotation", "segmentation"])
def test_evaluations_can_be_asked_for(protocol):
    script = (SCRIPTS / "study" / "frozen.sh").read_text()
    options = dict(re.findall(r'^ +(cells|roads)=\("\$model" (.*)\)$', script, re.M))
    chosen = options["roads" if protocol == "segmentation" else "cells"]
    parse(["eval", protocol, "MODEL", *shlex.split(chosen.replace("$pbc", "A").replace("$camvid", "B"))])
    assert f"eval {protocol}" in script or protocol in re.search(r"for protocol in (.*);", script)[1].split()


def test_tiles_of_a_kernel_are_timed_beside_its_own(monkeypatch, capsys):
    names = runpy.run_path(str(SCRIPTS / "tiles.py"))["main"].__globals__
    chosen = [SimpleNamespace(label=label, name="octic") for label in ("GELU", "norm")]
    chosen.append(SimpleNamespace(label="GELU", name="standard"))
    of = {"GELU": {"gelu forward 8x4": (512, 4)}, "norm": {"norm 8": (2, 2)}}
    monkeypatch.setitem(names, "operators", lambda shape, settings: chosen)
    monkeypatch.setitem(names, "measure_ceilings", lambda settings: None)
    monkeypatch.setitem(names, "asked", lambda operator, settings: of[operator.label])
    # A tile of 8 warps does not compile.
    monkeypatch.setitem(
        names, "timed", lambda operator, kernel, tiles, *_: {t: t[0] / 1e3 for t in tiles if t[1] < 8}
    )
    monkeypatch.setattr("sys.argv", ["tiles.py", "gelu", "1024,4", "64,8", "--sizes", "huge"])
    names["main"]()
    times = "(512, 4) 512.0, (1024, 4) 1024.0, (64, 8) does not run"
    assert capsys.readouterr().out == f"huge GELU, gelu forward 8x4: {times}\n"
    monkeypatch.setattr("sys.argv", ["tiles.py", "gelu", "1024,4,2", "--sizes", "huge"])
    with pytest.raises(SystemExit, match=r"has 2 numbers, as \(512, 4\); got \(1024, 4, 2\)"):
        names["main"]()
    monkeypatch.setattr("sys.argv", ["tiles.py", "relu", "1024,4", "--sizes", "huge"])
    with pytest.raises(SystemExit):
        names["main"]()
    assert "no kernel is called 'relu'; expected one of gelu forward 8x4, norm 8" in capsys.readouterr().err
