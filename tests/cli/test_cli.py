"""The command line itself."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from quickvit import __version__
from quickvit.cli import COMMANDS, main
from quickvit.cli.command import Command
from quickvit.cli.output import print_json


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--version"], 0, f"quickvit {__version__}"),
        (["--help"], 0, "verify"),
        (["models", "--famly", "h8"], 2, "--famly"),
        (["verify", "quickvit_h8_tiny_patch16_224", "--dtype", "int8"], 2, "int8"),
        (["embed", "quickvit_h8_tiny_patch16_224", "--out", "f.npz"], 2, "images"),
        (["bench", "model", "--compile", "most"], 2, "most"),
        (["bench", "ops", "--families", "d8"], 2, "--families"),
        (["bench", "model", "--famil", "d8"], 2, "--famil"),
        (["eval", "knn", "m.safetensors", "--dat", "digits"], 2, "--dat"),
        (["demo", "--epoch", "3"], 2, "--epoch"),
        (["train", "deit3", "--model=m", "--data=d", "--out=o", "--epoch", "3"], 2, "--epoch"),
        (["train", "deit3", "--model=m", "--data=d", "--out=o", "--run.log", "3"], 2, "--run.log"),
        (["train", "replay", "captured", "--js"], 2, "--js"),
        (["bench"], 2, "subcommand"),
        ([], 2, "subcommand"),
    ],
)
def test_parser(argv, code, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    captured = capsys.readouterr()
    assert exit_info.value.code == code
    assert message in captured.out + captured.err


def test_what_is_not_finite_is_null_in_json(capsys):
    print_json({"rows": [{"loss": math.nan, "ratio": (1.5, -math.inf)}], "file": Path("a")})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"rows": [{"loss": None, "ratio": [1.5, None]}], "file": "a"}


def test_module_is_the_command():
    command = [sys.executable, "-m", "quickvit", "info", "nothing"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("quickvit: error: unknown model 'nothing'")


def test_an_interruption_is_one_line(run, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "demo", Command(interrupted, COMMANDS["demo"].add_arguments))
    assert run("demo") == (130, "", "quickvit: interrupted\n")
