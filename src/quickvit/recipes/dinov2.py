"""DINOv2: self-supervised training of backbones.

Values are those of Quick ViTs' table of hyperparameters (ViT-L/16 and ViT-H/16) where it has them, else those of
DINOv2's default configuration, to which the paper refers. Where the two differ, it is said beside the value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from quickvit.data import (
    BlockMasking,
    EvalTransform,
    MultiCrop,
    Source,
    ViewBatch,
    ViewLoader,
    cache,
    declare_preprocessing,
    dinobloom_views,
    dinov2_views,
    eval_transform,
    mix,
    open_source,
)
from quickvit.data.transforms import Where
from quickvit.evaluate.classification import KnnClassifier, Splits, open_splits
from quickvit.evaluate.extract import Features
from quickvit.evaluate.knn import TEMPERATURE
from quickvit.recipes.config import ABOVE_0, as_plain, end_of_rate, given, require_clip, require_within, row
from quickvit.recipes.dino.backbone import CropEncoder, HiddenPatches
from quickvit.recipes.dino.head import DinoHead
from quickvit.recipes.dino.losses import koleo_loss
from quickvit.recipes.dino.progress import collect, scores
from quickvit.recipes.dino.targets import Centering, Comparison, Logits, Targets
from quickvit.recipes.dino.watch import diagnose, feature_std
from quickvit.recipes.model import (
    LayerScale,
    ModelArguments,
    build,
    create,
    patch_size,
    require_whole_patches,
    save_model,
    started_from,
)
from quickvit.recipes.run import carry_out
from quickvit.train import (
    Outcome,
    Precision,
    Recipe,
    RunConfig,
    Schedule,
    World,
    averaged_copy,
    bare,
    build_optimizer,
    cosine,
    follow,
    parameter_group,
    parameter_groups,
    scaled,
    warmup_then_cosine,
)

logger = logging.getLogger(__name__)

MODEL = "model.safetensors"
SNAPSHOTS = "teachers"
# DINOv2 scales the learning rate by √(batch / 1024).
REFERENCE_BATCH = 1024
FINAL_LEARNING_RATE = 1e-6
# Images of a GPU in the paper, for ViT-L; a ViT-H has half as many on twice the GPUs.
GROUP, LARGE_GROUP, LARGE = 64, 32, 1280
# The rate of stochastic depth above which DINOv2 leaves samples out of the computation.
SUBSET = 0.1
# Shares of the updates: 12,500, 37,500 and 1,250 of 125,000.
WARMUP, TEMPERATURE_WARMUP, FROZEN = 0.1, 0.3, 0.01
ViewsName = Literal["dinov2", "dinobloom"]
VIEWS: dict[ViewsName, Callable[..., MultiCrop]] = {"dinov2": dinov2_views, "dinobloom": dinobloom_views}
# Numbers of neighbours that are noted during training.
NEIGHBOURS = (1, 20)

# Quick ViTs: batches of 1024, 125,000 updates, base learning rate 4e-3, drop path 0.3, 65,536 prototypes, layer
# scale 1e-5, KoLeo 0.1. DINOv2: temperatures, centring, tokens in half precision, and momentum; of that Quick ViTs'
# table says 0.8, with which the teacher would be the student of five updates ago, and the configuration that its
# authors released says 0.992.
IMAGENET: dict[str, Any] = {
    "batch_size": 1024,
    "steps": 125_000,
    "learning_rate": 4e-3,
    "drop_path": 0.3,
    "prototypes": 65536,
    "layer_scale": 1e-5,
    "koleo_weight": 0.1,
    "momentum": 0.992,
    "first_teacher_temperature": 0.04,
    "teacher_temperature": 0.07,
    "centering": "softmax",
    "residual": "bf16",
}
# For sets of thousands of images, and for models of a few million parameters. Nobody publishes such runs; these are
# what learned and stayed stable in ours. With DINOv2's layer scale short runs spend their updates on waking up the
# blocks, with its temperatures the targets of images that are much alike fade until they say nothing, and then its
# KoLeo is all that is left to learn from.
SMALL: dict[str, Any] = {
    "batch_size": 256,
    "steps": 10_000,
    "learning_rate": 3e-3,
    "layer_scale": 0.1,
    "koleo_weight": 0.01,
    "momentum": 0.95,
    "first_teacher_temperature": 0.03,
    "teacher_temperature": 0.03,
    "centering": "sinkhorn",
    "residual": "float32",
}
SMALL_SIZES: dict[int, dict[str, Any]] = {
    0: {"drop_path": 0.0, "prototypes": 1024},
    384: {"drop_path": 0.1, "prototypes": 2048},
    768: {"drop_path": 0.2, "prototypes": 4096},
}


@dataclass(frozen=True)
class Dinov2Config:
    """Train a backbone without labels by DINOv2's recipe.

    What is left open follows from the preset, from the model and from other values.
    """

    EVALUATIONS: ClassVar[int] = 10

    model: str
    """Name of a Quick ViT, of a baseline (baseline_large_patch16_224) or of a ViT of timm."""
    data: dict[str, float] | str
    """A folder of images, nested in any way, or another source of quickvit.data; or several with their weights, for
    example {"cells": 2, "smears": 1}, which are their shares of the samples whatever their sizes."""
    out: Path
    """The run folder. A run that is there already is resumed."""
    finetune: Path | None = None
    """Checkpoint of a backbone to go on from, of this model at any resolution; its heads are new."""
    preset: Literal["imagenet", "small"] = "imagenet"
    """imagenet has the paper's values; small is for sets of thousands of images and models up to ViT-B."""
    img_size: int = 224
    """Side of the global views (DINOv2)."""
    local_size: int | None = None
    """Side of the local views; by default 96/224 of the global ones' (DINOv2), in whole patches."""
    local_views: int = 8
    """Local views of an image (DINOv2)."""
    views: ViewsName = "dinov2"
    """How they are augmented; dinobloom for cells and other images without an upright pose, whose colours matter."""
    global_scale: tuple[float, float] = (0.32, 1.0)
    """Area of the global views, relative to the image's (DINOv2)."""
    local_scale: tuple[float, float] = (0.05, 0.32)
    """Area of the local views (DINOv2)."""
    patch_size: int | None = None
    """Side of the patches; the model's own by default."""
    octic_depth: int | None = None
    """The paper's k, how many blocks are octic: 0 … depth; the model's own by default."""
    invariant: str | None = None
    """The invariant of a d8 or i8; power_spectrum by default, which is the paper's for ViT-H by its FLOPs. By those
    of its ViT-L it had polynomial there."""
    lift: Literal["octic", "free"] | None = None
    """free for the paper's ablation without symmetry in the patch embedding (h8 and h2)."""
    layer_scale: LayerScale = "auto"
    """Initial layer scale: 1e-5 (Quick ViTs), 0.1 with the small preset, or null for none. With a checkpoint,
    there is one if it has one."""
    model_args: ModelArguments | None = None
    """Further arguments of the model, for example {"depth": 6}."""
    steps: int | None = None
    """Updates: 125,000 (Quick ViTs), 10,000 with the small preset."""
    batch_size: int | None = None
    """Images per update of all GPUs together: 1024 (Quick ViTs), 256 with the small preset."""
    learning_rate: float | None = None
    """For a batch of 1024, scaled by √(batch / 1024): 4e-3 (Quick ViTs), 3e-3 with the small preset."""
    final_learning_rate: float | None = None
    """Where the cosine ends: 1e-6 (DINOv2), or the scaled learning rate if that is smaller."""
    warmup_steps: int | None = None
    """Updates in which the learning rate rises: a tenth of all (Quick ViTs: 12,500 of 125,000)."""
    layer_decay: float = 0.9
    """Factor of the learning rate from a layer to the one below (DINOv2)."""
    patch_embed_rate: float = 0.2
    """Factor of the learning rate of the patch embedding (DINOv2)."""
    weight_decay: float = 0.04
    """At the beginning (Quick ViTs)."""
    final_weight_decay: float = 0.4
    """At the end of a cosine (DINOv2)."""
    clip: float | None = 3.0
    """Largest norm of the gradient, of the backbone and of the head each (Quick ViTs)."""
    drop_path: float | None = None
    """Stochastic depth, the same in all blocks: 0.3 (Quick ViTs), 0 to 0.2 with the small preset."""
    drop_path_subset: bool | None = None
    """Compute residual branches for those samples alone that stochastic depth keeps, the same number each time; by
    default above a rate of 0.1 (DINOv2), where that is faster."""
    prototypes: int | None = None
    """65,536 (Quick ViTs), fewer with the small preset; shared by class tokens and patches (DINOv2)."""
    head_layers: int = 3
    """Layers of the head (DINOv2)."""
    head_hidden: int = 2048
    """Their width (DINOv2)."""
    head_bottleneck: int = 256
    """Width of what is compared with the prototypes (DINOv2)."""
    frozen_steps: int | None = None
    """Updates in which the prototypes stay as they are: a hundredth of all (DINOv2: 1,250 of 125,000)."""
    momentum: float | None = None
    """Of the teacher, at the beginning: 0.992 (DINOv2; Quick ViTs' table says 0.8), 0.95 with the small preset."""
    final_momentum: float = 1.0
    """At the end of a cosine (DINOv2)."""
    teacher_temperature: float | None = None
    """Of the teacher's targets: 0.07 (DINOv2), 0.03 with the small preset."""
    first_teacher_temperature: float | None = None
    """At the beginning: 0.04 (DINOv2), 0.03 with the small preset."""
    temperature_steps: int | None = None
    """Updates in which the temperature rises: 3 of 10 (DINOv2: 37,500 of 125,000)."""
    centering: Centering | None = None
    """softmax with a moving centre (DINOv2), sinkhorn (its larger models, and the small preset), or none, to see a
    collapse."""
    dino_weight: float = 1.0
    """Of the loss of class tokens (DINOv2)."""
    ibot_weight: float = 1.0
    """Of the loss of hidden patches (DINOv2)."""
    koleo_weight: float | None = None
    """Of KoLeo, for each global view: 0.1 (Quick ViTs), 0.01 with the small preset."""
    mask_probability: float = 0.5
    """Share of the global views that have hidden patches (Quick ViTs)."""
    mask_ratio: tuple[float, float] = (0.1, 0.5)
    """Shares of patches that are hidden there (Quick ViTs)."""
    group: int | None = None
    """So many consecutive images share a draw of masks, and seek their neighbours for KoLeo among themselves: 64, as
    a GPU has for the paper's ViT-L, 32 from ViT-H on, or what of 64 divides the batch."""
    crop_ratio: float = 224 / 256
    """Share of the image that is evaluated (DINOv2)."""
    labelled: str | None = None
    """Data with classes for k-NN during training; the training data by default, if it has classes and a validation
    split."""
    knn_images: int = 100_000
    """At most so many training images are neighbours there."""
    snapshots: bool = True
    """Keep the teacher of each evaluation in RUN/teachers."""
    precision: Literal["auto", "bf16", "float32", "float64"] = "auto"
    """auto is bf16 on a GPU (Quick ViTs) and float32 on a CPU."""
    residual: Literal["bf16", "float32"] | None = None
    """Where the precision is bf16, that of the residual stream between the blocks: bf16 (DINOv2, whose tokens are in
    half precision throughout), which is faster; float32 with the small preset."""
    steps_per_epoch: int = 1250
    """Updates that are called an epoch, however many images there are (DINOv2)."""
    colors: Where = "workers"
    """Who changes colours: the loader's processes, as in DINOv2, or the device for a whole batch at once, up to
    rounding the same. Choose it where the loader is what training waits for."""
    crops: Where = "workers"
    """Who crops and turns, likewise; a device that does changes colours too. For images of one size, best with
    cache: the loader then hardly does anything but draw numbers."""
    cache: bool = False
    """Keep decoded images in memory, for small ones whose files cost more to open than to augment."""
    seed: int = 0
    """Of weights, order, views, masks and stochastic depth."""
    run: RunConfig = field(default_factory=RunConfig)
    """How the run is carried out; may change from one start to the next. By default there are ten evaluations."""

    def defaults(self, width: int) -> dict[str, Any]:
        """The preset's values for a model of this width."""
        return IMAGENET if self.preset == "imagenet" else {**SMALL, **row(SMALL_SIZES, width)}

    def images_of_gpu(self, width: int) -> int:
        """How many images a GPU is meant to have at once."""
        return GROUP if width < LARGE else LARGE_GROUP


