"""From the words of a command line to what was learned from a model's frozen features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from jsonargparse import ArgumentParser, Namespace

from quickvit.cli.arguments import PRECISIONS, add_model
from quickvit.cli.build import choose_device, load_announced
from quickvit.data import EvalTransform, Source
from quickvit.data.listed import open_listed
from quickvit.data.segmentation import SegmentationSource, open_segmentation
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.classification import (
    CS,
    Classifier,
    Splits,
    fit_hematology,
    fit_knn,
    fit_linear,
    fit_logistic_grid,
    open_splits,
    require_known_classes,
)
from quickvit.evaluate.extract import Extraction, Features, extract
from quickvit.evaluate.knn import NEIGHBOURS
from quickvit.evaluate.linear import LEARNING_RATES, ProbeTraining
from quickvit.evaluate.rotation import UPRIGHT, Pose
from quickvit.evaluate.segmentation import (
    SegmentationData,
    Segmenter,
    fit_segmentation,
    load_segmentation,
    squeezed,
)
from quickvit.provenance import surroundings
from quickvit.recipes.run import trained_by
from quickvit.train.distributed import World, connected

Fitted = TypeVar("Fitted")
Data = TypeVar("Data")

CLASSIFICATION = ("knn", "linear", "hematology")
# The solvers of `linear`, the first by default, and the options that only one has.
SOLVERS = {"sgd": ("steps", "learning_rates"), "lbfgs": ("cs",)}
# DINOv2 resizes the shorter side to 256 for a crop of 224; DinoBloom squeezes whole cells into the square.
CROPS: dict[str, dict[str, Any]] = {
    "knn": {"crop_ratio": 224 / 256},
    "linear": {"crop_ratio": 224 / 256},
    "hematology": {"crop_mode": "squash"},
}


@dataclass(frozen=True)
class Frozen:
    """A backbone, and how its features are computed and kept."""

    backbone: Backbone
    how: Extraction
    circle: bool

    @property
    def world(self) -> World:
        """The processes that work together."""
        return self.how.world

    def about(self, arguments: Namespace) -> dict[str, Any]:
        """What a result is reported with."""
        names = ("model", "checkpoint", "pretrained", "data", "circle", "seed")
        return {
            **{name: arguments[name] for name in names if name in arguments},
            **surroundings(self.world.device, arguments.command_line),
            "trained_by": trained_by(arguments.model),
            "img_size": self.backbone.img_size,
            "dtype": str(self.backbone.dtype).removeprefix("torch."),
        }


class Learned(NamedTuple, Generic[Fitted, Data]):
    """What was fitted to a training split, its test split in any pose, and how the images of that are prepared."""

    fitted: Fitted
    load: Callable[[Pose], Data]
    test: Source
    transform: EvalTransform


@contextmanager
def freeze(arguments: Namespace) -> Iterator[Frozen]:
    """The model of a command line, on this process's device."""
    if arguments.device is not None:
        choose_device(arguments.device)
    with connected(arguments.device) as world:
        model = load_announced(arguments, world)
        dtype = arguments.dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
        backbone = Backbone(model, arguments.model, device=world.device, dtype=PRECISIONS[dtype])
        how = Extraction(
            cache=None if arguments.cache is None else Path(arguments.cache),
            batch_size=arguments.batch_size,
            workers=arguments.workers,
            seed=arguments.get("seed", 0),
            max_unreadable=arguments.max_unreadable,
            progress=True,
            world=world,
        )
        yield Frozen(backbone, how, arguments.get("circle", False))


def add_frozen(parser: ArgumentParser, dtype: str | None = None) -> None:
    """The arguments of `freeze`; `dtype` is the default, None for that of the device."""
    add_model(parser, dtype)
    parser.add_argument(
        "--pretrained", action="store_true", help="timm's pretrained weights, of models of timm"
    )
    parser.add_argument("--img-size", help="H or HxW, the model's own by default")
    parser.add_argument("--cache", help="folder for features; ~/.cache/quickvit/features by default")


# ---------------------------------------------------------------------- classification


