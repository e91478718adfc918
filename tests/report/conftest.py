"""A small i8 and a small ViT, and what they make of two images."""

import numpy as np
import pytest
from PIL import Image
from small_models import CLASSES, small

from quickvit.report.exploration import explore


@pytest.fixture(scope="session")
def octic():
    return small("quickvit_i8_tiny_patch16_224")


@pytest.fixture(scope="session")
def baseline():
    return small("baseline_tiny_patch16_224")


@pytest.fixture(scope="session")
def images():
    """Squares of random colours: no pose of them looks like another."""
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1))
        for _ in range(2)
    ]


@pytest.fixture(scope="session")
def exploration(octic, baseline, images):
    return explore(octic, baseline, images, CLASSES, [0, 1])
