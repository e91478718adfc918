"""Batches that are cropped and coloured on a GPU."""

import random

import pytest
import torch

from quickvit.data import TrainLoader, deit3_transform, open_source
from quickvit.data.crops import FILTERS, Crop, crop_batch, draw_box

pytestmark = [
    pytest.mark.gpu,
    # That synchronisation is looked for.
    pytest.mark.filterwarnings("default"),
]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("interpolation", FILTERS)
def test_crops_are_those_of_the_cpu(interpolation, precision):
    """And the host does not wait for them."""
    draws = random.Random(0)
    pixels = torch.randint(256, (16, 45, 61, 3), dtype=torch.uint8)
    crops = torch.tensor(
        [[Crop(*draw_box(45, 61, draws), *draws.choices((0, 1), k=3)) for _ in range(4)] for _ in pixels]
    ).float()
    expected = crop_batch(pixels, crops, (40, 40), interpolation)
    pixels, crops = pixels.to(DEVICE), crops.pin_memory()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        crop_batch(pixels, crops, (40, 40), interpolation)
        torch.cuda.set_sync_debug_mode("error")
        ours = crop_batch(pixels, crops, (40, 40), interpolation)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_float32_matmul_precision(before)
    assert (ours.cpu() - expected).abs().max() <= 1


@pytest.mark.parametrize("crops", ["workers", "device"])
def test_batches_are_those_of_the_cpu(crops):
    transform = deit3_transform(16, colors="device", crops=crops)
    ours, expected = (
        next(TrainLoader(open_source("digits"), transform, batch_size=32, device=device).batches(0, 1))
        for device in (DEVICE, "cpu")
    )
    assert ours.images.device == DEVICE
    # Solarising may fall to either side of its threshold.
    assert (ours.images.cpu() - expected.images).abs().median() < 0.02
