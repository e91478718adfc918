"""The pages say what runs."""

import json
import re
import runpy
import shlex
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
import torch
from records import WHOLE_MODELS, kernels, measured

from quickvit import D8, QuickVisionTransformer, save_checkpoint
from quickvit.bench import work
from quickvit.cli import main, parse
from quickvit.models.zoo import SIZES
from quickvit.testing import randomize

ROOT = Path(__file__).parent.parent
# What is said of speed: of whole models, and of kernels.
SPEED = [ROOT / "docs/performance.md", ROOT / "docs/kernels.md"]
RESULTS = ROOT / "benchmarks/results"
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# What stands behind the backticks. A block with a title, which the site shows above it, is not run.
OPENING = re.compile(r'(python|sh|text)(?: title="Not run in the tests: (.+)")?')
# Programs besides quickvit that a block of commands may call. They are not looked at.
OTHERS = ("make", "pip", ".venv/bin/pre-commit", "awk")
# Records of operators, and the sizes of each.
OPERATORS = (
    ("h200_operators", "ViT-Large/16", "ViT-Huge/14"),
    ("h200_operators_giant", "ViT-Giant/14", "ViT-E/14"),
)


# Kinds of kernels by the beginning of their names.
KINDS = {
    "products": "nvjet|_octic_linear|_linear_heads",
    "weight gradients": "_partial_sums|_sum_slices",
    "fc1 + GELU": "_linear_gelu",
    "GELU": "_gelu_(for|back)ward",
    "attention": "_attention",
    "norms": "_norm_|_sum_partial",
    "copies into heads": "_to_heads|_to_packed",
}


class Block(NamedTuple):
    """A fenced block: its language, why it is not run, the line it begins in, and its code."""

    language: str
    exception: str | None
    line: int
    code: str


def blocks(page):
    """All blocks of a page."""
    text = page.read_text()
    found = list(re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE))
    if len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)) != 2 * len(found):
        raise ValueError(f"{page.name}: a block that is not closed, or not by ```")
    for match in found:
        opening = OPENING.fullmatch(match[2])
        if opening is None:
            raise ValueError(f"{page.name}: a block begins with {match[2]!r}, expected {OPENING.pattern}")
        yield Block(opening[1], opening[2], text.count("\n", 0, match.start()) + 1, dedent(match[3]))


def run(page):
    """Run the Python of a page from top to bottom, as one program."""
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and not block.exception:
            # Errors name the line of the page.
            exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


def commands(page):
    """The command lines of a page."""
    for block in blocks(page):
        if block.language == "sh" and not block.exception:
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield words


def understand(page):
    """Let the parser of quickvit read the command lines of a page."""
    for words in commands(page):
        if words[0] == "torchrun":
            words = words[words.index("-m") + 1 :]
        if words[0] == "quickvit":
            parse(words[1:])
        else:
            assert words[0] in OTHERS, f"{page.name}: unknown program {words[0]}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty folder and cache to work in, and PyTorch's default precision afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    torch.set_default_dtype(torch.float32)


def named(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_runs(page):
    run(page)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_understood(page):
    Path("recipe.yaml").write_text("model: quickvit_h8_tiny_patch16_224\ndata: digits\nout: run\n")
    understand(page)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert 1 == 2\n```\n", AssertionError),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", AssertionError),
        ("1. In a list:\n\n    ```python\n    1 / 0\n    ```\n", ZeroDivisionError),
        ("```python\nimport quickvit.nothing\n```\n", ImportError),
        ("```pycon\n>>> 1\n```\n", ValueError),
        ("```\nno language\n```\n", ValueError),
        ('```python title="Later"\n1\n```\n', ValueError),
        ('```python title="Not run in the tests: "\n1\n```\n', ValueError),
        ("```python\n1 / 0\n", ValueError),
        ("~~~python\n1 / 0\n~~~\n", ValueError),
        ("```sh\nquickvit fly\n```\n", SystemExit),
        ("```sh\nquickvit eval knn m.safetensors --dta digits\n```\n", SystemExit),
        ("```sh\ntorchrun -m quickvit train deit3 --model m --data d --out o --epoks 3\n```\n", SystemExit),
        ("```sh\nrm -r run\n```\n", AssertionError),
    ],
)
def test_a_broken_block_is_caught(text, error):
    page = Path("page.md")
    page.write_text(text)

    def look():
        run(page)
        understand(page)

    with pytest.raises(error):
        look()