# The least and the most that these may be.
LIMITS = {
    **dict.fromkeys(("batch_size", "knn_images", "steps_per_epoch"), (1, math.inf)),
    **dict.fromkeys(("head_layers", "head_hidden", "head_bottleneck"), (1, math.inf)),
    # With one there is nothing to tell apart.
    "prototypes": (2, math.inf),
    **dict.fromkeys(("teacher_temperature", "first_teacher_temperature"), (ABOVE_0, math.inf)),
    **dict.fromkeys(
        ("steps", "local_views", "warmup_steps", "frozen_steps", "temperature_steps"), (0, math.inf)
    ),
    **dict.fromkeys(("learning_rate", "final_learning_rate", "patch_embed_rate"), (0, math.inf)),
    **dict.fromkeys(("weight_decay", "final_weight_decay"), (0, math.inf)),
    **dict.fromkeys(("dino_weight", "ibot_weight", "koleo_weight"), (0, math.inf)),
    **dict.fromkeys(("momentum", "final_momentum", "layer_decay", "drop_path", "mask_probability"), (0, 1)),
}
# Fields that say where things are or how they are done, not what is computed.
_PLACES = ("data", "out", "finetune", "labelled", "knn_images", "snapshots", "cache", "run")
C = TypeVar("C", bound=Dinov2Config)


