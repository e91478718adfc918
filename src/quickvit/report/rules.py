"""How the results judge a claim: each rule a function of everything that was measured.

A difference of two means counts if it is larger than twice its standard error over the seeds, and than 0.2 points:
of models with 84.0 and 84.2 % (tab:deit) the paper says that they match or exceed each other.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from quickvit.bench import Row
from quickvit.bench.flops import BASELINE, Variant
from quickvit.bench.work import Storage, linear
from quickvit.group import D8
from quickvit.layers import OcticLinear
from quickvit.models import FAMILIES
from quickvit.report import paper
from quickvit.report.formulas import model_cost
from quickvit.report.results import Measurement, Metric, Results
from quickvit.report.sample import Sample, number, uncertainty
from quickvit.report.tables import frozen
from quickvit.report.tables.beside import family_name, times
from quickvit.report.tables.computed import paper_shape
from quickvit.report.tables.measures import top1, turned
from quickvit.report.tables.speed import FORWARD, INFERENCE, LAYER, LINEAR
from quickvit.report.tables.studies import blocks

TOLERANCE = 0.2
# Of a measurement that says how fast whole models are: the paper has 64, and 32 per GPU in some runs of DINOv2.
MANY_IMAGES = 32
RULE = (
    "The verdicts are computed. Two models are called different if their means differ by more than twice the "
    f"standard error over the seeds and by more than {TOLERANCE} points: the paper counts 84.0 beside 84.2 % as no "
    f"loss. Speed of whole models is judged as the paper measures it, compiled, with {MANY_IMAGES} images or more."
)
# Seeds that differ by more make a match worthless, in points.
MARGIN = 1.0
# How far computed FLOP ratios may be from the paper's, which count element-wise work too.
CLOSE = 0.02
# A fused GELU may take this much longer than a standard one: the paper's "few percent".
FEW_PERCENT = 1.05
# Data sets with an up.
PHOTOGRAPHS = ("cifar10", "imagenet-large", "imagenet-huge")
HALF = ("bfloat16", "float16")
# Why one seed cannot decide.
ONE_SEED = "one seed has no spread"


class Verdict(StrEnum):
    """What the results say."""

    CONFIRMED = "confirmed here"
    NOT_CONFIRMED = "not confirmed here"
    UNDECIDED = "undecided here"
    NOT_TESTABLE = "not testable at this scale"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Finding:
    """A verdict and the numbers that it rests on."""

    verdict: Verdict
    evidence: str = ""


Rule = Callable[[Results], Finding]


def together(findings: Iterable[Finding]) -> Finding:
    """Confirmed if nothing speaks against it and something for it."""
    found = list(findings)
    order = (Verdict.NOT_CONFIRMED, Verdict.CONFIRMED, Verdict.UNDECIDED, Verdict.NOT_TESTABLE)
    verdict = next((v for v in order if any(f.verdict == v for f in found)), Verdict.NOT_RUN)
    return Finding(verdict, "; ".join(f.evidence for f in found if f.evidence))


def holds(condition: bool, evidence: str) -> Finding:
    """Confirmed or not."""
    return Finding(Verdict.CONFIRMED if condition else Verdict.NOT_CONFIRMED, evidence)


# ---------------------------------------------------------------------- comparisons of samples


def compare(samples: Mapping[str, Sample | None], place: str, *, better: bool) -> Finding:
    """Whether the first of two is better than the second, or else at least as good, beyond what seeds do."""
    a, b = samples.values()
    if a is None or b is None:
        return Finding(Verdict.NOT_RUN)
    evidence = f"{place}: " + ", ".join(f"{name} {s.text(2)}" for name, s in samples.items() if s)
    noise = uncertainty(a, b)
    if noise is None:
        return Finding(Verdict.UNDECIDED, f"{evidence}, {ONE_SEED}")
    difference, least = a.mean - b.mean, max(noise, TOLERANCE)
    if better:
        return holds(difference > least, evidence)
    if difference >= -least and noise > MARGIN:
        return Finding(Verdict.UNDECIDED, f"{evidence}, the seeds differ too much")
    return holds(difference >= -least, evidence)


def compared(
    study: str, a: str, b: str, metric: Metric, *, better: bool, on: Sequence[str] | None = None
) -> Rule:
    """Row a of a study against row b, on all data sets or on these."""

    def rule(results: Results) -> Finding:
        return together(
            compare(
                {family_name(name): results.sample(study, dataset, name, metric) for name in (a, b)},
                dataset,
                better=better,
            )
            for dataset in results.datasets(study)
            if on is None or dataset in on
        )

    return rule


def best(study: str, name: str) -> Rule:
    """Whether no other row of a study is better than this one."""

    def rule(results: Results) -> Finding:
        findings = []
        for dataset in results.datasets(study):
            names = sorted({run.name for run in results.study(study, dataset)})
            found = {other: results.sample(study, dataset, other, top1) for other in names}
            others = {other: s for other, s in found.items() if s is not None and other != name}
            if others:
                first = max(others, key=lambda other: others[other].mean)
                pair = {name: found.get(name), f"best other: {first}": others[first]}
                findings.append(compare(pair, dataset, better=False))
        return together(findings)

    return rule


def half_depth(results: Results) -> Finding:
    """Whether no other number of octic blocks is better than half of the blocks."""
    return best("depth", f"k={blocks(results) // 2}")(results)


def loses(family: str) -> Rule:
    """Whether a family is less accurate on photographs turned by 90°s, by more than the spread."""

    def rule(results: Results) -> Finding:
        findings = []
        for dataset in PHOTOGRAPHS:
            change = results.sample("families", dataset, family, turned)
            if change is not None:
                evidence = f"{dataset}: {change.text(2, sign=True)} points"
                if change.spread is None:
                    findings.append(Finding(Verdict.UNDECIDED, f"{evidence}, {ONE_SEED}"))
                else:
                    findings.append(holds(change.mean + change.spread < -TOLERANCE, evidence))
        return together(findings)

    return rule


def unchanged(study: str, name: str, metric: Metric, limit: float) -> Rule:
    """Whether no run of a row changes by more than so many points.

    A model that is invariant by construction needs no second seed.
    """
    exact = name in FAMILIES and FAMILIES[name].invariant

    def rule(results: Results) -> Finding:
        samples = [results.sample(study, dataset, name, metric) for dataset in results.datasets(study)]
        found = [abs(change) for sample in samples if sample for change in sample.values]
        if not found:
            return Finding(Verdict.NOT_RUN)
        runs = "1 run" if len(found) == 1 else f"{len(found)} runs"
        evidence = f"largest change in {runs}: {max(found):.2f} points"
        if not exact and any(sample.spread is None for sample in samples if sample):
            return Finding(Verdict.UNDECIDED, f"{evidence}, {ONE_SEED}")
        return holds(max(found) <= limit, evidence)

    return rule


def cheaper_and_as_good(family: str) -> Rule:
    """Whether a family needs fewer MACs than the ViT and is as accurate."""

    def rule(results: Results) -> Finding:
        finding = compared("families", family, "vit", top1, better=False)(results)
        for dataset in results.datasets("families"):
            a, b = (results.sample("families", dataset, n, lambda run: run.gmacs) for n in (family, "vit"))
            if a and b and a.mean >= b.mean:
                return Finding(Verdict.NOT_CONFIRMED, f"{finding.evidence}; no fewer MACs on {dataset}")
        return finding

    return rule


def blood_cells(results: Results) -> Finding:
    """Whether the i8's mean is higher than the ViT's in most of DinoBloom's scores."""
    findings = []
    for dataset in results.datasets(frozen.STUDY):
        won, certain = [], True
        for key in paper.HEMATOLOGY.rows["vit"]:
            metric = partial(frozen.answer, key=key)
            i8, vit = (results.sample(frozen.STUDY, dataset, name, metric) for name in ("i8", "vit"))
            if i8 and vit:
                won.append(i8.mean > vit.mean)
                certain = certain and uncertainty(i8, vit) is not None
        evidence = f"{dataset}: {sum(won)} of {len(won)} scores"
        if won and certain:
            findings.append(holds(2 * sum(won) > len(won), evidence))
        elif won:
            findings.append(Finding(Verdict.UNDECIDED, f"{evidence}, {ONE_SEED}"))
    return together(findings)


