"""Processes of torchrun share the work on frozen features, and know what one alone would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import quickvit
from quickvit import QuickVisionTransformer
from quickvit.data import open_source
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.classification import fit_hematology, fit_knn, fit_linear, fit_logistic_grid
from quickvit.evaluate.extract import Extraction, extract
from quickvit.evaluate.linear import ProbeTraining
from quickvit.evaluate.segmentation import SegmentationData, SegmentationProtocol, fit_segmentation
from quickvit.testing import randomize
from quickvit.train.distributed import World, connected

OPTIONS = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}


def results(cache, world):
    """Every protocol in short, as JSON."""
    backbone = Backbone(randomize(QuickVisionTransformer(family="i8", **OPTIONS)), "tiny")
    how = Extraction(Path(cache), batch_size=100, world=world)
    sources = (open_source("digits", split) for split in ("train", "val"))
    train, test = (extract(backbone, source, backbone.transform(), how) for source in sources)
    common = {"world": world}
    classifiers = {
        "knn": fit_knn(train, ks=(1, 10), **common),
        "linear": fit_linear(
            train, training=ProbeTraining(steps=10), learning_rates=(0.001, 0.01, 0.1), **common
        ),
        "logistic": fit_logistic_grid(train, cs=(0.01, 1.0, 100.0), max_iterations=20, **common),
        "hematology": fit_hematology(train, **common),
    }
    found = {
        name: {
            "tried": [(trial.choice, trial.score) for trial in classifier.tried],
            "labels": {key: labels.tolist() for key, labels in classifier.predict(test).items()},
        }
        for name, classifier in classifiers.items()
    }
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(3, (21, 4, 4), generator=generator).to(torch.uint8)
    noise = torch.randn(21, 2, 2, 5, generator=generator)
    data = SegmentationData(noise + masks[:, ::2, ::2, None], masks, (255,), torch.arange(21))
    fitted = fit_segmentation(data, SegmentationProtocol(cs=(0.1, 1.0, 10.0), neighbours=(1, 3)), world=world)
    scores = fitted.evaluate(data)
    found["segmentation"] = {
        name: [[(trial.choice, trial.score) for trial in score.tried], score.mean_iou]
        for name, score in scores.items()
    }
    return json.dumps(found)


def test_two_processes_know_what_one_would(tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(quickvit.__file__).parents[1]),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, __file__, tmp_path / "two"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    alone = json.loads(results(tmp_path / "one", World()))
    together = json.loads((tmp_path / "two" / "results.json").read_text())
    assert len(list((tmp_path / "two").glob("*/ledger.1"))) == 1
    assert together == alone


if __name__ == "__main__":
    with connected("cpu") as world:
        text = results(sys.argv[1], world)
        if world.main:
            (Path(sys.argv[1]) / "results.json").write_text(text)
