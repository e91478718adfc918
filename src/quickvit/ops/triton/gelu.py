"""GELU through the regular domain, on packed channels.

    y = Qᵀ GELU(Q (x + b e_A1)),    Q = √2/4 B,    B the butterfly of signs, BᵀB = 8

A feature x[T, C] holds eight blocks of m = C/8 columns, A1 A2 B1 B2 E11 E21 E12 E22. Q mixes only entry i
of each of the eight blocks of one token, an octet. The T·m octets are independent, and the kernels run over
them as one flat list: no lane idles when m is not a power of two.
"""

import math

import torch
import triton
import triton.language as tl

from quickvit.ops.tiles import tile
from quickvit.ops.triton.launch import traced

# Octets per program and warps, by bytes per element. Forward, a thread moves 16 bytes of each block at
# once.
FORWARD_TILES: dict[int, tuple[int, int]] = {2: (1024, 4), 4: (512, 4)}
BACKWARD_TILES: dict[int, tuple[int, int]] = {2: (512, 4), 4: (512, 4)}

# Φ(z) ≈ σ(p(z)), p(z) = Σ_k p_k z^(2k+1): the odd polynomial of degree 9 with the smallest error of GELU,
# max |z (Φ(z) - σ(p(z)))| over 0 < z < 6. It was found by Gauss-Newton steps on least squares, the weights
# multiplied after each step by the size of the error (Lawson); the tests repeat the fit. The error is
# 3.0e-6, far below the rounding of 16-bit storage. p is positive for every z > 0 and ends in a positive
# power, so nothing is clamped.
LOGIT = (
    1.5956562719576026,
    7.293758205720695e-2,
    -2.4972335761619006e-4,
    -6.116199580346782e-5,
    2.2381634126672158e-6,
)

# The kernels work on t = B x, that is z = s t with s = √2/4, so powers of s move into the coefficients.
_S = math.sqrt(2) / 4
_LOG2E = 1 / math.log(2)
_Q0, _Q1, _Q2, _Q3, _Q4 = (tl.constexpr(-_LOG2E * p * _S ** (2 * k + 1)) for k, p in enumerate(LOGIT))
_ERF_SCALE = tl.constexpr(_S / math.sqrt(2))
_NORMAL_2 = tl.constexpr(-0.5 * _LOG2E * _S**2)
_NORMAL_0 = tl.constexpr(math.log2(_S / 8 / math.sqrt(2 * math.pi)))


@triton.jit
def to_regular(a1, a2, b1, b2, e11, e21, e12, e22):
    """Inverse Fourier transform without its factor, B x."""
    a, b = a1 + a2, a1 - a2
    c, d = b1 + b2, b1 - b2
    e, f = e11 + e12, e11 - e12
    g, h = e21 + e22, e21 - e22
    apc, amc = a + c, a - c
    bpd, bmd = b + d, b - d
    eph, emh = e + h, e - h
    fpg, fmg = f + g, f - g
    return apc + eph, amc + fmg, apc - eph, amc - fmg, bpd - fpg, bmd - emh, bpd + fpg, bmd + emh


@triton.jit
def to_isotypic(r0, r1, r2, r3, r4, r5, r6, r7):
    """Fourier transform without its factor, Bᵀ r."""
    apc, eph = r0 + r2, r0 - r2
    amc, fmg = r1 + r3, r1 - r3
    bpd, fpg = r6 + r4, r6 - r4
    bmd, emh = r7 + r5, r7 - r5
    a, c = apc + amc, apc - amc
    b, d = bpd + bmd, bpd - bmd
    e, h = eph + emh, eph - emh
    f, g = fpg + fmg, fpg - fmg
    return a + b, a - b, c + d, c - d, e + f, g + h, e - f, g - h


