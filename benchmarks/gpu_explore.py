"""Exploration on a GPU: layout of heads, tiles of the norm, host time of each operator."""

import time

import torch
from gpu_check import SIZES, graph_ms

from quickvit.group import Layout
from quickvit.ops import linear
from quickvit.ops.triton import attention as ta
from quickvit.ops.triton import gelu as tg
from quickvit.ops.triton import heads as th
from quickvit.ops.triton import norm as tn


def host_us(function):
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        function()
    elapsed = (time.perf_counter() - start) / 50 * 1e6
    torch.cuda.synchronize()
    return elapsed


for size in ("large", "huge"):
    width, heads, tokens, hidden = SIZES[size]
    qkv = torch.randn(64, tokens, 3 * width, device="cuda", dtype=torch.bfloat16)
    flat = qkv.view(-1, 3 * width)
    bias = torch.randn(3 * width // 8, device="cuda", dtype=torch.bfloat16)
    q, k, v = th.to_heads(flat, heads, 3, bias)
    for tile in ((512, 4), (1024, 4), (2048, 4), (1024, 8), (512, 2)):
        th.TILE = tile
        print(size, tile, "to_heads", graph_ms(lambda: th.to_heads(flat, heads, 3, bias)), "to_packed 3", graph_ms(lambda: th.to_packed([q, k, v])), "to_packed 1", graph_ms(lambda: th.to_packed([q])))
    layout = Layout(width)
    x = torch.randn(64 * tokens, width, device="cuda", dtype=torch.bfloat16)
    branch = torch.randn_like(x)
    gain, shift, scale = (torch.randn(n, device="cuda") for n in (layout.gains, layout.copies, layout.gains))
    _, _, stats = tn.residual_norm_forward(x, branch, shift, scale, None, 1, gain, shift, 1e-6)
    def fwd():
        return tn.residual_norm_forward(x, branch, shift, scale, None, 1, gain, shift, 1e-6)
    def bwd():
        return tn.residual_norm_backward(x, branch, x, stats, gain, branch, shift, scale, None, 1)
    key = 1024 if size == "large" else 2048
    old = tn.FORWARD_TILES[key], tn.BACKWARD_TILES[key]
    best = []
    for tile in ((1, 12, 2), (2, 10, 2), (2, 16, 1), (4, 8, 1), (4, 8, 2), (4, 4, 3), (8, 4, 2), (8, 4, 3), (2, 10, 3)):
        tn.FORWARD_TILES[key] = tile
        best.append((graph_ms(fwd, 5), tile))
    print(size, "residual norm", sorted(best)[:3], "default", old[0])
    tn.FORWARD_TILES[key] = old[0]
    best = []
    for tile in ((4, 4, 2), (4, 5, 1), (2, 5, 2), (4, 4, 3), (8, 2, 2), (8, 2, 3), (4, 4, 1), (8, 2, 1), (8, 3, 1), (4, 6, 1)):
        tn.BACKWARD_TILES[key] = tile
        best.append((graph_ms(bwd, 5), tile))
    print(size, "residual norm backward", sorted(best)[:3], "default", old[1])
    tn.BACKWARD_TILES[key] = old[1]
    if size == "large":
        h = torch.randn(64, hidden, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(4, width // 8, width // 8, device="cuda", dtype=torch.bfloat16), torch.randn(1, width // 4, width // 4, device="cuda", dtype=torch.bfloat16)
        xs = x[:64]
        print("host us: linear", host_us(lambda: linear._linear(xs, *w, None)), "gelu", host_us(lambda: tg.gelu_forward(h, None)), "norm", host_us(lambda: tn.residual_norm_forward(xs, xs, shift, scale, None, 1, gain, shift, 1e-6)), "attention", host_us(lambda: ta.attention_forward(qkv[:1], None, heads)), "gelu op", host_us(lambda: torch.ops.quickvit.octic_gelu(h, None, 8)), "mm", host_us(lambda: xs @ xs.T))
