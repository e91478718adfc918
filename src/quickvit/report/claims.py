"""The paper's claims: sentence, place, the table here that has the numbers, and the rule that judges."""

from __future__ import annotations

from dataclasses import dataclass

from quickvit.report.results import Results
from quickvit.report.rules import (
    PHOTOGRAPHS,
    Finding,
    Rule,
    best,
    blood_cells,
    cheap_gelu,
    cheaper_and_as_good,
    compared,
    crossing,
    faster,
    full_precision,
    half_depth,
    hybrid_saving,
    large_scale,
    linear_saving,
    loses,
    memory_falls,
    model_saving,
    speed_grows,
    unchanged,
)
from quickvit.report.tables import frozen
from quickvit.report.tables.measures import tilted, top1, turned
from quickvit.report.tables.speed import FORWARD, TRAINING

# What rounding may change of an invariant model's accuracy, and what the paper calls negligible, in points.
ROUNDING, NEGLIGIBLE = 0.1, 1.0
OCTIC = ("d8", "h8", "i8")


@dataclass(frozen=True)
class Claim:
    """A sentence, the paper's label, the id of our table, and the rule."""

    sentence: str
    label: str
    table: str
    rule: Rule


CLAIMS = (
    Claim(
        "An octic linear layer needs 5.33× fewer FLOPs and 8× fewer weights.",
        "fig:linear_layer",
        "dihedral-groups",
        linear_saving,
    ),
    Claim(
        "The FLOP savings of whole models grow with their size.",
        "tab:vit-scale",
        "compute-scaling",
        model_saving,
    ),
    Claim(
        "i8 and h8 of size H need 40 % fewer FLOPs than ViT.",
        "fig:computational_savings",
        "imagenet",
        hybrid_saving,
    ),
    Claim(
        "For one image, octic layers have the higher arithmetic intensity from C ≈ 3200 on.",
        "appendix:arithmetic-intensity",
        "linear-layers",
        crossing,
    ),
    Claim(
        "Octic models are faster than ViTs of their size on a GPU.",
        "tab:vit-scale",
        "forward-speed",
        faster("model", FORWARD, OCTIC),
    ),
    Claim("Their speed-up grows with their size.", "tab:vit-scale", "forward-speed", speed_grows),
    Claim(
        "They train faster, too.", "tab:training-speed", "training-speed", faster("train", TRAINING, OCTIC)
    ),
    Claim(
        "They need less memory for inference, the larger they are the less.",
        "tab:vit-scale",
        "memory",
        memory_falls,
    ),
    Claim(
        "In full precision octic layers gain more than in half precision.",
        "tab:linear-performance",
        "linear-layers",
        full_precision,
    ),
    Claim(
        "GELU through the regular domain costs a few per cent.",
        "tab:non-linearity-runtime",
        "gelu",
        cheap_gelu,
    ),
    Claim(
        "h8 of size H reaches 85.0 % on ImageNet-1K, beside 84.6 % of ViT.",
        "tab:deit",
        "imagenet",
        large_scale,
    ),
    Claim(
        "h8 matches the accuracy of ViT at fewer FLOPs.",
        "tab:deit",
        "classification",
        cheaper_and_as_good("h8"),
    ),
    Claim(
        "i8 matches the accuracy of ViT at fewer FLOPs.",
        "tab:deit",
        "classification",
        cheaper_and_as_good("i8"),
    ),
    Claim(
        "On upright photographs h8 is more accurate than i8.",
        "sec:nbr_octic_blocks",
        "classification",
        compared("families", "h8", "i8", top1, better=True, on=PHOTOGRAPHS),
    ),
    Claim(
        "i8 loses nothing when images are turned by 90°.",
        "tab:deit",
        "classification",
        unchanged("families", "i8", turned, ROUNDING),
    ),
    Claim("ViT loses accuracy on turned photographs.", "tab:deit", "classification", loses("vit")),
    Claim("h8, which breaks the symmetry, does so too.", "tab:deit", "classification", loses("h8")),
    Claim(
        "i8 loses less than ViT when images are turned by 45°.",
        "tab:rotation-error",
        "rotation-45",
        compared("families", "i8", "vit", tilted, better=True),
    ),
    Claim(
        "Frozen features of h8 are as good as those of ViT.",
        "tab:dinov2",
        "frozen-features",
        compared(frozen.STUDY, "h8", "vit", frozen.neighbours, better=False),
    ),
    Claim(
        "Frozen features of i8 are as good as those of ViT.",
        "tab:dinov2",
        "frozen-features",
        compared(frozen.STUDY, "i8", "vit", frozen.neighbours, better=False),
    ),
    Claim("i8 is better than ViT in most scores of blood cells.", "tab:dinobloom", "hematology", blood_cells),
    Claim(
        "Turning blood cells changes next to nothing for ViT.",
        "appendix:dinobloom",
        "frozen-features",
        unchanged(frozen.STUDY, "vit", frozen.turned, NEGLIGIBLE),
    ),
    Claim(
        "No invariant is better than the power spectrum.",
        "tab:ablations",
        "invariants",
        best("invariants", "power_spectrum"),
    ),
    Claim(
        "An equivariant patch embedding is better than a free one.",
        "sec:equi_break",
        "lift",
        compared("lift", "octic", "free", top1, better=True),
    ),
    Claim(
        "No number of octic blocks is better than half of the blocks.",
        "fig:hybridisation_ablation",
        "octic-depth",
        half_depth,
    ),
)


def judge(results: Results) -> list[tuple[Claim, Finding]]:
    """Every claim, and what the results say of it."""
    return [(claim, claim.rule(results)) for claim in CLAIMS]