def resolve(config: C, device: torch.device) -> C:
    """The configuration with every value filled in."""
    with torch.device("meta"):
        model = create(config, classes=0, crops=True)
    patch = patch_size(model)
    chosen = {
        name: _or(getattr(config, name), value) for name, value in config.defaults(model.embed_dim).items()
    }
    if config.layer_scale != "auto":
        chosen["layer_scale"] = config.layer_scale
    steps, batch_size = chosen["steps"], chosen["batch_size"]
    peak = _peak(chosen["learning_rate"], batch_size)
    local_size = _or(config.local_size, max(1, round(config.img_size * 96 / 224 / patch)) * patch)
    require_whole_patches("local_size", local_size, patch)
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "float32"
    return replace(
        config,
        **{**chosen, **started_from(config, config.finetune)},
        final_learning_rate=end_of_rate(config.final_learning_rate, FINAL_LEARNING_RATE, peak),
        drop_path_subset=_or(config.drop_path_subset, chosen["drop_path"] > SUBSET),
        local_size=local_size,
        warmup_steps=_or(config.warmup_steps, round(WARMUP * steps)),
        temperature_steps=_or(config.temperature_steps, round(TEMPERATURE_WARMUP * steps)),
        frozen_steps=_or(config.frozen_steps, round(FROZEN * steps)),
        group=_or(config.group, _group(config.images_of_gpu(model.embed_dim), batch_size)),
        precision=precision,
        run=replace(
            config.run, evaluate_every=_or(config.run.evaluate_every, max(1, steps // config.EVALUATIONS))
        ),
    )


def train(config: Dinov2Config, command: str = "") -> Outcome:
    """Train by DINOv2's recipe, from the start or from where the run folder's checkpoints end."""
    return carry_out(config, resolve, Dinov2, command)


class Dinov2(Recipe):
    """A student and its teacher, a backbone and a head each, and the teacher's targets.

    Takes a resolved configuration.
    """

    name = "dinov2"
    batch_type = ViewBatch
    evaluates_first = True
    later_settings = ("data",)

    def __init__(self, config: Dinov2Config) -> None:
        _check(config)
        self.config = config
        self.seed, self.clip = config.seed, config.clip
        self.batch_size, self.total_steps = given(config.batch_size), given(config.steps)
        self.steps_per_epoch = config.steps_per_epoch
        self.precision: Precision = "float32" if config.precision == "auto" else config.precision
        self.dtype = torch.float64 if self.precision == "float64" else torch.float32
        prototypes = given(config.prototypes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            vit = build(
                config,
                0,
                config.finetune,
                drop_path=given(config.drop_path),
                drop_path_subset=given(config.drop_path_subset),
                crops=True,
            )
            widths = {"hidden": config.head_hidden, "bottleneck": config.head_bottleneck}
            head = DinoHead(vit.embed_dim, prototypes, layers=config.head_layers, **widths).to(self.dtype)
        declare_preprocessing(vit, self.eval_transform())
        half = self.precision == config.residual == "bf16"
        student = CropEncoder(vit, torch.bfloat16 if half else None).to(self.dtype)
        self.modules = {
            "student": student,
            "student_head": head,
            "teacher": averaged_copy(student),
            "teacher_head": averaged_copy(head),
            "targets": Targets(prototypes, given(config.centering), self.dtype),
        }
        side = config.img_size // patch_size(vit)
        self.masking = BlockMasking(
            (side, side), config.mask_probability, config.mask_ratio, given(config.group)
        )
        self._momentum = cosine(given(config.momentum), config.final_momentum, self.total_steps)
        self._temperature = _risen(
            given(config.first_teacher_temperature),
            given(config.teacher_temperature),
            given(config.temperature_steps),
        )
        self._step = -1
        self._watched: dict[str, Tensor] = {}
        self._trouble: str | None = None

    @classmethod
    def rebuild(cls, config: Dinov2Config) -> Dinov2:
        """The recipe of a run that is to be looked at; its weights are to come from a state of it."""
        return cls(replace(config, finetune=None))

    def settings(self) -> Mapping[str, Any]:
        """The configuration, less where things are and how the run is carried out; of several data their weights."""
        plain = {name: value for name, value in as_plain(self.config).items() if name not in _PLACES}
        data = self.config.data
        return {**plain, "data": None if isinstance(data, str) else list(data.values())}

    # ------------------------------------------------------------------ optimisation

    def optimizer(self) -> Optimizer:
        """AdamW with DINOv2's schedules, the prototypes frozen at first."""
        config = self.config
        lr = warmup_then_cosine(
            _peak(given(config.learning_rate), self.batch_size),
            given(config.final_learning_rate),
            self.total_steps,
            given(config.warmup_steps),
        )
        decay = cosine(config.weight_decay, config.final_weight_decay, self.total_steps)
        student, head = bare(self.modules["student"]), bare(self.modules["student_head"])
        assert isinstance(student, CropEncoder)
        # What is neither a block nor below them is not slowed down, and counts as a layer above the last block.
        below = scaled(lr, config.layer_decay)
        lowest = scaled(lr, config.layer_decay ** (len(student.vit.blocks) + 1))
        patches = scaled(lowest, config.patch_embed_rate)
        rates = {"norm.": lr, "invariant.": lr, "patch_embed.": patches}
        # Unlike timm, DINOv2 decays positions and tokens too.
        groups = parameter_groups(student.vit, below, decay, config.layer_decay, rates, undecayed=())
        frozen = {"prototypes": lambda step: lr(step) if step >= given(config.frozen_steps) else 0.0}
        groups += parameter_groups(head, lr, decay, rates=frozen)
        if student.mask_token is not None:
            # It belongs to the layer of the patch embedding, as a Quick ViT's does.
            groups.append(parameter_group([student.mask_token], lowest, decay))
        return build_optimizer("adamw", groups)

    def after_step(self, step: int) -> None:
        """Let the teacher follow, take in what was seen of its targets, and look for signs of collapse."""
        for name in ("", "_head"):
            follow(self.modules[f"teacher{name}"], bare(self.modules[f"student{name}"]), self._momentum(step))
        self._targets.update(step, self.world)
        if (step + 1) % self.config.run.log_every == 0 and step >= given(self.config.warmup_steps):
            self._look_for_collapse(step + 1)

    def _look_for_collapse(self, done: int) -> None:
        """Raise the alarm once for each kind of trouble; before the warm-up is over, all features are much alike."""
        numbers = {name: value.item() for name, value in self._watched.items()}
        trouble, before = diagnose(numbers, given(self.config.centering)), self._trouble
        self._trouble = trouble
        if trouble != before and self.world.main:
            logger.warning(
                "after %d updates: %s", done, f"COLLAPSE: {trouble}" if trouble else "no collapse any more"
            )

    # ------------------------------------------------------------------ data

    def batches(self, start: int, world: World) -> Iterator[ViewBatch]:
        """Views of images, and masks."""
        config = self.config
        self._step = start - 1
        # What is wrong with the labelled data shows here too, also where a run goes on between two evaluations.
        _ = self._labelled
        share = self.batch_size // (world.size * config.run.accumulate)
        if share % self.masking.group:
            raise ValueError(
                f"group must divide the {share} images of a backward pass, got {self.masking.group}; set --group, "
                f"for example to {math.gcd(share, self.masking.group)}"
            )
        loader = ViewLoader(
            _open(config.data, config.cache),
            VIEWS[config.views](
                config.img_size,
                given(config.local_size),
                config.local_views,
                global_scale=config.global_scale,
                local_scale=config.local_scale,
                colors=config.colors,
                crops=config.crops,
            ),
            self.masking,
            batch_size=self.batch_size,
            seed=config.seed,
            steps_per_epoch=self.steps_per_epoch,
            rank=world.rank,
            world_size=world.size,
            workers=config.run.workers,
            device=world.device,
        )
        return loader.batches(start, self.total_steps)

    # ------------------------------------------------------------------ loss

    def loss(self, batch: ViewBatch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """DINO's, iBOT's and KoLeo's losses, weighted, and signs of collapse.

        V views of B images; n hidden patches, of which some are there to fill up a number that is always the same.
        """
        config, targets = self.config, self._targets
        if step != self._step:
            targets.begin()
            self._step = step
        images, views = batch.global_views.shape[:2]
        global_views = batch.global_views.flatten(0, 1).to(self.dtype)
        masks = batch.masks.flatten(0, 1)
        hidden = HiddenPatches(masks, images // self.masking.group * self.masking.most, self.dtype)

        with torch.no_grad():
            teacher_classes, patches = hidden.of(*self.modules["teacher"]([global_views]))
            teacher = self._compare("teacher_head", (images, views), teacher_classes, patches)
            temperature = torch.full((), self._temperature(step), dtype=self.dtype, device=masks.device)
            taught, unseen, _ = teacher.parts()
            shifts = (
                targets.shift(taught.flatten(0, 1), "class", temperature, self.world),
                targets.shift(unseen, "patch", temperature, self.world, hidden.counted),
            )

        crops = [global_views]
        if config.local_views:
            crops.append(batch.local_views.flatten(0, 1).to(self.dtype))
        tokens, *local_tokens = self.modules["student"](crops, masks)
        classes, patches = hidden.of(tokens)
        local = (tokens[:, 0] for tokens in local_tokens)
        student = self._compare("student_head", (images, views), classes, patches, *local)
        compared: Comparison = self.modules["targets"](
            student, teacher, shifts, temperature, hidden.weights, hidden.counted
        )
        targets.observe(compared.seen)
        # Neighbours are those of the same view of the images of a group, never another view of the same image.
        koleo = koleo_loss(classes.unflatten(0, (-1, self.masking.group, views)).transpose(1, 2))
        loss = (
            config.dino_weight * compared.dino
            + config.ibot_weight * compared.ibot
            + given(config.koleo_weight) * views * koleo
        )
        self._watched = {
            "feature_std": feature_std(teacher_classes),
            "target_entropy": compared.target_entropy,
            "agreement": compared.agreement,
            **targets.numbers(step),
        }
        return loss, {"dino": compared.dino, "ibot": compared.ibot, "koleo": koleo, **self._watched}

    def _compare(self, name: str, shape: tuple[int, int], *tokens: Tensor) -> Logits:
        """Class tokens of images and views, of hidden patches and of local views through a head, at once."""
        return Logits(self.modules[name](torch.cat(tokens)), shape, len(tokens[1]))

    @property
    def _targets(self) -> Targets:
        targets = self.modules["targets"]
        assert isinstance(targets, Targets)
        return targets

    # ------------------------------------------------------------------ results

    def eval_transform(self) -> EvalTransform:
        """How images are prepared for the teacher."""
        return eval_transform(self.config.img_size, self.config.crop_ratio)

    def evaluate(self, world: World) -> dict[str, float]:
        """The accuracy of the teacher's nearest neighbours, if there is labelled data; and keep the teacher."""
        if self.config.snapshots:
            self._keep_teacher(world)
        splits = self._labelled
        if splits is None:
            return {}
        options = {"batch_size": max(1, self.batch_size // world.size), "workers": self.config.run.workers}
        train, test = (
            collect(self._vectors, source, self.eval_transform(), world, most=most, **options)
            for source, most in ((splits.train, self.config.knn_images), (self.tested(splits), None))
        )
        return self.judge(train, test, world)

    def _keep_teacher(self, world: World) -> None:
        # Targets do not count an update that was left out.
        done = max(int(self._targets.updates), self._step + 1)
        path = self.config.out / SNAPSHOTS / f"step-{done:08d}.safetensors"
        try:
            self._save(path, world)
        except OSError as error:
            # A full disk must not end a run for a snapshot.
            logger.warning("no snapshot of the teacher: %s", error)

    def tested(self, splits: Splits) -> Source:
        """What features are judged on during training: the validation split, if there is another to test on."""
        return splits.val or splits.test

    def judge(self, train: Features, test: Features, world: World) -> dict[str, float]:
        """Scores of features: the accuracies of DINOv2's k-NN."""
        ks = tuple(k for k in NEIGHBOURS if k <= len(train.targets))
        knn = KnnClassifier(train, ks, "cosine", TEMPERATURE, world.device, world, progress=False)
        return {name: value for name, value in scores(knn, test).items() if name.endswith("/accuracy")}

    def export(self, folder: Path, world: World) -> None:
        """Write `model.safetensors`: the teacher's backbone, with how images are prepared for it."""
        self._save(folder / MODEL, world)

    def _save(self, path: Path, world: World) -> None:
        teacher = self.modules["teacher"]
        assert isinstance(teacher, CropEncoder)
        save_model(teacher.vit, path, world)

    def _vectors(self, images: Tensor) -> Tensor:
        """The teacher's class tokens."""
        tokens: Tensor
        (tokens,) = self.modules["teacher"]([images.to(self.dtype)])
        return tokens[:, 0]

    @cached_property
    def _labelled(self) -> Splits | None:
        """Data with classes: what was asked for, or the training data if it has them."""
        config = self.config
        if config.labelled is not None:
            return self._splits(config.labelled)
        try:
            return self._splits(config.data) if isinstance(config.data, str) else None
        except (ValueError, FileNotFoundError) as reason:
            logger.info("no k-NN during training: %s", reason)
            return None

    def _splits(self, spec: str) -> Splits:
        """The splits of data, whose classes must be numbered alike where they are learned and tested."""
        splits = open_splits(spec)
        learned, tested = splits.train, self.tested(splits)
        if learned.classes != tested.classes:
            some = ", ".join(sorted({*learned.classes} ^ {*tested.classes})[:5])
            raise ValueError(
                f"{tested.name} must have the {len(learned.classes)} classes of {learned.name}, got "
                f"{len(tested.classes)}; only one of them has {some}. Name all classes in classes.txt"
            )
        return splits


# ---------------------------------------------------------------------- parts


def _open(data: dict[str, float] | str, keep: bool) -> Source:
    """The images of a folder, or of several in proportion to their weights."""
    sources = {
        spec: open_source(spec, "train", labelled=False)
        for spec in ([data] if isinstance(data, str) else data)
    }
    kept = {spec: cache(source) if keep else source for spec, source in sources.items()}
    return kept[data] if isinstance(data, str) else mix({kept[spec]: weight for spec, weight in data.items()})


def _risen(start: float, end: float, steps: int) -> Schedule:
    """A line from `start` to `end`, then `end`."""
    return warmup_then_cosine(end, end, steps, steps, start)


def _peak(learning_rate: float, batch_size: int) -> float:
    """The learning rate of a batch."""
    return learning_rate * math.sqrt(batch_size / REFERENCE_BATCH)


def _group(images: int, batch_size: int) -> int:
    """So many images as a GPU is meant to have, or what of the paper's 64 divides the batch."""
    return math.gcd(GROUP, batch_size) if batch_size % images else images


def _or(value: Any, default: Any) -> Any:
    return default if value in (None, "auto") else value


def _check(config: Dinov2Config) -> None:
    """Refuse a configuration that cannot be carried out."""
    require_within(vars(config), LIMITS)
    require_clip(config.clip)
    if given(config.group) < 2 and config.koleo_weight:
        raise ValueError(
            f"KoLeo needs a group of at least 2 images, got {config.group}; use another batch_size or group"
        )
    if config.centering == "sinkhorn" and config.run.accumulate > 1:
        raise ValueError(
            f"Sinkhorn–Knopp assigns all images of an update at once, so accumulate must be 1, got "
            f"{config.run.accumulate}; use --centering softmax"
        )