@triton.jit
def _eighth_of_normal_cdf(t, u, EXACT: tl.constexpr):
    """Φ(s t) / 8, given u = t²."""
    if EXACT:
        phi = tl.math.erf(t * _ERF_SCALE) * 0.0625 + 0.0625
    else:
        # σ / 8 = 1 / (8 + 8 exp(-p)). The square of rsqrt is one special-function instruction and one
        # product, a division several instructions. Products and sums are fused by name: newer releases of Triton do
        # not do it by themselves.
        slope = tl.fma(tl.fma(tl.fma(tl.fma(u, _Q4, _Q3), u, _Q2), u, _Q1), u, _Q0)
        root = tl.math.rsqrt(tl.fma(tl.math.exp2(t * slope), 8.0, 8.0))
        phi = root * root
    return phi


@triton.jit
def gelu_of(t, EXACT: tl.constexpr):
    """GELU(s t) / (8 s) = t Φ(s t) / 8: the 8 s is what the two transforms left out."""
    return t * _eighth_of_normal_cdf(t, t * t, EXACT)


@triton.jit
def gelu_times(t, v, EXACT: tl.constexpr):
    """GELU'(s t) v / 8, GELU'(z) = Φ(z) + z exp(-z²/2) / √(2π)."""
    u = t * t
    density = tl.math.exp2(tl.fma(u, _NORMAL_2, _NORMAL_0))
    return v * tl.fma(t, density, _eighth_of_normal_cdf(t, u, EXACT))


