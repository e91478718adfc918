"""The operators of an octic block, one by one, against their floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quickvit.bench import work
from quickvit.bench.layers import layer_case, random
from quickvit.bench.table import Row, timed_rows
from quickvit.bench.timing import Job, Settings, measure
from quickvit.bench.work import Ceilings, Shape, Storage, Work
from quickvit.group import D8, Layout
from quickvit.ops import octic_attention, octic_gelu, octic_layer_norm, octic_linear, octic_residual_norm
from quickvit.ops.mlp import activate
from quickvit.ops.self_attention import octic_self_attention, takes_self_attention

NORM_EPS = 1e-6


@dataclass(frozen=True)
class Operator:
    """A function of random tensors of these shapes and of float32 vectors, or its gradient by some of them."""

    label: str
    name: str
    steps: Sequence[Work]
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    vectors: tuple[int, ...] = ()
    # Arguments by which the gradient is computed; none for the function itself.
    by: tuple[int, ...] = ()

    def build(self, settings: Settings) -> Job:
        """The call on fresh tensors."""
        arguments = [random(settings, *shape) for shape in self.shapes]
        arguments += [torch.randn(length, device=settings.device) for length in self.vectors]
        if not self.by:
            return partial(self.function, *arguments)
        leaves = [arguments[i].requires_grad_() for i in self.by]
        result = self.function(*arguments)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        grads = tuple(torch.randn_like(output) for output in outputs)
        return partial(torch.autograd.grad, outputs, leaves, grads, retain_graph=True)


def bench_operators(settings: Settings, ceilings: Ceilings, shapes: Sequence[Shape]) -> list[Row]:
    """Each operator of an octic block, and PyTorch's own where there is one like it."""
    rows = []
    for shape in shapes:
        chosen = list(operators(shape, settings))
        for label in dict.fromkeys(operator.label for operator in chosen):
            cases = [
                layer_case(o.name, partial(o.build, settings), o.steps, settings, ceilings)
                for o in chosen
                if o.label == label
            ]
            place = f"{shape.label} {label}"
            rows += timed_rows(place, cases, measure(cases, settings, place), settings, ceilings)
    return rows


def operators(shape: Shape, settings: Settings) -> Iterator[Operator]:
    """The operators of a block of this shape, forward and backward."""
    width, hidden = shape.dims.embed_dim, shape.dims.mlp_dim
    rows, storage = settings.batch * shape.tokens, Storage.inference(settings.dtype)
    for name, inputs, outputs in (
        ("qkv", width, 3 * width),
        ("proj", width, width),
        ("fc1", width, hidden),
        ("fc2", hidden, width),
    ):
        yield from _products(name, rows, inputs, outputs, storage)
    yield from _gelu(rows, hidden, storage)
    if settings.cuda:
        yield _first_half(rows, width, hidden, storage)
    yield from _norms(settings.batch, shape, storage)
    yield from _attention(settings.batch, shape, storage)


