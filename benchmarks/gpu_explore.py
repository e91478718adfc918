"""Exploration on a GPU: layout of heads."""

import torch
from gpu_check import SIZES, graph_ms

from quickvit.group import Layout
from quickvit.ops import attention
from quickvit.ops.triton import heads as th


def by_cat(x, heads, layout):
    pieces = [x[..., b.slice].unflatten(-1, (3, heads, -1)) for b in layout.blocks]
    return torch.cat(pieces, dim=-1)


for size in ("large", "huge", "giant"):
    width, heads, tokens, hidden = SIZES[size]
    flat = torch.randn(64 * tokens, 3 * width, device="cuda", dtype=torch.bfloat16)
    q, k, v = th.to_heads(flat, heads, 3, None)
    layout = Layout(3 * width)
    compiled = torch.compile(by_cat)
    print(
        size,
        "eager cat",
        graph_ms(lambda: by_cat(flat, heads, layout)),
        "compiled",
        graph_ms(lambda: compiled(flat, heads, layout)),
    )
    for tile in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        th.TILE = tile
        print(
            size,
            tile,
            "to_heads",
            graph_ms(lambda: th.to_heads(flat, heads, 3, None)),
            "to_packed 3",
            graph_ms(lambda: th.to_packed([q, k, v])),
            "to_packed 1",
            graph_ms(lambda: th.to_packed([q])),
            "floor",
            2 * flat.nbytes / 4.3e9,
        )
