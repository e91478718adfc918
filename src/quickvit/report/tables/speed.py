"""Tables of time and memory: `quickvit bench` beside the paper."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quickvit.bench import Row
from quickvit.report import paper
from quickvit.report.paper import Numbers, Quoted
from quickvit.report.results import Measurement, Results
from quickvit.report.table import HERE, NOTHING, PAPER, Column, Table
from quickvit.report.tables.beside import family_name, lines, quotation, sources, times
from quickvit.report.tables.computed import paper_shape

SIZES = "large huge giant e 22b"
# As `bench.work.Shape` labels it.
MODEL = r"(ViT-\w+/\d+(?: \d+px)?(?:, \d+ blocks?)?)"
FORWARD = re.compile(f"{MODEL} forward")
INFERENCE = re.compile(f"{MODEL} (?:forward|inference)")
BLOCK = re.compile(rf"{MODEL} block (forward(?: \+ backward)?)")
TRAINING = re.compile(rf"{MODEL} (\w+) (?:forward \+ backward|step)")
PACKING = re.compile(rf"{MODEL} dinov2 packing of (\w+)")
LINEAR = re.compile(r"linear, C = (\d+) → \d+, \d+ tokens")
LAYER = re.compile(r"(GELU|MLP), C = (\d+), \d+ tokens")
PLACE = Column("on")
CPU = (
    "On a CPU octic layers run kernels in C, which may multiply faster than PyTorch: what they gain beyond the ratio "
    "of FLOPs, 5.33, is not owed to equivariance."
)


def forward_speed(results: Results) -> Table:
    """Forward passes of whole models."""
    found = lines(_matches(results, FORWARD, "model"), _paper_inference("speed", "images_per_s"))
    return Table(
        "forward-speed",
        "Inference speed",
        (
            *(Column("model"), Column("family")),
            *(Column("speed-up", HERE), Column("speed-up", PAPER)),
            *(Column("images/s", HERE), Column("images/s", PAPER), PLACE),
        ),
        tuple(
            (
                *(line.key[0], family_name(line.key[1])),
                *(times(line.here("ratio", 2)), times(line.paper("ratio", 2))),
                *(line.here("images_per_s"), line.paper("images_per_s", 0), line.place),
            )
            for line in found
        ),
        quotation(paper.SCALING, paper.DEIT),
        "Forward passes of whole models, each speed-up against timm's ViT measured in turns with it. The paper's "
        "speed-ups of h2, i8 and h8 are ratios of its throughputs.",
        sources(found),
        (
            f"quickvit bench model --sizes {SIZES} --families d8 h8 i8 h2 --compile reduce-overhead --views false "
            "--out benchmarks/GPU_model.json",
        ),
    )


def block_speed(results: Results) -> Table:
    """One transformer block."""
    measured = (
        ((match[1], match[2], row.name), measurement, row)
        for match, measurement, row in cases(results, BLOCK, "block")
    )
    expected: dict[tuple[str, str, str], Numbers] = {
        (model, passes, family): {}
        for model in (paper.L16, paper.H14)
        for passes in ("forward", "forward + backward")
        for family in ("vit", "d8")
    }
    found = lines(measured, Quoted("", "", expected))
    return Table(
        "block-speed",
        "Speed of a block",
        (
            *(Column("model"), Column("passes"), Column("family")),
            *(Column("speed-up", HERE), Column("ms", HERE), Column("time / floor", HERE), PLACE),
        ),
        tuple(
            (
                *(*line.key[:2], family_name(line.key[2])),
                *(times(line.here("ratio", 2)), line.here("ms"), line.here("over_floor", 2), line.place),
            )
            for line in found
        ),
        note="A single block, forward without gradients, and forward and backward with autocast. In a model of many "
        "the residual sum of a block is one pass with the first norm of the next, which one alone cannot have.",
        sources=sources(found),
        commands=(
            "quickvit bench block --sizes large huge --families d8 --compile reduce-overhead "
            "--out benchmarks/GPU_block.json",
        ),
    )


def memory(results: Results) -> Table:
    """Peak memory of inference."""
    measured = (m for m in _matches(results, INFERENCE, "model", "memory") if m[2].memory_mib is not None)
    found = lines(measured, _paper_inference("memory", "memory_mb"))
    return Table(
        "memory",
        "Peak memory of inference",
        (
            *(Column("model"), Column("family")),
            *(Column("saving", HERE), Column("saving", PAPER)),
            *(Column("MiB", HERE), Column("MB", PAPER), PLACE),
        ),
        tuple(
            (
                *(line.key[0], family_name(line.key[1])),
                *(times(line.here("memory_ratio", 2)), times(line.paper("ratio", 2))),
                *(line.here("memory_mib", 0), line.paper("memory_mb", 0), line.place),
            )
            for line in found
        ),
        quotation(paper.SCALING, paper.DEIT),
        "Weights, images and activations, each model alone on the device. Ours have weights in bfloat16, the paper's "
        "mixed precision. ViT-22B has 48 blocks here, as its authors say, and 36 in the paper.",
        sources(found),
        (f"quickvit bench memory --sizes {SIZES} --families d8 h8 i8 h2 --out benchmarks/GPU_memory.json",),
    )


def training_speed(results: Results) -> Table:
    """Forward and backward passes of whole models."""
    measured = (
        ((match[2], match[1], row.name), measurement, row)
        for match, measurement, row in cases(results, TRAINING, "train")
    )
    found = lines(measured, paper.TRAINING)
    return Table(
        "training-speed",
        "Training speed",
        (
            *(Column("model"), Column("family"), Column("recipe")),
            *(Column("speed-up", HERE), Column("speed-up", PAPER)),
            *(Column("images/s", HERE), Column("images/s", PAPER), PLACE),
        ),
        tuple(
            (
                *(line.key[1], family_name(line.key[2]), line.key[0]),
                *(times(line.here("ratio", 2)), times(line.paper("ratio", 2))),
                *(line.here("images_per_s"), line.paper("images_per_s", 0), line.place),
            )
            for line in found
        ),
        quotation(paper.TRAINING),
        "Forward and backward passes in the shapes of a recipe, those of dinov2 with its heads and losses, beside "
        "timm's ViT.",
        sources(found),
        (
            "quickvit bench train --sizes large huge --families d8 h8 i8 --out benchmarks/GPU_train.json",
            "quickvit bench train --sizes large huge --families d8 h8 i8 --patch 16 --recipe dinov2 "
            "--out benchmarks/GPU_train_dinov2.json",
        ),
    )


def packing(results: Results) -> Table:
    """Crops of several sizes in one pass."""
    measured = (
        ((match[1], match[2]), measurement, row)
        for match, measurement, row in cases(results, PACKING, "train")
        if row.name == match[2]
    )
    found = lines(measured, Quoted("", "", {(paper.L16, family): {} for family in ("vit", "h8")}))
    return Table(
        "packing",
        "Crops of two sizes in one packed pass",
        (
            *(Column("model"), Column("family")),
            *(Column("speed-up", HERE), Column("ms", HERE), PLACE),
        ),
        tuple(
            (
                *(line.key[0], family_name(line.key[1])),
                *(times(line.here("ratio", 2)), line.here("ms"), line.place),
            )
            for line in found
        ),
        note="A step of DINOv2 less the optimiser: two global and eight local crops of each image. The speed-up is "
        "that over one pass for each size.",
        sources=sources(found),
        commands=(
            "quickvit bench train --recipe dinov2 --batch 32 --sizes large --families h8 --compile default "
            "--out benchmarks/GPU_packing.json",
        ),
    )


def linear_layers(results: Results) -> Table:
    """Single linear layers."""
    measured = (
        ((row.name, row.dtype or "", int(match[1])), measurement, row)
        for match, measurement, row in cases(results, LINEAR, "linear")
    )
    found = lines(measured, paper.LINEAR)
    names = ("ms", "tflops_per_s", "intensity")
    return Table(
        "linear-layers",
        "Linear layers C → 4C",
        (
            *(Column("layer"), Column("C"), Column("dtype")),
            *(
                column
                for title in ("speed-up", "ms", "TFLOP/s", "FLOPs per byte")
                for column in (Column(title, HERE), Column(title, PAPER))
            ),
            PLACE,
        ),
        tuple(
            (
                *(line.key[0], str(line.key[2]), line.key[1]),
                *(times(line.here("ratio", 2)), times(line.paper("ratio", 2))),
                *(cell for name in names for cell in (line.here(name), line.paper(name))),
                line.place,
            )
            for line in found
        ),
        quotation(paper.LINEAR),
        f"Without bias; many calls in one CUDA graph on a GPU, their tensors too many for its cache. {CPU}",
        sources(found),
        ("quickvit bench linear --out benchmarks/GPU_linear.json",),
    )


def gelu(results: Results) -> Table:
    """GELU and MLP, standard and octic."""
    measured = (
        ((match[1], row.name, int(match[2])), measurement, row)
        for match, measurement, row in cases(results, LAYER, "gelu")
    )
    found = lines(measured, paper.GELU)
    return Table(
        "gelu",
        "GELU and MLP",
        (
            *(Column("operation"), Column("layer"), Column("C")),
            *(Column("speed-up", HERE), Column("speed-up", PAPER)),
            *(Column("µs", HERE), Column("µs", PAPER), PLACE),
        ),
        tuple(
            (
                *(line.key[0], line.key[1], str(line.key[2])),
                *(times(line.here("ratio", 2)), _paper_ratio(*line.key)),
                *(line.here("ms", scale=1e3), line.paper("us", 1), line.place),
            )
            for line in found
        ),
        quotation(paper.GELU),
        f"GELU on 4C channels beside a copy of the same bytes, and the MLP C → 4C → C. {CPU}",
        sources(found),
        ("quickvit bench gelu --out benchmarks/GPU_gelu.json",),
    )


def _paper_ratio(operation: str, layer: str, width: int) -> str:
    """The paper's time of the standard layer over that of this one."""
    rows = paper.GELU.rows
    if (operation, layer, width) not in rows:
        return NOTHING
    return times(rows[operation, "standard", width]["us"] / rows[operation, layer, width]["us"])


