"""Tables: ours beside the paper's, gaps, and what untrusted text cannot do."""

from html.parser import HTMLParser

import pytest

from quickvit.bench.layers import count_flops
from quickvit.report import paper
from quickvit.report.formulas import block_flops
from quickvit.report.results import Results, Source, read_results
from quickvit.report.table import HERE, NOT_RUN, PAPER, Column, Table, html, markdown
from quickvit.report.tables import TABLES
from quickvit.report.tables.computed import compute_scaling, dihedral_groups, paper_models
from quickvit.report.tables.frozen import frozen_features, hematology
from quickvit.report.tables.frozen import progress as course
from quickvit.report.tables.speed import (
    block_speed,
    forward_speed,
    gelu,
    linear_layers,
    memory,
    packing,
    training_speed,
)
from quickvit.report.tables.studies import classification, depth, invariants, lift, natural, slanted

ALL = [table for tables in TABLES.values() for table in tables]
NASTY = '<script>alert(1)</script>|`*x*`\n[y](javascript:z)"'


def cells(table, **key):
    """The row, as a dictionary, whose cells are these."""
    titles = [f"{c.title} {c.origin}".strip() for c in table.columns]
    rows = [dict(zip(titles, row, strict=True)) for row in table.rows]
    (row,) = (row for row in rows if all(row[name] == value for name, value in key.items()))
    return row


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_every_table_without_results(make):
    """Nothing measured: no number of ours but by formula, and a command for every gap."""
    table = make(Results())
    for row in table.rows:
        for column, cell in zip(table.columns, row, strict=True):
            assert column.origin != HERE or cell == NOT_RUN
    measured = any(column.origin == HERE for column in table.columns)
    assert measured == table.gaps == bool(table.commands)
    assert not table.sources
    assert ("not run" in markdown(table)) == table.gaps


def test_tables_have_their_own_names():
    tables = [make(Results()) for make in ALL]
    assert len({table.id for table in tables}) == len(tables)
    assert len({table.title for table in tables}) == len(tables)


class TestComputed:
    def test_scaling(self):
        table = compute_scaling(Results())
        row = cells(table, model="ViT-Large/16")
        assert (row["ViT GMACs formula"], row["d8 GMACs formula"]) == ("61.6", "13.2")
        assert (row["fewer FLOPs formula"], row["fewer FLOPs paper"]) == ("4.66×", "4.58×")
        assert cells(table, model="ViT-22b/14")["depth"] == "48 (paper 36)"

    @pytest.mark.parametrize("key", list(paper.DEIT.rows))
    def test_parameters_are_the_papers(self, key):
        row = cells(paper_models(Results()), model=key[0], family="ViT" if key[1] == "vit" else key[1])
        assert row["parameters (M) formula"] == row["parameters (M) paper"]
        assert float(row["GMACs formula"]) == pytest.approx(paper.DEIT.rows[key]["gmacs"], rel=0.01)

    def test_groups(self, bench, add_bench):
        case = "linear, C = 1024 → 4096, 12544 tokens"
        add_bench(
            "gpu_groups",
            "linear",
            (case, "standard", 1.0),
            (case, "octic", 2.5),
            (case, "D16", 3.5),
            (case, "D32", 4.5, {"dtype": "float32"}),
            (case.replace("12544", "12608"), "D32", 5.5),
        )
        table = dihedral_groups(read_results(bench))
        assert cells(table, group="D8")["speed-up here"] == "2.50×"
        row = cells(table, group="D16")
        assert (row["speed-up here"], row["on"]) == ("3.50×", "A GPU, bfloat16")
        assert row["fewer FLOPs formula"] == row["fewer FLOPs paper"] == "9.14×"
        assert row["FLOPs per byte formula"] == row["FLOPs per byte paper"]
        assert cells(table, group="D32")["speed-up here"] == NOT_RUN

    @pytest.mark.parametrize("width", [128, 1024, 4096])
    def test_flops_of_a_block_are_what_is_traced(self, width):
        standard, octic = count_flops([width], tokens=197)
        assert block_flops(width, 197, octic=False).products == pytest.approx(1e9 * standard.gflops)
        assert block_flops(width, 197, octic=True).products == pytest.approx(1e9 * octic.gflops)

    def test_other_operations_weigh_on_the_octic_block(self):
        standard, octic = (block_flops(1024, 197, octic=octic) for octic in (False, True))
        assert standard.total / octic.total < standard.products / octic.products
        assert 0 < octic.rest - standard.rest < 0.05 * octic.total


