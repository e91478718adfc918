"""Invariants: maps from steerable to invariant features.

Each ψ takes packed tensors [..., C] to [..., K] with ψ(ρ(g)x) = ψ(x); `OcticInvariant` follows it with one linear
map back to C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.group.fourier import exact


class LinearInvariant(nn.Module):
    """ψ(x) = x_A1."""

    def __init__(self, dim: int, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(dim, group)
        self.out_features = self.layout.copies

    def forward(self, x: Tensor) -> Tensor:
        """Take the invariant irrep."""
        return x[..., self.layout.invariant]


class PowerSpectrum(nn.Module):
    """ψ(x) = (x_A1, |x_A2|, |x_B1|, |x_B2|, ‖x_E1‖, ‖x_E2‖)."""

    def __init__(self, dim: int, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(dim, group)
        self.out_features = self.layout.gains

    def forward(self, x: Tensor) -> Tensor:
        """Magnitude of every irrep channel; A1 keeps its sign."""
        n2, split = self.layout.group.num_two_dim, self.layout.one_dim_channels
        parts = [x[..., self.layout.invariant], x[..., self.layout.copies : split].abs()]
        if n2:
            # Half precision has neither the squares of small numbers nor those of large ones.
            wide = x[..., split:].to(torch.promote_types(x.dtype, torch.float32))
            first, second = wide.unflatten(-1, (n2, 2, -1)).unbind(-2)
            # The square root has no gradient at 0; clamped to the smallest number, it has the gradient 0.
            power = (first.square() + second.square()).clamp_min(torch.finfo(wide.dtype).tiny)
            parts.append(power.sqrt().flatten(-2).to(x.dtype))
        return torch.cat(parts, dim=-1)


class PolynomialInvariant(nn.Module):
    """ψ(x) = a list of invariant polynomials in the eight sub-tokens of D8, in the paper's order."""

    def __init__(self, dim: int, group: DihedralGroup, basis: Callable[..., list[Tensor]]) -> None:
        super().__init__()
        if group != D8:
            raise ValueError(f"the {basis.__name__} invariant is known for D8 only, not for {group}")
        self.basis = basis
        self.out_features = len(basis(*torch.zeros(8, 1, device="cpu"))) * Layout(dim, group).copies

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate all polynomials."""
        a1, a2, b1, b2, e11, e21, e12, e22 = x.chunk(8, dim=-1)
        return torch.cat(self.basis(a1, a2, b1, b2, e11, e12, e21, e22), dim=-1)

    def extra_repr(self) -> str:
        """Name of the basis."""
        return self.basis.__name__


def _quadratic(e11: Tensor, e12: Tensor, e21: Tensor, e22: Tensor) -> tuple[list[Tensor], ...]:
    """The quadratic forms of two E pairs (22, 12 and 11) that transform like A1, B2 and B1."""
    a1 = [e21**2 + e22**2, e11 * e21 + e12 * e22, e11**2 + e12**2]
    b2 = [e21 * e22, e12 * e21 + e11 * e22, e11 * e12]
    b1 = [e21**2 - e22**2, e11 * e21 - e12 * e22, e11**2 - e12**2]
    return a1, b2, b1


def triple_correlation(
    a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor, e11: Tensor, e12: Tensor, e21: Tensor, e22: Tensor
) -> list[Tensor]:
    """A basis of the invariant polynomials of degree three: K = 15."""
    like_a1, like_b2, like_b1 = _quadratic(e11, e12, e21, e22)
    return [
        a1**3,
        *(a1 * q for q in like_a1),
        a1 * b2**2,
        a1 * b1**2,
        a1 * a2**2,
        *(b2 * q for q in like_b2),
        *(b1 * q for q in like_b1),
        a2 * (e12 * e21 - e11 * e22),
        a2 * b1 * b2,
    ]


def polynomial(
    a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor, e11: Tensor, e12: Tensor, e21: Tensor, e22: Tensor
) -> list[Tensor]:
    """Generators of the ring of invariant polynomials, of degrees one to five: K = 32."""
    like_a1, like_b2, like_b1 = _quadratic(e11, e12, e21, e22)
    like_a2 = e12 * e21 - e11 * e22
    return [
        a1,
        *like_a1,
        b2**2,
        b1**2,
        a2**2,
        *(b2 * q for q in like_b2),
        *(b1 * q for q in like_b1),
        a2 * like_a2,
        a2 * b1 * b2,
        *(e11**i * e21 ** (4 - i) + e12**i * e22 ** (4 - i) for i in range(5)),
        b1 * b2 * like_a2,
        *(a2 * b2 * q for q in like_b1),
        *(a2 * b1 * q for q in like_b2),
        a2 * (e21**3 * e22 - e21 * e22**3),
        a2 * (e12 * e21**3 - e11 * e22**3),
        a2 * e11 * e12 * (e21**2 - e22**2),
        a2 * e11 * e12 * (e11 * e21 - e12 * e22),
        a2 * (e11**3 * e12 - e11 * e12**3),
    ]


class MaxFilter(nn.Module):
    """ψ(x)_k = max_g ⟨y_k, ρ(g)x⟩ for 2C learned templates y."""

    def __init__(self, dim: int, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(dim, group)
        self.out_features = 2 * dim
        self.templates = nn.Parameter(torch.empty(2 * dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Templates of about unit norm."""
        nn.init.normal_(self.templates, std=self.layout.channels**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Best match of each template over all poses of x."""
        order = self.layout.group.order
        actions = _actions(order, self.templates)
        poses = actions.mT[:, None] @ self.templates.unflatten(-1, (order, -1))
        best: Tensor | None = None
        for templates in poses.flatten(-2):
            match = nn.functional.linear(x, templates)
            best = match if best is None else torch.maximum(best, match)
        assert best is not None
        return best


class Canonical(nn.Module):
    """ψ(x) = ρ(g*)x with g* = argmax_g ⟨y, ρ(g)x⟩ for one learned template y.

    The argmax has no gradient; the template learns through the softmax of the same scores (straight-through).
    """

    def __init__(self, dim: int, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(dim, group)
        self.out_features = dim
        self.template = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A template of about unit norm."""
        nn.init.normal_(self.template, std=self.layout.channels**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Turn each token into its canonical pose."""
        order = self.layout.group.order
        # In half precision scores would often be equal, and the choice depend on the pose that is shown.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        actions = _actions(order, wide)
        with exact(wide):
            templates = (actions.mT @ self.template.to(wide).unflatten(-1, (order, -1))).flatten(-2)
            scores = nn.functional.linear(wide, templates)
        # one_hot would look at values, which vmap does not allow.
        choice = (scores.argmax(-1, keepdim=True) == torch.arange(order, device=x.device)).to(x.dtype)
        if torch.is_grad_enabled():
            soft = scores.softmax(-1).to(x.dtype)
            choice = choice + (soft - soft.detach())
        pose = torch.einsum("...g,gij->...ij", choice, actions.to(x.dtype))
        return (pose @ x.unflatten(-1, (order, -1))).flatten(-2)


def _actions(order: int, like: Tensor) -> Tensor:
    """ρ(g) on the sub-tokens of every block, for all elements: [|G|, |G|, |G|].

    Not a buffer, which would have to be made again after `to_empty`.
    """
    # What is neither is a stand-in for a tensor, of a model that is exported; it must not be kept.
    ordinary = type(like) in (Tensor, nn.Parameter)
    kept = torch.compiler.is_dynamo_compiling() or ordinary
    return (_kept_actions if kept else _new_actions)(order, like.device, like.dtype)


@torch.compiler.assume_constant_result
def _kept_actions(order: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _cached_actions(order, device, dtype)


def _new_actions(order: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    layout = Layout(order, DihedralGroup(order))
    with torch.inference_mode(False):
        return torch.stack([layout.action_matrix(g) for g in layout.group.elements]).to(device, dtype)


_cached_actions = cache(_new_actions)


Invariant = LinearInvariant | PowerSpectrum | PolynomialInvariant | MaxFilter | Canonical
INVARIANTS: dict[str, Callable[[int, DihedralGroup], Invariant]] = {
    "power_spectrum": PowerSpectrum,
    "polynomial": partial(PolynomialInvariant, basis=polynomial),
    "triple_correlation": partial(PolynomialInvariant, basis=triple_correlation),
    "linear": LinearInvariant,
    "max_filter": MaxFilter,
    "canonical": Canonical,
}
"""The invariants by their names: width and group → module."""


class OcticInvariant(nn.Module):
    """An invariant followed by one linear map: steerable [..., C] → invariant [..., C]."""

    def __init__(self, dim: int, invariant: str = "power_spectrum", group: DihedralGroup = D8) -> None:
        super().__init__()
        if invariant not in INVARIANTS:
            raise ValueError(f"unknown invariant {invariant!r}; expected one of {', '.join(INVARIANTS)}")
        psi = INVARIANTS[invariant](dim, group)
        self.invariant = psi
        self.proj = nn.Linear(psi.out_features, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights that map features of unit variance to unit variance."""
        nn.init.trunc_normal_(self.proj.weight, std=self.proj.in_features**-0.5)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Make every token invariant."""
        return self.proj(self.invariant(x))
