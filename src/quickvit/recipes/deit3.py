"""DeiT III: supervised training of the paper's classifiers, and fine-tuning at another resolution.

Values are those of Quick ViTs' table of hyperparameters (ViT-L/16 and ViT-H/14) where it has them, else of the
commands that the authors of DeiT III published; where neither says anything, it is said beside the value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from quickvit.data import (
    Batch,
    Mixing,
    Source,
    TrainLoader,
    cache,
    declare_preprocessing,
    deit3_transform,
    eval_transform,
    open_source,
)
from quickvit.data.loader import MAX_UNREADABLE
from quickvit.data.transforms import Where
from quickvit.evaluate.accuracy import measure_accuracy
from quickvit.evaluate.labels import class_numbers
from quickvit.models import ViT
from quickvit.models.declared import LABELS, declare
from quickvit.recipes.config import ABOVE_0, as_plain, end_of_rate, given, require_clip, require_within, row
from quickvit.recipes.model import LayerScale, ModelArguments, build, create, save_model, started_from
from quickvit.recipes.run import carry_out
from quickvit.train import (
    Outcome,
    Precision,
    Recipe,
    RunConfig,
    World,
    averaged_copy,
    bare,
    build_optimizer,
    follow,
    parameter_groups,
    warmup_cosine,
)
from quickvit.train.optimizers import OptimizerName

logger = logging.getLogger(__name__)

MODEL = "model.safetensors"
# Training, evaluation and the number of classes read the same source, and listing a large folder takes its time.
_open_source = lru_cache(open_source)
# Width from which on a row holds: learning rate, weight decay, stochastic depth, images that share a draw of mixing.
# ViT-L and ViT-H: Quick ViTs, table of hyperparameters, 400 epochs. ViT-S and ViT-B: DeiT III's commands, which are
# for 800 epochs, of ViT-B at 192 pixels; nobody says what is best for 400. Nobody publishes ViT-Ti; it has the values
# of ViT-S without stochastic depth. Mixing is drawn once per GPU there.
SIZES: dict[int, dict[str, Any]] = {
    0: {"learning_rate": 4e-3, "weight_decay": 0.05, "drop_path": 0.0, "mixing_group": 256},
    384: {"learning_rate": 4e-3, "weight_decay": 0.05, "drop_path": 0.05, "mixing_group": 256},
    768: {"learning_rate": 3e-3, "weight_decay": 0.05, "drop_path": 0.2, "mixing_group": 256},
    1024: {"learning_rate": 3e-3, "weight_decay": 0.02, "drop_path": 0.4, "mixing_group": 128},
    1280: {"learning_rate": 3e-3, "weight_decay": 0.02, "drop_path": 0.5, "mixing_group": 64},
}
# Quick ViTs: 400 epochs, 5 of warm-up, batches of 2048, LAMB, BCE, repeated augmentation, clipping. DeiT III: layer
# scale.
TRAINING: dict[str, Any] = {
    "epochs": 400,
    "batch_size": 2048,
    "optimizer": "lamb",
    "loss": "bce",
    "smoothing": 0.0,
    "repeats": 3,
    "clip": 1.0,
    "layer_scale": 1e-4,
}
# DeiT III.
FINAL_LEARNING_RATE = 1e-5
# DeiT III's commands for fine-tuning at 224 and 384 pixels, with ThreeAugment where they have RandAugment. They leave
# --clip-grad at its default, none; the 1 of training belongs to LAMB.
FINETUNING: dict[str, Any] = {
    "epochs": 20,
    "batch_size": 512,
    "optimizer": "adamw",
    "loss": "ce",
    "smoothing": 0.1,
    "repeats": 1,
    "learning_rate": 1e-5,
    "weight_decay": 0.1,
    "mixing_group": 64,
    "clip": None,
}
FINETUNING_DROP_PATH = {0: 0.0, 384: 0.0, 768: 0.2, 1024: 0.45, 1280: 0.55}
# DeiT III's commands leave --opt-eps at its default, for FusedLAMB and for AdamW; timm's own LAMB would have 1e-6.
EPS = 1e-8


@dataclass(frozen=True)
class Deit3Config:
    """Train a classifier by DeiT III's recipe.

    What is left open follows from the size of the model, or from fine-tuning.
    """

    model: str
    """Name of a Quick ViT, of a baseline (baseline_large_patch16_224) or of a ViT of timm."""
    data: str
    """A folder with `train/CLASS/*.jpg` and `val/CLASS/*.jpg`, digits, or another source of quickvit.data."""
    out: Path
    """The run folder. A run that is there already is resumed."""
    finetune: Path | None = None
    """Checkpoint to start from, of this model at any resolution."""
    img_size: int = 224
    """Side of the images (Quick ViTs: 224)."""
    patch_size: int | None = None
    """Side of the patches; the model's own by default."""
    octic_depth: int | None = None
    """The paper's k, how many blocks are octic: 0 … depth; the model's own by default."""
    invariant: str | None = None
    """The invariant of a d8 or i8; power_spectrum by default. The paper's i8 of this recipe has polynomial."""
    lift: Literal["octic", "free"] | None = None
    """free for the paper's ablation without symmetry in the patch embedding (h8 and h2)."""
    layer_scale: LayerScale = "auto"
    """Initial layer scale: 1e-4 (DeiT III), or null for none. Fine-tuning has one if the checkpoint does."""
    model_args: ModelArguments | None = None
    """Further arguments of the model, for example {"depth": 6}."""
    epochs: int | None = None
    """400 (Quick ViTs), 20 for fine-tuning (DeiT III)."""
    warmup_epochs: float = 5
    """Epochs in which the learning rate rises (Quick ViTs)."""
    batch_size: int | None = None
    """Images per update of all GPUs together: 2048 (Quick ViTs), 512 for fine-tuning (DeiT III)."""
    optimizer: OptimizerName | None = None
    """lamb (Quick ViTs), adamw for fine-tuning (DeiT III)."""
    learning_rate: float | None = None
    """3e-3, 4e-3 up to ViT-S, 1e-5 for fine-tuning; not scaled by the batch size."""
    warmup_learning_rate: float = 1e-6
    """Where the warm-up begins (DeiT III)."""
    final_learning_rate: float | None = None
    """Where the cosine ends: 1e-5 (DeiT III), or the learning rate if that is smaller."""
    weight_decay: float | None = None
    """0.02, 0.05 up to ViT-B, 0.1 for fine-tuning."""
    layer_decay: float | None = None
    """Factor of the learning rate from a layer to the one below, for fine-tuning; none in DeiT III."""
    clip: float | Literal["auto"] | None = "auto"
    """Largest norm of the gradient, or null for no clipping: 1 (Quick ViTs), null for fine-tuning (DeiT III)."""
    drop_path: float | None = None
    """Stochastic depth, the same in all blocks: 0.4 for ViT-L, 0.5 for ViT-H (Quick ViTs), less for smaller ones."""
    loss: Literal["bce", "ce"] | None = None
    """bce (Quick ViTs), ce for fine-tuning (DeiT III)."""
    smoothing: float | None = None
    """Label smoothing: 0, 0.1 for fine-tuning (DeiT III) by ce; there is none for bce."""
    mixup: float = 0.8
    """α of mixup (Quick ViTs)."""
    cutmix: float = 1.0
    """α of CutMix (Quick ViTs); one of the two on every batch, with equal odds."""
    mixing_group: int | None = None
    """So many images share a draw of mixup or CutMix, as many as a GPU has in DeiT III."""
    min_crop: float = 0.08
    """Smallest area of a random crop, relative to the image's (DeiT III); short runs on small images want more."""
    color_jitter: float = 0.3
    """Strength of colour jitter (Quick ViTs)."""
    three_augment: bool = True
    """Grayscale, solarisation or blur for every image (DeiT III)."""
    colors: Where = "workers"
    """Who changes colours: the loader's processes, as in DeiT III, or the device for a whole batch at once, up to
    rounding the same. Choose it where the loader is what training waits for."""
    crops: Where = "workers"
    """Who crops and mirrors, likewise; a device that does changes colours too. For images of one size, best with
    cache: the loader then hardly does anything but draw numbers."""
    repeats: int | None = None
    """Repeated augmentation: 3, none for fine-tuning (DeiT III)."""
    crop_ratio: float = 1.0
    """Share of the image that is evaluated (DeiT III)."""
    average: float | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and exported too; none in
    the paper."""
    precision: Literal["auto", "bf16", "float32", "float64"] = "auto"
    """auto is bf16 on a GPU (Quick ViTs: mixed precision) and float32 on a CPU."""
    classes: int | None = None
    """Number of classes; those of the data by default."""
    class_names: str | None = None
    """A digest of the names of the classes; that of the data by default. A run is not resumed with other classes."""
    steps_per_epoch: int | None = None
    """Updates per epoch; as many as the data has whole batches by default."""
    seed: int = 0
    """Of weights, order, augmentation and stochastic depth."""
    max_unreadable: float = MAX_UNREADABLE
    """Images that may be unreadable before the run stops: a number, or below 1 a fraction of all."""
    cache: bool = False
    """Keep the decoded training images in memory, for sets of small images."""
    run: RunConfig = field(default_factory=RunConfig)
    """How the run is carried out; may change from one start to the next."""


# The least and the most that these may be.
LIMITS = {
    **dict.fromkeys(("epochs", "batch_size", "steps_per_epoch"), (1, math.inf)),
    **dict.fromkeys(("learning_rate", "final_learning_rate", "warmup_learning_rate"), (0, math.inf)),
    **dict.fromkeys(("weight_decay", "warmup_epochs"), (0, math.inf)),
    **dict.fromkeys(("layer_decay", "average", "drop_path"), (0, 1)),
    "min_crop": (ABOVE_0, 1),
}
# Fields that say where things are or how they are done, not what is computed.
_PLACES = ("data", "out", "finetune", "max_unreadable", "cache", "run")


def resolve(config: Deit3Config, device: torch.device) -> Deit3Config:
    """The configuration with every value filled in."""
    # What a folder had for an earlier run in this process it may not have any more.
    _open_source.cache_clear()
    with torch.device("meta"):
        width = create(config, classes=2).embed_dim
    defaults = {**TRAINING, **row(SIZES, width)}
    if config.finetune is not None:
        defaults |= {**FINETUNING, "drop_path": row(FINETUNING_DROP_PATH, width)}
    if config.loss == "bce":
        # Its targets are 1 for every class that has a part in an image, however small.
        defaults["smoothing"] = 0.0
    # None is a value of those that may be auto.
    known = {
        name: value
        for name in defaults
        if (value := getattr(config, name)) != ("auto" if name in ("clip", "layer_scale") else None)
    }
    peak = {**defaults, **known}["learning_rate"]
    known["final_learning_rate"] = end_of_rate(config.final_learning_rate, FINAL_LEARNING_RATE, peak)
    _check({**vars(config), **defaults, **known})
    source = _open_source(config.data, "train")
    if config.classes is not None and config.classes != len(source.classes):
        raise ValueError(
            f"classes must be the {len(source.classes)} of {source.name}, got {config.classes}; classes without "
            "images can be named in classes.txt"
        )
    names = blake2b("\0".join(source.classes).encode(), digest_size=8).hexdigest()
    if config.class_names not in (None, names):
        raise ValueError(
            f"class_names must be the {names} of {source.name}, got {config.class_names}, which are other classes; "
            "leave it out to train on these"
        )
    batch_size = {**defaults, **known}["batch_size"]
    steps = config.steps_per_epoch or len(source) // batch_size
    if not steps:
        raise ValueError(
            f"batch_size must be at most the {len(source)} images of {source.name}, got {batch_size}"
        )
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "float32"
    resolved = {
        **defaults,
        **known,
        **started_from(config, config.finetune),
        "classes": config.classes or len(source.classes),
        "class_names": names,
        "steps_per_epoch": steps,
        "precision": precision,
    }
    return replace(config, **resolved)


def _check(values: Mapping[str, Any]) -> None:
    """Refuse a configuration that cannot be carried out."""
    require_within(values, LIMITS)
    require_clip(values["clip"])
    if values["loss"] == "bce" and values["smoothing"]:
        raise ValueError(
            f"smoothing must be 0 with the loss bce, whose targets it would all make 1, got {values['smoothing']}; "
            "use --loss ce"
        )


def train(config: Deit3Config, command: str = "") -> Outcome:
    """Train by DeiT III's recipe, from the start or from where the run folder's checkpoints end."""
    return carry_out(config, resolve, Deit3, command)


class Deit3(Recipe):
    """A classifier, and if asked for the average of its weights. Takes a resolved configuration."""

    name = "deit3"

    def __init__(self, config: Deit3Config) -> None:
        self.config = config
        self.seed, self.clip = config.seed, None if config.clip == "auto" else config.clip
        self.batch_size, self.steps_per_epoch = given(config.batch_size), given(config.steps_per_epoch)
        self.total_steps = given(config.epochs) * self.steps_per_epoch
        self.precision: Precision = "float32" if config.precision == "auto" else config.precision
        self.dtype = torch.float64 if self.precision == "float64" else torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = build_model(config).to(self.dtype)
        self.transform = eval_transform(config.img_size, config.crop_ratio)
        declare_preprocessing(model, self.transform)
        self.modules = {"model": model}
        if config.average is not None:
            self.modules["average"] = averaged_copy(model)

    @classmethod
    def rebuild(cls, config: Deit3Config) -> Deit3:
        """The recipe of a run that is to be looked at; its weights are to come from a state of it."""
        return cls(replace(config, finetune=None))

    def settings(self) -> Mapping[str, Any]:
        """The configuration, less where things are and how the run is carried out."""
        return {name: value for name, value in as_plain(self.config).items() if name not in _PLACES}

    def optimizer(self) -> Optimizer:
        """LAMB or AdamW with the warm-up and cosine of DeiT III."""
        config = self.config
        lr = warmup_cosine(
            given(config.learning_rate),
            given(config.final_learning_rate),
            self.total_steps,
            round(config.warmup_epochs * self.steps_per_epoch),
            config.warmup_learning_rate,
        )
        model = bare(self.modules["model"])
        groups = parameter_groups(model, lr, given(config.weight_decay), config.layer_decay)
        return build_optimizer(given(config.optimizer), groups, eps=EPS)

    def batches(self, start: int, world: World) -> Iterator[Batch]:
        """Augmented and mixed images with their mixed targets."""
        config = self.config
        source = _open_source(config.data, "train")
        for module in self.modules.values():
            declare(module, **{LABELS: source.classes})
        # What is wrong with the validation split shows here too, not after the first epoch.
        validation = self._validation()
        if validation is not None:
            class_numbers(self.modules["model"], validation.classes, validation.name)
        if world.main:
            tested = f"{len(validation)} for validation" if validation is not None else "none for validation"
            logger.info(
                "%d images of %d classes in %s, %s", len(source), len(source.classes), source.name, tested
            )
        loader = TrainLoader(
            cache(source) if config.cache else source,
            deit3_transform(
                config.img_size,
                scale=(config.min_crop, 1.0),
                color_jitter=config.color_jitter,
                three_augment=config.three_augment,
                colors=config.colors,
                crops=config.crops,
            ),
            batch_size=self.batch_size,
            seed=config.seed,
            steps_per_epoch=self.steps_per_epoch,
            repeats=given(config.repeats),
            mixing=Mixing(
                given(config.classes),
                mixup=config.mixup,
                cutmix=config.cutmix,
                smoothing=given(config.smoothing),
                group=given(config.mixing_group),
            ),
            rank=world.rank,
            world_size=world.size,
            workers=config.run.workers,
            max_unreadable=config.max_unreadable,
            device=world.device,
        )
        return loader.batches(start, self.total_steps)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG002
        """The loss of mixed targets."""
        logits = self.modules["model"](batch.images.to(self.dtype)).to(self.dtype)
        criterion = bce_loss if self.config.loss == "bce" else functional.cross_entropy
        return criterion(logits, batch.targets.to(self.dtype)), {}

    def after_step(self, step: int) -> None:  # noqa: ARG002
        """Let the average follow."""
        if self.config.average is not None:
            follow(self.modules["average"], bare(self.modules["model"]), self.config.average)

    def evaluate(self, world: World) -> dict[str, float]:
        """Top-1 and top-5 accuracy on the validation split, if the data has one."""
        config = self.config
        source = self._validation()
        if source is None:
            return {}
        numbers: dict[str, float] = {}
        for name, module in self.modules.items():
            report = measure_accuracy(
                bare(module),
                source,
                self.transform,
                world=world,
                batch_size=max(1, self.batch_size // (world.size * config.run.accumulate)),
                workers=config.run.workers,
                dtype=torch.bfloat16 if self.precision == "bf16" else self.dtype,
                max_unreadable=config.max_unreadable,
            )
            prefix = "" if name == "model" else f"{name}_"
            (accuracy,) = report.rows
            numbers[f"{prefix}top1"] = accuracy.top1
            if accuracy.top5 is not None:
                numbers[f"{prefix}top5"] = accuracy.top5
        return numbers

    def _validation(self) -> Source | None:
        """The validation split, if the data has one."""
        try:
            return _open_source(self.config.data, "val")
        except FileNotFoundError:
            return None

    def export(self, folder: Path, world: World) -> None:
        """Write `model.safetensors`: the average if there is one, with its classes and how images are prepared."""
        model = bare(self.modules.get("average", self.modules["model"]))
        save_model(model, folder / MODEL, world)


def bce_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """DeiT III's loss: the binary cross-entropy of every class, 1 for each that has a part in the image."""
    return functional.binary_cross_entropy_with_logits(logits, (targets > 0).to(logits.dtype))


def build_model(config: Deit3Config) -> ViT:
    """The model of a resolved configuration, with the weights of the checkpoint that it starts from."""
    return build(config, given(config.classes), config.finetune, drop_path=given(config.drop_path))
