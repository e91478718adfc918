"""`quickvit verify` and `embed`."""

import json

import numpy as np
import pytest
import torch

from quickvit import QuickVisionTransformer
from quickvit.layers import OcticPosition

ELEMENTS = ["e", "r", "r2", "r3", "s", "sr", "sr2", "sr3"]


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