def large_scale(results: Results) -> Finding:
    """Whether an h8 of size H is as accurate as in the paper and better than the ViT, if anybody has trained them."""

    data = "imagenet-huge"
    finding = compared("families", "h8", "vit", top1, better=True, on=(data,))(results)
    if finding.verdict == Verdict.NOT_RUN:
        return Finding(Verdict.NOT_TESTABLE, "takes 400 epochs of ImageNet-1K")
    h8 = results.sample("families", data, "h8", top1)
    if h8 is not None and h8.mean < paper.DEIT.rows[paper.H14, "h8"]["top1"] - TOLERANCE:
        return Finding(Verdict.NOT_CONFIRMED, finding.evidence)
    return finding


# ---------------------------------------------------------------------- formulas


def linear_saving(_: Results) -> Finding:
    """The FLOPs by the irreps of D8, and the weights of a layer that is built."""
    layer = OcticLinear(64, 64, bias=False)
    weights = 64 * 64 / sum(parameter.numel() for parameter in layer.parameters())
    evidence = f"{D8.flop_reduction:.2f}× fewer FLOPs, {weights:g}× fewer weights"
    return holds(
        abs(D8.flop_reduction - paper.LINEAR_SAVING) < 0.01 and weights == paper.LINEAR_WEIGHTS, evidence
    )


