"""The Triton kernels against their definitions in float64, gradients too, on outputs that start as NaN."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from some_rows import rows_at  # noqa: E402

from quickvit.group import Layout  # noqa: E402
from quickvit.ops import attention as operators  # noqa: E402
from quickvit.ops import norm as norm_operators  # noqa: E402
from quickvit.ops import precision  # noqa: E402
from quickvit.ops.heads import merge_heads, split_heads  # noqa: E402
from quickvit.ops.packing import Shapes, attend, pack, unpack  # noqa: E402
from quickvit.ops.triton import (  # noqa: E402
    attention,
    convert,
    deviation,
    gelu,
    heads,
    norm,
    weight_gradient,
    whole_head,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EPS = 1e-6
NO_BRANCH = None, None, None, None, 1

# The interpreter multiplies bfloat16 matrices as if their bits were integers. In float32, which the attention
# kernels are not meant for, nothing hides an error; on a GPU their products would round to tf32.
MATRIX_DTYPES = [torch.float16, torch.bfloat16 if CUDA else torch.float32]

# The interpreter works in numpy, which warns of the infinities that the kernels expect.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def runnable() -> None:
    if not CUDA and isinstance(tl.sum, triton.runtime.JITFunction):
        pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel forgets to write is NaN."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(math.nan)
    )


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


def exact(*tensors: Tensor | None) -> list[Tensor | None]:
    """Leaves in float64 with the values of the given tensors."""
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, ulps: float = 1.0) -> None:
    """Equal to within a rounding of each entry and a smaller one of the largest entry.

    The interpreter truncates to bfloat16, so a rounding is a whole unit in the last place.
    """
    unit = torch.finfo(dtype).eps
    expected = expected.detach()
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    bound = ulps * unit * (expected.abs() + 0.5 * expected.abs().max()) + 1e-30
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"largest error {(error / bound).max():.2f} times the bound"


# --- GELU


def inverse_fourier() -> Tensor:
    """Q[8, 8], rows over group elements, columns over A1 A2 B1 B2 E11 E21 E12 E22."""
    a1, a2, b1, b2, e11, e21, e12, e22 = torch.eye(8, dtype=torch.float64, device=DEVICE)
    a, b, c, d = a1 + a2, a1 - a2, b1 + b2, b1 - b2
    e, f, g, h = e11 + e12, e11 - e12, e21 + e22, e21 - e22
    rows = [a + c + e + h, a - c + f - g, a + c - e - h, a - c - f + g]
    rows += [b + d - f - g, b - d - e + h, b + d + f + g, b - d + e - h]
    return math.sqrt(2) / 4 * torch.stack(rows)


def add_invariant(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + functional.pad(bias, (0, x.shape[-1] - bias.shape[0]))


def gelu_definition(x: Tensor, bias: Tensor | None) -> Tensor:
    q = inverse_fourier()
    octets = add_invariant(x, bias).unflatten(-1, (8, -1))
    return (q.T @ functional.gelu(q @ octets)).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "m", "with_bias"),
    [(1, 8, True), (7, 12, True), (7, 12, False), (197, 26, True), (3, 80, True)],
)
def test_gelu(tokens: int, m: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, grad = draw(0, tokens, 8 * m, dtype=dtype, scale=2.0), draw(1, tokens, 8 * m, dtype=dtype)
    bias = draw(2, m, dtype=dtype) if with_bias else None
    x64, bias64 = exact(x, bias)
    y64 = gelu_definition(x64, bias64)
    y64.backward(grad.double())
    assert_near(gelu.gelu_forward(x, bias), y64, dtype, ulps=4 if dtype == torch.float32 else 1)
    factors = draw(3, tokens)
    scaled = gelu_definition(factors.double()[:, None] * x, bias64)
    assert_near(gelu.gelu_forward(x, bias, None, factors), scaled, dtype, 4 if dtype == torch.float32 else 1)
    dx = gelu.gelu_backward(grad, x, bias)
    assert dx.dtype == dtype
    assert_near(dx, x64.grad, dtype, ulps=4 if dtype == torch.float32 else 1)


def fit_logit(terms: int, reach: float = 6.0, points: int = 1500, steps: int = 100) -> np.ndarray:
    """The odd polynomial p with the smallest max |z (Φ(z) - σ(p(z)))| over 0 < z < reach."""
    z = np.linspace(reach / points, reach, points)
    upper = np.array([0.5 * math.erfc(t / math.sqrt(2)) for t in z])
    lower = 1 - upper
    powers = (z[:, None] / reach) ** (2 * np.arange(terms) + 1)
    slope = z * lower * upper
    c = np.linalg.lstsq(powers * slope[:, None], np.log(lower / upper) * slope, rcond=None)[0]
    weights = np.ones(points)
    best = (math.inf, c)
    for _ in range(steps):
        sigma = 1 / (1 + np.exp(-powers @ c))
        error = z * (lower - sigma)
        best = min(best, (np.abs(error).max(), c), key=lambda pair: pair[0])
        weights *= np.abs(error) / np.abs(error).max() + 1e-3
        weights /= weights.sum()
        root = np.sqrt(weights)
        jacobian = powers * (z * sigma * (1 - sigma) * root)[:, None]
        c = c + np.linalg.lstsq(jacobian, error * root, rcond=None)[0]
    return best[1] / reach ** (2 * np.arange(terms) + 1)


def test_logit_is_the_best_polynomial() -> None:
    np.testing.assert_allclose(fit_logit(len(gelu.LOGIT)), gelu.LOGIT, rtol=2e-3)


@pytest.mark.parametrize("with_grad", [False, True])
def test_fast_gelu_is_far_below_half_precision(with_grad: bool) -> None:
    """The fast path on float32, where nothing hides its error."""
    m = 512
    z = torch.cat([torch.linspace(-12, 12, 8 * m - 4), torch.tensor([-1e3, 1e3, -1e15, 1e15])]).double()
    q = inverse_fourier().cpu()
    x = (q.T @ z.view(8, m)).view(1, -1).float().to(DEVICE)
    grad = (q.T @ torch.ones(8, m, dtype=torch.float64)).view(1, -1).float().to(DEVICE)
    y = torch.empty_like(x)
    meta = {"M": m, "VEC": 16, "EXACT": False, "BLOCK": 512, "num_warps": 4}
    if with_grad:
        gelu._gelu_backward[(1,)](grad, x, None, y, 1, **meta)
        expected = torch.special.ndtr(z) + z * (-z * z / 2).exp() / math.sqrt(2 * math.pi)
    else:
        gelu._gelu_forward[(1,)](x, None, None, y, 1, **meta)
        expected = functional.gelu(z)
    actual = (q @ y.cpu().double().view(8, m)).view(-1)
    error = (actual - expected).abs()
    # Octets that hold the huge values have the rounding of the huge values.
    ordinary = z.view(8, m).abs().amax(0) < 100
    assert actual.isfinite().all()
    assert error.view(8, m)[:, ordinary].max() < 1.5e-5
    assert (error <= 1.5e-5 + 1e-6 * z.view(8, m).abs().amax(0).repeat(8)).all()


# --- norm


def expand(per_channel: Tensor) -> Tensor:
    """One value per irrep channel, [3C/4], to one per column, [C]."""
    m = per_channel.shape[0] // 6
    return torch.cat([per_channel, per_channel[4 * m :]])


def centre(x: Tensor, pair_weight: float) -> tuple[Tensor, Tensor]:
    """Without its means, and the reciprocal standard deviation of that."""
    m = x.shape[1] // 8
    parts = x.split([m] * 4 + [2 * m] * 2, dim=1)
    centred = torch.cat([p - p.mean(1, keepdim=True) for p in parts], dim=1)
    weights = torch.ones_like(x[0]).index_fill(0, torch.arange(4 * m, 8 * m, device=x.device), pair_weight)
    variance = (weights * centred.square()).mean(1, keepdim=True)
    return centred, (variance + EPS).rsqrt()


def norm_definition(x: Tensor, gain: Tensor, shift: Tensor, pair_weight: float) -> Tensor:
    centred, rstd = centre(x, pair_weight)
    return add_invariant(centred * rstd * expand(gain), shift)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
@pytest.mark.parametrize(("tokens", "m", "pair_weight"), [(1, 8, 1.0), (7, 12, 0.25), (19, 26, 1.0)])
def test_norm(tokens: int, m: int, pair_weight: float, dtype: torch.dtype, out: torch.dtype) -> None:
    x = draw(0, tokens, 8 * m, dtype=dtype) + 3
    gain, shift = draw(1, 6 * m), draw(2, m)
    dy, dstream = draw(3, tokens, 8 * m, dtype=out), draw(4, tokens, 8 * m, dtype=dtype)
    x64, gain64, shift64 = exact(x, gain, shift)
    y64 = norm_definition(x64, gain64, shift64, pair_weight)
    y64.backward(dy.double())

    _, y, statistics = norm.residual_norm_forward(x, *NO_BRANCH, gain, shift, EPS, out, pair_weight)
    assert y.dtype == out
    assert statistics.isfinite().all()
    assert_near(y, y64, out, ulps=8 if out == torch.float32 else 1)
    for extra in (None, dstream):
        dx, _, dgain, dshift, *_ = norm.residual_norm_backward(
            dy, extra, x, statistics, gain, *NO_BRANCH, pair_weight
        )
        assert dx.dtype == dtype
        assert_near(
            dx,
            x64.grad if extra is None else x64.grad + extra.double(),
            dtype,
            ulps=8 if dtype == torch.float32 else 1,
        )
        assert_near(dgain, gain64.grad, torch.float32, ulps=16)
        assert_near(dshift, shift64.grad, torch.float32, ulps=16)


@pytest.mark.parametrize(
    ("dtype", "branch_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("rows", "tokens_per_row", "m", "options"),
    [
        (1, 1, 8, "bias scale rows dstream"),
        (2, 7, 12, "bias scale rows dstream"),
        (2, 7, 12, ""),
        (2, 7, 12, "scale dstream"),
        (2, 7, 12, "bias rows"),
        (1, 61, 8, "bias scale rows dstream"),
        (14, 1, 12, "bias scale rows dstream added normed"),
        (14, 1, 8, "bias rows added"),
        (14, 1, 20, "scale dstream normed"),
    ],
)
def test_residual_norm(
    rows: int, tokens_per_row: int, m: int, options: str, dtype: torch.dtype, branch_dtype: torch.dtype
) -> None:
    tokens, channels = rows * tokens_per_row, 8 * m
    every = torch.arange(tokens, device=DEVICE)
    added, normed = (
        every[draw(seed, tokens).argsort()[:count]] if name in options.split() else every
        for seed, name, count in ((9, "added", tokens - 3), (10, "normed", tokens - 5))
    )
    x, branch = draw(0, tokens, channels, dtype=dtype), draw(1, len(added), channels, dtype=branch_dtype)
    gain, shift = draw(2, 6 * m), draw(3, m)
    bias = draw(4, m) if "bias" in options else None
    scale = draw(5, 6 * m) if "scale" in options else None
    row_scale = draw(6, len(added) // tokens_per_row).abs() if "rows" in options else None
    dy = draw(7, len(normed), channels, dtype=branch_dtype)
    dstream = draw(8, tokens, channels, dtype=dtype) if "dstream" in options else None
    maps = {
        name: rows_at(index, tokens).place
        for name, index in (("added", added), ("normed", normed))
        if name in options.split()
    }

    stream, y, statistics = norm.residual_norm_forward(
        *(x, branch, bias, scale, row_scale, tokens_per_row, gain, shift, EPS, branch_dtype),
        **maps,
        rows=len(normed),
    )
    if not maps:
        taken = x.clone(), branch.clone()
        norm.residual_norm_forward(
            *(*taken, bias, scale, row_scale, tokens_per_row, gain, shift, EPS, branch_dtype), into=taken
        )
        assert torch.equal(taken[0], stream)
        assert torch.equal(taken[1], y)
    x64, branch64, bias64, scale64, gain64, shift64 = exact(x, branch, bias, scale, gain, shift)
    more = add_invariant(branch64, bias64)
    if scale64 is not None:
        more = more * expand(scale64)
    if row_scale is not None:
        more = more * row_scale.double().repeat_interleave(tokens_per_row)[:, None]
    stream64 = x64.index_add(0, added, more)
    assert stream.dtype == dtype
    assert y.dtype == branch_dtype
    assert_near(stream, stream64, dtype, ulps=4 if dtype == torch.float32 else 1)
    # The norm is that of the stream as it was stored: what it rounded away has a derivative of one.
    stored64 = stream64 + (stream.double() - stream64).detach()
    y64 = norm_definition(stored64[normed], gain64, shift64, 1.0)
    assert_near(y, y64, branch_dtype, ulps=8 if branch_dtype == torch.float32 else 1)

    outputs, grads = [y64], [dy.double()]
    if dstream is not None:
        outputs, grads = [y64, stored64], [dy.double(), dstream.double()]
    torch.autograd.backward(outputs, grads)
    dx, dbranch, dgain, dshift, dscale, dbias = norm.residual_norm_backward(
        *(dy, dstream, stream, statistics, gain, branch, bias, scale, row_scale, tokens_per_row), **maps
    )
    assert dx.dtype == dtype
    assert dbranch.dtype == branch_dtype
    assert_near(dx, x64.grad, dtype, ulps=8 if dtype == torch.float32 else 1)
    assert_near(dbranch, branch64.grad, branch_dtype, ulps=8 if branch_dtype == torch.float32 else 1)
    assert_near(dgain, gain64.grad, torch.float32, ulps=32)
    assert_near(dshift, shift64.grad, torch.float32, ulps=32)
    for actual, leaf in ((dscale, scale64), (dbias, bias64)):
        assert (actual is None) == (leaf is None)
        if leaf is not None:
            assert_near(actual, leaf.grad, torch.float32, ulps=32)


def test_the_operator_of_some_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients reach the tensors that they are of."""
    monkeypatch.setattr(norm_operators, "kernels", lambda x, name: norm)
    layout, tokens = Layout(64), 11
    added, normed = (rows_at(draw(seed, tokens).argsort()[:5], tokens) for seed in (0, 1))
    factors, dz, dy = draw(2, 5).abs(), draw(3, tokens, 64), draw(4, 5, 64)
    tensors = draw(5, tokens, 64), draw(6, 5, 64), draw(7, 8), draw(8, 48), draw(9, 48), draw(10, 8)

    def operator(
        x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        maps = added.place, normed.place, len(normed.chosen)
        rest = gain, shift, EPS, 1.0, torch.float32
        z, y, _ = norm_operators._residual_norm.gpu(x, branch, bias, scale, factors, *maps, *rest)
        return z, y

    def definition(
        x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        options = {"bias": bias, "scale": scale, "sample_scale": factors, "added": added, "normed": normed}
        return norm_operators.octic_residual_norm(x, branch, gain, shift, EPS, layout, **options)

    results = []
    for function, given in ((operator, tensors), (definition, exact(*tensors))):
        leaves = [t.detach().requires_grad_() for t in given]
        z, y = function(*leaves)
        grads = torch.autograd.grad((z, y), leaves, (dz.to(z.dtype), dy.to(y.dtype)))
        results.append([z.detach(), y.detach(), *grads])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected, torch.float32, ulps=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "m", "pair_weight"), [(0, 8, 1.0), (1, 8, 1.0), (7, 12, 0.25), (19, 26, 1.0), (5, 20, 1.0)]
)
def test_what_a_norm_divides_by(tokens: int, m: int, pair_weight: float, dtype: torch.dtype) -> None:
    x = draw(0, tokens, 8 * m, dtype=dtype) + 3
    rstd = deviation.deviation(x, EPS, pair_weight)
    assert rstd.shape == (tokens,)
    if tokens:
        torch.testing.assert_close(rstd, centre(x.double(), pair_weight)[1][:, 0].float())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_norm_of_squares_that_overflow() -> None:
    x, gain, shift = draw(0, 3, 64), draw(1, 48), draw(2, 8)
    x[1, 5] = 1e20
    _, y, _ = norm.residual_norm_forward(x, *NO_BRANCH, gain, shift, EPS)
    assert y[1].isnan().all()
    assert y[::2].isfinite().all()