# ---------------------------------------------------------------------- rows


def cases(
    results: Results, pattern: re.Pattern[str], *benchmarks: str
) -> Iterator[tuple[re.Match[str], Measurement, Row]]:
    """The rows whose case is of a form."""
    for measurement, row in results.measured(*benchmarks):
        if match := pattern.fullmatch(row.case):
            yield match, measurement, row


def _matches(
    results: Results, pattern: re.Pattern[str], *benchmarks: str
) -> Iterator[tuple[tuple[str, str], Measurement, Row]]:
    """The rows of whole models, by model and family."""
    for match, measurement, row in cases(results, pattern, *benchmarks):
        yield (match[1], row.name), measurement, row


def _paper_inference(ratio: str, number: str) -> Quoted[tuple[str, str]]:
    """A number of the paper's classifiers with its ratio to the ViT's, and the ratio of the octic models."""
    rows: dict[tuple[str, str], Numbers] = {}
    for size, quoted in paper.SCALING.rows.items():
        label = paper_shape(size).label
        for (model, family), numbers in paper.DEIT.rows.items():
            if model == label:
                pair = numbers[number], paper.DEIT.rows[model, "vit"][number]
                # More images per second are better, less memory is.
                better = pair if number == "images_per_s" else pair[::-1]
                rows[model, family] = {number: pair[0], "ratio": better[0] / better[1]}
        rows[label, "d8"] = {"ratio": quoted[ratio]}
    return Quoted("", "", rows)
