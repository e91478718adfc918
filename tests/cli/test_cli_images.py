"""`quickvit embed` and `predict`."""

import json
import os

import numpy as np
import pytest
import torch

from quickvit import load_checkpoint, save_checkpoint
from quickvit.data import preprocessing, read_image
from quickvit.models.declared import declare


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

    def test_what_is_no_vit(self, run, images, tmp_path):
        code, _, err = run("embed", "resnet18", images, "--out", tmp_path / "f.npz")
        assert code == 2
        assert "resnet18 is neither a Quick ViT nor a ViT of timm" in err

    def test_an_unusable_out_is_found_before_the_work(self, run, monkeypatch, images, checkpoint):
        monkeypatch.setattr("quickvit.cli.images.embed_images", lambda *_, **__: pytest.fail("takes time"))
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

    def test_a_model_without_a_class_token(self, run, images, tmp_path):
        name = "vit_little_patch16_reg1_gap_256"
        code, _, err = run("embed", name, images, "--out", tmp_path / "f.npz", "--pool", "token")
        assert code == 2
        assert f"{name} has no class token; choose --pool avg" in err

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


class TestPredict:
    def test_classes_of_images(self, run, images, trained):
        code, out, err = run("predict", trained, images, "--device", "cpu", "--top", 2, "--json")
        assert code == 0
        assert "the weights are random" not in err
        model = load_checkpoint(trained).eval()
        found = json.loads(out)["answers"]
        assert len(found) == 3
        for path, answer in found.items():
            with torch.no_grad():
                shares = model(preprocessing(model)(read_image(path))[None]).softmax(-1)[0]
            best = shares.argsort(descending=True)[:2].tolist()
            assert list(answer) == [("ant", "bee", "cat")[i] for i in best]
            assert list(answer.values()) == pytest.approx(shares[best].tolist(), abs=1e-5)

    def test_a_table(self, run, images, trained):
        (images / "broken.png").write_bytes(b"no image")
        code, out, err = run("predict", trained, images)
        assert code == 0
        header, _, *rows = (line.split() for line in out.splitlines())
        assert header == ["image", "class", "share"]
        assert [row[0] for row in rows] == [str(images / name) for name in ("a.png", "b.jpg", "inner/c.png")]
        assert all(row[1] in ("ant", "bee", "cat") and row[2].endswith("%") for row in rows)
        assert f"quickvit: skipped {images / 'broken.png'}: " in err

    def test_classes_without_names_have_numbers(self, run, images, checkpoint):
        code, out, _ = run("predict", checkpoint, images / "a.png", "--top", 99, "--json")
        assert code == 0
        (answer,) = json.loads(out)["answers"].values()
        assert sorted(answer) == [str(i) for i in range(7)]
        assert sum(answer.values()) == pytest.approx(1)

    def test_names_give_no_orders_to_a_terminal(self, run, images, trained, tmp_path):
        model = load_checkpoint(trained)
        declare(model, label_names=("\x1b[2J", "\x1b[2J", "\x1b[2J"))
        save_checkpoint(model, tmp_path / "new.safetensors")
        _, out, _ = run("predict", tmp_path / "new.safetensors", images / "a.png")
        assert "\x1b" not in out
        assert r"'\x1b[2J'" in out

    @pytest.mark.parametrize("name", [b"\x1b[2J.png", b"caf\xe9.png"], ids=["control", "latin-1"])
    def test_files_of_any_name(self, run, images, trained, tmp_path, name):
        path, broken = (images / (start + os.fsdecode(name)) for start in ("", "broken"))
        (images / "a.png").rename(path)
        broken.write_bytes(b"no image")
        code, out, err = run("predict", trained, images)
        assert code == 0
        for text, shown in ((out, path), (err, broken)):
            assert "\x1b" not in text
            assert ascii(str(shown)) in text
        assert run("embed", trained, images, "--out", tmp_path / "f.npz")[0] == 0
        with np.load(tmp_path / "f.npz") as file:
            assert str(path) in file["paths"]
        code, out, _ = run("predict", trained, images, "--json")
        assert str(path) in json.loads(out)["answers"]

    def test_too_few_names_are_no_names(self, run, images, trained, tmp_path):
        model = load_checkpoint(trained)
        declare(model, label_names=("ant", "bee"))
        save_checkpoint(model, tmp_path / "new.safetensors")
        _, out, _ = run("predict", tmp_path / "new.safetensors", images / "a.png", "--top", 3, "--json")
        (answer,) = json.loads(out)["answers"].values()
        assert sorted(answer) == ["0", "1", "2"]

    def test_names_of_other_classes_are_forgotten(self, run, images, trained, tmp_path):
        model = load_checkpoint(trained)
        model.reset_classifier(3)
        save_checkpoint(model, tmp_path / "new.safetensors")
        _, out, _ = run("predict", tmp_path / "new.safetensors", images / "a.png", "--top", 3, "--json")
        (answer,) = json.loads(out)["answers"].values()
        assert sorted(answer) == ["0", "1", "2"]

    def test_a_model_without_a_head(self, run, images, trained, tmp_path):
        model = load_checkpoint(trained)
        model.reset_classifier(0)
        save_checkpoint(model, tmp_path / "new.safetensors")
        code, _, err = run("predict", tmp_path / "new.safetensors", images)
        assert code == 2
        assert "the model has no head" in err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--top", "0"], "--top must be at least 1, got 0"),
            (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        ],
    )
    def test_wrong_arguments(self, run, images, trained, arguments, message):
        code, _, err = run("predict", trained, images, *arguments)
        assert code == 2
        assert message in err