def test_an_exception_says_why():
    page = Path("page.md")
    page.write_text('```python title="Not run in the tests: needs two GPUs"\n1 / 0\n```\n')
    run(page)
    assert [block.exception for block in blocks(page)] == ["needs two GPUs"]


def test_the_commands_of_the_data_page_run(capsys):
    options = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 10,
    }
    save_checkpoint(randomize(QuickVisionTransformer(**options)), "model.safetensors")
    lines = [words for words in commands(ROOT / "docs/data.md") if words[0] == "quickvit"]
    assert len(lines) >= 3
    for line in lines:
        assert main(line[1:]) == 0, capsys.readouterr().err


def test_the_performance_page_says_what_was_measured():
    text = "".join(page.read_text() for page in SPEED)
    for name in WHOLE_MODELS:
        record = measured(name)
        assert re.sub(r" --out \S+", "", record["command"]) in text
        for row in record["results"]:
            if row["ratio"] is None:
                assert f"took {row['ms']:.1f} ms" in text
                continue
            cells = (
                f"{row['ms']:.2f} | {row['images_per_s']:.0f} | {row['ratio']:.2f}× | {row['over_floor']:.2f}"
            )
            assert f"| {row['case']} | {row['name']} | {cells} |" in text
    words = " ".join(text.split())
    for name in ("launched", "small"):
        packing = measured(f"h200_packing_{name}")
        assert re.sub(r" --out \S+", "", packing["command"]) in text
        ratios = {(row["case"].split("dinov2 ")[1], row["name"]): row["ratio"] for row in packing["results"]}
        assert f"{ratios['packing of h8', 'h8']:.2f} times the speed of a pass for each size with h8" in words
        assert re.search(rf"{ratios['packing of vit', 'vit']:.2f}( times)? with ViT", words)
        assert f"({ratios['step', 'h8']:.2f} times)" in words
    for record in (measured("h200_block_large"), measured("h200_block_huge")):
        assert re.sub(r" --out \S+", "", record["command"]) in text
        for row in record["results"]:
            cells = f"{row['ms']:.2f} | {row['ratio']:.2f}× | {row['over_floor']:.2f}"
            assert f"| {row['case']} | {row['name']} | {cells} |" in text
    for record, *sizes in OPERATORS:
        operators = measured(record)
        assert re.sub(r" --out \S+", "", operators["command"]) in text
        octic = {row["case"]: row for row in operators["results"] if row["name"] == "octic"}
        for case in octic:
            size, operator = case.split(" ", 1)
            if size == sizes[0]:
                pair = [octic[f"{size} {operator}"] for size in sizes]
                cells = (
                    f"{1e3 * r['ms']:.0f} | {1e3 * r['floor_ms']:.0f} | {r['over_floor']:.2f}" for r in pair
                )
                assert f"| {operator} | {' | '.join(cells)} |" in text


def test_the_performance_page_says_what_one_graph_is_good_for():
    text = "".join(page.read_text() for page in SPEED)
    record = measured("h200_train_large_graph")
    assert re.sub(r" --out \S+", "", record["command"]) in text
    vit, d8 = record["results"]
    words = f"d8 takes {d8['ms']:.1f} ms and ViT {vit['ms']:.1f}, {d8['ratio']:.2f} times as long"
    assert words in " ".join(text.split())


