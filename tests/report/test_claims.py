"""The rules that judge the paper's claims."""

import pytest

from quickvit.report.claims import CLAIMS
from quickvit.report.results import Results, read_results
from quickvit.report.rules import (
    Finding,
    Verdict,
    compare,
    crossing,
    hybrid_saving,
    linear_saving,
    model_saving,
    together,
)
from quickvit.report.sample import Sample
from quickvit.report.tables import TABLES

CONFIRMED, NOT_CONFIRMED, UNDECIDED, NOT_TESTABLE, NOT_RUN = Verdict
FORWARD, TRAIN = "ViT-Large/16 forward", "ViT-Large/16 deit3 forward + backward"


def judge(words, results):
    """What the results say of the one claim with these words."""
    (claim,) = (claim for claim in CLAIMS if words in claim.sentence)
    return claim.rule(results)


def test_claims_point_to_tables():
    tables = {make(Results()).id for tables in TABLES.values() for make in tables}
    assert {claim.table for claim in CLAIMS} <= tables
    assert len({claim.sentence for claim in CLAIMS}) == len(CLAIMS)


def test_nothing_is_claimed_without_results():
    formulas = (linear_saving, model_saving, hybrid_saving, crossing)
    for claim in CLAIMS:
        finding = claim.rule(Results())
        if claim.rule in formulas:
            assert finding.verdict == CONFIRMED
        else:
            assert finding.verdict in (NOT_RUN, NOT_TESTABLE), claim.sentence
        assert (finding.verdict == NOT_RUN) == (finding.evidence == "")


@pytest.mark.parametrize(
    ("a", "b", "better", "verdict"),
    [
        ((90, 90.2), (88, 88.2), True, CONFIRMED),
        ((90, 90.2), (89.9, 90.1), True, NOT_CONFIRMED),
        ((88, 92), (87, 89), True, NOT_CONFIRMED),
        ((90, 90.2), (90.1, 90.3), False, CONFIRMED),
        ((88, 88.2), (90, 90.2), False, NOT_CONFIRMED),
        ((86, 92), (87, 93), False, UNDECIDED),
        ((90,), (88, 88.2), True, UNDECIDED),
        (None, (88, 88.2), True, NOT_RUN),
    ],
)
def test_compare(a, b, better, verdict):
    pair = {"a": a and Sample(a), "b": b and Sample(b)}
    assert compare(pair, "here", better=better).verdict == verdict


def test_together():
    findings = [Finding(verdict, f"from {verdict}") for verdict in Verdict]
    assert together(findings).verdict == NOT_CONFIRMED
    assert together(findings[:1] + findings[2:]) == Finding(
        CONFIRMED,
        "from confirmed here; from undecided here; from not testable at this scale; from not run",
    )
    assert together(findings[2:]).verdict == UNDECIDED
    assert together(findings[3:]).verdict == NOT_TESTABLE
    assert together([]) == Finding(NOT_RUN, "")


def test_families(bench, add_run):
    for seed in range(3):
        add_run(name="vit", seed=seed, top1=90 + 0.1 * seed)
        add_run(name="h8", seed=seed, top1=90.5 + 0.1 * seed)
        add_run(name="i8", seed=seed, top1=87 + 0.1 * seed, invariant=True)
    results = read_results(bench)
    assert judge("h8 matches the accuracy", results) == Finding(
        CONFIRMED, "cifar10: h8 90.60 ± 0.10, ViT 90.10 ± 0.10"
    )
    assert judge("i8 matches the accuracy", results).verdict == NOT_CONFIRMED
    assert judge("h8 is more accurate than i8", results).verdict == CONFIRMED
    assert judge("i8 loses nothing", results) == Finding(CONFIRMED, "largest change in 3 runs: 0.00 points")
    assert judge("ViT loses accuracy", results).evidence == "cifar10: −20.00 ± 0.00 points"
    assert judge("i8 loses less than ViT when images are turned by 45°", results).verdict == CONFIRMED


def test_fewer_flops_are_part_of_the_claim(bench, add_run):
    for name in ("vit", "h8"):
        for seed in range(2):
            add_run(name=name, seed=seed, top1=90 + 0.1 * seed, gmacs=1.0)
    finding = judge("h8 matches the accuracy", read_results(bench))
    assert finding.verdict == NOT_CONFIRMED
    assert finding.evidence.endswith("no fewer MACs on cifar10")


def test_a_broken_invariant_is_seen(bench, add_run):
    add_run(name="i8", invariant=False)
    assert judge("i8 loses nothing", read_results(bench)).verdict == NOT_CONFIRMED


