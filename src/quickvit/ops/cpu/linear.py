"""The equivariant linear map, and the perceptron of two of them, see linear.c."""

from __future__ import annotations

from torch import Tensor

from quickvit.ops.cpu.library import call, checked, scratch, size, strided


def linear_forward(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor | None) -> Tensor:
    """y[T, F] of x[T, C] with contiguous tokens, weight_1[4, F/8, C/8] and weight_2[1, F/4, C/4], bias[F/8]."""
    tokens, inputs, outputs = x.shape[0], weight_1.shape[2], weight_1.shape[1]
    _check_shapes(x, weight_1, weight_2)
    y = x.new_empty(tokens, 8 * outputs)
    call(
        "linear_forward",
        strided(x),
        x.stride(0),
        strided(weight_1),
        *weight_1.stride(),
        strided(weight_2),
        *weight_2.stride()[1:],
        checked(bias, outputs),
        y,
        x.new_empty(size("linear_packed_size", inputs, outputs)),
        tokens,
        inputs,
        outputs,
    )
    return y


def mlp_forward(
    x: Tensor, first_1: Tensor, first_2: Tensor, bias: Tensor | None, second_1: Tensor, second_2: Tensor
) -> Tensor:
    """y[T, F] = W₂ GELU(W₁ x + b e_A1) of x[T, C] with contiguous tokens; the weights are as in `linear_forward`."""
    (hidden, inputs), outputs, tokens = first_1.shape[1:], second_1.shape[1], x.shape[0]
    _check_shapes(x, first_1, first_2)
    y = x.new_empty(tokens, 8 * outputs)
    memory, threads = scratch("mlp_scratch", hidden)
    packed = size("linear_packed_size", inputs, hidden) + size("linear_packed_size", hidden, outputs)
    call(
        "mlp_forward",
        strided(x),
        x.stride(0),
        checked(first_1, 4, hidden, inputs),
        checked(first_2, 1, 2 * hidden, 2 * inputs),
        checked(bias, hidden),
        checked(second_1, 4, outputs, hidden),
        checked(second_2, 1, 2 * outputs, 2 * hidden),
        y,
        x.new_empty(packed),
        memory,
        tokens,
        inputs,
        hidden,
        outputs,
        threads=threads,
    )
    return y


def _check_shapes(x: Tensor, weight_1: Tensor, weight_2: Tensor) -> None:
    irreps, outputs, inputs = weight_1.shape
    alike = irreps == 4 and weight_2.shape == (1, 2 * outputs, 2 * inputs) and x.shape[1:] == (8 * inputs,)
    if not alike or not outputs or not inputs:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight_1, weight_2))
        raise ValueError(f"expected tokens [T, 8i] and weights [4, o, i] and [1, 2o, 2i], got {shapes}")
    if x.stride(1) != 1:
        raise ValueError(f"expected contiguous tokens, got strides {x.stride()}")