def _products(name: str, rows: int, inputs: int, outputs: int, storage: Storage) -> Iterator[Operator]:
    # Input and weight gradients are products of the same size.
    octic = (work.linear(rows, inputs, outputs, storage, D8),)
    standard = (work.linear(rows, inputs, outputs, storage),)
    yield Operator(name, "standard", standard, functional.linear, ((rows, inputs), (outputs, inputs)))
    shapes = ((rows, inputs), (4, outputs // 8, inputs // 8), (1, outputs // 4, inputs // 4))
    yield Operator(name, "octic", octic, octic_linear, shapes)
    yield Operator(f"{name} input gradient", "octic", octic, octic_linear, shapes, by=(0,))
    yield Operator(f"{name} weight gradient", "octic", octic, octic_linear, shapes, by=(1, 2))


def _gelu(rows: int, hidden: int, storage: Storage) -> Iterator[Operator]:
    steps = work.elementwise(rows * hidden, 2, storage.compute)
    x, bias = (rows, hidden), (hidden // D8.order,)
    yield Operator("GELU", "standard", (steps,), functional.gelu, (x,))
    yield Operator("GELU", "octic", (steps,), octic_gelu, (x, bias))
    yield Operator("GELU", "copy", (steps,), torch.clone, (x,))
    yield Operator("GELU gradient", "octic", (steps.times(1, 1.5),), octic_gelu, (x, bias), by=(0,))


def _first_half(rows: int, width: int, hidden: int, storage: Storage) -> Operator:
    """The first linear map of a perceptron and GELU, as in inference."""

    def forward(x: Tensor, one: Tensor, two: Tensor, bias: Tensor) -> Tensor:
        out = x.new_empty(rows, hidden)
        activate(x, one, two, bias, out)
        return out

    m, f = width // 8, hidden // 8
    shapes = (rows, width), (4, f, m), (1, 2 * f, 2 * m), (f,)
    return Operator("fc1 + GELU", "octic", (work.linear(rows, width, hidden, storage, D8),), forward, shapes)


def _norms(batch: int, shape: Shape, storage: Storage) -> Iterator[Operator]:
    layout = Layout(shape.dims.embed_dim)
    width, gains, m = layout.channels, layout.gains, layout.copies
    rows = batch * shape.tokens
    x = (batch, shape.tokens, width)

    def standard(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return functional.layer_norm(x, (width,), gain, shift, NORM_EPS)

    def norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return octic_layer_norm(x, gain, shift, NORM_EPS, layout)

    def residual(
        x: Tensor, branch: Tensor, gain: Tensor, shift: Tensor, bias: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        return octic_residual_norm(x, branch, gain, shift, NORM_EPS, layout, bias=bias, scale=scale)

    alone = work.elementwise(rows * width, 2, storage.compute)
    fused = work.residual_norm(rows, width, storage)
    vectors = (gains, m, m, gains)
    yield Operator("norm", "standard", (alone,), standard, (x, (width,), (width,)))
    yield Operator("norm", "octic", (alone,), norm, (x,), vectors[:2])
    yield Operator("norm gradient", "octic", (alone.times(1, 1.5),), norm, (x,), vectors[:2], by=(0, 1, 2))
    yield Operator("residual + norm", "octic", (fused,), residual, (x, x), vectors)
    gradient = (fused.times(1, 1.5),)
    yield Operator(
        "residual + norm gradient", "octic", gradient, residual, (x, x), vectors, by=tuple(range(6))
    )


def _attention(batch: int, shape: Shape, storage: Storage) -> Iterator[Operator]:
    width, heads, tokens = shape.dims.embed_dim, shape.dims.num_heads, shape.tokens
    layout = Layout(3 * width)
    qkv = (batch, tokens, 3 * width)

    def standard(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v)

    def octic(qkv: Tensor, bias: Tensor) -> Tensor:
        return octic_attention(qkv, heads, layout, bias)

    steps, bias = work.attention(batch, tokens, width, storage), (layout.copies,)
    yield Operator("attention", "standard", (steps,), standard, (qkv,))
    yield Operator("attention", "octic", (steps,), octic, (qkv, bias))
    yield Operator("attention gradient", "octic", (steps.times(2.5, 2),), octic, (qkv, bias), by=(0,))

    def with_qkv(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor) -> Tensor:
        if takes_self_attention(x, heads, D8):
            return octic_self_attention(x, weight_1, weight_2, bias, heads)
        return octic(octic_linear(x, weight_1, weight_2), bias)

    m, both = width // 8, (work.linear(batch * tokens, width, 3 * width, storage, D8), steps)
    shapes = ((batch, tokens, width), (4, 3 * m, m), (1, 6 * m, 2 * m), (3 * m,))
    yield Operator("qkv + attention", "octic", both, with_qkv, shapes)
    gradients = both[0].times(2, 2), steps.times(2.5, 2)
    yield Operator("qkv + attention gradient", "octic", gradients, with_qkv, shapes, by=(0, 1, 2, 3))
