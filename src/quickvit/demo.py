"""The demonstration: a standard ViT, an h8 and an i8 trained side by side on scikit-learn's digits, on a CPU.

All three have one size, one recipe and one seed, and see upright digits only. They are then tested on upright
digits and on the same digits turned and mirrored at random. `run_demo` writes a picture and the results.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import quickvit
from quickvit import D8, act_on_image
from quickvit.bench.flops import count
from quickvit.bench.timing import threads
from quickvit.data import Batch
from quickvit.provenance import require_folder, surroundings, write
from quickvit.report.demo_figure import draw_demo
from quickvit.train import Recipe, RunConfig, Trainer, World, build_optimizer, parameter_groups

MODELS = ("ViT", "h8", "i8")
CLASSES = 10
# Digits that a transformation turns nearly into each other.
LOOKALIKES = (((6, 9), "a half turn"), ((2, 5), "a mirroring"))
BATCH_FOR_SPEED, ROUNDS = 256, 9
ACCURACY = "test accuracy"


@dataclass(frozen=True)
class DemoConfig:
    """Settings of the demonstration.

    out: folder for demo.png and results.json.
    seed: decides the split, the initial weights, the order of the images, their shifts and the test poses.
    epochs, batch_size, learning_rate, weight_decay, label_smoothing: AdamW with a cosine schedule.
    warmup_epochs: epochs in which the learning rate rises linearly.
    max_shift: training images move by up to so many pixels along each axis.
    image_size, patch_size: pixels that the 8 × 8 digits are resized to, and of the patches they are cut into.
    width, depth, heads: size of all three models; half the blocks of h8 and i8 are octic.
    test_images: how many of the 1,797 digits are kept for testing.
    train_images: how many of the others are trained on; all by default.
    threads: CPU threads. With one, the result is the same on any number of cores, and other programs slow the
        demonstration down the least.
    """

    out: Path = Path("demo")
    seed: int = 0
    epochs: int = 16
    batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    warmup_epochs: int = 1
    max_shift: int = 1
    image_size: int = 32
    patch_size: int = 8
    width: int = 128
    depth: int = 4
    heads: int = 4
    test_images: int = 360
    train_images: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, H, W], standardised, and labels [N], for training and for testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Trained:
    """A trained model, the test accuracy after each epoch and the seconds that the training took."""

    model: nn.Module
    curve: list[float]
    seconds: float


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Train and test the three models, write the picture and the results, and return the results.

    A signal to stop is a KeyboardInterrupt, and nothing is written.
    """
    require_extras()
    require_folder(config.out)
    with threads(config.threads):
        return _run(config)


def _run(config: DemoConfig) -> dict[str, Any]:
    digits = load_digits(config)
    trained = {name: train(name, digits, config) for name in MODELS}
    models = {name: run.model for name, run in trained.items()}

    images, labels = digits.test_images, digits.test_labels
    poses = torch.randint(len(D8.elements), labels.shape, generator=_random(config.seed, "poses"))
    turned_images = transform(images, poses)
    upright = {name: predict(model, images) for name, model in models.items()}
    turned = {name: predict(model, turned_images) for name, model in models.items()}
    speed = measure_throughput(models, digits.train_images)
    costs = {name: count(model) for name, model in models.items()}
    rows = [
        {
            "model": name,
            "parameters": costs[name].parameters,
            "macs": costs[name].macs,
            "images_per_second": speed[name],
            "accuracy_upright": _accuracy(upright[name], labels),
            "accuracy_transformed": _accuracy(turned[name], labels),
            "same_answer": _accuracy(upright[name], turned[name]),
            "train_seconds": trained[name].seconds,
        }
        for name in models
    ]
    confusion = {name: _confusion(upright[name], labels) for name in MODELS}
    results: dict[str, Any] = {
        "config": {**asdict(config), "out": str(config.out)},
        **surroundings(images.device, "quickvit demo"),
        "images": {"train": len(digits.train_labels), "test": len(labels)},
        "rows": rows,
        "curves": {name: run.curve for name, run in trained.items()},
        "confusion_upright": confusion,
        "confusion_transformed": {name: _confusion(turned[name], labels) for name in MODELS},
        "lookalikes": [_lookalikes(pair, by, confusion) for pair, by in LOOKALIKES],
    }
    write(results, config.out / "results.json")
    draw_demo(results, models, images, labels, config.out / "demo.png")
    return results


