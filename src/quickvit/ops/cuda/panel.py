"""A linear map and what comes after it in one kernel, on NVIDIA's Hopper: weights at rest, tokens stream past them.

    y = Qᵀ GELU(Q (W x + b e_A1))          or          q, k and v, as heads in pairs, see `heads.py`

Both mix entries of all eight blocks of a feature. A program keeps the weights of some columns of all eight blocks in
shared memory, a panel, and blocks of 64 tokens flow past. Four warps multiply; each leaves what it has on the desks
of two others, which do what comes after and store the result while the products of the next tile go on. One more
thread loads. Programs come in clusters, which have different panels and the same tokens: each box of these is read
once for all of them, which Triton cannot say.

Buffers are handed over by barriers: `full` says that one was filled, `empty` that it may be filled again.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch

from quickvit.ops.cuda import library
from quickvit.ops.triton.gelu import LOGIT as LOGIT_EXACT
from quickvit.ops.triton.hopper_gelu import LOGIT
from quickvit.ops.triton.launch import multiprocessors, shared_memory

# By the number of channels: the columns of a panel, as many as leave room for the boxes that are on their way.
COLUMNS: dict[int, int] = {1024: 64, 1280: 32, 1664: 32, 1792: 32}
# Columns of a panel of heads, and the heads of a width that has them in pairs.
HEAD_COLUMNS = 32
HEADS: dict[int, int] = {1280: 16}
# Programs that share their tokens.
CLUSTER = 2
# Whether tokens come to the cache a tile before they are loaded.
FETCH = True
# Bytes of a box of tokens, 64 times 64 channels, and of all barriers.
BOX, REST = 8192, 1024
# Warps that apply GELU for each of the four that multiply, and bytes of their desks.
HELPERS = 2
DESK = 8 * 8 * 32 * 2
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_S = math.sqrt(2) / 4


def _panel(channels: int, columns: int) -> int:
    """Bytes of the weights of so many columns of each block: channels in boxes of 64, the last may have 32."""
    m = channels // 8
    padded = [n // 64 * 64 + (32 if n % 64 else 0) for n in (m, 2 * m)]
    return 2 * columns * (4 * padded[0] + 2 * padded[1])


def _slots(channels: int, columns: int, limit: int) -> int:
    """How many boxes of tokens there is room for, beside a panel."""
    return max(limit - REST - _panel(channels, columns) - 4 * HELPERS * DESK, 0) // BOX


def _products(columns: int, kind: str) -> str:
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
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        "{{{entries}}}, left, right, more, 1, 1, 0, 0;}}"
        : {outputs} : "r"(left), "r"(right), "r"(upper), "r"(more));
}}
"""


def source(
    dtype: torch.dtype, channels: int, width: int, bias: torch.dtype | None, heads: int, limit: int
) -> str:
    """The kernel for these types and sizes, so many heads, 0 for GELU, and so much shared memory."""
    columns = _columns(channels, heads)
    constants = {
        "M": channels // 8,
        "F": width // 8,
        "N": columns,
        "SLOTS": _slots(channels, columns, limit),
        "CLUSTER": CLUSTER,
        "HELPERS": HELPERS,
        "FETCH": int(FETCH),
        "HALF": int(dtype == torch.float16),
        "BIAS": 0 if bias is None else 1 if bias == dtype else 2,
        "PIECE": channels // 8 // heads if heads else 0,
        "HEADS": heads,
        "TYPE": "unsigned short",
    }
    constants |= {f"P{k}": f"{p * _S ** (2 * k + 1) / 2!r}f" for k, p in enumerate(LOGIT)}
    constants |= {f"Q{k}": f"{-p * _S ** (2 * k + 1) / math.log(2)!r}f" for k, p in enumerate(LOGIT_EXACT)}
    general = """
template <int COLUMNS> __device__ void wgmma(
    float (&total)[COLUMNS / 2], unsigned left, unsigned right, unsigned upper, int more);
"""
    parts = [f"#define {name} {value}" for name, value in constants.items()]
    parts += [general, *(_products(n, _KINDS[dtype]) for n in (columns, 2 * columns))]
    return "\n".join([*parts, *((library.FOLDER / name).read_text() for name in ("hopper.cuh", "panel.cu"))])


def _columns(channels: int, heads: int) -> int:
    return HEAD_COLUMNS if heads else COLUMNS[channels]


@cache
def _kernel(
    device: torch.device, dtype: torch.dtype, channels: int, width: int, bias: torch.dtype | None, heads: int
) -> library.Kernel:
    limit = shared_memory(device)
    text = source(dtype, channels, width, bias, heads, limit)
    code, _ = library.compile_source(text, torch.cuda.get_device_capability(device))
    return library.load(code, "panel", shared_bytes(channels, _columns(channels, heads), limit))


def shared_bytes(channels: int, columns: int, limit: int) -> int:
    """How much of so much shared memory a program uses."""
    return _panel(channels, columns) + _slots(channels, columns, limit) * BOX + 4 * HELPERS * DESK + REST


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether there is a kernel from C channels to a width, with GELU: in 16 bits."""
    if channels not in COLUMNS or width % 256 or dtype not in _KINDS or not library.available():
        return False
    return _slots(channels, COLUMNS[channels], shared_memory(device)) > 2


@cache
def takes_heads(device: torch.device, dtype: torch.dtype, channels: int) -> bool:
    """Whether there is a kernel from C channels to q, k and v in pairs: in 16 bits."""
    if channels not in HEADS or dtype not in _KINDS or not library.available():
        return False
    return _slots(channels, HEAD_COLUMNS, shared_memory(device)) > 2


def linear_gelu(
    x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """GELU(W x + b) of x[T, C] written to out[T, 8F], which is contiguous; one[4, F, C/8], two[1, 2F, C/4]."""
    _launch(x, one, two, bias, out, 0)


def linear_heads(
    x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """q, k and v of x[T, C] in pairs, [3, T, H, D], with the bias of A1; one[4, 3C/8, C/8], two[1, 3C/4, C/4]."""
    tokens, channels = x.shape
    heads = HEADS[channels]
    out = torch.empty((3, tokens, heads, channels // heads), dtype=x.dtype, device=x.device)
    _launch(x, one, two, bias, out, heads)
    return out


def _launch(
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    heads: int,
) -> None:
    tokens, channels = x.shape
    if not tokens:
        return
    width, columns = 8 * one.shape[1], _columns(channels, heads)
    # What a panel has more than the one before: all of its columns, or whole heads.
    piece = channels // 8 // heads if heads else 1
    each = columns // piece * piece
    if bias is not None and bias.data_ptr() % 8:
        bias = bias.clone()
    blocks, groups = -(-tokens // 64), -(-width // (8 * each * CLUSTER))
    with torch.cuda.device_of(x):
        kernel = _kernel(x.device, x.dtype, channels, width, None if bias is None else bias.dtype, heads)
        matrices = (_in_place(x), 64), (one.flatten(0, 1), columns), (two.flatten(0, 1), columns)
        boxes = [library.Boxes(matrix, rows, wide) for matrix, rows in matrices for wide in (64, 32)]
        arguments: list[Any] = [
            library.Together(boxes),
            ctypes.c_void_p(0 if bias is None else bias.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(tokens),
            ctypes.c_int(blocks),
            ctypes.c_int(blocks * groups),
        ]
        clusters = min(blocks * groups, multiprocessors(x.device) // CLUSTER)
        kernel.launch(clusters * CLUSTER, 32 * (8 + 4 * HELPERS), arguments)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    """Tokens where the hardware can read them."""
    readable = x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)