def model_saving(_: Results) -> Finding:
    """Ratios of whole models, which must grow with the size and be close to the paper's."""
    ratios = {}
    for size in paper.SCALING.rows:
        vit, octic = (model_cost(Variant(family, size, paper_shape(size).patch)) for family in ("vit", "d8"))
        ratios[size] = vit.macs / octic.macs
    near = all(abs(r / paper.SCALING.rows[size]["flops"] - 1) < CLOSE for size, r in ratios.items())
    grows = list(ratios.values()) == sorted(ratios.values())
    return holds(near and grows, ", ".join(f"{size} {times(ratio)}" for size, ratio in ratios.items()))


def hybrid_saving(_: Results) -> Finding:
    """The share of the FLOPs of ViT-H that its i8 and h8 do without."""
    vit, *families = (model_cost(Variant(family, "huge", 14)) for family in ("vit", "i8", "h8"))
    i8, h8 = (1 - cost.macs / vit.macs for cost in families)
    near = all(abs(saved - paper.HYBRID_SAVING) < CLOSE for saved in (i8, h8))
    return holds(near, f"i8 {i8:.1%}, h8 {h8:.1%}")


def crossing(_: Results) -> Finding:
    """The first width, in steps of 8, at which an octic layer has the higher intensity."""
    storage = Storage(2, 2, 2)
    width = 8
    while (
        linear(196, width, 4 * width, storage, D8).intensity
        < linear(196, width, 4 * width, storage).intensity
    ):
        width += 8
    return holds(abs(width / paper.CROSSING - 1) < CLOSE, f"C = {width}")


# ---------------------------------------------------------------------- speed


def _gpu_rows(
    results: Results, benchmark: str, pattern: re.Pattern[str]
) -> Iterator[tuple[Measurement, Row, re.Match[str], float]]:
    """The rows that were measured on a GPU and compared with another: how many times faster they were."""
    for measurement, row in results.measured(benchmark):
        match = pattern.fullmatch(row.case)
        if match and measurement.source.gpu and row.ratio:
            yield measurement, row, match, row.ratio


def _spread(measurement: Measurement, row: Row) -> float | None:
    """The larger spread of a row and of the ViT that it was compared with; None if one has a single sample."""
    compared = {(other.case, other.dtype): other for other in measurement.rows if other.name == BASELINE}
    other = compared.get((row.case, row.dtype), row)
    return None if row.spread is None or other.spread is None else max(row.spread, other.spread)


def _where(measurement: Measurement) -> str:
    """On what it was measured, and how."""
    compiled = "not compiled" if measurement.compile == "none" else f"compile {measurement.compile}"
    return f"{measurement.source.hardware}, batch {measurement.batch}, {compiled}"


def _as_in_the_paper(measurement: Measurement) -> bool:
    """Whether models were compiled and had many images."""
    batch = measurement.batch
    return measurement.compile != "none" and batch.isdigit() and int(batch) >= MANY_IMAGES


