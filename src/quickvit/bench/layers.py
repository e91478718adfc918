"""Single layers: the paper's tables of linear layers and of GELU, and its figure of FLOPs against the width.

On a GPU many calls are captured in one CUDA graph, so that gaps between launches do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from quickvit.bench import work
from quickvit.bench.table import Row, timed_rows
from quickvit.bench.timing import Case, GraphedCalls, Job, Settings, measure
from quickvit.bench.work import Ceilings, Storage, Work, floor_ms
from quickvit.group import D8, DihedralGroup
from quickvit.layers import OcticBlock, OcticLinear, OcticMlp
from quickvit.ops import octic_gelu

# Expansion of the MLP in the paper's tables of layers: C → 4C.
EXPANSION = 4
GRAPH_CALLS = 10
# A call that takes longer needs no graph of many: its launch does not matter.
LONG_MS = 1.0
# The inputs of the calls together hold this many times the cache of a GPU.
CACHES = 3


# ---------------------------------------------------------------------- the paper's tables


def bench_linear(
    settings: Settings,
    ceilings: Ceilings,
    widths: Sequence[int],
    *,
    tokens: int = 196,
    groups: Sequence[DihedralGroup] = (D8,),
) -> list[Row]:
    """Linear layers C → 4C without bias: standard, equivariant to each of the groups, and eight equal blocks."""
    count = settings.batch * positive("tokens", tokens)
    rows = []
    for width in [checked_width(width, *groups) for width in widths]:
        outputs, storage = EXPANSION * width, Storage.inference(settings.dtype)
        eight = work.product(count, width, outputs, storage, 1 / 8, 1 / 8)
        layers: list[tuple[str, Callable[..., nn.Module], Work]] = [
            ("standard", partial(nn.Linear, bias=False), work.linear(count, width, outputs, storage))
        ]
        for group in groups:
            kind = partial(OcticLinear, bias=False, group=group)
            steps = work.linear(count, width, outputs, storage, group)
            layers.append(("octic" if group == D8 else str(group), kind, steps))
        layers.append(("eight blocks", EightBlocks, eight))
        cases = [
            layer_case(name, partial(_linear, kind, count, width, settings), [steps], settings, ceilings)
            for name, kind, steps in layers
        ]
        label = f"linear, C = {width} → {outputs}, {count} tokens"
        rows += timed_rows(label, cases, measure(cases, settings, label), settings, ceilings)
    return rows


def bench_gelu(
    settings: Settings, ceilings: Ceilings, widths: Sequence[int], *, tokens: int = 196
) -> list[Row]:
    """GELU on 4C channels beside a copy of the same bytes, and the MLP C → 4C → C, standard and octic."""
    count = settings.batch * positive("tokens", tokens)
    rows = []
    for width in map(checked_width, widths):
        hidden, storage = EXPANSION * width, Storage.inference(settings.dtype)
        moved = work.elementwise(count * hidden, 2, storage.compute)
        gelus = [
            layer_case(name, partial(_gelu, name, count, hidden, settings), [moved], settings, ceilings)
            for name in ("standard", "octic", "copy")
        ]
        mlps = []
        for name, group in (("standard", None), ("octic", D8)):
            steps = [
                work.linear(count, width, hidden, storage, group),
                moved,
                work.linear(count, hidden, width, storage, group),
            ]
            build = partial(_mlp, name, count, width, settings)
            mlps.append(layer_case(name, build, steps, settings, ceilings))
        for kind, cases in (("GELU", gelus), ("MLP", mlps)):
            label = f"{kind}, C = {width}, {count} tokens"
            rows += timed_rows(label, cases, measure(cases, settings, label), settings, ceilings)
    return rows


def count_flops(widths: Sequence[int], *, tokens: int = 197) -> list[Row]:
    """FLOPs of the matrix products in a block, standard and octic, against the width; nothing is computed."""
    rows = []
    for width in map(checked_width, widths):
        counts = {}
        for name, kind in (("standard", Block), ("octic", OcticBlock)):
            with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
                # The number of heads does not change the count.
                kind(width, num_heads=1)(torch.empty(1, positive("tokens", tokens), width))
            counts[name] = counter.get_total_flops()
        rows += [
            Row(
                f"block, C = {width}, {tokens} tokens",
                name,
                gflops=flops / 1e9,
                ratio=counts["standard"] / flops,
            )
            for name, flops in counts.items()
        ]
    return rows


class OcticGelu(nn.Module):
    """`octic_gelu` as a module, which can be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, C] → [T, C]."""
        return octic_gelu(x)


class EightBlocks(nn.Module):
    """A linear map of eight equal blocks, each with a weight of its own: [T, C] → [T, F]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, out_features // 8, in_features // 8) / in_features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the blocks as `OcticLinear` does: straight into the output, on a GPU in one launch."""
        y = x.new_empty(x.shape[0], 8 * self.weight.shape[1])
        blocks, out = (t.unflatten(1, (8, -1)).transpose(0, 1) for t in (x, y))
        if x.is_cuda:
            torch.bmm(blocks, self.weight.mT, out=out)
        else:
            for i, weight in enumerate(self.weight):
                torch.mm(blocks[i], weight.T, out=out[i])
        return y


# ---------------------------------------------------------------------- jobs


def layer_case(
    name: str, build: Callable[[], Job], steps: Sequence[Work], settings: Settings, ceilings: Ceilings
) -> Case:
    """A case of many calls in a CUDA graph, their tensors too many for the cache; on a CPU, of single calls."""
    if not settings.cuda:
        return Case(name, build, steps)
    calls = GRAPH_CALLS if floor_ms(steps, ceilings) < LONG_MS else 1
    cache = torch.cuda.get_device_properties(settings.device).L2_cache_size
    sets = max(1, min(calls, math.ceil(CACHES * cache / sum(step.bytes for step in steps))))
    return Case(name, lambda: GraphedCalls([build] * sets, calls), steps, calls=calls)


def random(settings: Settings, *shape: int) -> Tensor:
    """Normal numbers in the dtype of the settings."""
    return torch.randn(*shape, device=settings.device).to(settings.dtype)


def _on_random(function: Callable[[Tensor], Tensor], count: int, channels: int, settings: Settings) -> Job:
    x = random(settings, count, channels)

    def job() -> Tensor:
        with torch.no_grad():
            return function(x)

    return job


def _linear(kind: Callable[..., nn.Module], count: int, width: int, settings: Settings) -> Job:
    with torch.device(settings.device):
        layer = kind(width, EXPANSION * width).to(settings.dtype)
    return _on_random(layer, count, width, settings)


def _gelu(name: str, count: int, hidden: int, settings: Settings) -> Job:
    if name == "copy":
        return _on_random(torch.clone, count, hidden, settings)
    gelu: nn.Module = OcticGelu() if name == "octic" else nn.GELU()
    return _on_random(settings.compiled(gelu), count, hidden, settings)


def _mlp(name: str, count: int, width: int, settings: Settings) -> Job:
    hidden = EXPANSION * width
    with torch.device(settings.device):
        if name == "octic":
            mlp: nn.Module = OcticMlp(width, hidden)
        else:
            mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
    return _on_random(settings.compiled(mlp.to(settings.dtype).eval()), count, width, settings)


def checked_width(width: int, *groups: DihedralGroup) -> int:
    """The width, if features of all groups and of D8 can have it."""
    order = math.lcm(D8.order, *(group.order for group in groups))
    if width < order or width % order:
        raise ValueError(f"a width must be a positive multiple of {order}, got {width}")
    return width


def positive(name: str, value: int) -> int:
    """The value, if it is at least 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
