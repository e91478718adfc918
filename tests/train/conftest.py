"""Images for small runs."""

import numpy as np
import pytest
from PIL import Image
from tiny_runs import CLASSES, IMAGES


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of three classes, each with its own brightness, for training and validation."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split, number in (("train", IMAGES), ("val", 3)):
        for label in range(CLASSES):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for i in range(number):
                pixels = generator.integers(80 * label, 80 * label + 60, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return folder
