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
from quickvit.ops.triton import attention, convert, deviation, gelu, heads, norm, weight_gradient, whole_head

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
    for module in (attention, convert, deviation, gelu, heads, norm, weight_gradient, whole_head):
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
    convert.convert([gain, factors], x.dtype)
    convert.convert([bias], gain.dtype)
    deviation.deviation(x, 1e-6)
    gelu.gelu_forward(features, hidden_bias, features)
    gelu.gelu_forward(features, hidden_bias, features, factors)
    gelu.gelu_backward(features, features, hidden_bias)
    if dim in attention.FORWARD_TILES:
        out, lse = attention.attention_forward(qkv, qkv_bias, number, shapes)
        attention.attention_backward(out, qkv, qkv_bias, out, lse, number, shapes)
    else:
        for pairs, added in ((False, None), (False, qkv_bias), (True, None), (True, qkv_bias)):
            in_heads = heads.to_heads(qkv, number, 3, added, shapes[0], 0, pairs=pairs)
            heads.to_packed(in_heads, qkv, 0, pairs=pairs)
            heads.into_heads(qkv, number, added)
    if whole_head.takes(length, dim, x.device):
        whole_head.attention_whole_head(qkv, qkv_bias, number, shapes)
        whole_head.gradient_of_batch(x, qkv, qkv_bias, qkv, number, (1, 37), 0)
    for grad, source in ((qkv, x), (x, x), (features, x), (x, features)):
        if weight_gradient.takes(grad, source):
            weight_gradient.weight_gradient(grad, source)
    weight_gradient.bias_gradient(qkv, 3 * m, torch.float32)


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


class Driver:
    """Of a GPU that is not there."""

    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


class Compiler(Recorder):
    """In place of a kernel: compiles launches instead of making them."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: LAUNCHES.append(self.kernel.warmup(*args, grid=grid, **kwargs))


def hopper(limit):
    """The bytes of the kernels that are for Hopper alone."""
    from quickvit.ops.triton import hopper as kernels
    from quickvit.ops.triton import hopper_attention as of_heads
    from quickvit.ops.triton import hopper_gelu as with_gelu
    from quickvit.ops.triton import hopper_gradient as of_heads_grad
    from quickvit.ops.triton import hopper_heads as to_heads

    triton.runtime.driver.set_active(Driver())
    kernels._octic_linear = Compiler(kernels._octic_linear)
    with_gelu._linear_gelu = Compiler(with_gelu._linear_gelu)
    to_heads._linear_heads = Compiler(to_heads._linear_heads)
    of_heads._attention = Compiler(of_heads._attention)
    of_heads_grad._attention_gradient = Compiler(of_heads_grad._attention_gradient)
    kernels.shared_memory = of_heads.shared_memory = lambda device: limit
    for module in (kernels, with_gelu, to_heads, of_heads):
        module.multiprocessors = lambda device: 132
    LAUNCHES.clear()
    for width in (768, 1024):
        for dtype in (torch.bfloat16, torch.float16):
            m, f = width // 8, width // 2
            x, y = torch.empty(1, width, dtype=dtype), torch.empty(1, 4 * width, dtype=dtype)
            one, two = torch.empty(4, f, m, dtype=dtype), torch.empty(1, 2 * f, 2 * m, dtype=dtype)
            kernels.linear(x, one, two, y)
            kernels.linear(x, one.mT.contiguous().mT, two.mT.contiguous().mT, y)
            kernels.linear_heads(x, one, two, torch.empty(f), 8)
            kernels.linear_heads(x, one, two, torch.empty(f), 8, torch.empty(1))
    for width in with_gelu.STEPS:
        for dtype in (torch.bfloat16, torch.float16):
            x, y = torch.empty(1, width, dtype=dtype), torch.empty(1, 4 * width, dtype=dtype)
            one, two = (
                torch.empty(shape, dtype=dtype)
                for shape in ((4, width // 2, width // 8), (1, width, width // 4))
            )
            with_gelu.linear_gelu(x, one, two, torch.empty(width // 2), y)
            with_gelu.linear_gelu(x, one, two, None, y)
            with_gelu.linear_gelu(x, one, two, torch.empty(width // 2), y, (1e-6, 1.0))
    for dtype in (torch.bfloat16, torch.float16):
        x, one, two = (torch.empty(shape, dtype=dtype) for shape in ((1, 1280), (4, 480, 160), (1, 960, 320)))
        to_heads.linear_heads(x, one, two, torch.empty(480))
        to_heads.linear_heads(x, one, two, None)
        to_heads.linear_heads(x, one, two, torch.empty(480), (1e-6, 1.0))
    for tokens in (257, 197):
        for pairs, shape in ((True, (3, 1, tokens, 16, 80)), (False, (1, tokens, 3, 16, 80))):
            qkv = torch.empty(shape, dtype=torch.bfloat16)
            out, logs = of_heads.attention_forward(*qkv.unbind(0 if pairs else 2), pairs=pairs)
            of_heads_grad.attention_backward(out, qkv, out, logs, pairs=pairs)
        for dim in (104, 112):
            of_heads.attention_forward(*torch.empty(3, 1, tokens, 16, dim, dtype=torch.bfloat16), pairs=False)
    return [(kernel.metadata.name, kernel.metadata.shared) for kernel in LAUNCHES]


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
    assert len(found) > 15
    sizes = [*found.values(), *(hopper(limit) if capability == 90 else ())]
    for name, size in sizes:
        sys.stdout.write(f"{name:32} {size:7}\n")
    too_large = [name for name, size in sizes if size > limit]
    assert not too_large, f"{too_large} need more than {limit} bytes of shared memory"


if __name__ == "__main__":
    main(int(sys.argv[1]))
