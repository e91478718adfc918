"""The command line: every command, its JSON, its exit codes and its errors."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from quickvit import QuickVisionTransformer, __version__, save_checkpoint
from quickvit.cli import main
from quickvit.layers import OcticPosition
from quickvit.models import SIZES
from quickvit.testing import randomize

ELEMENTS = ["e", "r", "r2", "r3", "s", "sr", "sr2", "sr3"]


@pytest.fixture
def run(capsys):
    """Run a command line: exit code, standard output, standard error."""

    def call(*argv):
        code = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """An i8 of size tiny for small images."""
    path = tmp_path_factory.mktemp("checkpoint") / "i8.safetensors"
    arguments = {**SIZES["tiny"].arguments(), "img_size": 32, "num_classes": 7, "init_values": 1e-4}
    save_checkpoint(randomize(QuickVisionTransformer(family="i8", **arguments), seed=5), path)
    return path


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in ("a.png", "b.jpg", "inner/c.png"):
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / name)
    return folder


class TestModels:
    def test_json_has_every_variant_of_a_size(self, run):
        code, out, err = run("models", "--size", "huge", "--json")
        rows = json.loads(out)
        assert (code, err) == (0, "")
        assert list(rows[0]) == [
            *("name", "family", "size", "patch_size", "invariant"),
            *("parameters", "gmacs", "gflops"),
        ]
        kinds = [(row["family"], row["invariant"], row["patch_size"]) for row in rows]
        for patch in (14, 16):
            assert {(family, invariant) for family, invariant, p in kinds if p == patch} == {
                ("vit", None),
                ("d8", "power_spectrum"),
                ("i8", "power_spectrum"),
                ("i8", "polynomial"),
                ("h8", None),
                ("h2", None),
            }
        row = next(r for r in rows if (r["name"], r["family"]) == ("quickvit_h8_huge_patch14_224", "h8"))
        assert round(row["parameters"] / 1e6, 1) == 355.8
        assert row["gmacs"] == pytest.approx(101.6, rel=0.01)
        assert row["gflops"] == 2 * row["gmacs"]

    def test_table(self, run):
        code, out, _ = run("models", "--family", "i8", "--size", "large", "--patch", "16")
        lines = [line.split() for line in out.splitlines()]
        assert code == 0
        assert lines[0] == ["name", "family", "invariant", "parameters", "(M)", "GMACs"]
        assert lines[2:] == [
            ["quickvit_i8_large_patch16_224", "i8", "power_spectrum", "172.1", "37.5"],
            ["quickvit_i8_large_patch16_224", "i8", "polynomial", "175.5", "38.2"],
        ]

    def test_unknown_family(self, run):
        code, out, err = run("models", "--family", "h9")
        assert (code, out) == (2, "")
        assert err == "quickvit: error: unknown family 'h9'; expected one of vit, d8, i8, h8, h2\n"


class TestInfo:
    def test_parts_add_up(self, run):
        _, out, _ = run("info", "quickvit_i8_22b_patch14_224", "--json")
        result = json.loads(out)
        assert result["family"] == "i8"
        assert result["octic_depth"] == 24
        assert [p["part"] for p in result["parts"]] == [
            *("lift", "octic_blocks", "invariant", "standard_blocks", "head")
        ]
        for key in ("parameters", "gmacs", "gflops"):
            assert sum(part[key] for part in result["parts"]) == pytest.approx(result[key])

    @pytest.mark.parametrize(
        "name", ["baseline_tiny_patch16_224", "vit_tiny_patch16_224", "deit3_small_patch16_224"]
    )
    def test_standard_vits(self, run, name):
        code, out, _ = run("info", name)
        assert code == 0
        assert "standard blocks" in out
        assert "octic blocks" not in out

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("quickvit_h8_larg_patch16_224", "did you mean quickvit_h8_large_patch16_224,"),
            ("%%%", "`quickvit models` lists the names"),
            ("resnet50", "resnet50 is neither a Quick ViT nor a ViT of timm"),
        ],
    )
    def test_unknown_names(self, run, name, message):
        code, out, err = run("info", name)
        assert (code, out) == (2, "")
        assert err.startswith("quickvit: error: ")
        assert message in err
        assert err.count("\n") == 1


class TestVerify:
    @pytest.mark.parametrize("family", ["d8", "i8", "h8", "h2"])
    @pytest.mark.parametrize(("size", "dtype"), [("32x48", "float64"), ("32", "float32"), ("32", "bfloat16")])
    def test_families_keep_their_promises(self, run, family, size, dtype):
        code, out, _ = run(
            *("verify", f"quickvit_{family}_tiny_patch16_224", "--img-size", size, "--dtype", dtype, "--json")
        )
        result = json.loads(out)
        assert code == 0
        assert result["broken"] == []
        assert result["promises"] == ["equivariance", "invariance"][: 2 if family in ("d8", "i8") else 1]
        assert [row["element"] for row in result["elements"]] == ELEMENTS
        known = [row["element"] for row in result["elements"] if row["equivariance"] is not None]
        assert known == (["e", "s"] if family == "h2" else ELEMENTS)
        if family.startswith("h"):
            assert result["worst"]["invariance"] > 0.1

    def test_table_names_every_element(self, run):
        code, out, _ = run("verify", "quickvit_i8_tiny_patch16_224", "--img-size", "32")
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()[2:11]] == [*ELEMENTS, "worst"]
        assert out.endswith("equivariance and invariance; kept\n")

    def test_broken_invariance_is_exit_code_1(self, run, monkeypatch):
        monkeypatch.setattr(QuickVisionTransformer, "_leave", lambda self, x: x)
        code, out, _ = run("verify", "quickvit_i8_tiny_patch16_224", "--img-size", "32", "--json")
        assert code == 1
        assert json.loads(out)["broken"] == ["invariance"]

    def test_broken_equivariance_is_exit_code_1(self, run, monkeypatch):
        positions = torch.randn(2, 2, 192)
        monkeypatch.setattr(OcticPosition, "forward", lambda self, height, width: positions)
        code, out, _ = run("verify", "quickvit_h8_tiny_patch16_224", "--img-size", "32")
        assert code == 1
        assert out.endswith("equivariance; broken: equivariance\n")

    @pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "baseline_tiny_patch16_224"])
    def test_a_standard_vit_promises_nothing(self, run, name):
        code, out, _ = run("verify", name, "--img-size", "32x48", "--json")
        result = json.loads(out)
        assert code == 0
        assert result["promises"] == []
        assert result["worst"]["equivariance"] is None
        assert result["worst"]["invariance"] > 0.1

    def test_checkpoint(self, run, checkpoint):
        code, out, _ = run(
            "verify",
            "quickvit_i8_tiny_patch16_224",
            "--checkpoint",
            checkpoint,
            "--dtype",
            "float64",
            "--json",
        )
        result = json.loads(out)
        assert code == 0
        assert result["img_size"] == [32, 32]
        assert result["worst"]["invariance"] < 1e-10

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["quickvit_d8_tiny_patch16_224", "--img-size", "33"], "33×33 pixels has no whole patches of 16"),
            (["vit_tiny_patch16_224", "--img-size", "8"], "8×8 pixels has no whole patches of 16"),
            (["quickvit_d8_tiny_patch16_224", "--img-size", "3x"], "H or HxW, got '3x'"),
            (["quickvit_d8_tiny_patch16_224", "--checkpoint", "nowhere.safetensors"], "nowhere.safetensors"),
        ],
    )
    def test_wrong_arguments(self, run, arguments, message):
        code, out, err = run("verify", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("quickvit: error: ")
        assert message in err

    def test_a_checkpoint_of_another_model(self, run, checkpoint):
        code, _, err = run("verify", "quickvit_h8_tiny_patch14_224", "--checkpoint", checkpoint)
        assert code == 2
        assert (
            "is not a quickvit_h8_tiny_patch14_224: family i8 instead of h8, patch_size 16 instead of 14"
            in err
        )

    def test_a_damaged_checkpoint(self, run, checkpoint, tmp_path):
        damaged = tmp_path / "damaged.safetensors"
        damaged.write_bytes(checkpoint.read_bytes()[:1000])
        code, _, err = run("verify", "quickvit_i8_tiny_patch16_224", "--checkpoint", damaged)
        assert code == 2
        assert err.startswith("quickvit: error: ")
        assert str(damaged) in err


class TestEmbed:
    def test_features_of_a_folder(self, run, images, checkpoint, tmp_path):
        out_file = tmp_path / "new" / "features.npz"
        code, out, err = run(
            *("embed", "quickvit_i8_tiny_patch16_224", images, "--checkpoint", checkpoint, "--out", out_file),
            *("--batch-size", 2, "--device", "cpu", "--json"),
        )
        assert code == 0
        assert json.loads(out) == {"out": str(out_file), "images": 3, "width": 192, "skipped": {}}
        assert "3/3" in err
        with np.load(out_file) as file:
            assert file["features"].shape == (3, 192)
            assert file["features"].dtype == np.float32
            assert file["features"].std(0).min() > 0
            assert [path.rsplit("/", 1)[1] for path in file["paths"]] == ["a.png", "b.jpg", "c.png"]

    def test_pooling(self, run, images, checkpoint, tmp_path):
        features = []
        for pool in ("token", "avg"):
            out_file = tmp_path / f"{pool}.npz"
            run(
                *("embed", "quickvit_i8_tiny_patch16_224", images / "a.png", "--out", out_file),
                *("--checkpoint", checkpoint, "--pool", pool),
            )
            with np.load(out_file) as file:
                features.append(file["features"])
        assert not np.allclose(*features)

    def test_unreadable_images_are_skipped(self, run, images, checkpoint, tmp_path):
        (images / "broken.png").write_bytes(b"no image")
        out_file = tmp_path / "features.npz"
        code, out, err = run(
            "embed", "quickvit_i8_tiny_patch16_224", images, "--checkpoint", checkpoint, "--out", out_file
        )
        assert code == 0
        assert "skipped 1 images" in out
        assert f"quickvit: skipped {images / 'broken.png'}: UnidentifiedImageError" in err
        with np.load(out_file) as file:
            assert len(file["features"]) == len(file["paths"]) == 3

    def test_nothing_readable_is_exit_code_1(self, run, checkpoint, tmp_path):
        out_file = tmp_path / "features.npz"
        code, out, err = run(
            *("embed", "quickvit_i8_tiny_patch16_224", tmp_path / "missing.png", "--checkpoint", checkpoint),
            *("--out", out_file),
        )
        assert (code, out) == (1, "")
        assert "none of the 1 images could be read" in err
        assert not out_file.exists()

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (["--device", "abacus"], "cannot use the device 'abacus'"),
            (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        ],
    )
    def test_wrong_arguments(self, run, images, checkpoint, tmp_path, option, message):
        code, _, err = run(
            *("embed", "quickvit_i8_tiny_patch16_224", images, "--checkpoint", checkpoint),
            *("--out", tmp_path / "features.npz", *option),
        )
        assert code == 2
        assert message in err

    def test_an_empty_folder(self, run, tmp_path):
        code, _, err = run("embed", "quickvit_i8_tiny_patch16_224", tmp_path, "--out", tmp_path / "f.npz")
        assert code == 2
        assert f"no images in {tmp_path}" in err


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

    def test_nothing_measured_is_exit_code_1(self, run, monkeypatch):
        def broken(*arguments, **options):
            raise RuntimeError("no such kernel")

        monkeypatch.setattr("quickvit.bench.models._create", broken)
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
            (["--threads", "0"], "threads must be at least 1, got 0"),
        ],
    )
    def test_wrong_arguments(self, run, arguments, message):
        code, out, err = run("bench", "model", *self.SMALL, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("quickvit: error: ")
        assert message in err


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


def test_module_is_the_command():
    command = [sys.executable, "-m", "quickvit", "info", "nothing"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("quickvit: error: unknown model 'nothing'")