def format_table(results: dict[str, Any]) -> str:
    """The results as a table for a terminal, followed by what the invariant model confuses."""
    table: list[tuple[str, ...]] = [
        ("model", "parameters", "MMACs", "images/s", "upright", "transformed", "same answer")
    ]
    for row in results["rows"]:
        shares = (row[key] for key in ("accuracy_upright", "accuracy_transformed", "same_answer"))
        costs = f"{row['parameters']:,}", f"{row['macs'] / 1e6:.1f}", f"{row['images_per_second']:,.0f}"
        table.append((row["model"], *costs, *(f"{share:.1%}" for share in shares)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, tuple("-" * width for width in widths))
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table]
    images, number = results["images"], results["config"]["threads"]
    lines += [
        "",
        f"Trained on {images['train']:,} upright digits, tested on {images['test']} others: upright, and",
        "each transformed by a random one of the eight rotations and mirrorings. Same answer: upright and",
        f"transformed, right or wrong. Images per second: batches of {BATCH_FOR_SPEED}, CPU threads: {number}.",
    ]
    for entry in results["lookalikes"]:
        (a, b), counts = entry["pair"], entry["confused"]
        confused = ", ".join(f"{name} {count}" for name, count in counts.items())
        lines.append(
            f"{a} and {b} are {entry['by']} apart. Confused upright, of {entry['images']}: {confused}."
        )
    counts = results["confusion_upright"]["i8"]
    recall = sorted((row[digit] / max(1, sum(row)), digit) for digit, row in enumerate(counts))
    hardest = ", ".join(f"{digit} ({share:.0%} right)" for share, digit in recall[:3])
    lines.append(f"Hardest for i8: {hardest}.")
    return "\n".join(lines)


def require_extras() -> None:
    """Raise a ModuleNotFoundError if scikit-learn or matplotlib is missing."""
    packages = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
    missing = [name for module, name in packages.items() if find_spec(module) is None]
    if missing:
        names = " and ".join(missing)
        raise ModuleNotFoundError(f'the demo needs {names}: pip install "quickvit[demo]"', name=names)


# ---------------------------------------------------------------------- data


def load_digits(config: DemoConfig) -> Digits:
    """scikit-learn's handwritten digits, resized and split with every class in proportion."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data = load()
    labels = torch.tensor(data.target)
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    size = (config.image_size, config.image_size)
    images = functional.interpolate(images, size, mode="bicubic", align_corners=False)
    train_indices, test_indices = train_test_split(
        range(len(labels)),
        train_size=config.train_images,
        test_size=config.test_images,
        random_state=config.seed,
        stratify=data.target,
    )
    images = (images - images[train_indices].mean()) / images[train_indices].std()
    return Digits(images[train_indices], labels[train_indices], images[test_indices], labels[test_indices])


def shift(images: Tensor, max_shift: int, generator: torch.Generator) -> Tensor:
    """Each image moved by up to `max_shift` pixels along each axis; its border is filled with background."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (max_shift,) * 4, value=images.min().item())
    y, x = torch.randint(2 * max_shift + 1, (2, count, 1), generator=generator)
    rows, columns = y + torch.arange(height), x + torch.arange(width)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def transform(images: Tensor, poses: Tensor) -> Tensor:
    """Image i under the group element number poses[i]."""
    out = torch.empty_like(images)
    for index, g in enumerate(D8.elements):
        out[poses == index] = act_on_image(images[poses == index], g)
    return out


# ---------------------------------------------------------------------- training


def create_model(name: str, config: DemoConfig) -> nn.Module:
    """One of `MODELS`, all of the same size."""
    # Layer scale is for deep models: it would slow down these few steps.
    arguments: dict[str, Any] = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": 1,
        "num_classes": CLASSES,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "global_pool": "avg",
        "class_token": False,
        "init_values": None,
    }
    if name == "ViT":
        return quickvit.create_baseline("tiny", **arguments)
    return timm.create_model(f"quickvit_{name}_tiny_patch16_224", **arguments)