class TestSpeed:
    def test_forward(self, bench, add_bench):
        case = "ViT-Large/16 forward"
        add_bench(
            "gpu_model",
            "model",
            (case, "vit", 1.0, {"images_per_s": 3000.0}),
            (case, "d8", 1.9, {"images_per_s": 5700.0}),
            ("ViT-Base/16 forward", "d8", 3.0),
            ("ViT-Large/16 invariant answer", "d8", 8.0),
        )
        table = forward_speed(read_results(bench))
        row = cells(table, model="ViT-Large/16", family="d8")
        assert (row["images/s here"], row["speed-up here"], row["speed-up paper"]) == (
            "5,700",
            "1.90×",
            "1.32×",
        )
        assert row["on"] == "A GPU, bfloat16, batch 64, compiled default"
        assert cells(table, model="ViT-Base/16", family="d8")["speed-up paper"] == "–"
        assert cells(table, model="ViT-Huge/14", family="h8")["speed-up here"] == NOT_RUN
        assert cells(table, model="ViT-Huge/14", family="h8")["speed-up paper"] == "1.16×"
        assert [source.file for source in table.sources] == ["benchmarks/gpu_model.json"]

    def test_other_image_sizes(self, bench, add_bench):
        model = "ViT-Large/16 384px"
        results = [
            ("model", f"{model} forward", forward_speed, {"model": model}),
            ("block", f"{model} block forward", block_speed, {"model": model, "passes": "forward"}),
            ("train", f"{model}, 8 blocks deit3 step", training_speed, {"model": f"{model}, 8 blocks"}),
        ]
        for benchmark, case, _, _ in results:
            add_bench(benchmark, benchmark, (case, "d8", 1.9))
        for _, _, table, key in results:
            assert cells(table(read_results(bench)), family="d8", **key)["speed-up here"] == "1.90×"

    def test_two_machines_are_two_rows(self, bench, add_bench):
        for name in ("a", "b"):
            add_bench(name, "model", ("ViT-Large/16 forward", "d8", 2.0))
        rows = [row for row in forward_speed(read_results(bench)).rows if row[:2] == ("ViT-Large/16", "d8")]
        assert len(rows) == 2

    def test_a_failure_is_said(self, bench, add_bench):
        add_bench(
            "gpu", "model", ("ViT-Large/16 forward", "d8", None, {"ms": None, "failure": "out of memory"})
        )
        assert (
            cells(forward_speed(read_results(bench)), model="ViT-Large/16", family="d8")["speed-up here"]
            == "failed"
        )

    def test_blocks(self, bench, add_bench):
        case = "ViT-Large/16 block forward + backward"
        add_bench("gpu_block", "block", (case, "d8", 1.7, {"ms": 1.234, "over_floor": 2.05}))
        table = block_speed(read_results(bench))
        row = cells(table, model="ViT-Large/16", passes="forward + backward", family="d8")
        assert (row["speed-up here"], row["ms here"], row["time / floor here"]) == ("1.70×", "1.23", "2.05")
        assert cells(table, model="ViT-Large/16", passes="forward", family="d8")["ms here"] == NOT_RUN

    def test_memory(self, bench, add_bench):
        more = {"ms": None, "memory_mib": 500.0, "memory_ratio": 2.5}
        add_bench("gpu_memory", "memory", ("ViT-Large/16 inference", "d8", None, more))
        row = cells(memory(read_results(bench)), model="ViT-Large/16", family="d8")
        assert (row["MiB here"], row["saving here"], row["saving paper"]) == ("500", "2.50×", "2.44×")

    def test_training(self, bench, add_bench):
        add_bench(
            "gpu_train",
            "train",
            ("ViT-Large/16 dinov2 step", "h8", 1.3),
            ("ViT-Huge/14, 8 blocks deit3 forward + backward", "h8", 1.4),
            ("ViT-Large/16 dinov2 packing of h8", "h8, a pass per size", 1.0),
            ("ViT-Large/16 dinov2 packing of h8", "h8", 1.2),
        )
        results = read_results(bench)
        table = training_speed(results)
        row = cells(table, model="ViT-Large/16", family="h8", recipe="dinov2")
        assert (row["speed-up here"], row["speed-up paper"]) == ("1.30×", "1.16×")
        row = cells(table, model="ViT-Huge/14, 8 blocks", family="h8", recipe="deit3")
        assert (row["speed-up here"], row["speed-up paper"]) == ("1.40×", "–")
        row = cells(packing(results), model="ViT-Large/16", family="h8")
        assert (row["speed-up here"], row["ms here"]) == ("1.20×", "2.00")

    def test_linear(self, bench, add_bench):
        more = {"dtype": "float16", "intensity": 151.6, "ms": 0.0512}
        add_bench("gpu", "linear", ("linear, C = 1024 → 4096, 12544 tokens", "octic", 2.7, more))
        row = cells(linear_layers(read_results(bench)), layer="octic", C="1024", dtype="float16")
        assert (row["FLOPs per byte here"], row["FLOPs per byte paper"]) == ("152", "150")
        assert (row["ms here"], row["ms paper"], row["TFLOP/s here"]) == ("0.0512", "0.19", NOT_RUN)

    def test_gelu(self, bench, add_bench):
        add_bench("gpu", "gelu", ("MLP, C = 512, 6272 tokens", "octic", 1.5, {"ms": 0.2}))
        row = cells(gelu(read_results(bench)), operation="MLP", layer="octic", C="512")
        assert (row["µs here"], row["µs paper"]) == ("200", "244.4")
        assert (row["speed-up here"], row["speed-up paper"]) == ("1.50×", "1.33×")


