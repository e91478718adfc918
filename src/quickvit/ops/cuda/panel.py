"""A linear map and what comes after it in one kernel, on NVIDIA's Hopper: weights at rest, tokens stream past them.

    y = Qᵀ GELU(Q (s W x + b e_A1))        or        q, k and v of s W x + b e_A1 as octets, see `octets.py`

where s = 1, or what a norm multiplies a token by. GELU mixes entries of all eight blocks of a feature. A program
keeps the weights of some columns of all eight blocks in shared memory, a panel, and boxes of tokens flow past. Two
groups of four warps take turns: while one multiplies a tile of 64 tokens, which keeps the hardware for products busy,
the other applies GELU to its tile in registers and stores it. One more thread loads. Programs come in clusters, which
have different panels and the same tokens: each box of these is read once for all of them, which Triton cannot say.

GELU's arithmetic takes as long as the products, and so is in float16, two entries at a time. It keeps more of W x
than bfloat16 does, up to 2¹⁶, and in sixteenths the sums of eight. The weights' columns come to shared memory in such
an order that a thread's entries of a row lie side by side in the result.

Buffers are handed over by barriers: `full` says that one was filled, `empty` that it may be filled again.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch

from quickvit.ops.cuda import library
from quickvit.ops.triton.hopper_gelu import LOGIT
from quickvit.ops.triton.launch import shared_memory

# By the number of channels: the columns of each block in a panel, as many as leave room for what is on its way.
COLUMNS: dict[int, int] = {768: 64, 1024: 64, 1280: 64, 1664: 48, 1792: 48}
# Programs that share their tokens: the more, the less often these are read, but fewer may run at the same time.
CLUSTERS: dict[int, int] = {768: 2, 1024: 2, 1280: 2, 1664: 2, 1792: 2}
# Groups of warps that multiply, and tokens of a tile of one of them.
GROUPS, ROWS = 2, 64
# What comes after the products: BOTH also writes what GELU is of, which its gradient reads.
AFTER = "GELU", "BOTH", "GRADIENT", "OCTETS"
# Bytes of all barriers.
REST = 1024


def _panel(channels: int) -> int:
    """Bytes of the weights of a panel: channels in boxes of 64, the last may have 32."""
    m = channels // 8
    padded = [n // 64 * 64 + (32 if n % 64 else 0) for n in (m, 2 * m)]
    return 2 * COLUMNS[channels] * (4 * padded[0] + 2 * padded[1])


def _slots(channels: int, limit: int) -> int:
    """How many boxes of tokens there is room for, beside a panel."""
    return max(limit - REST - _panel(channels), 0) // (2 * 64 * ROWS)


def _run(channels: int, after: str) -> int:
    """Eights of columns of which a thread has its entries side by side: as many as it can read or write at once.

    The gradient has registers for less.
    """
    return 4 if COLUMNS[channels] % 32 == 0 and after != "GRADIENT" else 2


def _products(columns: int) -> str:
    """wgmma of 64 rows, 16 channels and so many columns, as a function."""
    count = columns // 2
    entries = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(total[{i}])' for i in range(count))
    return f"""
template <> __device__ __forceinline__ void wgmma<{columns}>(
    float (&total)[{count}], unsigned left, unsigned right, unsigned upper, int more) {{
    asm volatile("{{.reg .pred more;\\n.reg .b64 left, right;\\n"
        "mov.b64 left, {{%{count}, %{count + 2}}};\\nmov.b64 right, {{%{count + 1}, %{count + 2}}};\\n"
        "setp.ne.b32 more, %{count + 3}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        "{{{entries}}}, left, right, more, 1, 1, 0, 0;}}"
        : {outputs} : "r"(left), "r"(right), "r"(upper), "r"(more));
}}
"""


def source(
    channels: int, width: int, after: str, bias: torch.dtype | None, scaled: bool, heads: int, limit: int
) -> str:
    """The kernel for these types and sizes, with or without factors of tokens, and so much shared memory."""
    constants: dict[str, int | str] = {name: i for i, name in enumerate(AFTER)}
    constants |= {
        "M": channels // 8,
        "F": width // 8,
        "AFTER": after,
        "COLUMNS": COLUMNS[channels],
        "RUN": _run(channels, after),
        "SLOTS": _slots(channels, limit),
        "CLUSTER": CLUSTERS[channels],
        "BIAS": 0 if bias is None else 1 if bias == torch.bfloat16 else 2,
        "SCALED": int(scaled),
        "HEADS": heads,
        "PIECE": channels // 8 // heads,
        "ROOM": _room(channels // 8 // heads),
    }
    # In u with z = 4√2 u; half of the polynomial, for tanh.
    constants |= {f"P{k}": f"{p * (4 * math.sqrt(2)) ** (2 * k + 1) / 2!r}f" for k, p in enumerate(LOGIT)}
    general = """
template <int WIDTH> __device__ void wgmma(
    float (&total)[WIDTH / 2], unsigned left, unsigned right, unsigned upper, int more);