class DemoRecipe(Recipe):
    """Cross-entropy on shifted digits; everything random is a function of the seed and the epoch or step."""

    name = "demo"

    def __init__(self, name: str, digits: Digits, config: DemoConfig) -> None:
        number = len(digits.train_labels)
        self.digits, self.config = digits, config
        self.seed, self.batch_size = config.seed, config.batch_size
        self.steps_per_epoch = number // config.batch_size
        self.total_steps = config.epochs * self.steps_per_epoch
        if not self.steps_per_epoch:
            raise ValueError(
                f"batch_size must be at most the {number} training images, got {config.batch_size}"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.modules = {"model": create_model(name, config)}

    def optimizer(self) -> Optimizer:
        """AdamW with warm-up and cosine."""
        rate = partial(learning_rate, steps_per_epoch=self.steps_per_epoch, config=self.config)
        return build_optimizer(
            "adamw", parameter_groups(self.modules["model"], rate, self.config.weight_decay)
        )

    def batches(self, start: int, world: World) -> Iterator[Batch]:  # noqa: ARG002
        """Shuffled and shifted digits."""
        digits, seed = self.digits, self.seed
        for step in range(start, self.total_steps):
            epoch, place = divmod(step, self.steps_per_epoch)
            order = torch.randperm(len(digits.train_labels), generator=_random(seed, "order", epoch))
            indices = order[place * self.batch_size : (place + 1) * self.batch_size]
            generator = _random(seed, "shift", step)
            images = shift(digits.train_images[indices], self.config.max_shift, generator)
            yield Batch(images, digits.train_labels[indices], indices)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG002
        """Cross-entropy with smoothed labels."""
        logits = self.modules["model"](batch.images)
        smoothing = self.config.label_smoothing
        return functional.cross_entropy(logits, batch.targets, label_smoothing=smoothing), {}

    def evaluate(self, world: World) -> dict[str, float]:  # noqa: ARG002
        """Accuracy on the test digits, as they are."""
        predictions = predict(self.modules["model"], self.digits.test_images)
        return {ACCURACY: _accuracy(predictions, self.digits.test_labels)}


def train(name: str, digits: Digits, config: DemoConfig) -> Trained:
    """Train one model."""
    recipe = DemoRecipe(name, digits, config)
    outcome = Trainer(recipe, RunConfig()).fit(label=f"training {name:>3}")
    if outcome.stopped:
        # The trainer noted the signal and ended its step; half a training is no result.
        raise KeyboardInterrupt
    curve = [numbers[ACCURACY] for _, numbers in outcome.evaluations]
    return Trained(recipe.modules["model"].eval(), curve, outcome.seconds)


def learning_rate(step: int, steps_per_epoch: int, config: DemoConfig) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    warmup, total = config.warmup_epochs * steps_per_epoch, config.epochs * steps_per_epoch
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2


def _random(*key: Any) -> torch.Generator:
    """A generator that is a function of its key alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


# ---------------------------------------------------------------------- measuring


@torch.inference_mode()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """The class that the model gives each image."""
    model.eval()
    return torch.cat([model(batch).argmax(-1) for batch in images.split(BATCH_FOR_SPEED)])


def measure_throughput(models: dict[str, nn.Module], images: Tensor) -> dict[str, float]:
    """Images per second of each model: the median of some rounds in which the models take turns."""
    batch = images[torch.arange(BATCH_FOR_SPEED) % len(images)]
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS + 1):
        for name, model in models.items():
            start = time.perf_counter()
            predict(model, batch)
            seconds[name].append(time.perf_counter() - start)
    return {name: len(batch) / statistics.median(values[1:]) for name, values in seconds.items()}


def _accuracy(predictions: Tensor, labels: Tensor) -> float:
    return (predictions == labels).double().mean().item()


def _confusion(predictions: Tensor, labels: Tensor) -> list[list[int]]:
    """How many images of each class (row) were given each class (column)."""
    counts = torch.bincount(labels * CLASSES + predictions, minlength=CLASSES**2)
    return counts.view(CLASSES, CLASSES).tolist()


def _lookalikes(pair: tuple[int, int], by: str, confusions: dict[str, list[list[int]]]) -> dict[str, Any]:
    """How many images of two classes each model took for the other of the two."""
    a, b = pair
    confused = {name: counts[a][b] + counts[b][a] for name, counts in confusions.items()}
    images = sum(map(sum, (confusions["i8"][a], confusions["i8"][b])))
    return {"pair": list(pair), "by": by, "images": images, "confused": confused}
