"""`quickvit explore`."""

import pytest
import torch

from quickvit import save_checkpoint
from quickvit.cli.explore import _evenly
from quickvit.data import Sample, Unreadable
from quickvit.models import create_model
from quickvit.models.checkpoints import save_weights
from quickvit.models.standard import standard_config

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}


@pytest.fixture
def models(tmp_path):
    torch.manual_seed(0)
    vit = create_model("baseline_tiny_patch16_224", **SMALL)
    save_weights(vit.state_dict(), tmp_path / "vit.safetensors", standard_config(vit))
    for family in ("i8", "h2"):
        save_checkpoint(
            create_model(f"quickvit_{family}_tiny_patch16_224", **SMALL), tmp_path / f"{family}.safetensors"
        )
    return tmp_path


def test_a_page(run, models):
    out = models / "new" / "explorer.html"
    options = ("--data", "digits", "--images", 3, "--out", out)
    code, printed, _ = run(
        "explore", models / "i8.safetensors", "--baseline", models / "vit.safetensors", *options
    )
    assert code == 0
    assert "3 images" in printed
    assert float(printed.split("within ")[1].split()[0]) < 1e-4
    assert 10_000 < out.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("h2.safetensors", "--baseline", "vit.safetensors"), "got h2"),
        (("i8.safetensors", "--baseline", "none.safetensors"), "no checkpoint at"),
        (
            ("i8.safetensors", "--baseline", "vit.safetensors", "--images", "0"),
            "--images must be from 1 to the 360",
        ),
    ],
)
def test_mistakes(run, models, monkeypatch, options, message):
    monkeypatch.chdir(models)
    code, _, err = run("explore", *options)
    assert code == 2
    assert message in err


class Holey:
    """A source of ten samples, of which some cannot be read."""

    name = "holey"

    def __init__(self, *unreadable):
        self.unreadable = unreadable

    def __len__(self):
        return 10

    def read(self, index):
        if index in self.unreadable:
            raise Unreadable(str(index), "broken")
        return Sample(None, index)


@pytest.mark.parametrize(
    ("unreadable", "found"), [((), [0, 3, 6]), ((0, 3, 4), [1, 5, 6]), ((6, 7, 8), [0, 3, 9])]
)
def test_images_are_taken_at_even_distances(unreadable, found):
    assert [sample.target for sample in _evenly(Holey(*unreadable), 3)] == found


def test_too_many_unreadable_images():
    with pytest.raises(ValueError, match="only 2 of the images of holey"):
        _evenly(Holey(6, 7, 8, 9), 3)
