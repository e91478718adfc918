"""Tables that need no measurement: what formulas and the models themselves say, beside the paper."""

from __future__ import annotations

from quickvit.bench.flops import Variant
from quickvit.bench.work import Shape, Storage, linear
from quickvit.group import DihedralGroup
from quickvit.models import SIZES
from quickvit.report import paper
from quickvit.report.formulas import model_cost
from quickvit.report.results import Results
from quickvit.report.sample import number
from quickvit.report.table import FORMULA, HERE, NOT_RUN, NOTHING, PAPER, Column, Table, unique
from quickvit.report.tables.beside import family_name, quotation, times, written
from quickvit.report.tables.measures import TOP1, TURNED

ORDERS = (8, 16, 32, 64)
IMAGENET = "imagenet"
# The paper's setting for linear layers: 64 images of 196 tokens, 1024 → 4096 channels, two bytes.
TOKENS, INPUTS, OUTPUTS, PRECISION = 64 * 196, 1024, 4096, 2


def compute_scaling(_: Results) -> Table:
    """FLOPs and parameters of the standard ViT over those of the octic one, by size."""
    rows = []
    for size, quoted in paper.SCALING.rows.items():
        dims, shape = SIZES[size], paper_shape(size)
        depth = str(dims.depth)
        if dims.depth != quoted["depth"]:
            depth += f" (paper {quoted['depth']:.0f})"
        vit, octic = (model_cost(Variant(family, size, shape.patch)) for family in ("vit", "d8"))
        rows.append(
            (
                *(shape.label, times(vit.macs / octic.macs), times(quoted["flops"])),
                times(vit.parameters / octic.parameters),
                *(written(vit.macs / 1e9, 1), written(octic.macs / 1e9, 1)),
                *(written(vit.parameters / 1e6, 1), written(octic.parameters / 1e6, 1)),
                *(str(dims.embed_dim), depth, str(dims.mlp_dim), str(dims.num_heads)),
            )
        )
    return Table(
        "compute-scaling",
        "Compute scaling",
        (
            *(Column("model"), Column("fewer FLOPs", FORMULA), Column("fewer FLOPs", PAPER)),
            Column("fewer parameters", FORMULA),
            *(Column("ViT GMACs", FORMULA), Column("d8 GMACs", FORMULA)),
            *(Column("ViT parameters (M)", FORMULA), Column("d8 parameters (M)", FORMULA)),
            *map(Column, ("width", "depth", "MLP", "heads")),
        ),
        tuple(rows),
        quotation(paper.SCALING),
        "All blocks octic. Ours counts matrix products only, the paper all that its counter sees.",
    )


def paper_models(results: Results) -> Table:
    """Parameters and MACs of the paper's classifiers, and their accuracy, which takes ImageNet-1K and a cluster."""
    rows, used = [], []
    for (label, family), quoted in paper.DEIT.rows.items():
        size, patch = label.removeprefix("ViT-").split("/")
        invariant = "polynomial" if family == "i8" else None
        variant = Variant(family, size.lower(), int(patch), invariant)
        cost = model_cost(variant)
        options = (f"--invariant={invariant}",) if invariant else ()
        runs = [
            run
            for run in results.study("families", f"{IMAGENET}-{size.lower()}")
            if (run.model, run.options) == (variant.name, options)
        ]
        used += [run.source for run in runs]
        rows.append(
            (
                *(label, family_name(family)),
                *(written(cost.parameters / 1e6, 1), written(quoted["parameters"], 1)),
                *(written(cost.macs / 1e9, 1), written(quoted["gmacs"], 1)),
                *(TOP1.cell(runs), written(quoted["top1"], 1)),
                *(TURNED.cell(runs), number(quoted["rotated"], 1, sign=True)),
            )
        )
    return Table(
        "imagenet",
        "The paper's classifiers on ImageNet-1K",
        (
            *(Column("model"), Column("family")),
            *(Column("parameters (M)", FORMULA), Column("parameters (M)", PAPER)),
            *(Column("GMACs", FORMULA), Column("GMACs", PAPER)),
            *(Column("top-1 (%)", HERE), Column("top-1 (%)", PAPER)),
            *(Column("turned by 90°s", HERE), Column("turned by 90°s", PAPER)),
        ),
        tuple(rows),
        quotation(paper.DEIT),
        "The i8 has the polynomial invariant here, as the paper's parameter counts say. The paper calls MACs FLOPs "
        "and counts element-wise work too.",
        unique(used),
        (
            "quickvit train deit3 --model quickvit_i8_large_patch16_224 --invariant polynomial --data IMAGENET "
            "--out RUN",
            "python benchmarks/study/record.py RUN --imagenet IMAGENET",
        ),
    )


def dihedral_groups(results: Results) -> Table:
    """Savings and arithmetic intensity of linear layers of larger groups, and their times where measured."""
    case, half = f"linear, C = {INPUTS} → {OUTPUTS}, {TOKENS} tokens", ("bfloat16", "float16")
    measured = [
        (m, row)
        for m, row in results.measured("linear")
        if row.case == case and row.dtype in half and row.ratio
    ]
    rows, used = [], []
    for order in ORDERS:
        group, n = DihedralGroup(order), order // 4
        name = "octic" if order == ORDERS[0] else str(group)
        step = linear(TOKENS, INPUTS, OUTPUTS, Storage(PRECISION, PRECISION, PRECISION), group)
        computed = (
            *(str(group), f"{180 / n:g}°"),
            *(times(group.flop_reduction), times(paper.flop_saving(n)), times(float(order), 0)),
            written(step.intensity, 0),
            written(paper.intensity(n, TOKENS, INPUTS, OUTPUTS, PRECISION), 0),
        )
        ours = [(m, row) for m, row in measured if row.name == name]
        used += [m.source for m, _ in ours]
        if ours:
            rows += [
                (*computed, times(row.ratio or 0), f"{m.source.hardware}, {row.dtype}") for m, row in ours
            ]
        else:
            rows.append((*computed, NOT_RUN, NOTHING))
    return Table(
        "dihedral-groups",
        "Larger dihedral groups",
        (
            *(Column("group"), Column("smallest turn")),
            *(Column("fewer FLOPs", FORMULA), Column("fewer FLOPs", PAPER), Column("fewer weights", FORMULA)),
            *(Column("FLOPs per byte", FORMULA), Column("FLOPs per byte", PAPER)),
            *(Column("speed-up", HERE), Column("on")),
        ),
        tuple(rows),
        "appendix:larger-dihedral-groups (its formulas 4n²/(2n−1) and of the arithmetic intensity)",
        f"One linear layer of {INPUTS} → {OUTPUTS} channels on {TOKENS:,} tokens in half precision. Ours sums over "
        "the irreps of the group: |G|²/Σd³. Only the octic group has kernels of its own.",
        unique(used),
        ("quickvit bench linear --widths 1024 --groups 8 16 32 64 --out benchmarks/GPU_groups.json",),
    )


def paper_shape(size: str) -> Shape:
    """A size with the patches that the paper gives it."""
    return Shape(size, 16 if size == "large" else 14)
