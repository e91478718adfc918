"""A linear map and what comes after it in one kernel, on NVIDIA's Hopper: weights at rest, tokens stream past them.

    y = Qᵀ GELU(Q (s W x + b e_A1))        or        q, k and v of s W x + b e_A1 as octets, see `octets.py`

where s = 1, or what a norm multiplies a token by. Both mix entries of all eight blocks of a feature. A program
keeps the weights of some columns of all eight blocks in shared memory, a panel, and boxes of tokens flow past. Two
groups of four warps multiply, each a tile whose columns, or tokens, are its own. While the hardware multiplies they
do, in registers, what comes after the products of the tile before, and store it. One more thread loads. Programs come
in clusters, which have different panels and the same tokens: each box of these is read once for all of them, which
Triton cannot say.

GELU's arithmetic takes as long as the products, and so is in float16, two entries at a time. It keeps more of a
product than bfloat16 does, up to 2¹⁶, and in sixteenths the sums of eight. The weights' columns come to shared memory
in such an order that a thread's entries of a row lie side by side in the result.

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

# By the number of channels: whether the groups of warps have different tokens, since weights of more columns leave
# too little room for what is on its way.
ALONG: dict[int, bool] = {768: False, 1024: False, 1280: False, 1664: True, 1792: True}
# Columns of each block that a group of warps has, and groups.
N, GROUPS = 32, 2
# Programs that share their tokens: the more, the less often these are read, but fewer may run at the same time.
CLUSTERS: dict[int, int] = {768: 2, 1024: 2, 1280: 2, 1664: 4, 1792: 4}
# What comes after the products: BOTH also writes what GELU is of, which its gradient reads.
AFTER = "GELU", "OCTETS", "BOTH", "GRADIENT"
# Bytes of all barriers.
REST = 1024
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def _panel(channels: int) -> int:
    """Bytes of the weights of a panel: channels in boxes of 64, the last may have 32."""
    m = channels // 8
    padded = [n // 64 * 64 + (32 if n % 64 else 0) for n in (m, 2 * m)]
    return 2 * _columns(channels) * (4 * padded[0] + 2 * padded[1])


def _columns(channels: int) -> int:
    return N if ALONG[channels] else N * GROUPS


def _rows(channels: int) -> int:
    return 64 * GROUPS if ALONG[channels] else 64


def _slots(channels: int, limit: int) -> int:
    """How many boxes of tokens there is room for, beside a panel."""
    return max(limit - REST - _panel(channels), 0) // (2 * 64 * _rows(channels))


def _products(columns: int, kind: str, *, transposed: bool = False) -> str:
    """wgmma of 64 rows, 16 channels and so many columns, of operands or transposed ones, as a function."""
    count, turn = columns // 2, int(transposed)
    entries = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(total[{i}])' for i in range(count))
    return f"""
template <> __device__ __forceinline__ void wgmma<{columns}>(
    float (&total)[{count}], unsigned left, unsigned right, unsigned upper, int more) {{
    asm volatile("{{.reg .pred more;\\n.reg .b64 left, right;\\n"
        "mov.b64 left, {{%{count}, %{count + 2}}};\\nmov.b64 right, {{%{count + 1}, %{count + 2}}};\\n"
        "setp.ne.b32 more, %{count + 3}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        "{{{entries}}}, left, right, more, 1, 1, {turn}, {turn};}}"
        : {outputs} : "r"(left), "r"(right), "r"(upper), "r"(more));
}}
"""


def source(
    dtype: torch.dtype,
    channels: int,
    width: int,
    after: str,
    bias: torch.dtype | None,
    scaled: bool,
    heads: int,
    limit: int,
) -> str:
    """The kernel for these types and sizes, with or without factors of tokens, and so much shared memory."""
    constants: dict[str, int | str] = {name: i for i, name in enumerate(AFTER)}
    constants |= {
        "M": channels // 8,
        "F": width // 8,
        "AFTER": after,
        "ALONG": int(ALONG[channels]),
        "SLOTS": _slots(channels, limit),
        "CLUSTER": CLUSTERS[channels],
        "HALF": int(dtype == torch.float16),
        "BIAS": 0 if bias is None else 1 if bias == dtype else 2,
        "SCALED": int(scaled),
        "HEADS": heads,
        "PIECE": channels // 8 // heads,
        "ROOM": _room(channels // 8 // heads),
    }
    # In u with z = 4√2 u; half of the polynomial, for tanh.
    constants |= {f"P{k}": f"{p * (4 * math.sqrt(2)) ** (2 * k + 1) / 2!r}f" for k, p in enumerate(LOGIT)}
    general = """
