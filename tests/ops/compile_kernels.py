"""Compile the kernels of Quick ViTs for a kind of GPU, none needed: python compile_kernels.py 89

Prints the bytes of shared memory of each, and fails if there are more than such a GPU has.
"""

import contextlib
import sys

import torch
import triton
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quickvit.ops import tiles
from quickvit.ops.triton import attention, gelu, heads, norm, weight_gradient, whole_head

# Bytes that a program may have, by compute capability.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Tokens, width, heads and hidden width of L/16 and H/14, and of heads of 128.
SHAPES = [(197, 1024, 16, 4096), (257, 1280, 16, 5120), (257, 1024, 8, 4096)]
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
SAMPLES = 64


LAUNCHES = []


class Recorder:
    """In place of a kernel: notes launches instead of making them."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: LAUNCHES.append((self.kernel, args, kwargs))


def prepare(capability):
    limit = SHARED[capability] * 1024
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
    torch.cuda.get_device_name = lambda device: "none"
    tiles.stored = lambda gpu: {}
    for module in (attention, gelu, heads, norm, weight_gradient, whole_head):
        module.traced = Recorder
        for name, value in (("multiprocessors", 108), ("shared_memory", limit)):
            if hasattr(module, name):
                setattr(module, name, lambda device, value=value: value)
    return limit


def launch(length, width, number, hidden):
    """All kernels of a block, forwards and backwards, in training and in inference."""

    def new(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    tokens, m, dim, shapes = SAMPLES * length, width // 8, width // number, ((SAMPLES, length),)
    x, features, qkv = new(tokens, width), new(tokens, hidden), new(tokens, 3 * width)
    bias, qkv_bias, hidden_bias = new(m), new(3 * m), new(hidden // 8)
    gain = new(6 * m, dtype=torch.float32)
    for stream in (x, new(tokens, width, dtype=torch.float32)):
        _, y, statistics = norm.residual_norm_forward(
            stream, x, bias, gain, None, 1, gain, bias, 1e-6, x.dtype
        )
        norm.residual_norm_backward(y, stream, stream, statistics, gain, x, bias, gain, None, 1)
        maps = dict.fromkeys(("added", "normed"), new(tokens, dtype=torch.int32))
        factors = new(tokens, dtype=torch.float32)
        norm.residual_norm_forward(
            *(stream, x, bias, gain, factors, 1, gain, bias, 1e-6, x.dtype), **maps, rows=tokens
        )
        norm.residual_norm_backward(*(y, stream, stream, statistics, gain, x, bias, gain, factors, 1), **maps)
    gelu.gelu_forward(features, hidden_bias, features)
    gelu.gelu_backward(features, features, hidden_bias)
    if dim in attention.FORWARD_TILES:
        out, lse = attention.attention_forward(qkv, qkv_bias, number, shapes)
        attention.attention_backward(out, qkv, qkv_bias, out, lse, number, shapes)
    else:
        heads.to_packed(heads.to_heads(qkv, number, 3, qkv_bias, shapes), 3)
    if whole_head.takes(length, dim, x.device):
        whole_head.attention_whole_head(qkv, qkv_bias, number, shapes)
    for grad, source in ((qkv, x), (x, x), (features, x), (x, features)):
        if weight_gradient.takes(grad, source):
            weight_gradient.weight_gradient(grad, source)


def compiled(kernel, args, kwargs, capability):
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    options = {k: v for k, v in kwargs.items() if k not in names}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = f"*{TYPES[value.dtype]}" if is_tensor else "i32"
        if is_tensor or (not parameter.do_not_specialize and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    key = repr((kernel.__name__, signature, constants, options))
    return key, lambda: triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(capability):
    limit = prepare(capability)
    with FakeTensorMode():
        for shape in SHAPES:
            launch(*shape)
    found = {}
    for kernel, args, kwargs in LAUNCHES:
        key, build = compiled(kernel, args, kwargs, capability)
        if key not in found:
            found[key] = kernel.__name__, build().metadata.shared
    for name, size in found.values():
        sys.stdout.write(f"{name:32} {size:7}\n")
    too_large = [name for name, size in found.values() if size > limit]
    assert not too_large, f"{too_large} need more than {limit} bytes of shared memory"
    assert len(found) > 15


if __name__ == "__main__":
    main(int(sys.argv[1]))
