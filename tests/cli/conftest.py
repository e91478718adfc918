"""Command lines run in this process, and files for them."""

import numpy as np
import pytest
from PIL import Image

from quickvit import QuickVisionTransformer, save_checkpoint
from quickvit.cli import main
from quickvit.models import SIZES
from quickvit.models.declared import declare
from quickvit.testing import randomize


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that trained an i8 with small patches."""
    folder = tmp_path_factory.mktemp("run")
    model = QuickVisionTransformer(
        family="i8", img_size=16, patch_size=4, embed_dim=64, depth=2, num_heads=2, num_classes=3
    )
    declare(model, label_names=("ant", "bee", "cat"))
    save_checkpoint(randomize(model, seed=7), folder / "model.safetensors")
    return folder


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in ("a.png", "b.jpg", "inner/c.png"):
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / name)
    return folder