def test_norm_of_no_tokens() -> None:
    x, gain, shift = draw(0, 0, 64), draw(1, 48), draw(2, 8)
    _, y, statistics = norm.residual_norm_forward(x, *NO_BRANCH, gain, shift, EPS)
    dx, _, dgain, dshift, *_ = norm.residual_norm_backward(y, None, x, statistics, gain, *NO_BRANCH)
    assert y.shape == dx.shape == (0, 64)
    assert not dgain.any()
    assert not dshift.any()


# --- heads


def head_columns(head_count: int, c: int, parts: int) -> Tensor:
    """The packed column of each entry, [parts, heads, 8c]."""
    widths = [parts * head_count * c] * 4 + [parts * head_count * 2 * c] * 2
    blocks = torch.arange(sum(widths), device=DEVICE).split(widths)
    return torch.cat([block.view(parts, head_count, -1) for block in blocks], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "head_count", "c", "tile"),
    [
        (1, 1, 3, heads.TILE),
        (9, 4, 3, (2, 1)),
        (3, 4, 8, (2, 1)),
        (17, 2, 10, heads.TILE),
        (5, 3, 10, (2, 1)),
        (3, 5, 13, heads.TILE),
        (7, 2, 13, (4, 2)),
        (4, 3, 14, (4, 1)),
    ],
)
def test_heads(
    tokens: int,
    head_count: int,
    c: int,
    tile: tuple[int, int],
    parts: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "TILE", tile)
    m = head_count * c
    packed = draw(0, tokens, 8 * parts * m, dtype=dtype)
    columns = head_columns(head_count, c, parts)
    # The last token is a batch of its own.
    shapes = ((1, tokens - 1), (1, 1))
    again = torch.empty(packed.shape, dtype=dtype, device=DEVICE)
    origin = 0
    for number, length in shapes:
        features = heads.to_heads(packed, head_count, parts, None, (number, length), origin)
        assert [feature.shape[:2] for feature in features] == [(number, length)] * parts
        for feature, column in zip(features, columns, strict=True):
            assert torch.equal(feature.flatten(0, 1), packed[origin : origin + number * length, column])
        heads.to_packed(features, again, origin)
        origin += number * length
    assert torch.equal(again, packed)

    bias = draw(1, parts * m)
    expected = add_invariant(packed.double(), bias.double())
    features = heads.to_heads(packed, head_count, parts, bias, (tokens, 1), 0)
    for feature, column in zip(features, columns, strict=True):
        assert feature.dtype == dtype
        assert_near(feature[:, 0], expected[:, column], dtype)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("tile", [(1, 8), (2, 1)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("c", [10, 13])
def test_heads_in_the_place_of_packed_channels(
    tokens: int, tile: tuple[int, int], biased: bool, c: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "TILE_IN_PLACE", tile)
    packed, bias = draw(0, tokens, 24 * 3 * c), draw(1, 3 * 3 * c) if biased else None
    expected = heads.to_heads(packed, 3, 3, bias, (tokens, 1), 0)
    features = heads.into_heads(packed, 3, bias)
    assert features.data_ptr() == packed.data_ptr()
    for feature, copy in zip(features, expected, strict=True):
        assert torch.equal(feature, copy[:, 0])


@pytest.mark.parametrize("parts", [1, 3])
def test_heads_in_pairs(parts: int) -> None:
    tokens, head_count, c = 5, 2, 10
    packed = draw(0, tokens, 8 * parts * head_count * c)
    bias = draw(1, parts * head_count * c)
    shape = (tokens, 1)
    in_pieces = heads.to_heads(packed, head_count, parts, bias, shape, 0)
    in_pairs = heads.to_heads(packed, head_count, parts, bias, shape, 0, pairs=True)
    written = []
    for pieces, pairs in zip(in_pieces, in_pairs, strict=True):
        # [place, piece, 2]
        turned = pieces.unflatten(-1, (8, c // 2, 2)).transpose(-2, -3)
        assert torch.equal(pairs, turned[..., [0, 2, 4, 6, 1, 3, 5, 7], :].flatten(-3))
        written.append(turned.flatten(-3).contiguous())
    results = [torch.empty_like(packed) for _ in range(2)]
    heads.to_packed(in_pieces, results[0], 0)
    heads.to_packed(written, results[1], 0, pairs=True)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("pairs", "c", "vector"), [(False, 16, 8), (False, 10, 2), (True, 16, 2), (True, 10, 2)]
)
def test_only_neighbours_are_moved_together(pairs: bool, c: int, vector: int) -> None:
    """The interpreter moves entries one by one, and would not notice."""
    _, meta = heads._grid("to heads", draw(0, 1, 16 * c, dtype=torch.float16), 1, 2 * c, c, pairs)
    assert meta["VECTOR"] == vector


def test_heads_of_no_tokens() -> None:
    features = heads.to_heads(draw(0, 0, 240), 1, 3, None, (0, 5), 0)
    assert [feature.shape for feature in features] == [(0, 5, 1, 80)] * 3
    heads.to_packed(features, draw(0, 0, 240), 0)


# --- attention


def attention_definition(
    qkv: Tensor, bias: Tensor | None, heads: int, shapes: Shapes
) -> tuple[Tensor, Tensor]:
    """Packed output and log-sum-exp, batch by batch."""
    qkv = add_invariant(qkv, bias)
    m = qkv.shape[1] // 24
    outs, sums = [], []
    for batch in unpack(qkv, shapes):
        blocks = batch.split([3 * m] * 4 + [6 * m] * 2, dim=2)
        q, k, v = torch.cat([b.unflatten(2, (3, heads, -1)) for b in blocks], dim=-1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        c = m // heads
        pieces = out.split([c] * 4 + [2 * c] * 2, dim=-1)
        outs.append(torch.cat([p.flatten(2) for p in pieces], dim=-1))
        sums.append(scores.logsumexp(-1).flatten())
    return pack(outs)[0], torch.cat(sums)


@pytest.mark.parametrize("dtype", MATRIX_DTYPES)
@pytest.mark.parametrize(
    ("shapes", "heads", "c", "with_bias"),
    [
        (((1, 1),), 1, 8, True),
        (((2, 7), (0, 3), (3, 2)), 2, 8, True),
        (((1, 37),), 2, 8, False),
        (((1, 64),), 1, 8, True),
        (((1, 197), (1, 37)), 1, 8, True),
        (((1, 3), (1, 7)), 2, 16, True),
        (((1, 83),), 1, 16, False),
    ],
)
def test_attention(shapes: Shapes, heads: int, c: int, with_bias: bool, dtype: torch.dtype) -> None:
    m, tokens = heads * c, sum(number * length for number, length in shapes)
    qkv, dout = draw(0, tokens, 24 * m, dtype=dtype), draw(1, tokens, 8 * m, dtype=dtype)
    bias = draw(2, 3 * m) if with_bias else None
    qkv64, bias64 = exact(qkv, bias)
    out64, lse64 = attention_definition(qkv64, bias64, heads, shapes)
    out64.backward(dout.double())

    out, lse = attention.attention_forward(qkv, bias, heads, shapes)
    assert out.dtype == dtype
    assert_near(out, out64, dtype, ulps=8 if dtype == torch.float32 else 2)
    if bias is not None:
        seen = bias64.detach().clone()
        seen[m : 2 * m] = 0
        _, lse64 = attention_definition(qkv64, seen, heads, shapes)
    assert_near(lse, lse64, dtype, ulps=8 if dtype == torch.float32 else 2)

    dqkv = attention.attention_backward(dout, qkv, bias, out, lse, heads, shapes)
    assert dqkv.dtype == dtype
    assert_near(dqkv, qkv64.grad, dtype, ulps=32 if dtype == torch.float32 else 4)
    if bias is not None:
        assert_near(dqkv[:, : 3 * m].double().sum(0), bias64.grad, dtype, ulps=32)


def test_attention_where_padding_would_overflow() -> None:
    """Scores near -380 and b_q · k beyond the range of exp: rows past the end must still weigh nothing."""
    tokens, c = 7, 8
    qkv, dout, shapes = draw(0, tokens, 24 * c), draw(1, tokens, 8 * c, dtype=torch.float16), ((1, tokens),)
    bias = torch.zeros(3 * c, device=DEVICE)
    for block in qkv.split([3 * c] * 4 + [6 * c] * 2, dim=1):
        part = block.shape[1] // 3
        block[..., :part] += 6
        block[..., part : 2 * part] -= 10
    bias[:c] = -10
    qkv = qkv.half()
    qkv64, bias64 = exact(qkv, bias)
    out64, lse64 = attention_definition(qkv64, bias64, 1, shapes)
    out64.backward(dout.double())
    out, lse = attention.attention_forward(qkv, bias, 1, shapes)
    dqkv = attention.attention_backward(dout, qkv, bias, out, lse, 1, shapes)
    assert lse.max() < -100
    for actual, expected in ((out, out64), (lse, lse64), (dqkv, qkv64.grad)):
        assert_near(actual, expected, torch.float16, ulps=8)


@pytest.mark.parametrize("tiles", [attention.FORWARD_TILES, attention.QUERY_TILES, attention.KEY_TILES])
def test_tile_pads_least(tiles: attention.Tiles) -> None:
    for dim, choice in tiles.items():
        for rows in (1, 64, 196, 197, 257, 1025):
            programs, meta = attention._tile("", tiles, dim, rows, torch.device(DEVICE))
            assert programs * meta["BLOCK"] == min(triton.cdiv(rows, tile[0]) * tile[0] for tile in choice)
            rest = rows % meta["STEP"]
            assert rest <= meta["TAIL"] < 2 * max(rest, 9)


@pytest.mark.parametrize("tiles", [attention.FORWARD_TILES, attention.QUERY_TILES])
def test_local_crops_are_not_padded_to_global_ones(tiles: attention.Tiles) -> None:
    for rows, block in ((37, 64), (197, 128)):
        assert attention._tile("", tiles, 64, rows, torch.device(DEVICE))[1]["BLOCK"] == block


def test_attention_rejects_other_head_sizes() -> None:
    with pytest.raises(ValueError, match="size 80, expected one of 64, 128"):
        attention.attention_forward(draw(0, 1, 240), None, 1, ((1, 1),))


@pytest.mark.parametrize("dtype", MATRIX_DTYPES)
@pytest.mark.parametrize(
    ("shapes", "heads", "with_bias"),
    [
        (((2, 1),), 2, True),
        (((1, 17), (2, 5)), 3, True),
        (((1, 64),), 1, False),
        (((2, 83), (1, 0), (1, 7)), 1, False),
        (((1, 257),), 1, True),
    ],
)
def test_attention_of_whole_heads(shapes: Shapes, heads: int, with_bias: bool, dtype: torch.dtype) -> None:
    m, tokens = 10 * heads, sum(number * length for number, length in shapes)
    assert whole_head.takes(max(length for _, length in shapes), 80, torch.device(DEVICE))
    qkv, bias = draw(0, tokens, 24 * m, dtype=dtype), draw(2, 3 * m) if with_bias else None
    expected, _ = attention_definition(*exact(qkv, bias), heads, shapes)
    out = whole_head.attention_whole_head(qkv, bias, heads, shapes)
    assert out.dtype == dtype
    assert_near(out, expected, dtype, ulps=8 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("dtype", MATRIX_DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("number", "length", "heads"), [(2, 1, 2), (3, 5, 1), (2, 37, 3), (1, 64, 1)])
def test_gradients_of_whole_heads(
    number: int, length: int, heads: int, with_bias: bool, dtype: torch.dtype
) -> None:
    """Of a batch that has other tokens before and behind it, which stay as they are."""
    m, tokens, origin = 10 * heads, number * length, 3
    qkv = draw(0, origin + tokens + 2, 24 * m, dtype=dtype)
    dout, bias = draw(1, len(qkv), 8 * m, dtype=dtype), draw(2, 3 * m) if with_bias else None
    own = slice(origin, origin + tokens)
    qkv64, bias64 = exact(qkv[own], bias)
    out64, _ = attention_definition(qkv64, bias64, heads, ((number, length),))
    out64.backward(dout[own].double())

    out = torch.zeros_like(dout)
    whole_head.attention_of_batch(qkv, bias, out, heads, (number, length), origin)
    assert_near(out[own], out64, dtype, ulps=8 if dtype == torch.float32 else 2)
    dqkv = torch.zeros_like(qkv)
    whole_head.gradient_of_batch(dout, qkv, bias, dqkv, heads, (number, length), origin)
    assert_near(dqkv[own], qkv64.grad, dtype, ulps=32 if dtype == torch.float32 else 4)
    for written in (out, dqkv):
        assert not written[:origin].any()
        assert not written[origin + tokens :].any()
    if bias is not None:
        assert_near(dqkv[:, : 3 * m].double().sum(0), bias64.grad, dtype, ulps=32)


def test_attention_of_whole_heads_has_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    assert not whole_head.takes(257, 104, device)
    assert not whole_head.takes(whole_head.MAX_TOKENS + 1, 80, device)
    monkeypatch.setattr(whole_head, "shared_memory", lambda device: 99 * 2**10)
    assert not whole_head.takes(257, 80, device)
    assert whole_head.attention_whole_head(draw(0, 0, 240), None, 1, ((0, 5),)).shape == (0, 80)


def test_batches_pass_through_heads_and_back() -> None:
    """The operators around `scaled_dot_product_attention`, which take and give the batches apart: their gradients."""
    shapes, heads, layout = ((2, 5), (3, 2)), 2, Layout(480)
    qkv, bias, dout = draw(0, 16, 480), draw(1, 60), draw(2, 16, 160)

    def through_heads(qkv: Tensor, bias: Tensor) -> Tensor:
        numbers, lengths = ([*sizes] for sizes in zip(*shapes, strict=True))
        features = split_heads(qkv, bias, heads, numbers, lengths)
        return merge_heads([attend(*features[:3]), attend(*features[3:])])

    def definition(qkv: Tensor, bias: Tensor) -> Tensor:
        return operators.definition(qkv, heads, layout, bias, shapes=shapes)

    results = []
    for function, tensors in ((through_heads, (qkv, bias)), (definition, exact(qkv, bias))):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected, torch.float32, ulps=16)


# --- weight gradient


@pytest.mark.parametrize("dtype", MATRIX_DTYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "tile"),
    [
        (1, 8, 8, (16, 16, 0, 16, 1, 1, 1)),
        (37, 24, 40, (16, 32, 0, 16, 1, 1, 60)),
        (64, 40, 40, (16, 32, 16, 16, 1, 1, 90)),
        (70, 28, 20, (32, 16, 16, 32, 1, 1, 30)),
        (48, 32, 16, (16, 16, 0, 16, 1, 1, 60)),
        (33, 3, 13, (16, 16, 0, 16, 1, 1, 20)),
    ],
)
def test_weight_gradient(
    tokens: int,
    rows: int,
    columns: int,
    tile: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_gradient, "TILE", tile)
    # The rows of both lie apart, and what is between them must not matter.
    grad = draw(0, tokens, 8 * rows + 8, dtype=dtype)
    x = draw(1, tokens, 8 * columns + 16, dtype=dtype)
    grad[:, 8 * rows :] = math.nan
    x[:, 8 * columns :] = math.nan
    grad, x = grad[:, : 8 * rows], x[:, : 8 * columns]
    weight_1, weight_2 = weight_gradient.weight_gradient(grad, x)
    assert weight_1.dtype == weight_2.dtype == dtype
    one = [block.double().unflatten(1, (8, -1)) for block in (grad, x)]
    two = [block[:, 4:].reshape(tokens, 2, -1) for block in one]
    ulps = 8 if dtype == torch.float32 else 1
    assert_near(weight_1, torch.einsum("tbi,tbj->bij", one[0][:, :4], one[1][:, :4]), dtype, ulps)
    assert_near(weight_2, torch.einsum("tbi,tbj->ij", *two)[None], dtype, ulps)
    again = weight_gradient.weight_gradient(grad, x)
    assert all(torch.equal(a, b) for a, b in zip(again, (weight_1, weight_2), strict=True))


@pytest.mark.parametrize("dtype", MATRIX_DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 8), (33, 130), (2500, 60)])
def test_bias_gradient(tokens: int, width: int, dtype: torch.dtype) -> None:
    grad = draw(0, tokens, 8 * width + 8, dtype=dtype)[:, : 8 * width]
    found = weight_gradient.bias_gradient(grad, width, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), grad[:, :width].double().sum(0), rtol=1e-5, atol=1e-4)
    assert weight_gradient.bias_gradient(grad, width, dtype).dtype == dtype


