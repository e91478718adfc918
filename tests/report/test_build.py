"""The whole report: files, gaps, bytes, and a page that is sound and alone."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quickvit.report.build import GENERATOR, build_report, report_files
from quickvit.report.figures import FIGURES, curves
from quickvit.report.results import Results, read_results
from quickvit.report.symmetry import SYMMETRY, shown_image

COMMITTED = Path(__file__).parents[2] / "benchmarks"
NASTY = "<script>alert(1)</script><img src=x onerror=y>$x_1$ \"'&"
FETCHING = {"href", "src", "xlink:href", "srcset", "action", "poster", "data"}
VOID = {"meta", "br", "hr", "img", "input", "link"}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Page(HTMLParser):
    """Tags that must nest, ids, links and everything that could fetch something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.fetched = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._note(attributes)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self._note(attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def _note(self, attributes):
        for name, value in attributes:
            assert not name.startswith("on"), f"{name}={value}"
            if name == "id":
                self.ids.append(value)
            elif name in FETCHING and not value.startswith("data:"):
                (self.links if value.startswith("#") else self.fetched).append(value)


@pytest.fixture
def study(add_run):
    """A small study of everything."""
    for seed in range(2):
        for name in ("vit", "h2", "h8", "i8", "d8"):
            add_run(name=name, seed=seed, top1=90 + seed, invariant=name in ("i8", "d8"))
        for k in (0, 6, 12):
            add_run("depth", f"k={k}", seed)


def test_committed_benchmarks_give_the_same_bytes(tmp_path):
    """In another process, which hashes strings differently, in this one, and over a former report."""
    command = [sys.executable, "-m", "quickvit", "report", "--bench", COMMITTED, "--out", tmp_path / "1"]
    subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True, timeout=300)
    first = contents(tmp_path / "1")
    assert len(first) > 30
    for out in (tmp_path / "2", tmp_path / "1"):
        build_report(COMMITTED, None, out)
        assert contents(out) == first


def test_committed_benchmarks_are_shown():
    files = report_files(read_results(COMMITTED))
    assert "NVIDIA H200" in files["tables/forward-speed.md"]
    assert "h200_model.json" in files["index.html"]
    assert 'id="explorer"' in files["index.html"]
    assert "CC BY 4.0" in files["index.html"]
    (exploration,) = (COMMITTED / "explorer").iterdir()
    assert exploration.stat().st_size < 600_000


def test_a_result_that_is_gone_leaves_a_gap(bench, add_run, tmp_path):
    out = tmp_path / "report"
    path = add_run("lift", "free", top1=12.34)
    add_run("depth", "k=6")
    # One point is no curve.
    add_run("depth", "k=12")
    build_report(bench, None, out)
    before = contents(out)
    assert b"12.34" in before["tables/lift.md"]
    assert b"12.34" in before["index.html"]
    assert "figures/accuracy-depth-1.svg" in before
    path.unlink()
    (bench / "results" / "cifar10-depth" / "k=6-0.json").unlink()
    # Of a former version, which said so.
    (out / "tables" / "gone.md").write_text("old")
    page = out / "index.html"
    page.write_text(page.read_text().replace("tables/lift.md", "tables/lift.md tables/gone.md", 1))
    build_report(bench, None, out)
    after = contents(out)
    assert not any(b"12.34" in text for text in after.values())
    assert b"| free | \xe2\x80\x93 | 0 | not run |" in after["tables/lift.md"]
    assert set(before) - set(after) == {"figures/accuracy-depth-1.svg"}
    assert set(after) <= set(before)


def test_other_peoples_files_are_left_alone(bench, tmp_path):
    out = tmp_path / "report"
    out.mkdir()
    (out / "index.html").write_text("my page")
    with pytest.raises(ValueError, match="has files that are no report"):
        build_report(bench, None, out)
    assert contents(out) == {"index.html": b"my page"}
    with pytest.raises(ValueError, match=r"index\.html is a file; expected a folder"):
        build_report(bench, None, out / "index.html")
    (out / "index.html").write_text(GENERATOR)
    mine = [
        out / name for name in ("notes.txt", "tables/notes.md", "tables/notes.html", "figures/sketch.svg")
    ]
    for _ in range(2):
        for path in mine:
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        build_report(bench, None, out)
        assert {path.read_text() for path in mine} == {"mine"}


def test_a_mistake_leaves_the_former_report(bench, tmp_path):
    out = tmp_path / "report"
    build_report(bench, None, out)
    before = contents(out)
    (bench / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        build_report(bench, None, out)
    assert contents(out) == before


@pytest.mark.parametrize("explored", [False, True])
def test_the_page_is_sound_and_alone(bench, study, add_exploration, explored):
    if explored:
        add_exploration()
    files = report_files(read_results(bench))
    page = Page(files["index.html"])
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert page.fetched == []
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", files["index.html"])
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg\")|url\((?!#)|@import|//cdn", text)
    assert page.tags.count("svg") == (9 if explored else 6)
    assert page.tags.count("script") == (3 if explored else 1)


