"""`quickvit verify`."""

import json

import pytest
import torch

from quickvit import QuickVisionTransformer
from quickvit.layers import OcticPosition
from quickvit.models import create_model
from quickvit.models.checkpoints import save_weights
from quickvit.models.standard import standard_config
from quickvit.testing import randomize

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
        assert out.endswith(
            "promised in float32: equivariance within 1e-05 and invariance within 1e-05; kept\n"
        )

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
        assert out.endswith("equivariance within 1e-05; broken: equivariance\n")

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

    def test_weights_of_files_and_runs_stay_as_they_are(self, run, monkeypatch, trained):
        """Here the trained patches are not those of a named model."""
        monkeypatch.setattr(
            "quickvit.cli.evaluate.randomize", lambda *_: pytest.fail("the weights were replaced")
        )
        for model in (trained, trained / "model.safetensors"):
            code, out, _ = run("verify", model, "--dtype", "float64", "--json")
            result = json.loads(out)
            assert code == 0
            assert (result["name"], result["img_size"]) == (str(model), [16, 16])
            assert result["promises"] == ["equivariance", "invariance"]
            assert result["worst"]["invariance"] < 1e-10

    def test_a_trained_standard_vit_of_images_that_are_not_square(self, run, tmp_path):
        path = tmp_path / "vit.safetensors"
        vit = randomize(create_model("baseline_tiny_patch16_224", img_size=32, depth=1), seed=7)
        save_weights(vit.state_dict(), path, standard_config(vit))
        for model in ([path], ["baseline_tiny_patch16_224", "--checkpoint", path]):
            code, out, _ = run("verify", *model, "--img-size", "32x48", "--json")
            assert code == 0
            assert json.loads(out)["img_size"] == [32, 48]

    def test_a_file_needs_no_other_weights(self, run, trained, checkpoint):
        code, _, err = run("verify", trained, "--checkpoint", checkpoint)
        assert code == 2
        assert f"{trained} has weights already" in err

    def test_what_is_no_vit(self, run):
        code, _, err = run("verify", "resnet18")
        assert code == 2
        assert "resnet18 is neither a Quick ViT nor a ViT of timm" in err

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