class TestStudies:
    def test_mean_and_spread(self, bench, add_run):
        for seed, top1 in enumerate((90.0, 91.0, 92.5)):
            add_run(name="h8", seed=seed, top1=top1)
        add_run(name="i8", top1=88.0, invariant=True)
        table = classification(read_results(bench))
        row = cells(table, name="h8")
        assert (row["seeds"], row["top-1 (%) here"], row["top-1 (%) paper"]) == ("3", "91.17 ± 1.26", "84.5")
        assert row["turned by 90°s here"] == "−20.00 ± 0.00"
        assert (row["GMACs here"], row["MiB in training here"]) == ("0.220", NOT_RUN)
        row = cells(table, name="i8")
        assert (row["top-1 (%) here"], row["turned by 90°s here"]) == ("88.00", "0.00")
        assert cells(table, name="ViT")["top-1 (%) here"] == NOT_RUN

    def test_data_sets_apart(self, bench, add_run):
        add_run(top1=90.0)
        add_run(top1=80.0, dataset="pbc")
        table = slanted(read_results(bench))
        assert cells(table, name="ViT", data="pbc")["top-1 (%) here"] == "80.00"
        assert cells(table, name="ViT", data="cifar10")["turned by 45° here"] == "−25.00"

    def test_rows_that_nobody_expected(self, bench, add_run):
        add_run("depth", "k=2")
        add_run("depth", "k=12")
        assert [row[0] for row in depth(read_results(bench)).rows] == [
            "k=0",
            "k=3",
            "k=6",
            "k=9",
            "k=12",
            "k=2",
        ]
        assert sorted(["k=12", "k=3", "k=9"], key=natural) == ["k=3", "k=9", "k=12"]

    def test_ablations(self, bench, add_run):
        add_run("invariants", "max_filter", top1=70.0)
        add_run("lift", "free", top1=60.0)
        results = read_results(bench)
        row = cells(invariants(results), name="max filter")
        assert (row["top-1 (%) here"], row["top-1 (%) paper"], row["top-5 (%) paper"]) == (
            "70.00",
            "77.9",
            "93.9",
        )
        assert cells(lift(results), name="free")["top-1 (%) paper"] == "82.4"

    def test_frozen_features(self, bench, add_run):
        model = {"name": "quickvit_i8_small_patch16_224"}
        poses = [{"pose": "upright", "scores": {"1-NN": 0.8, "20-NN": 0.9, "logistic": 0.95}}]
        answers = {"1-NN": {"weighted_f1": 0.7, "accuracy": 0.8}}
        turned = {"1-NN": {"weighted_f1": 0.6}}
        progress = [
            {"step": 0, "poses": [{"pose": "upright", "answers": {"1-NN": {"accuracy": 0.3}}}]},
            {
                "step": 1000,
                "poses": [
                    {"pose": "upright", "answers": answers},
                    {"pose": "random quarter turn", "answers": turned},
                ],
            },
        ]
        add_run("dinov2", "i8", dataset="cells", model=model, poses=poses, progress=progress)
        results = read_results(bench)
        row = cells(frozen_features(results), data="cells", family="i8")
        assert (row["model"], row["linear (%) here"], row["k-NN (%) here"]) == ("ViT-Small", "95.00", "90.00")
        assert row["k-NN, turned by 90°s here"] == NOT_RUN
        row = cells(hematology(results), classifier="1-NN", family="i8")
        assert (row["wF1 (%) here"], row["wF1 (%) paper"]) == ("70.00", "78.1")
        assert (row["Acc (%) here"], row["bAcc (%) here"]) == ("80.00", NOT_RUN)
        row = cells(course(results), classifier="1-NN", family="i8", updates="0")
        assert (row["Acc (%) here"], row["wF1 (%) here"]) == ("30.00", NOT_RUN)
        row = cells(course(results), classifier="1-NN", family="i8", updates="1,000")
        assert (row["Acc (%) here"], row["wF1 (%), turned here"]) == ("80.00", "60.00")
        assert cells(course(results), classifier="20-NN", family="ViT")["Acc (%) here"] == NOT_RUN

    def test_the_papers_rows_are_filled_once_they_are_run(self, bench, add_run):
        model = {"name": "quickvit_h8_large_patch16_224"}
        add_run(name="h8", top1=84.0, dataset="imagenet-large", model=model)
        add_run(
            "dinov2",
            "h8",
            dataset="imagenet-large",
            model=model,
            poses=[{"pose": "upright", "scores": {"knn": 0.8}}],
        )
        results = read_results(bench)
        assert cells(paper_models(results), model="ViT-Large/16", family="h8")["top-1 (%) here"] == "84.00"
        row = cells(frozen_features(results), model="ViT-Large/16", family="h8", data="ImageNet-1K")
        assert (row["k-NN (%) here"], row["k-NN (%) paper"]) == ("80.00", "80.8")
        assert len(frozen_features(results).rows) == len(paper.DINOV2.rows) + len(paper.DINOV2_MORE.rows)

    def test_the_papers_i8_has_the_polynomial_invariant(self, bench, add_run):
        for invariant, shown in (("power_spectrum", NOT_RUN), ("polynomial", "84.00")):
            model = {"name": "quickvit_i8_large_patch16_224", "options": [f"--invariant={invariant}"]}
            add_run(name="i8", top1=84.0, dataset="imagenet-large", model=model)
            table = paper_models(read_results(bench))
            assert cells(table, model="ViT-Large/16", family="i8")["top-1 (%) here"] == shown


