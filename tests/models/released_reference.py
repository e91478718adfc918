"""The authors' released models, evaluated straight from a checkpoint's state dict.

An oracle for the checkpoint converter. It shares no code with quickvit and none with the released
code base: it was written from a description of what that code computes, and was compared with it once.

Tokens of the octic part are one tensor (B, N, 8, c) with c = C/8 and the slots

    0 A1 | 1 A2 | 2 B1 | 3 B2 | 4 E11 | 5 E12 | 6 E21 | 7 E22

where Eij is component j of copy i of the two-dimensional irrep. Flattened, this is the order in which
a released hybrid model hands its channels to the standard blocks. `E` weights of a checkpoint act on
each component by itself, over the channels (copy 1, copy 2).
"""

from collections.abc import Mapping
from math import sqrt
from typing import Literal, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["deit3", "dinov2"]
Family = Literal["h8", "i8"]
Invariant = Literal["power_spectrum", "polynomial"]
State = Mapping[str, Tensor]

OCTIC_NORM_EPS, NORM_EPS = 1e-5, 1e-6
ONE_DIMENSIONAL = ("A1", "A2", "B1", "B2")
LIFTS = (*ONE_DIMENSIONAL, "E_left", "E_right")

# Slots to group elements; times sqrt(2)/4 this is the paper's Q_reg, an orthogonal matrix.
FOURIER_SIGNS = "+++++++- ++--+--- ++++---+ ++---+++ +-+--+-- +--+--+- +-+-+-++ +--+++-+"

# A quarter (top left) becomes quarter + sign * transpose, then is mirrored to both sides with a parity.
QUARTER_SYMMETRY = {"A1": (1, 1), "A2": (-1, -1), "B1": (-1, 1), "B2": (1, -1)}

# Generators of the invariant ring in the order of the checkpoint; a digit is a slot.
POLYNOMIALS = (
    "0 66+77 46+57 44+55 33 22 11 367 356+347 345 266-277 246-257 244-255 156-147 123 "
    "6666+7777 4666+5777 4466+5577 4446+5557 4444+5555 2356-2347 1366-1377 1346-1357 1344-1355 "
    "1267 1256+1247 1245 16667-16777 15666-14777 14566-14577 14456-14557 14445-14555"
)


class Outputs(TypedDict):
    """What `released_forward` returns, tokens (B, 1 + N, C) and octic ones in slot order."""

    embedding: Tensor  # before the first block
    tokens: list[Tensor]  # after each block
    transition: Tensor  # before the first standard block
    norm: Tensor  # after the last layer norm
    logits: NotRequired[Tensor]  # where the checkpoint has a head


def released_forward(
    state: State,
    images: Tensor,
    *,
    kind: Kind,
    family: Family,
    heads: int,
    invariant: Invariant = "power_spectrum",
    masks: Tensor | None = None,
) -> Outputs:
    """Evaluate a released state dict in inference mode; `masks` (B, N) are DINOv2's masked patches."""
    x = _embed(state, images, kind, masks)
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    octic_depth = sum(f"blocks.{i}.norm1.scaling.beta" in state for i in range(depth))
    embedding, tokens = x.flatten(2), []
    for i in range(octic_depth):
        x = _octic_block(state, f"blocks.{i}", x, kind, heads)
        tokens.append(x.flatten(2))
    transition = x.flatten(2)
    if family == "i8":
        transition = _linear(state, "invariant_proj", _invariants(x, invariant))
    y = transition
    for i in range(octic_depth, depth):
        y = _standard_block(state, f"blocks.{i}", y, kind, heads)
        tokens.append(y)
    norm = _norm(state, "norm", y)
    outputs: Outputs = {"embedding": embedding, "tokens": tokens, "transition": transition, "norm": norm}
    if "head.weight" in state:
        outputs["logits"] = _linear(state, "head", norm[:, 0])
    return outputs


def _embed(state: State, images: Tensor, kind: Kind, masks: Tensor | None) -> Tensor:
    """Patches, then the mask token, then positions, then the class token (which has no position)."""
    kernels = _unfold([state[f"patch_embed.lift8.conv_{name}.weight"] for name in LIFTS])
    gains = images.new_tensor([sqrt(2) / 4] * 4 + [1 / 2] * 4)
    patch = kernels[0].shape[-1]
    x = torch.stack([F.conv2d(images, g * k, stride=patch) for g, k in zip(gains, kernels, strict=True)], 1)
    grid, x = x.shape[-2:], x.permute(0, 3, 4, 1, 2).flatten(1, 2)
    x[:, :, 0] += state["patch_embed.lift8.conv_A1.bias"]
    if masks is not None:
        mask_token = torch.cat([state[f"mask_token.{s}"] for s in range(8)])
        x = torch.where(masks[..., None, None], mask_token, x)
    position = torch.stack(_unfold([state[f"pos_embed.{i}"].permute(2, 0, 1) for i in range(6)]))
    if position.shape[-2:] != grid:  # only the DINOv2 models as they were trained could do this
        position = F.interpolate(position, size=grid, mode="bicubic")
    x = x + position.flatten(2).permute(2, 0, 1)
    if kind == "deit3":
        one = torch.stack([state[f"cls_token.{s}"] for s in range(4)], 2)
        cls_token = _join(one, state["cls_token.4"])
    else:
        cls_token = torch.stack([state[f"cls_token.{s}"] for s in range(8)], 2)
    return torch.cat([cls_token.expand(len(x), -1, -1, -1), x], 1)