def test_ablations(bench, add_run):
    for seed in range(2):
        for name, top1 in (("power_spectrum", 87.0), ("polynomial", 87.05), ("linear", 80.0)):
            add_run("invariants", name, seed, top1 + 0.1 * seed)
        for k, top1 in ((0, 92.0), (6, 90.0), (12, 85.0)):
            add_run("depth", f"k={k}", seed, top1 + 0.1 * seed)
        for name, top1 in (("octic", 90.0), ("free", 88.0)):
            add_run("lift", name, seed, top1 + 0.1 * seed)
    results = read_results(bench)
    finding = judge("power spectrum", results)
    assert finding.verdict == CONFIRMED
    assert "best other: polynomial" in finding.evidence
    assert judge("half of the blocks", results).verdict == NOT_CONFIRMED
    assert judge("better than a free one", results).verdict == CONFIRMED


def test_frozen_features(bench, add_run):
    for name, share in (("vit", 0.90), ("i8", 0.92), ("h8", 0.85)):
        for seed in range(2):
            scores = dict.fromkeys(("1-NN", "20-NN", "logistic"), share + 0.001 * seed)
            poses = [{"pose": pose, "scores": scores} for pose in ("upright", "random quarter turn")]
            add_run("dinov2", name, seed, dataset="cells", poses=poses)
    results = read_results(bench)
    assert judge("features of i8", results).verdict == CONFIRMED
    assert judge("features of h8", results).verdict == NOT_CONFIRMED
    assert judge("most scores of blood cells", results) == Finding(CONFIRMED, "cells: 3 of 3 scores")
    assert judge("next to nothing for ViT", results).verdict == CONFIRMED


def test_one_seed_does_not_decide_about_blood_cells(bench, add_run):
    for name, share in (("vit", 0.90), ("i8", 0.92)):
        scores = dict.fromkeys(("1-NN", "20-NN", "logistic"), share)
        poses = [{"pose": pose, "scores": scores} for pose in ("upright", "random quarter turn")]
        add_run("dinov2", name, dataset="cells", poses=poses)
    results = read_results(bench)
    assert judge("most scores of blood cells", results) == Finding(
        UNDECIDED, "cells: 3 of 3 scores, one seed has no spread"
    )
    assert judge("next to nothing for ViT", results) == Finding(
        UNDECIDED, "largest change in 1 run: 0.00 points, one seed has no spread"
    )


def test_one_seed_does_not_decide_about_turned_photographs(bench, add_run):
    add_run(name="vit")
    assert judge("ViT loses accuracy", read_results(bench)) == Finding(
        UNDECIDED, "cifar10: −20.00 points, one seed has no spread"
    )


def test_one_seed_decides_about_what_is_so_by_construction(bench, add_run):
    add_run(name="i8", invariant=True)
    finding = judge("i8 loses nothing", read_results(bench))
    assert finding == Finding(CONFIRMED, "largest change in 1 run: 0.00 points")


def test_speed(bench, add_bench):
    huge = "ViT-Huge/14 forward"
    add_bench("gpu_model", "model", (FORWARD, "d8", 1.9), (huge, "d8", 2.3), (FORWARD, "vit", 1.0))
    add_bench("gpu_train", "train", (TRAIN, "d8", 1.02, {"spread": 0.05}))
    layer = "linear, C = 1024 → 4096, 12544 tokens"
    add_bench("gpu_linear", "linear", (layer, "octic", 2.6), (layer, "octic", 4.8, {"dtype": "float32"}))
    add_bench("gpu_gelu", "gelu", ("GELU, C = 256, 6272 tokens", "octic", 0.8))
    results = read_results(bench)
    where = "(A GPU, batch 64, compile default)"
    found = f"ViT-Large/16 d8 1.90× {where}; ViT-Huge/14 d8 2.30× {where}"
    assert judge("are faster", results) == Finding(CONFIRMED, found)
    assert judge("grows with their size", Results(results.measurements[2:])).verdict == CONFIRMED
    slow = "ViT-Large/16 deit3 d8 1.02× (A GPU, batch 64, compile default, samples differ by 5%)"
    assert judge("train faster", results) == Finding(UNDECIDED, slow)
    add_bench("gpu_train", "train", (TRAIN, "d8", 0.9, {"spread": 0.05}))
    assert judge("train faster", read_results(bench)).verdict == NOT_CONFIRMED
    assert judge("full precision", results).verdict == CONFIRMED
    assert judge("GELU", results) == Finding(NOT_CONFIRMED, "C = 256: +25 % (A GPU)")