@triton.jit
def _octets(T, M: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets, columns, tokens and mask of this program's BLOCK octets in a [T, 8 M] tensor."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # One 64-bit division per program; those per octet stay in 32 bits.
    lane = tl.arange(0, BLOCK)
    flat = tl.multiple_of((start % M).to(tl.int32), VEC) + lane
    column = tl.max_contiguous(tl.multiple_of(flat % M, VEC), VEC)
    token = start // M + (flat // M)
    return token * (8 * M) + column, column, token, token < T


@triton.jit
def _load_octet(x, row_scale, bias, offset, column, token, mask, M: tl.constexpr):
    """The eight entries of row_scale · x + b e_A1, in float32."""
    a1 = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    a2 = tl.load(x + offset + M, mask=mask, other=0.0).to(tl.float32)
    b1 = tl.load(x + offset + 2 * M, mask=mask, other=0.0).to(tl.float32)
    b2 = tl.load(x + offset + 3 * M, mask=mask, other=0.0).to(tl.float32)
    e11 = tl.load(x + offset + 4 * M, mask=mask, other=0.0).to(tl.float32)
    e21 = tl.load(x + offset + 5 * M, mask=mask, other=0.0).to(tl.float32)
    e12 = tl.load(x + offset + 6 * M, mask=mask, other=0.0).to(tl.float32)
    e22 = tl.load(x + offset + 7 * M, mask=mask, other=0.0).to(tl.float32)
    if row_scale is not None:
        factor = tl.load(row_scale + token, mask=mask, other=0.0)
        a1, a2, b1, b2 = a1 * factor, a2 * factor, b1 * factor, b2 * factor
        e11, e21, e12, e22 = e11 * factor, e21 * factor, e12 * factor, e22 * factor
    if bias is not None:
        a1 += tl.load(bias + column).to(tl.float32)
    return a1, a2, b1, b2, e11, e21, e12, e22


@triton.jit
def _store_octet(y, offset, mask, a1, a2, b1, b2, e11, e21, e12, e22, M: tl.constexpr):
    dtype: tl.constexpr = y.dtype.element_ty
    tl.store(y + offset, a1.to(dtype), mask=mask)
    tl.store(y + offset + M, a2.to(dtype), mask=mask)
    tl.store(y + offset + 2 * M, b1.to(dtype), mask=mask)
    tl.store(y + offset + 3 * M, b2.to(dtype), mask=mask)
    tl.store(y + offset + 4 * M, e11.to(dtype), mask=mask)
    tl.store(y + offset + 5 * M, e21.to(dtype), mask=mask)
    tl.store(y + offset + 6 * M, e12.to(dtype), mask=mask)
    tl.store(y + offset + 7 * M, e22.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _gelu_forward(
    x,
    row_scale,
    bias,
    y,
    T,
    M: tl.constexpr,
    VEC: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = Bᵀ (t Φ(s t) / 8) with t = B (row_scale · x + b e_A1)."""
    offset, column, token, mask = _octets(T, M, VEC, BLOCK)
    a1, a2, b1, b2, e11, e21, e12, e22 = _load_octet(x, row_scale, bias, offset, column, token, mask, M)
    t0, t1, t2, t3, t4, t5, t6, t7 = to_regular(a1, a2, b1, b2, e11, e21, e12, e22)
    a1, a2, b1, b2, e11, e21, e12, e22 = to_isotypic(
        gelu_of(t0, EXACT),
        gelu_of(t1, EXACT),
        gelu_of(t2, EXACT),
        gelu_of(t3, EXACT),
        gelu_of(t4, EXACT),
        gelu_of(t5, EXACT),
        gelu_of(t6, EXACT),
        gelu_of(t7, EXACT),
    )
    _store_octet(y, offset, mask, a1, a2, b1, b2, e11, e21, e12, e22, M)


@triton.jit(do_not_specialize=["T"])
def _gelu_backward(
    grad, x, bias, dx, T, M: tl.constexpr, VEC: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    """dx = Bᵀ (GELU'(s t) B grad / 8) with t = B (x + b e_A1)."""
    offset, column, token, mask = _octets(T, M, VEC, BLOCK)
    a1, a2, b1, b2, e11, e21, e12, e22 = _load_octet(x, None, bias, offset, column, token, mask, M)
    t0, t1, t2, t3, t4, t5, t6, t7 = to_regular(a1, a2, b1, b2, e11, e21, e12, e22)
    a1, a2, b1, b2, e11, e21, e12, e22 = _load_octet(grad, None, None, offset, column, token, mask, M)
    v0, v1, v2, v3, v4, v5, v6, v7 = to_regular(a1, a2, b1, b2, e11, e21, e12, e22)
    a1, a2, b1, b2, e11, e21, e12, e22 = to_isotypic(
        gelu_times(t0, v0, EXACT),
        gelu_times(t1, v1, EXACT),
        gelu_times(t2, v2, EXACT),
        gelu_times(t3, v3, EXACT),
        gelu_times(t4, v4, EXACT),
        gelu_times(t5, v5, EXACT),
        gelu_times(t6, v6, EXACT),
        gelu_times(t7, v7, EXACT),
    )
    _store_octet(dx, offset, mask, a1, a2, b1, b2, e11, e21, e12, e22, M)


def gelu_forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Octic GELU of x[T, C] with a deferred A1 bias[C/8]: y = Qᵀ GELU(Q (x + b e_A1)); `out` may be x.

    row_scale[T], in float32, is what tokens are multiplied by before.
    """
    y = torch.empty_like(x) if out is None else out
    tokens, channels = x.shape
    m = channels // 8
    if tokens == 0:
        return y
    size = x.element_size()
    block, warps = tile("gelu forward", (m, size), x.device, FORWARD_TILES[size])
    with torch.cuda.device_of(x):
        traced(_gelu_forward)[(triton.cdiv(tokens * m, block),)](
            x,
            row_scale,
            bias,
            y,
            tokens,
            M=m,
            VEC=math.gcd(m, 16),
            EXACT=x.dtype == torch.float32,
            BLOCK=block,
            num_warps=warps,
        )
    return y


def gelu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Gradient of the octic GELU: dx = Qᵀ (GELU'(Q (x + b e_A1)) · Q grad). The bias's is the sum of A1's."""
    dx = torch.empty_like(x)
    tokens, channels = x.shape
    m = channels // 8
    if tokens == 0:
        return dx
    size = x.element_size()
    block, warps = tile("gelu backward", (m, size), x.device, BACKWARD_TILES[size])
    with torch.cuda.device_of(x):
        traced(_gelu_backward)[(triton.cdiv(tokens * m, block),)](
            grad,
            x,
            bias,
            dx,
            tokens,
            M=m,
            VEC=math.gcd(m, 16),
            EXACT=x.dtype == torch.float32,
            BLOCK=block,
            num_warps=warps,
        )
    return dx