class TestWriting:
    TABLE = Table(
        NASTY,
        NASTY,
        (Column(NASTY), Column("number", PAPER)),
        ((NASTY, NOT_RUN),),
        NASTY,
        NASTY,
        (Source(NASTY, NASTY, True, NASTY, NASTY, NASTY),),
        (NASTY,),
    )

    def test_html_is_escaped(self):
        found = []

        class Parser(HTMLParser):
            def handle_starttag(self, tag, attributes):
                found.append(tag)
                assert not any(name.startswith("on") for name, _ in attributes)

        Parser().feed(html(self.TABLE))
        assert "script" not in found
        assert found.count("td") == 1

    def test_markdown_is_escaped(self):
        text = markdown(self.TABLE)
        for line in text.splitlines():
            if not line.startswith("    "):
                assert "<script" not in line.replace(r"\<", "")
                assert "[y]" not in line
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len(rows) == 3
        assert all(row.replace(r"\|", "").count("|") == 3 for row in rows)

    def test_a_row_must_fit(self):
        with pytest.raises(ValueError, match="narrow: 2 cells in a row of 1 columns"):
            Table("narrow", "", (Column("one"),), (("a", "b"),))


def test_runs_that_differ_in_the_seed_are_one_source() -> None:
    def source(name: str, seed: int, rate: str) -> Source:
        command = f"quickvit train --out=runs/{name}-{seed} --seed={seed} --learning-rate={rate}"
        return Source(f"results/{name}-{seed}.json", "GPU", True, "2026-01-01", command, "0123456789abcdef")

    sources = (source("a", 0, "1e-3"), source("a", 1, "1e-3"), source("b", 1, "1e-3"), source("a", 2, "1e-4"))
    table = Table("t", "T", (Column("n"), Column("x", HERE)), (("a", "1"),), sources=sources)
    lines = [line for line in markdown(table).splitlines() if line.startswith("- ")]
    assert [line.split(", GPU")[0] for line in lines] == [
        "- results/a-0.json, a-1.json",
        "- results/b-1.json",
        "- results/a-2.json",
    ]
    assert html(table).count("<li>") == 3
