"""Launches: what a GPU has room for, what models launch there, and what PyTorch's compiler asks about them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quickvit.ops.triton.whole_head import takes

SCRIPT = """
import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner


class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


triton.runtime.driver.set_active(Hopper())
translate, times = triton_kernel_wrap.generate_ttir, []
triton_kernel_wrap.generate_ttir = lambda *args: (times.append(args), translate(*args))[1]

from quickvit.ops.triton.norm import _sum_partial

names = "identify_mutated_tensors", "identify_accessed_tensors"
analyse = next(getattr(triton_kernel_wrap, name) for name in names if hasattr(triton_kernel_wrap, name))


def arguments(dtype=torch.float32, M=8, dscale=None):
    gain, shift = torch.zeros(6 * M, dtype=dtype), torch.zeros(M, dtype=dtype)
    partial = torch.zeros(4, 7 * M)
    sizes = dict(M=M, WIDTH=7 * M, BLOCK_P=16, BLOCK=8)
    return dict(partial=partial, dgain=gain, dshift=shift, dscale=dscale, dbias=None, P=4, **sizes)


def asked(kernel, **kinds):
    # As a launch with a number of warps comes.
    kernel = triton.autotune([triton.Config({}, num_warps=2)], [])(kernel)
    assert isinstance(kernel, Autotuner)
    return analyse(kernel, arguments(**kinds), {})


first = str(asked(_sum_partial))
assert "dgain" in first and "dshift" in first and "dscale" not in first
assert str(analyse.__wrapped__(_sum_partial, arguments(), {})) == first
before = len(times)
again = asked(_sum_partial)
assert len(times) == before and str(again) == first
# An answer is the caller's own.
again.clear() if isinstance(again, list) else again.read_writes.writes.clear()
assert str(again) != first
assert str(asked(_sum_partial)) == first
for kinds in (dict(M=16), dict(dtype=torch.float16), dict(dscale=torch.zeros(48))):
    known = len(times)
    assert ("dscale" in str(asked(_sum_partial, **kinds))) == ("dscale" in kinds)
    assert len(times) == known + 1


@triton.jit
def foreign(x):
    pass


foreign.__module__ = "elsewhere"
known = len(times)
analyse(foreign, dict(x=torch.zeros(1)), {})
analyse(foreign, dict(x=torch.zeros(1)), {})
assert len(times) == known + 2
"""


def run(*command):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_launches_of_a_kind_are_analysed_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run(script)


@pytest.mark.parametrize(
    "capability", [89, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 86, 90, 100, 120))]
)
def test_kernels_fit_gpus_with_little_shared_memory(capability):
    """Compute capability 8.6, 8.9 and 12.0 have 99 KiB, less than half of Hopper's."""
    kernels = run(Path(__file__).with_name("compile_kernels.py"), str(capability))
    for large in ("_attention_whole_head", "_partial_sums"):
        assert (large in kernels) == (capability in (80, 90, 100))
    for gluon in ("_octic_linear", "_linear_gelu"):
        assert (gluon in kernels) == (capability == 90)


NORMS = "norm_forward norm_backward sum_partial column_sums sum_rows"
PACKED = "attention_forward attention_backward_query attention_backward_key"
HEADS = "linear_heads attention attention_gradient to_heads to_packed"
SLICES = "partial_sums sum_slices"
# What whole models launch on a Hopper; elsewhere Triton's kernels take the place of Gluon's.
LAUNCHED = {
    "infer base": "norm_forward octic_linear attention_forward gelu_forward",
    "infer large": "norm_forward octic_linear attention_forward linear_gelu",
    "infer huge": "norm_forward linear_heads attention to_packed linear_gelu",
    "infer giant": "norm_forward into_heads attention to_packed gelu_forward",
    "infer 22b": "norm_forward attention_forward gelu_forward",
    "infer one large image": "norm_forward attention_whole_head linear_gelu",
    "folded large": "deviation octic_linear attention_forward linear_gelu",
    "folded huge": "linear_heads attention to_packed linear_gelu",
    "train large": f"{NORMS} {PACKED} {SLICES} octic_linear gelu_forward gelu_backward",
    "train huge": f"{NORMS} {SLICES} {HEADS} gelu_forward gelu_backward",
    "train giant": f"{NORMS} gelu_forward gelu_backward to_heads to_packed",
}
GLUON = {"octic_linear", "linear_gelu", "linear_heads", "attention", "attention_gradient"}


@pytest.mark.parametrize("capability", [80, 90])
def test_models_run_on_a_gpu_that_is_not_there(capability):
    """Python of a GPU's path, gradients too; what kernels compute is tested elsewhere."""
    found = json.loads(run(Path(__file__).with_name("models_without_gpu.py"), str(capability)))
    if capability == 90:
        assert {name: set(found[name]) for name in LAUNCHED} == {
            k: set(v.split()) for k, v in LAUNCHED.items()
        }
        assert set().union(*found.values()) >= GLUON
    else:
        assert not set().union(*found.values()) & GLUON


def test_room_is_known_to_the_compiler():
    def choose(x):
        return x + 1 if takes(257, 80, x.device) else x

    assert torch.compile(choose, fullgraph=True, backend="eager")(torch.zeros(())) == 1
