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
from records import WHOLE_MODELS, measured

from quickvit import QuickVisionTransformer, save_checkpoint
from quickvit.cli import main, parse
from quickvit.testing import randomize

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# What stands behind the backticks. A block with a title, which the site shows above it, is not run.
OPENING = re.compile(r'(python|sh|text)(?: title="Not run in the tests: (.+)")?')
# Programs besides quickvit that a block of commands may call. They are not looked at.
OTHERS = ("make", "pip", ".venv/bin/pre-commit", "awk")


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
    text = (ROOT / "docs/performance.md").read_text()
    operators = measured("h200_operators")
    assert re.sub(r" --out \S+", "", operators["command"]) in text
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
    octic = {row["case"]: row for row in operators["results"] if row["name"] == "octic"}
    for case in octic:
        size, operator = case.split(" ", 1)
        if size == "ViT-Large/16":
            pair = octic[case], octic[f"ViT-Huge/14 {operator}"]
            cells = (f"{1e3 * r['ms']:.0f} | {1e3 * r['floor_ms']:.0f} | {r['over_floor']:.2f}" for r in pair)
            assert f"| {operator} | {' | '.join(cells)} |" in text


def test_the_performance_page_says_what_one_graph_is_good_for():
    text = (ROOT / "docs/performance.md").read_text()
    record = measured("h200_train_large_graph")
    assert re.sub(r" --out \S+", "", record["command"]) in text
    vit, d8 = record["results"]
    words = f"d8 takes {d8['ms']:.1f} ms and ViT {vit['ms']:.1f}, {d8['ratio']:.2f} times as long"
    assert words in " ".join(text.split())


def test_the_performance_page_adds_up_what_is_left_to_gain():
    """The operators of a block, what they would take at best, and what a block of a whole model takes."""
    rows = {(row["case"], row["name"]): row for row in measured("h200_operators")["results"]}
    timm = [measured(f"h200_block_{size}")["results"][0]["ms"] for size in ("large", "huge")]
    best, taken, above, whole = [], [], [], []
    for size, record, depth in (("ViT-Large/16", "h200_model", 24), ("ViT-Huge/14", "h200_huge", 32)):

        def us(operator, key="ms", name="octic", size=size):
            return 1e3 * rows[f"{size} {operator}", name][key]

        def excess(*operators, us=us):
            return sum(us(operator) - us(operator.split(" +")[0], "floor_ms") for operator in operators)

        attention = us("attention", name="standard")
        norms = 2 * (us("residual + norm") - us("residual + norm", "floor_ms"))
        above.append(
            [
                excess("fc1 + GELU"),
                excess("proj", "fc2"),
                us("qkv + attention") - us("qkv", "floor_ms") - attention,
                norms,
            ]
        )
        products = sum(us(operator, "floor_ms") for operator in ("qkv", "proj", "fc1", "fc2"))
        best.append(products + 2 * us("residual + norm", "floor_ms") + attention)
        taken.append(best[-1] + sum(above[-1]))
        whole.append(1e3 * measured(record)["results"][1]["ms"] / depth)
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    ratios = [1e3 * ms / us for ms, us in zip(timm, best, strict=True)]
    fused, narrow, attention, norms = ([f"{us:.0f}" for us in pair] for pair in zip(*above, strict=True))
    for words in (
        f"would take {best[0]:.0f} µs at L/16 and {best[1]:.0f} at H/14, {ratios[0]:.1f} and {ratios[1]:.1f} times",
        f"blocks take {whole[0]:.0f} and {whole[1]:.0f} µs; the operators",
        f"add up to {taken[0]:.0f} and {taken[1]:.0f}",
        f"fc1 + GELU ({fused[0]} and {fused[1]} µs), proj and fc2 ({narrow[0]} and {narrow[1]})",
        f"qkv and attention ({attention[0]} and {attention[1]}, ",
        f"norms ({norms[0]} and {norms[1]})",
    ):
        assert words in text


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
