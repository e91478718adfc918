"""What the symmetry does to weights: the matrix of a linear layer, and the patch filters by irrep."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import unfold

from quickvit.group import Irrep, act_on_image, isotypic_to_regular
from quickvit.layers import OcticLift, OcticLinear
from quickvit.models import QuickVisionTransformer

SUBSCRIPTS = "₁₂"
# The paper's figure of learned filters shows so many principal components of each irrep.
COMPONENTS = 16


def dense_weight(layer: OcticLinear, *, regular: bool = False) -> Tensor:
    """The matrix W [F, C] of a layer without its bias in the packed basis, or Q_reg W Q_regᵀ in the regular one."""
    basis = torch.eye(layer.in_layout.channels, dtype=layer.weight_1.dtype, device=layer.weight_1.device)
    with torch.no_grad():
        weight = (layer(basis) - layer(torch.zeros_like(basis))).T.double().cpu()
    if not regular:
        return weight
    group = layer.in_layout.group
    return isotypic_to_regular(isotypic_to_regular(weight, group).T, group).T


def principal_filters(
    model: QuickVisionTransformer, images: Tensor | None = None, count: int = COMPONENTS
) -> dict[str, Tensor]:
    """The first principal components [n, in, P, P] of the filters of each irrep; those of E₁ and E₂ are pairs.

    Channels of one irrep may be mixed at will without harm to the symmetry, so their components are of its type too.
    A filter is as good as its negative, so there is no mean to subtract.

    images [N, in, H, W] weigh what a filter looks for by how much of it there is in them. Images are smooth, and the
    rest of a filter stays almost as random as it began.
    """
    lift = model.patch_embed
    if not isinstance(lift, OcticLift):
        raise ValueError(
            "filters come by irrep only where the lift is octic; this model was made with lift='free'"
        )
    kernel = lift.kernel().detach().double().cpu()
    if images is not None:
        poses = torch.cat([act_on_image(images, g) for g in lift.layout.group.elements])
        kernel = _weighed(kernel, poses.double().cpu())
    found: dict[str, Tensor] = {}
    for irrep in lift.layout.group.irreps:
        blocks = [block for block in lift.layout.blocks if block.irrep == irrep]
        filters = torch.stack([kernel[block.slice] for block in blocks], dim=1)
        _, sizes, directions = torch.linalg.svd(filters.flatten(1), full_matrices=False)
        directions = directions[: min(count, int((sizes > 1e-9 * sizes[0]).sum()))]
        for component, parts in enumerate(directions.unflatten(1, filters.shape[1:]).unbind(1)):
            found[component_name(irrep, component)] = parts
    return found


def _weighed(kernel: Tensor, images: Tensor) -> Tensor:
    """K M^½, with M the mean of ppᵀ over all patches p of the images."""
    size = kernel.shape[-1]
    patches = unfold(images, size, stride=size).mT.flatten(0, 1)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return (kernel.flatten(1) @ root).view_as(kernel)


def component_name(irrep: Irrep, component: int) -> str:
    """How a component of an irrep is called: A1, … E₁, E₂."""
    return irrep.name if irrep.dim == 1 else f"{irrep.name}{SUBSCRIPTS[component]}"
