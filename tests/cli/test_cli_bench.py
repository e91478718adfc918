"""`quickvit bench`."""

import json

import pytest

from quickvit import __version__
from quickvit.bench.tune import Tuned
from quickvit.ops.tiles import stored


class TestBench:
    SMALL = ("--sizes", "tiny", "--img-size", 32, "--batch", 1, "--device", "cpu", "--repeats", 1)

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        monkeypatch.setattr("quickvit.bench.timing.SAMPLE_MS", 0.0)

    @pytest.mark.parametrize("kind", ["block", "model", "train", "memory", "ops"])
    def test_models_print_a_table(self, run, kind):
        depth = ("--depth", 1) if kind in ("model", "train", "memory") else ()
        code, out, err = run("bench", kind, *self.SMALL, *depth)
        assert (code, err) == (0, "")
        assert out.startswith("case  ")
        assert "ViT-Tiny/16 32px" in out
        assert ("ceilings in float32: " in out) == (kind != "memory")

    @pytest.mark.parametrize("kind", ["linear", "gelu"])
    def test_layers_print_a_table(self, run, kind):
        code, out, _ = run(
            *("bench", kind, "--widths", 16, 32, "--tokens", 2, "--batch", 1, "--device", "cpu"),
            *("--repeats", 1, "--threads", 1, "--dtype", "float32", "bfloat16"),
        )
        assert code == 0
        assert "C = 16" in out
        assert "C = 32" in out
        assert "ceilings in bfloat16: " in out

    def test_linear_layers_of_other_groups(self, run):
        small = ("--widths", 32, "--tokens", 2, "--batch", 1, "--device", "cpu", "--repeats", 1)
        code, out, _ = run("bench", "linear", *small, "--groups", 8, 16, "--json")
        assert code == 0
        assert [row["name"] for row in json.loads(out)["results"]] == [
            *("standard", "octic", "D16", "eight blocks")
        ]

    def test_flops(self, run):
        code, out, _ = run("bench", "flops", "--widths", 64, "--json")
        assert code == 0
        assert [row["name"] for row in json.loads(out)["results"]] == ["standard", "octic"]

    def test_json_and_file_say_the_same(self, run, tmp_path):
        path = tmp_path / "new" / "model.json"
        options = ("--depth", 2, "--families", "h8", "--threads", 1, "--json", "--out", path)
        code, out, err = run("bench", "model", *self.SMALL, *options)
        assert (code, err) == (0, "")
        record = json.loads(out)
        assert record == json.loads(path.read_text())
        assert [row["name"] for row in record["results"]] == ["vit", "h8"]
        assert record["versions"]["quickvit"] == __version__
        assert record["hardware"]["device"] == "cpu"
        assert record["command"].startswith("quickvit bench model --sizes tiny --img-size 32")
        assert record["settings"]["compile"] == "none"

    def test_an_unusable_out_is_found_before_the_work(self, run, monkeypatch, tmp_path):
        monkeypatch.setattr("quickvit.bench.suite.run", lambda *arguments: pytest.fail("this takes time"))
        code, out, err = run("bench", "flops", "--widths", 64, "--out", tmp_path)
        assert (code, out) == (2, "")
        assert (
            err == f"quickvit: error: cannot write {tmp_path}: it is a folder; expected the name of a file\n"
        )

    def test_the_table_outlives_a_failed_write(self, run, monkeypatch, tmp_path):
        def full(record, path):
            raise OSError("no space left on device")

        monkeypatch.setattr("quickvit.cli.bench.write", full)
        code, out, err = run("bench", "flops", "--widths", 64, "--out", tmp_path / "flops.json")
        assert code == 2
        assert "C = 64" in out
        assert "no space left" in err

    def test_nothing_measured_is_exit_code_1(self, run, monkeypatch):
        def broken(*arguments, **options):
            raise RuntimeError("no such kernel")

        monkeypatch.setattr("quickvit.bench.models.create_model", broken)
        code, out, _ = run("bench", "memory", *self.SMALL)
        assert code == 1
        assert out.count("RuntimeError: no such kernel") == 4

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--sizes", "tiny", "vast"], "unknown size 'vast'; expected one of tiny"),
            (["--families", "h9"], "unknown family 'h9'"),
            (["--batch", "0"], "batch must be at least 1, got 0"),
            (["--device", "abacus"], "cannot use the device 'abacus'"),
            (["--device", "meta"], "cannot use the device 'meta'"),
            (["--threads", "0"], "threads must be at least 1, got 0"),
        ],
    )
    def test_wrong_arguments(self, run, arguments, message):
        code, out, err = run("bench", "model", *self.SMALL, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("quickvit: error: ")
        assert message in err


class TestTune:
    def test_needs_a_gpu(self, run):
        code, _, err = run("tune", "--device", "cpu")
        assert code == 2
        assert "got the device cpu" in err

    @pytest.fixture
    def found(self, monkeypatch, tmp_path):
        """What the search finds on a made-up GPU."""
        found = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr("quickvit.cli.bench.require_gpu", lambda _: "A GPU")
        monkeypatch.setattr("quickvit.cli.bench.measure_ceilings", lambda _: None)
        monkeypatch.setattr("quickvit.cli.bench.search_tiles", lambda *_: iter(found))
        stored.cache_clear()
        yield found
        stored.cache_clear()

    def test_keeps_what_it_finds(self, run, found, tmp_path):
        found.append(Tuned("norm forward 8x2", (1, 16, 2), (2, 8, 2), 0.5, 0.25))
        found.append(Tuned("norm forward 8x4", (1, 16, 2), (1, 8, 2), None, 0.25))
        code, out, _ = run("tune", "--sizes", "tiny", "--device", "cpu")
        assert code == 0
        assert "norm forward 8x2  (1, 16, 2)   0.5000  (2, 8, 2)  0.2500" in out
        assert "norm forward 8x4  (1, 16, 2)        –  (1, 8, 2)  0.2500" in out
        assert stored("A GPU") == {"norm forward 8x2": (2, 8, 2), "norm forward 8x4": (1, 8, 2)}
        assert str(tmp_path) in out

    def test_nothing_found_is_said(self, run, found):
        code, out, err = run("tune", "--sizes", "tiny", "--device", "cpu")
        assert (code, out) == (1, "")
        assert err == "quickvit: nothing to tune: no kernel with tiles runs on this GPU\n"

    def test_sizes_are_checked_before_the_work(self, run, found, monkeypatch):
        monkeypatch.setattr("quickvit.cli.bench.measure_ceilings", lambda _: pytest.fail("this takes time"))
        code, _, err = run("tune", "--sizes", "vast", "--device", "cpu")
        assert code == 2
        assert "unknown size 'vast'" in err