def _unfold(quarters: list[Tensor]) -> list[Tensor]:
    """Six quarters (..., P/2, P/2) to eight maps (..., P, P), one per slot, row 0 at the top."""

    def mirror(quarter: Tensor, down: int, across: int) -> Tensor:
        half = torch.cat([quarter, down * quarter.flip(-2)], -2)
        return torch.cat([half, across * half.flip(-1)], -1)

    maps = []
    for quarter, name in zip(quarters[:4], ONE_DIMENSIONAL, strict=True):
        sign, parity = QUARTER_SYMMETRY[name]
        maps.append(mirror(quarter + sign * quarter.mT, parity, parity))
    for quarter in quarters[4:]:
        # The second component is the first one turned anti-clockwise by a quarter.
        maps += [mirror(quarter, 1, -1), mirror(-quarter.mT, -1, 1)]
    return maps


def _octic_block(state: State, name: str, x: Tensor, kind: Kind, heads: int) -> Tensor:
    scales = ("gamma_1", "gamma_2") if kind == "deit3" else ("ls1", "ls2")
    y = _octic_attention(state, f"{name}.attn", _octic_norm(state, f"{name}.norm1.scaling", x), heads)
    x = x + _octic_scale(state, f"{name}.{scales[0]}", y)
    y = _octic_linear(state, f"{name}.mlp.fc1", _octic_norm(state, f"{name}.norm2.scaling", x))
    y = _octic_linear(state, f"{name}.mlp.fc2", _octic_gelu(y))
    return x + _octic_scale(state, f"{name}.{scales[1]}", y)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Slots (B, N, 8, c) to one-dimensional irreps (B, N, 4, c) and components of E (B, N, 2, 2c)."""
    return x[:, :, :4], x[:, :, 4:].unflatten(2, (2, 2)).transpose(2, 3).flatten(3)


def _join(one: Tensor, two: Tensor) -> Tensor:
    return torch.cat([one, two.unflatten(3, (2, -1)).transpose(2, 3).flatten(2, 3)], 2)


def _octic_linear(state: State, name: str, x: Tensor) -> Tensor:
    one, two = _split(x)
    weight = torch.stack([state[f"{name}.lin_{irrep}.weight"] for irrep in ONE_DIMENSIONAL])
    one = torch.einsum("bnsi,soi->bnso", one, weight)
    one = torch.cat([one[:, :, :1] + state[f"{name}.lin_A1.bias"], one[:, :, 1:]], 2)
    return _join(one, two @ state[f"{name}.lin_E.weight"].mT)


def _octic_scale(state: State, name: str, x: Tensor) -> Tensor:
    one, two = _split(x)
    alpha = torch.stack([state[f"{name}.alpha_{irrep}"] for irrep in ONE_DIMENSIONAL])
    return _join(one * alpha, two * state[f"{name}.alpha_E"])


def _octic_norm(state: State, name: str, x: Tensor) -> Tensor:
    """Centre each irrep, divide by the square root of (v_A1 + v_A2 + v_B1 + v_B2 + (v_E1 + v_E2)/2 + ε)/8."""
    one, two = (part - part.mean(-1, keepdim=True) for part in _split(x))
    total = one.square().mean(-1).sum(-1) + two.square().mean(-1).mean(-1)
    deviation = ((total + OCTIC_NORM_EPS) / 8).sqrt()[..., None, None]
    y = _octic_scale(state, name, _join(one, two) / deviation)
    return torch.cat([y[:, :, :1] + state[f"{name}.beta"], y[:, :, 1:]], 2)


def _octic_gelu(x: Tensor) -> Tensor:
    signs = [[1.0 if sign == "+" else -1.0 for sign in row] for row in FOURIER_SIGNS.split()]
    fourier = x.new_tensor(signs) * (sqrt(2) / 4)
    regular = F.gelu(torch.einsum("gs,bnsc->bngc", fourier, x))
    return torch.einsum("gs,bngc->bnsc", fourier, regular)


def _octic_attention(state: State, name: str, x: Tensor, heads: int) -> Tensor:
    """A head sees (A1, A2, B1, B2, E first component, E second component)."""
    parts = _split(_octic_linear(state, f"{name}.qkv", x))
    q, k, v = torch.cat(
        [part.unflatten(3, (3, heads, -1)).permute(3, 0, 4, 1, 2, 5).flatten(4) for part in parts], -1
    )
    one, two = F.scaled_dot_product_attention(q, k, v).chunk(2, -1)  # (B, H, N, C / 2H) each
    one = one.unflatten(3, (4, -1)).permute(0, 2, 3, 1, 4).flatten(3)
    two = two.unflatten(3, (2, -1)).permute(0, 2, 3, 1, 4).flatten(3)
    return _octic_linear(state, f"{name}.proj", _join(one, two))


def _invariants(x: Tensor, invariant: Invariant) -> Tensor:
    """Invariant features, feature by feature: (B, N, K c)."""
    if invariant == "power_spectrum":
        copies = x[:, :, 4:].unflatten(2, (2, 2)).norm(dim=3)
        return torch.cat([x[:, :, :1], x[:, :, 1:4].abs(), copies], 2).flatten(2)
    slots = x.unbind(2)

    def monomial(digits: str) -> Tensor:
        return torch.stack([slots[int(digit)] for digit in digits]).prod(0)

    features = []
    for polynomial in POLYNOMIALS.split():
        sign = -1 if "-" in polynomial else 1
        first, *second = polynomial.replace("-", "+").split("+")
        features.append(monomial(first) + sum(sign * monomial(digits) for digits in second))
    return torch.cat(features, -1)


def _standard_block(state: State, name: str, x: Tensor, kind: Kind, heads: int) -> Tensor:
    scales = ("gamma_1", "gamma_2") if kind == "deit3" else ("ls1.gamma", "ls2.gamma")
    qkv = _linear(state, f"{name}.attn.qkv", _norm(state, f"{name}.norm1", x))
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + state[f"{name}.{scales[0]}"] * _linear(state, f"{name}.attn.proj", y)
    y = F.gelu(_linear(state, f"{name}.mlp.fc1", _norm(state, f"{name}.norm2", x)))
    return x + state[f"{name}.{scales[1]}"] * _linear(state, f"{name}.mlp.fc2", y)


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], NORM_EPS)


def random_released_state(
    kind: Kind,
    family: Family,
    *,
    width: int,
    depth: int,
    octic_depth: int,
    heads: int,
    patch: int,
    grid: int,
    num_classes: int = 0,
    invariant: Invariant = "power_spectrum",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """A state dict with the names and shapes of a released one and every learnt value random.

    `grid` is the number of patches per side. Only DeiT III checkpoints have a head, where `num_classes`
    is positive. Class and mask tokens are zero outside A1, as they are in every released model: those
    entries are stored but were never trained.
    """
    if width % (8 * heads) or patch % 2 or grid % 2 or not 0 <= octic_depth <= depth:
        raise ValueError(f"no released layout for {width=} {heads=} {patch=} {grid=} {octic_depth=} {depth=}")
    generator = torch.Generator().manual_seed(seed)
    c, state = width // 8, {}

    def put(name: str, *shape: int, mean: float = 0.0, spread: float = 0.3) -> None:
        state[name] = mean + spread * torch.randn(*shape, generator=generator, dtype=dtype)

    def put_linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        put(f"{name}.weight", rows, columns, spread=columns**-0.5)
        if bias:
            put(f"{name}.bias", rows)

    def put_octic(name: str, mean: float) -> None:
        for irrep in (*ONE_DIMENSIONAL, "E"):
            put(f"{name}.alpha_{irrep}", 2 * c if irrep == "E" else c, mean=mean)

    layers = (("attn.qkv", 3, 1), ("attn.proj", 1, 1), ("mlp.fc1", 4, 1), ("mlp.fc2", 1, 4))
    for i in range(4 if kind == "deit3" else 8):
        put(f"cls_token.{i}", 1, 1, c, spread=float(i == 0))
        if kind == "dinov2":
            put(f"mask_token.{i}", 1, c, spread=float(i == 0))
    if kind == "deit3":
        put("cls_token.4", 1, 1, 2, 2 * c, spread=0.0)
    for i in range(6):
        put(f"pos_embed.{i}", grid // 2, grid // 2, c)
    for name in LIFTS:
        put(f"patch_embed.lift8.conv_{name}.weight", c, 3, patch // 2, patch // 2, spread=1 / patch)
    put("patch_embed.lift8.conv_A1.bias", c)
    for i in range(depth):
        for n in (1, 2):
            scale = f"blocks.{i}." + (f"gamma_{n}" if kind == "deit3" else f"ls{n}")
            if i < octic_depth:
                put_octic(f"blocks.{i}.norm{n}.scaling", 1.0)
                put(f"blocks.{i}.norm{n}.scaling.beta", c)
                put_octic(scale, 0.5)
            else:
                put(f"blocks.{i}.norm{n}.weight", width, mean=1.0)
                put(f"blocks.{i}.norm{n}.bias", width)
                put(scale if kind == "deit3" else f"{scale}.gamma", width, mean=0.5)
        for layer, rows, columns in layers:
            if i < octic_depth:
                for irrep in (*ONE_DIMENSIONAL, "E"):
                    m = 2 * c if irrep == "E" else c
                    put_linear(f"blocks.{i}.{layer}.lin_{irrep}", rows * m, columns * m, irrep == "A1")
            else:
                put_linear(f"blocks.{i}.{layer}", rows * width, columns * width)
    if family == "i8":
        put_linear("invariant_proj", width, {"power_spectrum": 6, "polynomial": 32}[invariant] * c)
    put("norm.weight", width, mean=1.0)
    put("norm.bias", width)
    if kind == "deit3" and num_classes > 0:
        put_linear("head", num_classes, width)
    return state
