"""Accuracies are counted right, over poses and over ranks, and invariant models lose nothing by quarter turns."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from quickvit import QuickVisionTransformer
from quickvit.data import EvalLoader, TooManyUnreadable, eval_transform, open_source, preprocessing
from quickvit.data.sources.base import UNLABELLED
from quickvit.evaluate import POSES, Pose, cut_circle, measure_accuracy, rotate
from quickvit.models.declared import declare
from quickvit.testing import randomize
from quickvit.train.distributed import World

OPTIONS = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}


def classifier(family="i8", **options):
    return randomize(QuickVisionTransformer(family=family, **{**OPTIONS, **options}), 0)


@pytest.fixture(scope="module")
def digits():
    return open_source("digits", "val")


def logits(model, source, show=lambda images: images):
    model.eval()
    with torch.no_grad():
        batches = list(EvalLoader(source, preprocessing(model), batch_size=40))
        outputs = torch.cat([model(show(batch.images)) for batch in batches])
    return outputs, torch.cat([batch.targets for batch in batches])


def test_accuracies_are_shares_of_right_answers(digits):
    model = classifier("h8")
    poses = (Pose(), Pose(90.0), Pose(mirror=True))
    report = measure_accuracy(model, digits, preprocessing(model), poses, batch_size=50)
    assert (report.images, report.unreadable) == (360, ())
    for row, show in zip(
        report.rows, (lambda x: x, lambda x: rotate(x, 90), lambda x: x.flip(-1)), strict=True
    ):
        outputs, targets = logits(model, digits, show)
        assert row.top1 == (outputs.argmax(1) == targets).double().mean().item()
        ranks = (outputs > outputs.gather(1, targets[:, None])).sum(1)
        assert row.top5 == (ranks < 5).double().mean().item()
    assert len({row.top5 for row in report.rows}) > 1


def test_an_invariant_model_loses_nothing_by_quarter_turns(digits):
    model = classifier("i8")
    report = measure_accuracy(model, digits, preprocessing(model), POSES)
    upright = report.rows[0]
    for row in report.rows[:6]:
        assert (row.top1, row.top5) == (upright.top1, upright.top5), row.pose
    broken = measure_accuracy(classifier("h8"), digits, preprocessing(model), POSES[:4])
    assert len({row.top5 for row in broken.rows}) > 1


@pytest.mark.parametrize(
    ("weights", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_images_are_turned_before_they_are_rounded(weights, dtype, digits):
    model = classifier("h8").to(weights)
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    transform = preprocessing(model)
    measure_accuracy(model, digits, transform, (Pose(30.0),), batch_size=len(digits), dtype=dtype)
    (batch,) = EvalLoader(digits, transform, batch_size=len(digits))
    assert torch.equal(seen[0], rotate(batch.images, 30).to(weights))


def test_batches_do_not_matter_and_the_model_stays_as_it_was(digits):
    model = classifier("h8").train()
    poses = (Pose("any"), Pose("quarter", mirror=True))
    reports = [
        measure_accuracy(model, digits, preprocessing(model), poses, batch_size=size, workers=workers)
        for size, workers in ((360, 0), (7, 1))
    ]
    assert reports[0] == reports[1]
    assert model.training


def test_a_circle_is_cut_before_the_turn(digits):
    model = classifier("h8")
    report = measure_accuracy(model, digits, preprocessing(model), (Pose(90.0),), circle=True)
    outputs, targets = logits(model, digits, lambda images: rotate(cut_circle(images), 90))
    assert report.rows[0].top1 == (outputs.argmax(1) == targets).double().mean().item()


@dataclass(frozen=True)
class Stand(World):
    """A rank whose partners have already said what they have."""

    said: list = field(default_factory=list)

    def gather(self, value):
        self.said.append(value)
        return list(self.said)

    def together(self, items):
        """The others have more images left."""
        yield from items
        yield from [None, None]


@pytest.mark.parametrize("size", [3, 7])
def test_ranks_count_every_image_once(digits, size):
    model = classifier("h8")
    said = []
    poses = (Pose(), Pose("any"))
    for rank in range(size):
        world = Stand(rank, size, said=said)
        report = measure_accuracy(model, digits, preprocessing(model), poses, world=world, batch_size=17)
    assert report == measure_accuracy(model, digits, preprocessing(model), poses)


def test_ranks_count_unreadable_images_together(tmp_path, digits):
    for i in range(20):
        image, target = digits.read(i)
        (tmp_path / "val" / str(target)).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "val" / str(target) / f"{i:02}.png")
    source = open_source(tmp_path, "val")
    for i in (0, 19):
        Path(source.describe(i)).write_bytes(b"")
    model, said = classifier("h8", num_classes=len(source.classes)), []
    measure_accuracy(model, source, eval_transform(32), world=Stand(0, 2, said=said), max_unreadable=1)
    with pytest.raises(TooManyUnreadable, match=r"2 of the 20 images of .* cannot be read"):
        measure_accuracy(model, source, eval_transform(32), world=Stand(1, 2, said=said), max_unreadable=1)


def test_unreadable_images_do_not_count(tmp_path, digits):
    for i in range(40):
        image, target = digits.read(i)
        folder = tmp_path / "val" / str(target)
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{i:02}.png")
    whole = open_source(tmp_path, "val")
    model = classifier("h8", num_classes=len(whole.classes))
    transform = eval_transform(32)
    outputs, targets = logits(model, whole)
    right = (outputs.argmax(1) == targets)[1:]
    broken = whole.describe(0)
    with open(broken, "wb"):
        report = measure_accuracy(model, open_source(tmp_path, "val"), transform)
    assert report.images == 39
    assert report.rows[0].top1 == right.double().mean().item()
    assert report.unreadable[0][0] == broken


class Constant(nn.Module):
    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, x):
        return self.values.expand(len(x), -1)


def test_few_classes_have_no_top_5(tmp_path, digits):
    for target in (0, 1, 1):
        folder = tmp_path / str(target)
        folder.mkdir(exist_ok=True)
        digits.read(0).image.save(folder / f"{len(list(folder.iterdir()))}.png")
    report = measure_accuracy(Constant(0.0, 1.0), open_source(tmp_path), eval_transform(8))
    assert report.rows[0].top1 == pytest.approx(2 / 3)
    assert report.rows[0].top5 is None


def named(source, folder, names):
    """Some digits in folders with these names for their classes."""
    for index in range(40):
        sample = source.read(index)
        if sample.target in names:
            place = folder / names[sample.target]
            place.mkdir(parents=True, exist_ok=True)
            sample.image.save(place / f"{index}.png")
    return open_source(folder, "all")


def test_classes_are_brought_together_by_their_names(digits, tmp_path, caplog):
    """Data may write a name in capital letters, which come first, have fewer, or none that are known."""
    model, names = classifier(num_classes=3), ("one", "three", "two")
    numbers = dict(enumerate(("one", "two", "three"), 1))
    transform = eval_transform(32)
    data = named(digits, tmp_path / "same", numbers)
    expected = measure_accuracy(model, data, transform).rows[0].top1
    declare(model, label_names=names)
    assert measure_accuracy(model, data, transform).rows[0].top1 == expected
    declare(model, label_names=("one", "three", "Two"))
    other = named(digits, tmp_path / "other", {**numbers, 2: "Two"})
    assert other.classes == ("Two", "one", "three")
    assert measure_accuracy(model, other, transform).rows[0].top1 == expected

    part = named(digits, tmp_path / "part", {3: "three"})
    found, _ = logits(model, part)
    assert measure_accuracy(model, part, transform).rows[0].top1 == (found.argmax(1) == 1).float().mean()
    with pytest.raises(
        ValueError, match=r"not trained on the classes 'two' of .*; it knows 'one', 'three', 'Two'"
    ):
        measure_accuracy(model, data, transform)

    assert not caplog.records
    foreign = named(digits, tmp_path / "foreign", {1: "n01", 2: "n03", 3: "n02"})
    assert measure_accuracy(model, foreign, transform).rows[0].top1 == expected
    assert "names none of the model's classes" in caplog.text
    few = named(digits, tmp_path / "few", {1: "n01", 2: "n03"})
    with pytest.raises(ValueError, match=r"tells 3 classes apart, .*few.* has 2 others, 'n01', 'n03'"):
        measure_accuracy(model, few, transform)


def test_what_has_no_label_is_not_counted_as_wrong(digits):
    class Hidden:
        """Labels of one image are kept back."""

        name, classes = digits.name, digits.classes
        describe = staticmethod(digits.describe)

        def __len__(self):
            return 5

        def read(self, index):
            sample = digits.read(index)
            return sample._replace(target=UNLABELLED) if index == 3 else sample

    with pytest.raises(ValueError, match=r"digit \d+ has no label to be compared with an answer"):
        measure_accuracy(Constant(*[0.0] * 10), Hidden(), eval_transform(32))


def test_wrong_models_and_data_are_named(digits, tmp_path):
    with pytest.raises(ValueError, match=r"outputs are \(3,\), expected one for each of the 10 classes"):
        measure_accuracy(Constant(1.0, 2.0, 3.0), digits, eval_transform(32))
    with pytest.raises(ValueError, match="not finite for 360 of the 360 images of digits"):
        measure_accuracy(Constant(*[float("nan")] * 10), digits, eval_transform(32))
    digits.read(0).image.save(tmp_path / "0.png")
    unlabelled = open_source(tmp_path, labelled=False)
    with pytest.raises(ValueError, match="has no classes to be right about"):
        measure_accuracy(Constant(1.0), unlabelled, eval_transform(32))