def faster(benchmark: str, pattern: re.Pattern[str], families: tuple[str, ...]) -> Rule:
    """Whether all of these were faster than timm's ViT on a GPU, by more than the spread of the samples of either."""

    def rule(results: Results) -> Finding:
        findings = []
        for measurement, row, match, ratio in _gpu_rows(results, benchmark, pattern):
            if row.name in families and row.dtype in HALF and _as_in_the_paper(measurement):
                words = f"{' '.join(match.groups())} {row.name} {times(ratio)}"
                where = _where(measurement)
                spread = _spread(measurement, row)
                if spread is None or abs(ratio - 1) <= spread:
                    doubt = (
                        "one sample has no spread" if spread is None else f"samples differ by {spread:.0%}"
                    )
                    findings.append(Finding(Verdict.UNDECIDED, f"{words} ({where}, {doubt})"))
                else:
                    findings.append(holds(ratio > 1, f"{words} ({where})"))
        return together(findings)

    return rule


def speed_grows(results: Results) -> Finding:
    """Whether the speed-up of d8 is larger for each larger model that was measured in the same way.

    Models may be cut to fewer blocks, which all are alike; the one with the most counts.
    """
    found: dict[tuple[str, str], dict[str, tuple[float, str, float]]] = defaultdict(dict)
    for measurement, row, match, ratio in _gpu_rows(results, "model", FORWARD):
        if row.name == "d8" and row.dtype in HALF and _as_in_the_paper(measurement):
            way = _where(measurement), row.dtype
            model, _, cut = match[1].partition(", ")
            entry = float(cut.split()[0]) if cut else math.inf, match[1], ratio
            found[way][model] = max(found[way].get(model, entry), entry)
    findings = []
    for (where, _), models in found.items():
        sizes = [label for size in paper.SCALING.rows if (label := paper_shape(size).label) in models]
        if len(sizes) > 1:
            ratios = [models[size][2] for size in sizes]
            words = ", ".join(f"{models[size][1]} {times(models[size][2])}" for size in sizes)
            findings.append(holds(ratios == sorted(ratios), f"{words} ({where})"))
    return together(findings)


def memory_falls(results: Results) -> Finding:
    """Whether a d8 of each size needs less memory than the ViT, and the larger the size the less."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for measurement, row in results.measured("memory"):
        match = INFERENCE.fullmatch(row.case)
        if match and row.name == "d8" and row.memory_ratio and measurement.source.gpu:
            found[measurement.source.hardware][match[1]] = row.memory_ratio
    findings = []
    for hardware, models in found.items():
        ratios = {
            label: models[label]
            for size in paper.SCALING.rows
            if (label := paper_shape(size).label) in models
        }
        if len(ratios) > 1:
            words = ", ".join(f"{label} {times(ratio)}" for label, ratio in ratios.items())
            order = list(ratios.values())
            findings.append(holds(order[0] > 1 and order == sorted(order), f"{words} ({hardware})"))
    return together(findings)


def full_precision(results: Results) -> Finding:
    """Whether an octic layer's speed-up is larger in float32 than in half precision, width by width."""
    ratios: dict[tuple[str, str, str], dict[str | None, float]] = defaultdict(dict)
    for measurement, row, match, ratio in _gpu_rows(results, "linear", LINEAR):
        if row.name == "octic":
            ratios[measurement.source.file, measurement.source.hardware, match[1]][row.dtype] = ratio
    return together(
        holds(
            found["float32"] > max(half),
            f"C = {width}: {times(found['float32'])} in float32, {times(max(half))} in half precision ({hardware})",
        )
        for (_, hardware, width), found in ratios.items()
        if "float32" in found and (half := [found[dtype] for dtype in HALF if dtype in found])
    )


def cheap_gelu(results: Results) -> Finding:
    """Whether octic GELU took at most a few per cent longer at every width."""
    return together(
        holds(
            1 / ratio <= FEW_PERCENT,
            f"C = {match[2]}: {number(100 / ratio - 100, 0, sign=True)} % ({measurement.source.hardware})",
        )
        for measurement, row, match, ratio in _gpu_rows(results, "gelu", LAYER)
        if match[1] == "GELU" and row.name == "octic"
    )
