"""`quickvit report`."""

import shlex

from jsonargparse import ArgumentParser

from quickvit.cli import COMMANDS
from quickvit.report.results import Results
from quickvit.report.tables import TABLES


class TestReport:
    def test_says_where_the_page_is(self, run, tmp_path):
        (tmp_path / "bench").mkdir()
        code, out, err = run("report", "--bench", tmp_path / "bench", "--out", tmp_path / "report")
        assert (code, err) == (0, "")
        assert out == f"{tmp_path / 'report' / 'index.html'}\n"
        assert (tmp_path / "report" / "tables" / "compute-scaling.md").is_file()

    def test_results_elsewhere(self, run, tmp_path):
        for folder in ("bench", "runs"):
            (tmp_path / folder).mkdir()
        folders = ("--bench", tmp_path / "bench", "--runs", tmp_path / "runs", "--out", tmp_path / "report")
        assert run("report", *folders)[0] == 0

    def test_mistakes(self, run, tmp_path):
        code, _, err = run("report", "--bench", tmp_path / "nowhere", "--out", tmp_path / "report")
        assert code == 2
        assert err.startswith("quickvit: error: there is no folder ")
        (tmp_path / "model.json").write_text('{"benchmark": 1, "results": []}')
        code, _, err = run("report", "--bench", tmp_path, "--out", tmp_path / "report")
        assert code == 2
        assert "model.json: benchmark is '1'; expected a text" in err
        assert not (tmp_path / "report").exists()

    def test_missing_extra(self, run, monkeypatch):
        monkeypatch.setattr("quickvit.cli.report.find_spec", lambda name: None)
        code, _, err = run("report")
        assert code == 2
        assert 'pip install "quickvit[report]"' in err


def test_the_commands_for_what_was_not_run_are_understood():
    tables = [make(Results()) for tables in TABLES.values() for make in tables]
    commands = {command for table in tables for command in table.commands}
    ours = [shlex.split(command)[1:] for command in commands if command.startswith("quickvit ")]
    assert len(ours) >= 8
    for name, *rest in ours:
        parser = ArgumentParser(exit_on_error=False)
        COMMANDS[name].add_arguments(parser)
        parser.parse_args(rest)
