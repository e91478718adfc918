"""Frozen features on a GPU: neighbours in bounded memory and time, and invariance that survives rounding."""

import time
from statistics import median

import pytest
import torch

from quickvit import QuickVisionTransformer
from quickvit.data import open_source
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.classification import fit_hematology, fit_knn
from quickvit.evaluate.extract import Extraction, extract
from quickvit.evaluate.knn import nearest
from quickvit.evaluate.linear import ProbeTraining, probe_grid, train_probes
from quickvit.evaluate.poses import classify_in_poses
from quickvit.evaluate.rotation import POSES
from quickvit.testing import randomize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def seconds(work):
    """The time of a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_neighbours_of_16_bit_features(metric):
    generator = torch.Generator("cuda").manual_seed(0)
    keys = torch.randn(300_001, 64, device="cuda", generator=generator).bfloat16()
    queries = torch.randn(300, 64, device="cuda", generator=generator).bfloat16()
    found = nearest(queries, keys, 20, metric=metric)
    if metric == "cosine":
        keys, queries = (
            (x.float() / x.float().norm(dim=1, keepdim=True)).bfloat16() for x in (keys, queries)
        )
        exact = (queries.double() @ keys.double().T).topk(20)
    else:
        exact = (-torch.cdist(queries.double(), keys.double()).square()).topk(20)
    torch.testing.assert_close(found.scores.double(), exact.values, rtol=1e-5, atol=1e-4)
    assert (found.indices == exact.indices).double().mean() > 0.99


def test_imagenets_neighbours_take_little_memory_and_hardly_more_time_than_their_products():
    keys = torch.randn(1_281_167, 1024, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(8192, 2**17, device="cuda", dtype=torch.bfloat16)

    def products():
        for piece in keys.split(2**17):
            torch.mm(queries, piece.T, out=out[:, : len(piece)] if len(piece) == 2**17 else None)

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    nearest(queries, keys, 200)
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
    products()
    # In turns, since others may use the GPU now and then.
    assert median(seconds(lambda: nearest(queries, keys, 200)) / seconds(products) for _ in range(7)) < 2


def test_the_grid_of_probes_learns_the_same_as_on_a_cpu():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (200,), generator=generator)
    arrays = {
        name: torch.randn(5, 8, generator=generator)[labels] + torch.randn(200, 8, generator=generator)
        for name in ("class_1", "average")
    }
    training = ProbeTraining(steps=50, batch_size=64)
    trained = [
        train_probes(arrays, labels, 5, probe_grid(arrays, (0.01, 0.3)), training, device=device)
        for device in ("cpu", "cuda")
    ]
    for cpu, gpu in zip(trained[0].groups, trained[1].groups, strict=True):
        torch.testing.assert_close(gpu.weight.cpu(), cpu.weight, rtol=1e-3, atol=1e-4)


def test_invariant_features_lose_exactly_nothing(tmp_path):
    options = {
        "img_size": 64,
        "patch_size": 8,
        "embed_dim": 128,
        "depth": 4,
        "num_heads": 4,
        "num_classes": 0,
    }
    model = randomize(QuickVisionTransformer(family="i8", **options))
    backbone = Backbone(model, "i8", device="cuda")
    how, transform = Extraction(tmp_path, batch_size=256), backbone.transform()
    train = extract(backbone, open_source("digits"), transform, how)
    test = open_source("digits", "val")
    for classifier in (fit_knn(train, device="cuda"), fit_hematology(train, device="cuda")):
        rows = classify_in_poses(
            classifier, lambda pose: extract(backbone, test, transform, how, pose=pose), POSES[:6]
        )
        assert {value for row in rows for value in row.changes(rows[0]).values()} == {0.0}
        assert {value for row in rows for value in row.same.values()} == {1.0}


def test_bfloat16_features_are_near_those_in_float32(tmp_path):
    options = {
        "img_size": 64,
        "patch_size": 8,
        "embed_dim": 128,
        "depth": 4,
        "num_heads": 4,
        "num_classes": 0,
    }
    model = randomize(QuickVisionTransformer(family="h8", **options))
    source, how = open_source("digits", "val"), Extraction(tmp_path)
    backbones = [
        Backbone(model, "h8", device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    found = [extract(backbone, source, backbone.transform(), how) for backbone in backbones]
    exact, short = (features.vector.double() for features in found)
    assert found[1].vector.dtype == torch.bfloat16
    assert (short - exact).square().mean() < 0.01 * (exact - exact.mean(0)).square().mean()
