"""The pages in docs/ say what runs."""

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
