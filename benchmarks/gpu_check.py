"""Fused operators on a GPU: error against float64, time against the bytes they must move, and whole models.

python benchmarks/gpu_check.py [check|ops|block|model]
"""

from __future__ import annotations

import sys
import time

import timm
import torch
from torch import Tensor

import quickvit
from quickvit.group import Layout
from quickvit.ops import attention, gelu, linear, norm

DEVICE = "cuda"
SIZES = {"large": (1024, 16, 197, 4096), "huge": (1280, 16, 257, 5120), "giant": (1664, 16, 257, 8192)}


def median_ms(function, repeats: int = 30) -> float:
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def graph_ms(function, repeats: int = 20) -> float:
    """Median time of a function inside a CUDA graph of ten calls, without launch gaps."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    return median_ms(graph.replay, repeats) / 10


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def check() -> None:
    """Outputs and gradients of each operator against the definition in float64."""
    torch.manual_seed(0)
    for width, heads, tokens, hidden in [
        (64, 2, 7, 128),
        (1024, 16, 197, 4096),
        (1280, 16, 257, 5120),
        (1664, 16, 33, 8192),
    ]:
        for dtype in (torch.float32, torch.bfloat16):

            def run(function, definition, *tensors):
                wide = [t.double().requires_grad_() for t in tensors]
                ours = [t.clone().requires_grad_() for t in tensors]
                theirs = [t.clone().requires_grad_() for t in tensors]
                out, ref, low = function(*ours), definition(*wide), definition(*theirs)
                grad = torch.randn_like(ref)
                out.backward(grad.to(out.dtype))
                ref.backward(grad)
                low.backward(grad.to(low.dtype))
                errors = [relative(out, ref)] + [relative(a.grad, b.grad) for a, b in zip(ours, wide)]
                plain = [relative(low, ref)] + [relative(a.grad, b.grad) for a, b in zip(theirs, wide)]
                return errors, plain

            def randn(*shape):
                return torch.randn(*shape, device=DEVICE).to(dtype)

            layout = Layout(width)
            m = layout.copies
            cases = {
                "linear": (
                    linear.octic_linear,
                    linear.definition,
                    randn(2 * tokens, width),
                    randn(4, hidden // 8, m) / 8,
                    randn(1, hidden // 4, 2 * m) / 8,
                    randn(hidden // 8),
                ),
                "gelu": (gelu.octic_gelu, gelu.definition, randn(2 * tokens, width), randn(m)),
                "norm": (
                    lambda x, g, s: norm.octic_layer_norm(x, g, s, 1e-6, layout),
                    lambda x, g, s: norm.definition(x, g, s, 1e-6, layout),
                    randn(2, tokens, width) + 1,
                    randn(layout.gains),
                    randn(m),
                ),
                "residual": (
                    lambda x, b, bb, sc, g, s: sum(
                        norm.octic_residual_norm(x, b, g, s, 1e-6, layout, bias=bb, scale=sc)
                    ),
                    lambda x, b, bb, sc, g, s: (lambda z: z + norm.definition(z, g, s, 1e-6, layout))(
                        norm.residual(x, b, layout, bias=bb, scale=sc)
                    ),
                    randn(2, tokens, width),
                    randn(2, tokens, width),
                    randn(m),
                    randn(layout.gains),
                    randn(layout.gains),
                    randn(m),
                ),
                "attention": (
                    lambda q, b: attention.octic_attention(q, heads, Layout(3 * width), b),
                    lambda q, b: attention.definition(q, heads, Layout(3 * width), b),
                    randn(2, tokens, 3 * width),
                    randn(3 * m),
                ),
            }
            for name, (function, definition, *tensors) in cases.items():
                try:
                    errors, plain = run(function, definition, *tensors)
                except Exception as error:  # noqa: BLE001
                    print(name, width, dtype, "FAILED", type(error).__name__, str(error)[:300])
                    continue
                worst = max(e / max(p, 1e-9) for e, p in zip(errors, plain))
                print(
                    f"{name:10} C={width:5} {str(dtype)[6:]:9} fused {' '.join(f'{e:.1e}' for e in errors)}  worst/plain {worst:.2f}"
                )


def operators(size: str) -> None:
    """Time of each operator of a block against its memory floor (4.3 TB/s) and the products' arithmetic floor."""
    width, heads, tokens, hidden = SIZES[size]
    batch, dtype = 64, torch.bfloat16
    rows = batch * tokens
    layout = Layout(width)
    m = layout.copies

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    x, h, qkv, branch = (
        randn(rows, width),
        randn(rows, hidden),
        randn(batch, tokens, 3 * width),
        randn(rows, width),
    )
    gain, shift, scale = (torch.randn(n, device=DEVICE) for n in (layout.gains, m, layout.gains))

    def weights(cin, cout):
        return randn(4, cout // 8, cin // 8), randn(1, cout // 4, cin // 4)

    w = {
        "qkv": weights(width, 3 * width),
        "proj": weights(width, width),
        "fc1": weights(width, hidden),
        "fc2": weights(hidden, width),
    }
    from quickvit.ops.triton import attention as ta, gelu as tg, norm as tn

    def matmul_floor(cin, cout):
        return max(2 * rows * cin * cout * 3 / 16 / 790e9, (rows * (cin + cout) * 2) / 4.3e9)

    out, lse = ta.attention_forward(qkv, None, heads)
    do = randn(batch, tokens, width)
    _, _, stats = tn.residual_norm_forward(x, branch, shift, scale, None, 1, gain, shift, 1e-6)
    jobs = {
        "qkv": (lambda: linear._linear(x, *w["qkv"], None), matmul_floor(width, 3 * width)),
        "proj": (lambda: linear._linear(x, *w["proj"], None), matmul_floor(width, width)),
        "fc1": (lambda: linear._linear(x, *w["fc1"], None), matmul_floor(width, hidden)),
        "fc2": (lambda: linear._linear(h, *w["fc2"], None), matmul_floor(hidden, width)),
        "fc1 weight grad": (lambda: linear._weight_grad(h, x, 4, 1), matmul_floor(width, hidden)),
        "copy hidden": (lambda: h.clone(), 2 * h.nbytes / 4.3e9),
        "gelu": (lambda: tg.gelu_forward(h, None), 2 * h.nbytes / 4.3e9),
        "gelu grad": (lambda: tg.gelu_backward(h, h, None), 3 * h.nbytes / 4.3e9),
        "norm": (lambda: tn.norm_forward(x, gain, shift, 1e-6), 2 * x.nbytes / 4.3e9),
        "residual norm": (
            lambda: tn.residual_norm_forward(x, branch, shift, scale, None, 1, gain, shift, 1e-6),
            4 * x.nbytes / 4.3e9,
        ),
        "residual norm grad": (
            lambda: tn.residual_norm_backward(x, branch, x, stats, gain, branch, shift, scale, None, 1),
            6 * x.nbytes / 4.3e9,
        ),
        "attention": (
            lambda: ta.attention_forward(qkv, None, heads),
            max((qkv.nbytes + x.nbytes) / 4.3e9, 4 * batch * tokens**2 * width / 790e9),
        ),
        "attention grad": (
            lambda: ta.attention_backward(do, qkv, None, out, lse, heads),
            max((2 * qkv.nbytes + 2 * x.nbytes) / 4.3e9, 10 * batch * tokens**2 * width / 790e9),
        ),
        "sdpa": (
            lambda: torch.nn.functional.scaled_dot_product_attention(
                *qkv.view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
            ),
            0,
        ),
    }
    for name, (job, floor) in jobs.items():
        try:
            t = graph_ms(job)
        except Exception as error:  # noqa: BLE001
            print(size, name, "FAILED", type(error).__name__, str(error)[:300])
            continue
        print(f"{size} {name:20} {t:.4f} ms   floor {floor:.4f}   ratio {t / floor if floor else 0:.2f}")


def model(size: str, patch: int, train: bool, depth: int | None = None, mode: str = "default") -> None:
    extra = {} if depth is None else {"depth": depth}
    results = {}
    names = ("vit", "d8", "h8", "i8") if size in ("large", "huge") else ("vit", "d8")
    for name in names:
        torch.compiler.reset()
        torch.cuda.empty_cache()
        if name == "vit":
            net = quickvit.create_baseline(size, patch, **extra)
        else:
            net = timm.create_model(f"quickvit_{name}_{size}_patch{patch}_224", **extra)
        net = net.to(DEVICE)
        x = torch.randn(64, 3, 224, 224, device=DEVICE)
        start = time.time()
        if train:
            net.train()
            step = torch.compile(net, fullgraph=True, mode=mode if mode != "default" else None)

            def job():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = step(x).float().square().mean()
                loss.backward()
                net.zero_grad(set_to_none=True)
        else:
            net = net.bfloat16().eval()
            x = x.bfloat16()
            step = torch.compile(net, fullgraph=True, mode=mode if mode != "default" else None)

            def job():
                with torch.no_grad():
                    step(x)

        try:
            job()
            compile_s = time.time() - start
            torch.cuda.reset_peak_memory_stats()
            results[name] = median_ms(job, 15 if train else 20)
        except Exception as error:  # noqa: BLE001
            print(size, name, train, "FAILED", type(error).__name__, str(error)[-600:])
            continue
        memory = torch.cuda.max_memory_allocated() / 2**20
        print(
            f"{size}/{patch} {name:4} {'train' if train else 'infer'} {mode:16} {results[name]:8.2f} ms  "
            f"x{results.get('vit', 0) / results[name]:.2f}  {memory:.0f} MiB  first call {compile_s:.0f} s",
            flush=True,
        )
        del net, step, job


if __name__ == "__main__":
    command = sys.argv[1]
    if command == "check":
        check()
    elif command == "ops":
        for name in sys.argv[2:]:
            operators(name)
    elif command == "model":
        for arg in sys.argv[2:]:
            size, patch, kind, *rest = arg.split(":")
            model(
                size,
                int(patch),
                kind == "train",
                int(rest[0]) if rest and rest[0] else None,
                rest[1] if len(rest) > 1 else "default",
            )