def test_the_spread_of_the_vit_counts_too(bench, add_bench):
    ours, other = (FORWARD, "d8", 1.03), (FORWARD, "vit", 1.0, {"spread": 0.5, "dtype": "float32"})
    for spread, verdict in ((0.05, UNDECIDED), (None, UNDECIDED), (0.02, CONFIRMED)):
        add_bench("gpu_model", "model", (FORWARD, "vit", 1.0, {"spread": spread}), other, ours)
        finding = judge("are faster", read_results(bench))
        assert finding.verdict == verdict
        assert (spread == 0.05) == ("samples differ by 5%" in finding.evidence)


def test_one_sample_does_not_decide_about_speed(bench, add_bench):
    add_bench("gpu_model", "model", (FORWARD, "d8", 1.9, {"spread": None}))
    finding = judge("are faster", read_results(bench))
    assert finding == Finding(
        UNDECIDED, "ViT-Large/16 d8 1.90× (A GPU, batch 64, compile default, one sample has no spread)"
    )


def test_speed_of_models_that_were_cut(bench, add_bench):
    """In records of their own; the one with the most blocks counts, and what was compiled otherwise does not."""
    cut = "ViT-Huge/14, {} blocks forward".format
    add_bench("gpu_large", "model", (FORWARD, "d8", 1.9))
    add_bench("gpu_two", "model", (cut(2), "d8", 1.5))
    add_bench("gpu_huge", "model", (cut(8), "d8", 2.1))
    add_bench(
        "gpu_giant",
        "model",
        ("ViT-Giant/14 forward", "d8", 1.0),
        settings={"batch": 64, "compile": "blocks"},
    )
    finding = judge("grows with their size", read_results(bench))
    assert finding == Finding(
        CONFIRMED, "ViT-Large/16 1.90×, ViT-Huge/14, 8 blocks 2.10× (A GPU, batch 64, compile default)"
    )
    add_bench("gpu_large", "model", (FORWARD, "d8", 2.2))
    assert judge("grows with their size", read_results(bench)).verdict == NOT_CONFIRMED


@pytest.mark.parametrize("settings", [{"batch": 8, "compile": "default"}, {"batch": 64, "compile": "none"}])
def test_other_settings_than_the_papers_do_not_decide_about_speed(bench, add_bench, settings):
    add_bench("gpu_train", "train", (TRAIN, "d8", 0.7), settings=settings)
    add_bench(
        "gpu_model", "model", (FORWARD, "d8", 2.0), ("ViT-Huge/14 forward", "d8", 1.9), settings=settings
    )
    results = read_results(bench)
    for words in ("train faster", "are faster", "grows with their size"):
        assert judge(words, results).verdict == NOT_RUN


def test_memory(bench, add_bench):
    def ratios(*values):
        rows = (
            (f"ViT-{model} inference", "d8", None, {"memory_ratio": value})
            for model, value in zip(("Large/16", "Huge/14"), values, strict=True)
        )
        add_bench("gpu_memory", "memory", *rows)
        return judge("less memory", read_results(bench))

    assert ratios(2.5, 3) == Finding(CONFIRMED, "ViT-Large/16 2.50×, ViT-Huge/14 3.00× (A GPU)")
    assert ratios(3, 2.5).verdict == NOT_CONFIRMED
    assert ratios(0.9, 2.5).verdict == NOT_CONFIRMED


def test_large_scale_is_of_size_h_and_of_the_papers_accuracy(bench, add_run):
    def trained(size, h8, vit):
        for name, top1 in (("h8", h8), ("vit", vit)):
            for seed in range(2):
                model = {"name": f"quickvit_{name}_{size}_patch14_224"}
                add_run(name=name, seed=seed, top1=top1 + 0.1 * seed, dataset=f"imagenet-{size}", model=model)
        return judge("85.0 %", read_results(bench)).verdict

    assert trained("tiny", 61, 60) == NOT_TESTABLE
    assert trained("huge", 61, 60) == NOT_CONFIRMED
    assert trained("huge", 85, 85) == NOT_CONFIRMED
    assert trained("huge", 85, 84.6) == CONFIRMED


def test_a_processor_is_no_gpu(bench, add_bench):
    hardware = {"cpu": "A processor", "threads": 2}
    add_bench("cpu", "model", (FORWARD, "d8", 4.0), hardware=hardware)
    assert judge("are faster", read_results(bench)).verdict == NOT_RUN
