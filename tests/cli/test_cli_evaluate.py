"""`quickvit verify` and `embed`."""

import json

import numpy as np
import pytest
import torch

from quickvit import QuickVisionTransformer, save_checkpoint
from quickvit.layers import OcticPosition
from quickvit.models import create_model
from quickvit.models.checkpoints import save_weights
from quickvit.models.standard import standard_config
from quickvit.testing import randomize

ELEMENTS = ["e", "r", "r2", "r3", "s", "sr", "sr2", "sr3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that trained an i8 with small patches."""
    folder = tmp_path_factory.mktemp("run")
    model = QuickVisionTransformer(
        family="i8", img_size=16, patch_size=4, embed_dim=64, depth=2, num_heads=2, num_classes=3
    )
    save_checkpoint(randomize(model, seed=7), folder / "model.safetensors")
    return folder


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

    @pytest.mark.parametrize("command", [["verify"], ["embed", "--out", "f.npz"]])
    def test_what_is_no_vit(self, run, images, command):
        code, _, err = run(*command, "resnet18", *([images] if command[0] == "embed" else []))
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


class TestEmbed:
    def test_files_and_runs(self, run, images, trained, tmp_path):
        features = []
        for model in (trained, trained / "model.safetensors"):
            out_file = tmp_path / f"{model.name}.npz"
            code, _, err = run("embed", model, images, "--out", out_file, "--device", "cpu")
            assert code == 0
            assert "the weights are random" not in err
            with np.load(out_file) as file:
                features.append(file["features"])
        assert features[0].shape == (3, 64)
        assert np.array_equal(*features)

    def test_an_unusable_out_is_found_before_the_work(self, run, monkeypatch, images, checkpoint):
        monkeypatch.setattr("quickvit.cli.evaluate.embed_images", lambda *_, **__: pytest.fail("takes time"))
        code, _, err = run("embed", checkpoint, images, "--out", images)
        assert code == 2
        assert "it is a folder; expected the name of a file" in err

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

    def test_nothing_readable_is_exit_code_2(self, run, checkpoint, tmp_path):
        out_file = tmp_path / "features.npz"
        code, out, err = run(
            *("embed", "quickvit_i8_tiny_patch16_224", tmp_path / "missing.png", "--checkpoint", checkpoint),
            *("--out", out_file),
        )
        assert (code, out) == (2, "")
        assert "quickvit: error: none of the 1 images could be read" in err
        assert not out_file.exists()

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (["--device", "abacus"], "cannot use the device 'abacus'"),
            (["--device", "meta"], "cannot use the device 'meta'"),
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