def test_the_performance_page_adds_up_what_is_left_to_gain():
    """What a block would take at best, what operators take above that, and what a block of a whole model takes."""
    rows = {
        (row["case"], row["name"]): row for record, *_ in OPERATORS for row in measured(record)["results"]
    }
    models = {
        (row["case"], row["name"]): row["ms"]
        for record in ("h200_model", "h200_huge", "h200_giant")
        for row in measured(record)["results"]
    }
    text = "".join(page.read_text() for page in SPEED)
    ratios = []
    for size, label, depth in (
        ("ViT-Large/16", "L/16", 24),
        ("ViT-Huge/14", "H/14", 32),
        ("ViT-Giant/14", "G/14", 48),
        ("ViT-E/14", "e/14", 56),
    ):

        def us(operator, key="ms", name="octic", size=size):
            return 1e3 * rows[f"{size} {operator}", name][key]

        def excess(*operators, us=us):
            return sum(us(operator) - us(operator.split(" +")[0], "floor_ms") for operator in operators)

        attention = us("attention", name="standard")
        norms = 2 * us("residual + norm", "floor_ms")
        best = sum(us(operator, "floor_ms") for operator in ("qkv", "proj", "fc1", "fc2")) + norms + attention
        above = [
            excess("fc1 + GELU"),
            excess("proj", "fc2"),
            us("qkv + attention") - us("qkv", "floor_ms") - attention,
            2 * us("residual + norm") - norms,
        ]
        blocks = [1e3 * models[f"{size} forward", name] / depth for name in ("d8", "vit")]
        ratios.append(f"{blocks[1] / best:.1f}")
        cells = " | ".join(f"{us:.0f}" for us in (best, *above, best + sum(above), *blocks))
        assert f"| {label} | {cells} |" in text
    assert f"d8 would be {', '.join(ratios[:3])} and {ratios[3]} times as fast as ViT" in text


def test_the_performance_page_says_what_an_invariant_answer_costs():
    text = SPEED[0].read_text()
    record = measured("cpu_views")
    assert re.sub(r" --out \S+", "", record["command"]) in text
    rows = [row for row in record["results"] if row["case"].endswith("invariant answer")]
    assert [row["name"] for row in rows] == ["vit, mean of 8 views", "i8"]
    for row in rows:
        cells = f"{row['ms']:.0f} | {row['images_per_s']:.2f} | {row['ratio']:.2f}×"
        assert f"| {row['case']} | {row['name']} | {cells} |" in text


def test_the_performance_page_says_what_floors_are_without_gelu_and_folded():
    """Of an octic block in inference, also a folded one, by the rates that the records reached."""
    with_gelu, without, longer, folded = [], [], [], []
    for size, record, tokens, case, depth in (
        ("large", "h200_model", 197, "ViT-Large/16 forward", 24),
        ("huge", "h200_huge", 257, "ViT-Huge/14 forward", 32),
        ("giant", "h200_giant", 257, "ViT-Giant/14 forward", 48),
    ):
        found = measured(record)
        reached = work.Ceilings(**found["ceilings"]["bfloat16"])
        storage = work.Storage.inference(torch.bfloat16)
        steps = work.block(SIZES[size], 64, tokens, storage, D8)
        gelu = work.elementwise(64 * tokens * SIZES[size].mlp_dim, 2, storage.compute)
        assert gelu in steps
        whole, alone = (1e3 * work.floor_ms(some, reached) for some in (steps, [gelu]))
        with_gelu.append(f"{whole:.0f}")
        without.append(f"{whole - alone:.0f}")
        fewer = work.block(SIZES[size], 64, tokens, storage, D8, folded=True)
        folded.append(f"{1e3 * work.floor_ms(fewer, reached):.0f}")
        d8 = next(r["ms"] for r in found["results"] if (r["case"], r["name"]) == (case, "d8"))
        longer.append(f"{1e3 * d8 / depth / (whole - alone):.1f}")
    words = " ".join(SPEED[0].read_text().split())
    assert (
        f"would be {without[0]}, {without[1]} and {without[2]} µs at L/16, H/14 and G/14 instead of" in words
    )
    assert f"instead of {with_gelu[0]}, {with_gelu[1]} and {with_gelu[2]}," in words
    fall = "fall from {}, {} and {} µs to {}, {} and {} at L/16, H/14 and G/14".format(*with_gelu, *folded)
    assert fall in words
    assert f"about {longer[0]} and {longer[1]} times as long as them" in words


def kinds_of_kernels(name):
    """Microseconds of a block by kind; what is no kind is the rest."""
    sums = dict.fromkeys([*KINDS, "the rest"], 0.0)
    found = kernels(name)
    together = found.pop("together")
    for kernel, (block, _) in found.items():
        kind = next((kind for kind, names in KINDS.items() if re.match(names, kernel)), "the rest")
        sums[kind] += block
    assert sum(sums.values()) == pytest.approx(together[0], abs=1)
    return sums, together


