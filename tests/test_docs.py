"""The pages in docs/ say what runs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from quickvit import QuickVisionTransformer, save_checkpoint
from quickvit.cli import main
from quickvit.testing import randomize

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {})


def test_the_commands_of_the_data_page_run(tmp_path, monkeypatch, capsys):
    options = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 10,
    }
    save_checkpoint(randomize(QuickVisionTransformer(**options)), tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    (page,) = (page for page in PAGES if page.stem == "data")
    commands = [line for code in blocks(page, "sh") for line in code.splitlines()]
    assert len(commands) >= 3
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "quickvit"
        assert main(arguments) == 0, capsys.readouterr().err


def measured(name):
    return json.loads((PAGES[0].parent.parent / "benchmarks" / f"{name}.json").read_text())


def test_the_performance_page_says_what_was_measured():
    (page,) = (page for page in PAGES if page.stem == "performance")
    text = page.read_text()
    model, operators = measured("h200_model"), measured("h200_operators")
    for record in (model, operators):
        assert re.sub(r" --out \S+", "", record["command"]) in text
    for row in model["results"]:
        cells = f"{row['ms']:.2f} | {row['images_per_s']:.0f} | {row['ratio']:.2f}× | {row['over_floor']:.2f}"
        assert f"| {row['case']} | {row['name']} | {cells} |" in text
    octic = {row["case"]: row for row in operators["results"] if row["name"] == "octic"}
    for case in octic:
        size, operator = case.split(" ", 1)
        if size == "ViT-Large/16":
            pair = octic[case], octic[f"ViT-Huge/14 {operator}"]
            cells = (f"{1e3 * r['ms']:.0f} | {1e3 * r['floor_ms']:.0f} | {r['over_floor']:.2f}" for r in pair)
            assert f"| {operator} | {' | '.join(cells)} |" in text