"""
    parts = [f"#define {name} {value}" for name, value in constants.items()]
    parts += [general, *(_products(k * COLUMNS[channels]) for k in (1, 2))]
    return "\n".join([*parts, *((library.FOLDER / name).read_text() for name in ("hopper.cuh", "panel.cu"))])


@cache
def _kernel(
    device: torch.device,
    channels: int,
    width: int,
    after: str,
    bias: torch.dtype | None,
    scaled: bool,
    heads: int,
) -> library.Kernel:
    limit = shared_memory(device)
    text = source(channels, width, after, bias, scaled, heads, limit)
    code, _ = library.compile_source(text, torch.cuda.get_device_capability(device))
    return library.load(code, "panel", 128 * (GROUPS + 1), shared_bytes(channels, limit), CLUSTERS[channels])


def shared_bytes(channels: int, limit: int) -> int:
    """How much of so much shared memory a program uses."""
    return _panel(channels) + _slots(channels, limit) * 2 * 64 * ROWS + REST


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether there is a kernel from C channels to a width: in bfloat16, which rounds more than it does."""
    fits = channels in COLUMNS and width % 256 == 0
    return (
        dtype == torch.bfloat16
        and fits
        and library.available()
        and _slots(channels, shared_memory(device)) > 2
    )


@cache
def takes_octets(device: torch.device, dtype: torch.dtype, channels: int) -> bool:
    """Whether there is a kernel from C channels to q, k and v as octets."""
    fits = channels in COLUMNS and 3 * channels // 8 % (8 * _run(channels, "OCTETS")) == 0
    return (
        dtype == torch.bfloat16
        and fits
        and library.available()
        and _slots(channels, shared_memory(device)) > 2
    )


def linear_gelu(
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    row_scale: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> None:
    """GELU(s W x + b) of x[T, C] written to out[T, 8F], which is contiguous; one[4, F, C/8], two[1, 2F, C/4].

    s is the row_scale[T], in float32, or 1. Where there is a `hidden` like `out`, s W x + b is written to it.
    """
    _launch("GELU" if hidden is None else "BOTH", x, one, two, bias, out, row_scale, hidden)


def gelu_gradient(
    grad: torch.Tensor, one: torch.Tensor, two: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor
) -> None:
    """The gradient by hidden[T, 8F] of what a map makes of its GELU, from grad[T, C] and the map's transpose."""
    _launch("GRADIENT", grad, one, two, None, out, None, hidden)


def linear_octets(
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """q, k, v [3, T, H, D] of x[T, C] as octets, with the bias of A1; one[4, 3C/8, C/8], two[1, 3C/4, C/4].

    Each head begins at a sector of the cache: it may have more room than it needs.
    """
    tokens, channels = x.shape
    piece = channels // 8 // heads
    out = torch.empty((3, tokens, heads, _room(piece), 8), dtype=x.dtype, device=x.device)
    _launch("OCTETS", x, one, two, bias, out, row_scale, None, heads)
    return out[..., :piece, :].flatten(-2)


def _room(piece: int) -> int:
    """Octets from a head to the next: an even number of 16 bytes."""
    return piece + piece % 2


def _launch(
    after: str,
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    row_scale: torch.Tensor | None,
    hidden: torch.Tensor | None,
    heads: int = 1,
) -> None:
    tokens, channels = x.shape
    if not tokens:
        return
    if bias is not None and bias.data_ptr() % 8:
        bias = bias.clone()
    width = 8 * one.shape[1]
    blocks, groups = -(-tokens // ROWS), -(-width // (8 * COLUMNS[channels] * CLUSTERS[channels]))
    one, two, run = _in_place(one), _in_place(two), _run(channels, after)
    order, box = (_in_copies, (1, 1, 1, 8 * run)) if after == "OCTETS" else (_in_order, (1, run, 4, 2))
    with torch.cuda.device_of(x):
        kinds = None if bias is None else bias.dtype, row_scale is not None, heads
        kernel = _kernel(x.device, channels, width, after, *kinds)
        tensors = (_in_place(x), (ROWS,)), *((order(weight, run), box) for weight in (one, two))
        boxes = [library.Boxes(tensor, (*box, wide)) for tensor, box in tensors for wide in (64, 32)]
        clusters = min(blocks * groups, kernel.most)
        arguments: list[Any] = [
            library.Together(boxes),
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in (bias, row_scale, hidden, out)),
            *(ctypes.c_int(n) for n in (tokens, blocks, groups, _each(blocks, groups, clusters))),
        ]
        kernel.launch(clusters, arguments)


def _each(blocks: int, groups: int, clusters: int) -> int:
    """How many blocks of tokens a cluster of one group of panels has: as few as the others can make up for."""
    of_one = clusters // groups
    others = clusters - of_one * groups
    each = -(-blocks * groups // clusters)
    while of_one * each < blocks and (blocks - of_one * each) * groups > others * each:
        each += 1
    return each


def _in_order(weight: torch.Tensor, run: int) -> torch.Tensor:
    """Rows of weights in an order that gives each thread its entries side by side.

    Of eight columns of a product, thread t of four has entries 2t and 2t + 1. Of a run of R eights, column
    2Rt + 2j + e of the result is the entry 2t + e of eight j.
    """
    return weight.flatten(0, 1).unflatten(0, (-1, 4, run, 2)).transpose(1, 2)


def _in_copies(weight: torch.Tensor, run: int) -> torch.Tensor:
    """Rows of weights as groups of a run of eights, of E each with its copies on an axis."""
    copies = 1 if len(weight) > 1 else 2
    return weight.flatten(0, 1).unflatten(0, (-1, 8 * run, copies)).transpose(1, 2)[:, :, None]


def _in_place(x: torch.Tensor) -> torch.Tensor:
    """A tensor where the hardware can read it."""
    readable = (
        x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and not any(stride % 8 for stride in x.stride()[:-1])
    )
    return x if readable else x.clone(memory_format=torch.contiguous_format)
