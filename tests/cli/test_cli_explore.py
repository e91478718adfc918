"""`quickvit explore`."""

import pytest
import torch

from quickvit import load_checkpoint, save_checkpoint
from quickvit.cli.explore import _changing, _classes_in_turn, _pool
from quickvit.data import Sample, Unreadable
from quickvit.data.sources.digits import DigitsSource
from quickvit.models import create_model
from quickvit.models.checkpoints import save_weights
from quickvit.models.declared import declare
from quickvit.models.standard import standard_config
from quickvit.report.exploration_file import read_exploration

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}


@pytest.fixture
def models(tmp_path):
    torch.manual_seed(0)
    vit = create_model("baseline_tiny_patch16_224", **SMALL)
    # Its answers depend on the image.
    torch.nn.init.normal_(vit.patch_embed.proj.weight)
    torch.nn.init.normal_(vit.head.weight)
    save_weights(vit.state_dict(), tmp_path / "vit.safetensors", standard_config(vit))
    for family in ("i8", "h2"):
        save_checkpoint(
            create_model(f"quickvit_{family}_tiny_patch16_224", **SMALL), tmp_path / f"{family}.safetensors"
        )
    return tmp_path


@pytest.mark.parametrize("option", ["--out", "--save"])
def test_places_are_checked_before_the_work(run, models, monkeypatch, option):
    monkeypatch.setattr("quickvit.cli.explore.load_model", lambda _: pytest.fail("work began"))
    code, _, err = run("explore", "i8.safetensors", "--baseline", "vit.safetensors", option, models)
    assert code == 2
    assert f"cannot write {models}: it is a folder; expected the name of a file" in err


def test_a_page(run, models):
    out = models / "new" / "explorer.html"
    saved = models / "saved" / "digits.json"
    options = (
        "--data",
        "digits",
        "--images",
        3,
        "--changing",
        1,
        "--credit",
        "Me.",
        "--out",
        out,
        "--save",
        saved,
    )
    code, printed, _ = run(
        "explore", models / "i8.safetensors", "--baseline", models / "vit.safetensors", *options
    )
    assert code == 0
    assert "4 images" in printed
    assert float(printed.split("within ")[1].split()[0]) < 1e-4
    assert 10_000 < out.stat().st_size < 1_000_000
    found = read_exploration(saved)
    assert len(set(found.targets[:3])) == 3
    assert found.answers[1].changing[3]
    assert found.chosen == (
        "Shown are the first 3 of 48 images at even distances, from the classes in turn, and the next 1 that the ViT "
        "answers differently when turned."
    )
    assert (found.credit, found.source.command[:17]) == ("Me.", "quickvit explore ")
    assert "Me." in out.read_text()


def test_images_without_a_label_have_none_on_the_page(run, models, monkeypatch):
    read = DigitsSource.read
    monkeypatch.setattr(DigitsSource, "read", lambda *given: read(*given)._replace(target=-1))
    baseline, saved = ("--baseline", models / "vit.safetensors"), models / "saved.json"
    places = ("--out", models / "page.html", "--save", saved)
    code, _, _ = run("explore", models / "i8.safetensors", *baseline, "--images", 2, "--changing", 0, *places)
    assert code == 0
    assert read_exploration(saved).targets == (-1, -1)


def test_classes_have_the_names_that_the_model_knows(run, models):
    model = load_checkpoint(models / "i8.safetensors")
    declare(model, label_names=[*map(str, reversed(range(10)))])
    save_checkpoint(model, models / "named.safetensors")
    options = (
        "--data",
        "digits",
        "--images",
        3,
        "--out",
        models / "page.html",
        "--save",
        models / "saved.json",
    )
    code, _, _ = run(
        "explore", models / "named.safetensors", "--baseline", models / "named.safetensors", *options
    )
    assert code == 0
    found = read_exploration(models / "saved.json")
    assert found.classes == tuple(map(str, reversed(range(10))))
    _, _, error = run(
        "explore", models / "named.safetensors", "--baseline", models / "vit.safetensors", *options
    )
    assert "have their classes in different orders" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("h2.safetensors", "--baseline", "vit.safetensors"), "got h2"),
        (("i8.safetensors", "--baseline", "none.safetensors"), "no checkpoint at"),
        (
            ("i8.safetensors", "--baseline", "vit.safetensors", "--images", "0"),
            "--images must be from 1 to the 360",
        ),
        (
            ("i8.safetensors", "--baseline", "vit.safetensors", "--changing", "-1"),
            "--changing must be at least 0, got -1",
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

    name, length = "holey", 10

    def __init__(self, *unreadable):
        self.unreadable = unreadable

    def __len__(self):
        return self.length

    def read(self, index):
        if index in self.unreadable:
            raise Unreadable(str(index), "broken")
        return Sample(None, index)


def test_images_are_taken_at_even_distances():
    assert [sample.target for sample in _pool(Holey(), 1)] == list(range(10))
    assert [sample.target for sample in _pool(Holey(0, 3, 4), 7)] == [1, 2, 5, 6, 7, 8, 9]
    long = Holey()
    long.length = 160
    assert [sample.target for sample in _pool(long, 2)] == [0, 80, 5, 85, 10, 90, 15, 95] + [
        start + shift for start in range(20, 80, 5) for shift in (0, 80)
    ]


def test_too_many_unreadable_images():
    with pytest.raises(ValueError, match="only 2 of 10 images of holey"):
        _pool(Holey(*range(8)), 3)


def test_images_come_from_the_classes_in_turn():
    pool = [Sample(place, label) for place, label in enumerate((0, 0, 1, 1, 0, 2))]
    assert [sample.image for sample in _classes_in_turn(pool)] == [0, 2, 5, 1, 3, 4]


def test_images_that_change_their_answer(monkeypatch):
    labels = {"still": [1] * 8, "once": [1] * 7 + [0], "often": [0, 1] * 4}
    monkeypatch.setattr(
        "quickvit.cli.explore.ask_in_poses",
        lambda _, image: torch.nn.functional.one_hot(torch.tensor(labels[image]), 2),
    )
    samples = [Sample(image, 0) for image in ("still", "once", "still", "often")]
    assert [sample.image for sample in _changing(None, samples)] == ["once", "often"]
