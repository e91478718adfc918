"""`quickvit demo`."""

import json

import pytest


class TestDemo:
    @pytest.fixture
    def seen(self, monkeypatch):
        """Replace the work of the demo by noting its configuration."""
        from quickvit import demo

        seen = []
        monkeypatch.setattr(demo, "run_demo", lambda config: seen.append(config) or {"accuracy": 0.987654})
        monkeypatch.setattr(demo, "format_table", lambda results: f"{results['accuracy']:.1%}")
        return seen

    def test_options_reach_the_demo(self, run, seen):
        code, out, _ = run("demo", "--out", "here", "--seed", 3, "--epochs", 2, "--json")
        assert code == 0
        assert json.loads(out) == {"accuracy": 0.987654}
        assert (str(seen[0].out), seen[0].seed, seen[0].epochs) == ("here", 3, 2)

    def test_table(self, run, seen):
        code, out, _ = run("demo")
        assert code == 0
        assert out.splitlines() == ["98.8%", "", "picture and numbers: demo"]

    def test_missing_extra(self, run, monkeypatch):
        from quickvit import demo

        monkeypatch.setattr(demo, "find_spec", lambda name: None)
        code, _, err = run("demo")
        assert code == 2
        assert 'pip install "quickvit[demo]"' in err