def test_the_performance_page_says_where_the_time_goes():
    text = "".join(page.read_text() for page in SPEED)
    words = " ".join(text.split())
    forward = ("products", "fc1 + GELU", "GELU", "attention", "norms", "copies into heads", "the rest")
    beside, longer = [], []
    for label, size, record, name, depth in (
        ("L/16", "large", "h200_model", "ViT-Large/16", 24),
        ("H/14", "huge", "h200_huge", "ViT-Huge/14", 32),
        ("G/14", "giant", "h200_giant", "ViT-Giant/14", 48),
        (None, "vit_huge", "h200_huge", "ViT-Huge/14", 32),
    ):
        sums, (block, rest) = kinds_of_kernels(f"h200_kernels_{size}")
        family = "d8" if label else "vit"
        rows = measured(record)["results"]
        whole = next(r["ms"] for r in rows if (r["case"], r["name"]) == (f"{name} forward", family))
        longer.append(f"{100 * ((1e3 * whole - rest) / depth / block - 1):.0f}")
        if label:
            beside.append(f"{rest:.0f}")
            cells = [f"{sums[kind]:z.0f}" if sums[kind] or kind == "the rest" else "" for kind in forward]
            line = " | ".join([label, *cells, f"{block:.0f}"])
            assert f"| {line} |".replace("|  |", "| |") in text
    assert f"Beside its blocks a model takes {beside[0]}, {beside[1]} and {beside[2]} µs" in words
    assert (
        f"take {longer[0]}, {longer[1]} and {longer[2]}% longer than these, and ViT's {longer[3]}%" in words
    )
    sums, (block, _) = kinds_of_kernels("h200_kernels_train_huge")
    kinds = ("products", "weight gradients", "attention", "norms", "GELU", "copies into heads", "the rest")
    assert f"| {' | '.join(f'{sums[kind]:.0f}' for kind in kinds)} | {block:.0f} |" in text
    d8 = measured("h200_train_huge")["results"][1]
    assert f"{1e3 * d8['ms'] / 32:.0f} µs of the step" in words
    for record, case, said in (
        ("h200_train_large", "ViT-Large/16 deit3 forward + backward", "samples of d8's step differ by"),
        ("h200_block_large", "ViT-Large/16 block forward + backward", "samples of d8's differ by"),
    ):
        rows = measured(record)["results"]
        spread = next(r["spread"] for r in rows if (r["case"], r["name"]) == (case, "d8"))
        assert f"{said} {100 * spread:.0f}%" in words


def test_blood_cells_are_learned_as_the_page_says():
    """From the first evaluation to the last an i8 is ahead, with labels and without, at two thirds of the work."""
    text = (ROOT / "docs/howto/no-up.md").read_text()
    for picture in re.findall(r"\(\.\./(results/curves-\d\.svg)\)", text):
        assert "pbc_blood_96" in (ROOT / "docs" / picture).read_text()

    def runs(study, family):
        return [json.loads(file.read_text()) for file in sorted((RESULTS / study).glob(f"{family}-*.json"))]

    def means(study, family, curve, score):
        values = [[score(point) for point in run[curve]] for run in runs(study, family)]
        return [sum(column) / len(values) for column in zip(*values, strict=True)]

    studies = (
        ("pbc_blood_96-families", "curve", lambda point: point["eval/top1"]),
        ("pbc_blood_96-dinov2", "progress", lambda point: point["poses"][0]["scores"]["20-NN"]),
    )
    for study, curve, score in studies:
        vit, i8 = (means(study, family, curve, score) for family in ("vit", "i8"))
        assert all(ours > theirs for ours, theirs in zip(i8, vit, strict=True))
        work = [runs(study, family)[0]["gmacs"] for family in ("i8", "vit")]
        assert 0.6 < work[0] / work[1] < 0.7


def test_the_results_are_those_of_the_files():
    written = runpy.run_path(str(ROOT / "docs/results.py"))
    results = written["read_results"](ROOT / "benchmarks")
    assert written["page"](results) == written["PAGE"].read_text()
    drawn = {f"{name}.svg" for drawing in written["drawings"](results) for name in drawing.files}
    assert {file.name for file in written["PICTURES"].iterdir()} == drawn


def test_the_figures_are_what_the_code_draws():
    drawn = Path("figures")
    drawn.mkdir()
    runpy.run_path(str(ROOT / "docs/figures.py"))["main"](drawn)
    committed = {file.name: file.read_text() for file in (ROOT / "docs/figures").iterdir()}
    assert {file.name: file.read_text() for file in drawn.iterdir()} == committed