def classify(protocol: str, arguments: Namespace, frozen: Frozen) -> Learned[Classifier, Features]:
    """A classifier that a protocol has fitted to the data of a command line."""
    splits = _splits(arguments)
    transform = frozen.backbone.transform(**CROPS[protocol])

    def load(source: Source, pose: Pose = UPRIGHT) -> Features:
        return extract(frozen.backbone, source, transform, frozen.how, pose=pose, circle=frozen.circle)

    train, test = load(splits.train), load(splits.test)
    val = None if splits.val is None else load(splits.val)
    require_known_classes(train, [test] if val is None else [val, test])
    common: dict[str, Any] = {"device": frozen.world.device, "world": frozen.world, "progress": True}
    if protocol == "hematology":
        classifier: Classifier = fit_hematology(train, **common)
    elif protocol == "knn":
        classifier = fit_knn(train, val, ks=arguments.get("neighbours") or NEIGHBOURS, **common)
    elif arguments.get("solver") == "lbfgs":
        classifier = fit_logistic_grid(train, val, cs=arguments.get("cs") or CS, **common)
    else:
        steps = arguments.get("steps")
        training = ProbeTraining() if steps is None else ProbeTraining(steps=steps)
        rates = arguments.get("learning_rates") or LEARNING_RATES
        classifier = fit_linear(train, val, training=training, learning_rates=rates, **common)
    return Learned(
        classifier, lambda pose: test if pose == UPRIGHT else load(splits.test, pose), splits.test, transform
    )


# Options by the protocols that have them.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "knn": {"neighbours": {"type": int, "nargs": "+", "help": "numbers of neighbours to try"}},
    "linear": {
        "solver": {"choices": list(SOLVERS), "help": "sgd by default, lbfgs for small sets"},
        "steps": {"type": int, "help": f"of sgd, {ProbeTraining.steps} by default"},
        "learning_rates": {"type": float, "nargs": "+", "help": "of sgd, for a batch of 256"},
        "cs": {"type": float, "nargs": "+", "help": "of lbfgs, inverse strengths of regularisation"},
    },
    "hematology": {},
    "segmentation": {
        "ignore": {"type": int, "nargs": "+", "help": "labels to ignore, in place of the data set's"}
    },
}


def add_classification(parser: ArgumentParser, tested: str = "test, or val where there is none") -> None:
    """The arguments of `classify` that all protocols have; `tested` is the split by default."""
    parser.add_argument("--split", help=f"split that is tested: by default {tested}")
    for split in ("train", "val", "test"):
        parser.add_argument(f"--{split}-list", help=f"CSV or text file of the {split} images below --data")


def add_options(parser: ArgumentParser, protocol: str) -> None:
    """The arguments of `classify` and `segment` that a protocol has."""
    for name, option in OPTIONS[protocol].items():
        parser.add_argument(f"--{name.replace('_', '-')}", **option)


def require_own_options(arguments: Namespace, protocol: str) -> None:
    """Refuse the options of other protocols, where a command has those of all, and of the other solver."""
    solver = arguments.get("solver") or next(iter(SOLVERS))
    for kind, chosen, others in (("protocol", protocol, OPTIONS), ("solver", solver, SOLVERS)):
        for other, names in others.items():
            for name in names:
                if other != chosen and arguments.get(name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} is for --{kind} {other}, got {chosen}")


def _splits(arguments: Namespace) -> Splits:
    """The splits of --data, or those that files list."""
    train, val, test = (arguments.get(f"{split}_list") for split in ("train", "val", "test"))
    if not (train or val or test):
        return open_splits(arguments.data, arguments.get("split"))
    if not (train and test):
        raise ValueError("--train-list and --test-list belong together; give both")
    if arguments.get("split"):
        raise ValueError("--split is for splits in folders; with lists --test-list says what is tested")
    learned = open_listed(train, arguments.data)
    chosen = open_listed(val, arguments.data, learned.classes) if val else None
    return Splits(learned, chosen, open_listed(test, arguments.data, learned.classes))


# ---------------------------------------------------------------------- segmentation


def segment(arguments: Namespace, frozen: Frozen) -> Learned[Segmenter, SegmentationData]:
    """A segmenter that was fitted to the data of a command line."""
    train, test = (
        open_segmentation(arguments.data, split, ignored=arguments.get("ignore"))
        for split in ("train", arguments.get("split") or "val")
    )

    def load(source: SegmentationSource, pose: Pose = UPRIGHT) -> SegmentationData:
        return load_segmentation(frozen.backbone, source, frozen.how, pose=pose, circle=frozen.circle)

    # Both at the start, so that a mask that is wrong is found before the work.
    learned, tested = load(train), load(test)
    world = frozen.world
    fitted = fit_segmentation(learned, device=world.device, world=world, progress=True)
    return Learned(
        fitted, lambda pose: tested if pose == UPRIGHT else load(test, pose), test, squeezed(frozen.backbone)
    )


def add_segmentation(parser: ArgumentParser) -> None:
    """The arguments of `segment` that are no options of the protocol."""
    parser.add_argument("--split", help="split that is tested, val by default")
