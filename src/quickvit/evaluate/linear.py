"""Linear probes on frozen features: DINOv2's grid of them, trained at once.

A probe differs from another in what it sees (class tokens of the last layers, with or without the average of the
patch tokens) and in its learning rate. Probes do not influence each other, and a learning rate times a gradient is
the gradient of a weighted loss: one optimiser on the weighted sum of their losses trains them as it would train each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import cos, inf, pi

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from quickvit.data import derived_seed

Arrays = Mapping[str, Tensor]

# DINOv2's learning rates for a batch of 256; they grow in proportion to the batch.
LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
REFERENCE_BATCH = 256
# DINOv2's numbers of last layers.
LAYERS = (1, 4)
INITIAL_STD = 0.01
# Samples that are classified at one time.
ROWS = 4096


@dataclass(frozen=True)
class Probe:
    """A linear classifier of the named arrays side by side, and the learning rate of a batch of 256."""

    inputs: tuple[str, ...]
    learning_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < inf:
            raise ValueError(f"learning rates must be above 0 and finite, got {self.learning_rate}")


@dataclass(frozen=True)
class ProbeTraining:
    """SGD without weight decay and with a cosine schedule down to zero; the values are DINOv2's.

    batch_size: at most as many samples as there are. seed: of initial weights and order.
    """

    steps: int = 12_500
    batch_size: int = 1024
    momentum: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def probe_grid(arrays: Arrays, learning_rates: Sequence[float] = LEARNING_RATES) -> list[Probe]:
    """DINOv2's probes for the features at hand: class tokens of 1 and 4 layers, without and with the average.

    Of a model that has no class token, or not so many layers, the probes that are left.
    """
    layers = [tuple(f"class_{i}" for i in range(number, 0, -1)) for number in LAYERS]
    views = [names + more for names in layers if names[0] in arrays for more in ((), ("average",))]
    return [Probe(inputs, rate) for inputs in views or [("average",)] for rate in learning_rates]


class Probes:
    """Linear classifiers with the initial weights that DINOv2 gives them, a function of seed and inputs."""

    def __init__(
        self,
        probes: Sequence[Probe],
        arrays: Arrays,
        classes: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        if not probes:
            raise ValueError("there are no probes to train; give at least one learning rate")
        self.probes = tuple(probes)
        self.device = torch.device(device)
        self.dtype = torch.promote_types(arrays[probes[0].inputs[0]].dtype, torch.float32)
        self.groups: list[_Group] = []
        for inputs in dict.fromkeys(probe.inputs for probe in probes):
            places = [i for i, probe in enumerate(probes) if probe.inputs == inputs]
            rates = torch.tensor([probes[i].learning_rate for i in places], dtype=torch.float64)
            width = sum(arrays[name].shape[1] for name in inputs)
            generator = torch.Generator().manual_seed(derived_seed(seed, "probe", *inputs))
            weight = INITIAL_STD * torch.randn(classes, width, generator=generator)
            weight = weight.to(self.device, self.dtype).repeat(len(places), 1, 1)
            bias = weight.new_zeros(len(places), classes)
            self.groups.append(_Group(inputs, places, rates.to(weight), weight, bias))

    def parameters(self) -> list[Tensor]:
        """The weights and biases."""
        return [tensor for group in self.groups for tensor in (group.weight, group.bias)]

    def loss(self, features: Arrays, targets: Tensor) -> Tensor:
        """The sum over probes of learning rate times mean cross-entropy."""
        return torch.stack([group.loss(features, targets) for group in self.groups]).sum()

    @torch.inference_mode()
    def predict(self, arrays: Arrays) -> Tensor:
        """The label [probes, n] that each probe gives each sample; −1 where a probe has diverged."""
        number = len(arrays[self.probes[0].inputs[0]])
        labels = torch.empty(len(self.probes), number, dtype=torch.int64, device=self.device)
        for rows in torch.arange(number).split(ROWS):
            features = self.fetch(arrays, rows)
            for group in self.groups:
                logits = group.logits(features)
                chosen = logits.argmax(2).where(logits.isfinite().all(2), -1)
                labels[group.places, rows[0] : rows[-1] + 1] = chosen.T
        return labels

    def fetch(self, arrays: Arrays, rows: Tensor) -> dict[str, Tensor]:
        """Some rows of the arrays that the probes see, on their device and in their type."""
        names = dict.fromkeys(name for group in self.groups for name in group.inputs)
        return {
            name: arrays[name][rows.to(arrays[name].device)].to(self.device, self.dtype) for name in names
        }


def train_probes(
    arrays: Arrays,
    targets: Tensor,
    classes: int,
    probes: Sequence[Probe],
    training: ProbeTraining | None = None,
    *,
    rows: Tensor | None = None,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> Probes:
    """Train probes on arrays [n, D] with labels [n], on all rows or on some; in float32 or a wider type of theirs."""
    training = training or ProbeTraining()
    rows = torch.arange(len(targets)) if rows is None else rows
    model = Probes(probes, arrays, classes, training.seed, device)
    parameters = [parameter.requires_grad_() for parameter in model.parameters()]
    batch_size = min(training.batch_size, len(rows))
    scale = batch_size / REFERENCE_BATCH
    optimizer = torch.optim.SGD(parameters, lr=scale, momentum=training.momentum)
    batches = _batches(len(rows), batch_size, training)
    for step, batch in enumerate(tqdm(batches, "probes", training.steps, unit="step", disable=not progress)):
        optimizer.param_groups[0]["lr"] = scale * (1 + cos(pi * step / training.steps)) / 2
        chosen = rows[batch]
        loss = model.loss(model.fetch(arrays, chosen), targets[chosen].to(model.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    return model


@dataclass(frozen=True)
class _Group:
    """Probes that see the same: their numbers, learning rates [L], weight [L, classes, D], bias [L, classes]."""

    inputs: tuple[str, ...]
    places: list[int]
    rates: Tensor
    weight: Tensor
    bias: Tensor

    def logits(self, features: Arrays) -> Tensor:
        """[B, L, classes]."""
        x = torch.cat([features[name] for name in self.inputs], 1)
        return torch.addmm(self.bias.flatten(), x, self.weight.flatten(0, 1).T).unflatten(1, self.bias.shape)

    def loss(self, features: Arrays, targets: Tensor) -> Tensor:
        logits = self.logits(features)
        targets = targets[:, None].expand(logits.shape[:2])
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(0) @ self.rates


def _batches(number: int, batch_size: int, training: ProbeTraining) -> Iterator[Tensor]:
    """Indices below `number` for each step: one random order after the other, cut into equal batches."""
    left = torch.empty(0, dtype=torch.int64)
    epoch = 0
    for _ in range(training.steps):
        while len(left) < batch_size:
            generator = torch.Generator().manual_seed(derived_seed(training.seed, "order", epoch))
            left = torch.cat([left, torch.randperm(number, generator=generator)])
            epoch += 1
        batch, left = left[:batch_size], left[batch_size:]
        yield batch