def test_a_whole_model_is_named_before_one_that_was_cut(bench, add_bench):
    for path in bench.glob("*.json"):
        path.unlink()
    add_bench("gpu_cut", "model", ("ViT-22b/14, 2 blocks forward", "d8", 3.5))
    for words in ("as fast as timm’s ViT-22b/14, 2 blocks: d8", "as fast as timm’s ViT-Large/16 384px: d8"):
        assert words in report_files(read_results(bench))["index.html"]
        odd = ("a model of another kind forward", "d8", 9.0)
        add_bench("gpu_whole", "model", ("ViT-Large/16 384px forward", "d8", 1.9), odd)


def test_untrusted_words_are_only_words(bench, add_run, add_bench):
    provenance = {"hardware": {"gpu": NASTY}, "command": NASTY, "date": NASTY, "commit": NASTY}
    for study in ("families", "depth", "invariants", "dinov2"):
        add_run(study, "vit", dataset="x", model={"name": NASTY}, provenance=provenance)
    for study in ("families", "depth"):
        path = add_run(study, "h8")
        record = json.loads(path.read_text()) | {"dataset": NASTY, "name": NASTY}
        path.write_text(json.dumps(record))
    row = ("ViT-Large/16 forward", NASTY, 1.5, {"dtype": NASTY})
    add_bench("gpu", "model", row, hardware={"gpu": NASTY}, command=NASTY, settings={"compile": NASTY})
    files = report_files(read_results(bench))
    page = Page(files["index.html"])
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    for name, text in files.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(text)
            assert "<script" not in text


def test_figures_are_svg_without_dates(bench, study, add_exploration):
    add_exploration()
    results = read_results(bench)
    for figure in (*FIGURES, *SYMMETRY):
        drawing = figure(results)
        assert drawing == figure(results)
        assert drawing.panels
        for svg in drawing.panels:
            assert ElementTree.fromstring(svg).tag.endswith("svg")
            assert "dc:date" not in svg
            assert "Matplotlib" not in svg


def test_the_course_of_features_is_drawn_upright_and_turned(bench, add_run):
    def poses(upright, turned):
        return [
            {
                "pose": pose,
                "answers": {"20-NN": {"accuracy": accuracy}, "logistic": {"accuracy": accuracy**3}},
            }
            for pose, accuracy in (("upright", upright), ("random quarter turn", turned))
        ]

    progress = [{"step": 0, "poses": poses(0.5, 0.4)}, {"step": 9, "poses": poses(0.9, 0.7)}]
    for name in ("vit", NASTY):
        file = add_run("dinov2", "vit", seed=len(name), dataset="cells", progress=progress)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"name": name}))
    panels = curves(read_results(bench)).panels
    assert len(panels) == 2
    places = []
    for panel in panels:
        ElementTree.fromstring(panel)
        paths = re.findall(r'<path d="(M[^"]+)" clip-path="[^"]+" style="fill: none(.+?)"', panel)
        drawn = [(place, "dasharray" in style) for place, style in paths if "stroke-width: 2" in style]
        assert [dashed for _, dashed in drawn] == [False, False, True, True]
        assert drawn[0][0] == drawn[1][0] != drawn[2][0] == drawn[3][0]
        places.append([place for place, _ in drawn])
    assert places[0] != places[1]


def test_figures_say_what_was_not_run():
    drawings = {figure(Results()).id: figure(Results()) for figure in (*FIGURES, *SYMMETRY)}
    for name in ("flops-width", "blocks"):
        assert drawings[name].panels
        assert not drawings[name].commands
    for name in ("accuracy-depth", "curves", "filters", "cayley", "predictions"):
        assert drawings[name].panels == ()
        assert drawings[name].commands


def test_an_exploration_is_shown_while_its_file_is_there(bench, add_exploration, tmp_path):
    out = tmp_path / "report"
    shown = {f"figures/{name}-1.svg" for name in ("filters", "cayley", "predictions")}
    build_report(bench, None, out)
    before = contents(out)
    assert not shown & set(before)
    page = before["index.html"].decode()
    assert 'id="turn"' in page
    assert page.count("quickvit explore RUN_I8") == 4
    assert 'id="explorer"' not in page

    path = add_exploration()
    build_report(bench, None, out)
    after = contents(out)
    assert shown <= set(after)
    page = after["index.html"].decode()
    assert page.index('id="symmetry"') < page.index('id="explorer"') < page.index('id="compute"')
    assert "quickvit explore RUN_I8" not in page
    assert "Images by nobody" in page
    assert "explorer/exploration.json" in page

    path.unlink()
    build_report(bench, None, out)
    assert contents(out) == before


def test_one_exploration_at_a_time(bench, add_exploration):
    first, second = add_exploration("first"), add_exploration("second")
    with pytest.raises(ValueError, match=r"first\.json, second\.json; choose one with --explorer"):
        read_results(bench)
    assert read_results(bench, None, second).exploration.source.file == "explorer/second.json"
    first.unlink()
    assert read_results(bench).exploration.source.file == "explorer/second.json"


def test_the_image_that_is_shown(exploration):
    ours, theirs = exploration.answers
    assert shown_image(replace(exploration, answers=(theirs, ours))) == 0
    still = theirs.probabilities.clone()
    still[0] = still[0, :1]
    assert shown_image(replace(exploration, answers=(ours, replace(theirs, probabilities=still)))) == 1
