"""The work of a model's steps: FLOPs of matrix products, and bytes through memory.

A step (a product, attention, GELU, a norm with the residual sum before it) reads each of its inputs once and
writes each of its outputs once. Over the rates that the device reaches, its operations and its bytes give two
times; the larger is the floor of the step, and the floor of a chain of steps is the sum of theirs. Kernels that do
several steps in one, fc1 and GELU for example, can go below that sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quickvit.group import DihedralGroup
from quickvit.models import FAMILIES, SIZES
from quickvit.models.zoo import PATCHES, Size

CHANNELS = 3
CLASSES = 1000


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: bytes per second in a large copy, FLOP per second in a large matrix product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """FLOPs of matrix products and bytes of one step."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """The paper's arithmetic intensity, FLOPs per byte."""
        return self.flops / self.bytes

    def times(self, flops: float, bytes: float) -> Work:
        """The step with its two numbers scaled."""
        return Work(self.flops * flops, self.bytes * bytes)


def floor_ms(steps: Iterable[Work], ceilings: Ceilings) -> float:
    """The sum over the steps of the larger of the two times, in milliseconds."""
    rates = ceilings.flops_per_s, ceilings.bytes_per_s
    return 1e3 * sum(max(step.flops / rates[0], step.bytes / rates[1]) for step in steps)


@dataclass(frozen=True)
class Storage:
    """Bytes per element: of what products read and write, of the residual stream, of weights."""

    compute: int
    stream: int
    weight: int

    @classmethod
    def inference(cls, dtype: torch.dtype) -> Storage:
        """Everything in one dtype."""
        return cls(dtype.itemsize, dtype.itemsize, dtype.itemsize)

    @classmethod
    def training(cls, dtype: torch.dtype) -> Storage:
        """Autocast: products in `dtype`, weights and residual stream in float32."""
        return cls(dtype.itemsize, 4, 4)


