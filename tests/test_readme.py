"""The README's example runs."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {})
    assert (tmp_path / "model.safetensors").is_file()


def test_the_commands_exist():
    from quickvit.cli import COMMANDS

    named = set(re.findall(r"`quickvit (\w+)", README.read_text()))
    assert named - {"COMMAND"} <= set(COMMANDS)
    assert set(COMMANDS) <= named
