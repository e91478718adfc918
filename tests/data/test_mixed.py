"""Several sources as one, in proportion to their weights."""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from PIL import Image

from quickvit.data import EvalLoader, Sample, TooManyUnreadable, Unreadable, cache, eval_transform, mix


@dataclass(frozen=True, eq=False)
class Named:
    name: str
    count: int
    classes: tuple = ("a", "b")

    def __len__(self):
        return self.count

    def read(self, index):
        if index == 7:
            raise Unreadable(self.describe(index), "broken")
        return Sample(Image.new("RGB", (1, 1), (index, 0, 0)), 1)

    def describe(self, index):
        return f"{self.name}{index}"


def test_shares_are_the_weights_whatever_the_sizes():
    mixed = mix({Named("large", 90): 1.0, Named("small", 10): 2.0, Named("middle", 30): 0.5})
    found = [mixed.describe(i) for i in range(len(mixed))]
    shares = Counter(name.rstrip("0123456789") for name in found)
    assert shares == {"large": 90, "small": 180, "middle": 45}
    # Everything is there, and nothing much more often than its like.
    counts = Counter(found)
    assert len(counts) == 130
    assert {counts[f"small{i}"] for i in range(10)} == {18}
    assert {counts[f"middle{i}"] for i in range(30)} == {1, 2}


def test_samples_are_those_of_the_sources_without_their_classes():
    mixed = mix({Named("one", 3): 1.0, Named("two", 3): 1.0})
    assert (len(mixed), mixed.classes, mixed.name) == (6, (), "one and two")
    image, target = mixed.read(5)
    assert image.getpixel((0, 0)) == (2, 0, 0)
    assert target == -1


def test_what_cannot_be_read_is_named_by_its_source():
    mixed = mix({Named("one", 8): 1.0, Named("two", 8): 1.0})
    with pytest.raises(Unreadable, match="two7: broken"):
        mixed.read(15)


def test_an_image_that_comes_often_cannot_be_read_once():
    """One of 9 images is more than a tenth of them, though there are 16 places."""
    mixed = mix({Named("one", 8): 1.0, Named("two", 1): 1.0})
    assert (len(mixed), mixed.distinct) == (16, 9)
    for source in (mixed, cache(mixed)):
        loader = EvalLoader(source, eval_transform(8), batch_size=16, max_unreadable=0.1)
        with pytest.raises(TooManyUnreadable, match="1 of the 9 images of one and two cannot be read"):
            list(loader)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, "nothing to mix"),
        ({Named("one", 3): 0.0}, "the weight of one must be a number above 0, got 0.0"),
        ({Named("one", 3): math.inf}, "the weight of one must be a number above 0, got inf"),
    ],
)
def test_weights_make_sense(sources, message):
    with pytest.raises(ValueError, match=message):
        mix(sources)
