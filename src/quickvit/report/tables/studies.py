"""Tables of the training studies: mean and spread over seeds beside the paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quickvit.layers import INVARIANTS
from quickvit.models import SIZES
from quickvit.report import paper
from quickvit.report.paper import Numbers
from quickvit.report.results import Results
from quickvit.report.table import NOTHING, Column, Table, unique
from quickvit.report.tables.beside import family_name, quotation
from quickvit.report.tables.measures import (
    GMACS,
    MEMORY,
    PAPER_TOP1,
    PAPER_TOP5,
    PAPER_TURNED,
    PARAMETERS,
    RATE,
    TILTED,
    TOP1,
    TOP5,
    TURNED,
    Quote,
    Shown,
    headings,
    row,
)

FAMILIES = ("vit", "h2", "h8", "i8", "d8")
# Of the study's models, until one was run that says it.
SIZE = "tiny"


@dataclass(frozen=True)
class Study:
    """A table of a study: its rows, its columns, and what the paper says of each row.

    names: of the rows that are expected; others that were run follow them.
    """

    id: str
    title: str
    study: str
    names: Sequence[str]
    columns: tuple[Shown, ...]
    quoted: Mapping[str, Numbers] = field(default_factory=dict)
    quotes: str = ""
    note: str = ""
    label: Callable[[str], str] = str

    def table(self, results: Results) -> Table:
        """Rows by data set and name."""
        runs = results.study(self.study)
        names = list(dict.fromkeys([*self.names, *sorted({run.name for run in runs}, key=natural)]))
        rows = []
        for dataset in results.datasets(self.study) or [NOTHING]:
            for name in names:
                seeds = results.study(self.study, dataset, name)
                cells = row(self.columns, seeds, self.quoted.get(name, {}))
                rows.append((self.label(name), dataset, str(len(seeds)), *cells))
        return Table(
            self.id,
            self.title,
            (Column("name"), Column("data"), Column("seeds"), *headings(self.columns)),
            tuple(rows),
            self.quotes,
            self.note,
            unique(run.source for run in runs),
            (study_command(self.study),),
        )


def study_command(study: str, dataset: str = "cifar10") -> str:
    """The command that runs a study."""
    script = "python benchmarks/study/study.py"
    return f"{script} {dataset} --data DATA --runs RUNS --studies {study} --seeds 0 1 2"


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts k=3 before k=12."""
    return [(int(digits or 0), word) for word, digits in re.findall(r"(\D+)(\d{0,9})", name)]


def blocks(results: Results) -> int:
    """The number of blocks of the models whose octic depth was studied."""
    sizes = [run.size for run in results.study("depth") if run.size in SIZES]
    return SIZES[sizes[0] if sizes else SIZE].depth


# ---------------------------------------------------------------------- tables


def classification(results: Results) -> Table:
    """The families, trained alike."""
    quoted = {family: row for (model, family), row in paper.DEIT.rows.items() if model == paper.L16}
    quoted["d8"] = paper.INVARIANTS.rows["power_spectrum"]
    return Study(
        "classification",
        "Classification",
        "families",
        FAMILIES,
        (
            *(TOP1, PAPER_TOP1, TURNED, PAPER_TURNED),
            *(GMACS, Quote(GMACS.title, "gmacs"), PARAMETERS, Quote(PARAMETERS.title, "parameters")),
            *(RATE, Quote("images/s, inference", "images_per_s", 0)),
            *(MEMORY, Quote("MB, inference", "memory_mb", 0)),
        ),
        quoted,
        f"ViT-L/16 of {quotation(paper.DEIT, paper.INVARIANTS)}",
        "Small models, trained alike on upright images of small sets: compare the rows, not with the paper. Accuracy "
        "on the validation split, or on the test split where there is no other. Mean ± standard deviation "
        "over seeds. Runs shared a GPU and its processors: their images/s do not measure speed.",
        family_name,
    ).table(results)


def recipe(results: Results) -> Table:
    """DeiT III's recipe, as it is."""
    return Study(
        "recipe",
        "DeiT III's recipe on CIFAR-10",
        "recipe",
        ("vit", "h8", "i8"),
        (TOP1, TOP5, TURNED, TILTED, GMACS, PARAMETERS),
        note="30 epochs with the augmentation that the recipe has for 400, which is why all accuracies are low.",
        label=family_name,
    ).table(results)


def slanted(results: Results) -> Table:
    """What 45° do to a classifier."""
    quoted: dict[str, Numbers] = {
        family: {model: paper.ROTATION.rows[model, family]["change"] for model in (paper.L16, paper.H16)}
        for family in ("vit", "i8", "h8")
    }
    return Study(
        "rotation-45",
        "Images turned by 45°",
        "families",
        FAMILIES,
        (TOP1, TILTED, *(Quote(f"{model}, by 45°", model, sign=True) for model in (paper.L16, paper.H16))),
        quoted,
        quotation(paper.ROTATION),
        "Change of the accuracy in points. A turn by 45° is no element of the octic group, and loses the corners.",
        family_name,
    ).table(results)


def invariants(results: Results) -> Table:
    """Which invariant."""
    return Study(
        "invariants",
        "Invariants",
        "invariants",
        list(INVARIANTS),
        (TOP1, PAPER_TOP1, TOP5, PAPER_TOP5, TURNED, PARAMETERS),
        paper.INVARIANTS.rows,
        quotation(paper.INVARIANTS),
        "Ours are i8, invariant after half of the blocks; the paper's are invariant after the last.",
        lambda name: name.replace("_", " "),
    ).table(results)


def lift(results: Results) -> Table:
    """Whether the patch embedding must be equivariant."""
    return Study(
        "lift",
        "Equivariant or free patch embedding",
        "lift",
        list(paper.LIFT.rows),
        (TOP1, PAPER_TOP1, TURNED, PARAMETERS),
        paper.LIFT.rows,
        quotation(paper.LIFT),
        "The same h8 with an equivariant patch embedding, and with one that is free: octic blocks without symmetry.",
    ).table(results)


def depth(results: Results) -> Table:
    """How many blocks are octic."""
    total = blocks(results)
    return Study(
        "octic-depth",
        "Number of octic blocks",
        "depth",
        [f"k={quarter * total // 4}" for quarter in range(5)],
        (TOP1, TURNED, GMACS, PARAMETERS),
        quotes="fig:hybridisation_ablation (ViT-L, 24 blocks), a figure without numbers",
        note=f"The first k of {total} blocks of an h8 are octic. The paper's text: k of half the blocks is a good "
        "balance of cost and accuracy.",
    ).table(results)


def initialisation(results: Results) -> Table:
    """How weights begin."""
    return Study(
        "initialisation",
        "Initialisation",
        "initialisation",
        ("matched", "released"),
        (TOP1, TURNED),
        quotes="not studied; it does not say how weights begin",
        note="matched: weights scaled so that an octic layer keeps the variance of a standard one. released: octic "
        "linear layers begin as in the authors' code; positions and tokens do not.",
    ).table(results)


def norm(results: Results) -> Table:
    """Which layer norm."""
    return Study(
        "norm",
        "Layer norm",
        "norm",
        ("paper", "released"),
        (TOP1, TURNED),
        quotes="not studied; its text and its released weights differ",
        note="paper: unit variance stays unit variance. released: the norm that the authors' weights were trained "
        "with, where the two-dimensional irrep counts less.",
    ).table(results)