@dataclass(frozen=True)
class Shape:
    """A size of model with its patches and images, and possibly fewer blocks."""

    size: str
    patch: int
    img_size: int = 224
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"unknown size {self.size!r}; expected one of {', '.join(SIZES)}")
        if self.patch not in PATCHES:
            expected = ", ".join(map(str, PATCHES))
            raise ValueError(f"unknown patch size {self.patch}; expected one of {expected}")
        if self.img_size < self.patch or self.img_size % self.patch:
            raise ValueError(
                f"an image of {self.img_size}×{self.img_size} pixels has no whole patches of {self.patch}"
            )
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")

    @property
    def dims(self) -> Size:
        """Width, depth, heads and width of the MLP."""
        return SIZES[self.size]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.dims.depth if self.depth is None else self.depth

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches and the class token."""
        return (self.img_size // self.patch) ** 2 + 1

    @property
    def label(self) -> str:
        """As in ViT-Large/16, and what is unusual."""
        label = f"ViT-{self.size.capitalize()}/{self.patch}"
        if self.img_size != 224:
            label += f" {self.img_size}px"
        if self.depth is not None:
            label += f", {self.depth} block{'s' if self.depth > 1 else ''}"
        return label


# ---------------------------------------------------------------------- steps


def linear(
    rows: int, inputs: int, outputs: int, storage: Storage, group: DihedralGroup | None = None
) -> Work:
    """A linear map, standard or equivariant: 2BCF and 2BCF·3/16 FLOPs, BC + CF + BF and BC + CF/8 + BF elements."""
    flops, weights = 1.0, 1.0
    if group is not None:
        flops = (group.num_one_dim + 8 * group.num_two_dim) / group.order**2
        weights = 1 / group.order
    return product(rows, inputs, outputs, storage, flops, weights)


def product(
    rows: int, inputs: int, outputs: int, storage: Storage, flops: float = 1.0, weights: float = 1.0
) -> Work:
    """A linear map with these shares of the FLOPs and of the weights of a standard one."""
    moved = storage.compute * rows * (inputs + outputs) + storage.weight * weights * inputs * outputs
    return Work(2 * rows * inputs * outputs * flops, moved)


def attention(batch: int, tokens: int, width: int, storage: Storage) -> Work:
    """softmax(q kᵀ/√D) v: reads q, k and v, writes the sum."""
    return Work(4 * batch * tokens**2 * width, 4 * storage.compute * batch * tokens * width)


def elementwise(elements: int, passes: int, element_size: int) -> Work:
    """Reads and writes of a tensor, `passes` of them in all."""
    return Work(0, elements * passes * element_size)


def residual_norm(rows: int, width: int, storage: Storage) -> Work:
    """The residual sum and its norm: reads stream and branch, writes stream and normed stream."""
    return Work(0, 2 * rows * width * (storage.compute + storage.stream))


def onto(step: Work, rows: int, width: int, storage: Storage) -> Work:
    """A product that is added to the stream, which it reads too."""
    return Work(step.flops, step.bytes + storage.stream * rows * width)


# ---------------------------------------------------------------------- blocks and models


def block(
    dims: Size,
    batch: int,
    tokens: int,
    storage: Storage,
    group: DihedralGroup | None = None,
    *,
    backward: bool = False,
    folded: bool = False,
) -> list[Work]:
    """The steps of a transformer block, an octic one possibly `folded`; `backward` adds those of its gradients."""
    rows, width, hidden = batch * tokens, dims.embed_dim, dims.mlp_dim
    shapes = ((width, 3 * width), (width, width), (width, hidden), (hidden, width))
    products = [linear(rows, i, o, storage, group) for i, o in shapes]
    heads = attention(batch, tokens, width, storage)
    gelu = elementwise(rows * hidden, 2, storage.compute)
    norms = 2 * [residual_norm(rows, width, storage)]
    if folded and group is not None:
        # The products that follow read what a norm needs to know.
        norms = []
        products[1::2] = [onto(step, rows, width, storage) for step in products[1::2]]
    steps = [*products, heads, gelu, *norms]
    if backward:
        # The gradients of input and weight are two products of the same size. That of attention computes the
        # logits again and four products more, and reads q, k, v, the output and its gradient. GELU reads input
        # and gradient. The norm reads both gradients, stream and branch, and writes two gradients.
        steps += 2 * products
        steps += [heads.times(2.5, 2), *(step.times(1, 1.5) for step in (gelu, *norms))]
    return steps


def model(
    shape: Shape,
    family: str | None,
    batch: int,
    storage: Storage,
    *,
    backward: bool = False,
    features: bool = False,
    folded: bool = False,
) -> list[Work]:
    """The steps of a whole model of a family, or of the standard ViT: lift, blocks, invariant and head.

    features: all tokens are wanted, not the class token alone, and there is no head. folded: the octic blocks are.
    """
    width, rows = shape.dims.embed_dim, batch * shape.tokens
    pixels = CHANNELS * shape.patch**2
    lift = linear(rows - batch, pixels, width, storage)
    head = [] if features else [linear(batch, width, CLASSES, storage)]
    steps = [lift, *head]
    octic = 0
    if family is not None:
        kind = FAMILIES[family]
        octic = shape.blocks if kind.full_depth else shape.blocks // 2
        steps += octic * block(
            shape.dims, batch, shape.tokens, storage, kind.group, backward=backward, folded=folded
        )
        if kind.invariant:
            # The power spectrum has 3C/4 values; it need not be stored between x and the product.
            wanted = batch if kind.full_depth and not features else rows
            invariant = product(wanted, width, width, storage, 3 / 4, 3 / 4)
            steps += [invariant] * (3 if backward else 1)
    standard = block(shape.dims, batch, shape.tokens, storage, backward=backward)
    steps += (shape.blocks - octic) * standard
    if backward:
        # Images need no gradient.
        steps += [lift, *head, *head]
    return steps