def test_weight_gradient_of_no_tokens() -> None:
    weight_1, weight_2 = weight_gradient.weight_gradient(draw(0, 0, 64), draw(1, 0, 128))
    assert weight_1.shape == (4, 8, 16)
    assert weight_2.shape == (1, 16, 32)
    assert not weight_1.any()
    assert not weight_2.any()


# ---------------------------------------------------------------------- conversion


@pytest.mark.parametrize("number", [1, 4, 6])
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float32, torch.float16), (torch.float16, torch.float32)]
)
def test_tensors_in_another_dtype(number, before, after):
    sizes = [(4, 96, 32), (1, 192, 64), (5,), (0, 3), (convert.TILE[0],), (convert.TILE[0] + 1,)]
    tensors = [draw(i, *size, dtype=before) for i, size in enumerate(sizes[:number])]
    found = convert.convert(tensors, after)
    assert len(found) == number
    for ours, source in zip(found, tensors, strict=True):
        assert torch.equal(ours, source.to(after))
        assert ours.dtype == after


def test_gradients_of_tensors_in_another_dtype() -> None:
    """They come back in the dtype of the tensors; one that was not used has none."""
    tensors = [draw(i, 3, 5).requires_grad_() for i in range(3)]
    found = precision._convert(tensors, torch.float16)
    weights = [draw(7 + i, 3, 5).half() for i in range(2)]
    sum((x * w).sum() for x, w in zip(found, weights, strict=False)).backward()
    for tensor, weight in zip(tensors, weights, strict=False):
        assert torch.equal(tensor.grad, weight.float())
    assert tensors[2].grad is None or not tensors[2].grad.any()