template <int COLUMNS> __device__ void wgmma(
    float (&total)[COLUMNS / 2], unsigned left, unsigned right, unsigned upper, int more);
"""
    parts = [f"#define {name} {value}" for name, value in constants.items()]
    parts += [general, *(_products(n, _KINDS[dtype]) for n in (N, 2 * N))]
    return "\n".join([*parts, *((library.FOLDER / name).read_text() for name in ("hopper.cuh", "panel.cu"))])


@cache
def _kernel(
    device: torch.device,
    dtype: torch.dtype,
    channels: int,
    width: int,
    after: str,
    bias: torch.dtype | None,
    scaled: bool,
    heads: int,
) -> library.Kernel:
    limit = shared_memory(device)
    text = source(dtype, channels, width, after, bias, scaled, heads, limit)
    code, _ = library.compile_source(text, torch.cuda.get_device_capability(device))
    return library.load(code, "panel", 128 * (GROUPS + 1), shared_bytes(channels, limit), CLUSTERS[channels])


def shared_bytes(channels: int, limit: int) -> int:
    """How much of so much shared memory a program uses."""
    return _panel(channels) + _slots(channels, limit) * 2 * 64 * _rows(channels) + REST


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether there is a kernel with GELU from C channels to a width: in bfloat16, which rounds more than it does."""
    return dtype == torch.bfloat16 and width % 256 == 0 and _has_room(device, channels)


@cache
def takes_octets(device: torch.device, dtype: torch.dtype, channels: int) -> bool:
    """Whether there is a kernel from C channels to q, k and v as octets: in 16 bits."""
    return dtype in _KINDS and _has_room(device, channels)


def _has_room(device: torch.device, channels: int) -> bool:
    return channels in ALONG and library.available() and _slots(channels, shared_memory(device)) > 2


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
    _launch("OCTETS", x, one, two, bias, out, row_scale, heads=heads)
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
    hidden: torch.Tensor | None = None,
    heads: int = 1,
) -> None:
    tokens, channels = x.shape
    if not tokens:
        return
    if bias is not None and bias.data_ptr() % 8:
        bias = bias.clone()
    width, rows = 8 * one.shape[1], _rows(channels)
    blocks, groups = -(-tokens // rows), -(-width // (8 * _columns(channels) * CLUSTERS[channels]))
    order, box = (_in_copies, (1, 1, N, 1)) if after == "OCTETS" else (_in_order, (1, 4, 4, 2))
    with torch.cuda.device_of(x):
        dtype = None if bias is None else bias.dtype
        kernel = _kernel(x.device, x.dtype, channels, width, after, dtype, row_scale is not None, heads)
        tensors = (_in_place(x), (rows,)), (order(one), box), (order(two), box)
        boxes = [library.Boxes(tensor, (*box, wide)) for tensor, box in tensors for wide in (64, 32)]
        arguments: list[Any] = [
            library.Together(boxes),
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in (bias, row_scale, hidden, out)),
            *(ctypes.c_int(count) for count in (tokens, blocks, blocks * groups)),
        ]
        kernel.launch(min(blocks * groups, kernel.most), arguments)


def _in_order(weight: torch.Tensor) -> torch.Tensor:
    """Rows of weights in the order in which a group of warps has its columns: entries 8t + 2j + e at 8j + 2t + e.

    Of eight columns of a product, thread t of four has entries 2t and 2t + 1.
    """
    return weight.flatten(0, 1).unflatten(0, (-1, 4, 4, 2)).transpose(1, 2)


def _in_copies(weight: torch.Tensor) -> torch.Tensor:
    """Rows of all irreps of one dimension, or of E with its copies on an axis, as a tensor of five axes."""
    copies = 1 if len(weight) > 1 else 2
    return weight.flatten(0, 1).unflatten(0, (1, 1, -1, copies))


def _in_place(x: torch.Tensor) -> torch.Tensor:
    """Tokens where the hardware can read them."""
    readable = x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)
