"""Every benchmark on a CPU, as small as it gets."""

from dataclasses import asdict, replace

import pytest
import torch
from timm.layers import use_fused_attn
from torch import nn

import quickvit
from quickvit import act_on_image
from quickvit.bench import BENCHMARKS, Request, Row, run
from quickvit.bench import models as bench_models
from quickvit.bench import suite as bench_suite
from quickvit.bench.dinov2 import HEADS, Remembered, Separate, dinov2_crops, dinov2_step
from quickvit.bench.layers import EightBlocks
from quickvit.bench.memory import LiveStorages, build_and_weigh
from quickvit.bench.models import VIEWS, EightViews
from quickvit.bench.operators import operators
from quickvit.bench.table import table
from quickvit.bench.timing import Settings
from quickvit.bench.work import Ceilings, Shape
from quickvit.group import D8
from quickvit.layers import OcticBlock, OcticFoldedBlock, StandardBlock
from quickvit.provenance import hardware, versions
from quickvit.recipes import Dinov2
from quickvit.recipes.dino.backbone import CropEncoder
from quickvit.recipes.dinov2 import IMAGENET

CPU = torch.device("cpu")
SMALL = Request(CPU, sizes=("tiny",), img_size=32, depth=2, batch=1, repeats=1)
LAYERS = Request(CPU, widths=(16, 32), tokens=4, batch=2, repeats=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Ceilings from the air, and samples of single calls."""
    monkeypatch.setattr(bench_suite, "measure_ceilings", lambda settings: Ceilings(1e10, 1e11))
    monkeypatch.setattr("quickvit.bench.timing.SAMPLE_MS", 0.0)


def names(rows, case):
    return [row.name for row in rows if case in row.case]


def check_times(rows):
    for row in rows:
        assert row.failure is None
        assert row.ms > 0
        assert row.over_floor == pytest.approx(row.ms / row.floor_ms)
    first = {}
    for row in rows:
        baseline = first.setdefault((row.case, row.dtype), row)
        if row.ratio is not None:
            assert row.ratio == pytest.approx(baseline.ms / row.ms)


def test_model():
    rows = run("model", SMALL).rows
    check_times(rows)
    assert names(rows, "forward") == ["vit", "d8", "h8", "i8"]
    assert names(rows, "invariant answer") == [VIEWS, "d8", "i8"]
    assert all(row.images_per_s == pytest.approx(1e3 / row.ms) for row in rows)
    views, d8 = (next(row for row in rows if row.name == name) for name in (VIEWS, "d8"))
    vit = rows[0]
    assert views.gflops == pytest.approx(8 * vit.gflops)
    assert d8.gflops < vit.gflops / 2
    # The same measurement in both tables.
    assert {row.ms for row in rows if row.name == "i8"} == {rows[3].ms}


def test_model_without_views():
    rows = run("model", replace(SMALL, views=False, families=("d8", "vit", "d8"))).rows
    assert [row.name for row in rows] == ["vit", "d8"]
    assert names(run("model", replace(SMALL, families=("h8",))).rows, "invariant") == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train(dtype):
    rows = run("train", replace(SMALL, dtypes=(dtype,))).rows
    check_times(rows)
    assert names(rows, "deit3 forward + backward") == ["vit", "d8", "h8", "i8"]
    assert {row.dtype for row in rows} == {dtype}


@pytest.fixture
def few_prototypes(monkeypatch):
    monkeypatch.setitem(IMAGENET, "prototypes", 64)


def test_dinov2(few_prototypes):
    asked = replace(SMALL, recipe="dinov2", batch=2, drop_path=0.5)
    rows = run("train", replace(asked, dtypes=("bfloat16",))).rows
    check_times(rows)
    assert names(rows, "dinov2 step") == ["vit", "d8", "h8", "i8"]
    for name in ("vit", "d8", "h8", "i8"):
        several, one = (row for row in rows if row.case.endswith(f"packing of {name}"))
        assert (several.name, one.name) == (f"{name}, a pass per size", name)
        assert one.ratio == pytest.approx(several.ms / one.ms)
        # The same measurement in both tables, and the same work.
        assert one.ms == next(row.ms for row in rows if row.name == name)
        assert one.gflops == several.gflops
    heads = rows[-1]
    assert heads.name == HEADS
    assert heads.gflops < rows[0].gflops
    whole = run("train", replace(asked, drop_path_subset=False, separate=False, families=("vit",))).rows
    assert [row.name for row in whole] == ["vit", HEADS]
    assert rows[0].gflops < whole[0].gflops


@pytest.mark.parametrize("encoder", [CropEncoder, Separate, Remembered])
def test_what_is_timed_of_dinov2_is_its_step(few_prototypes, monkeypatch, encoder):
    """Ten crops of an image through the student, two through the teacher, and gradients everywhere."""
    seen = []
    forward = CropEncoder.forward

    def watched(self, crops, mask=None):
        seen.append((self.training, [tuple(x.shape) for x in crops], mask is not None))
        return forward(self, crops, mask)

    monkeypatch.setattr(CropEncoder, "forward", watched)
    settings = Settings(CPU, torch.float32, 2)
    job = dinov2_step(Shape("tiny", 16, 32, depth=2), settings, "h8", encoder, drop_path=0.0)
    (recipe,) = (cell.cell_contents for cell in job.__closure__ if isinstance(cell.cell_contents, Dinov2))
    losses = []
    loss = recipe.loss
    monkeypatch.setattr(recipe, "loss", lambda *args: losses.append(loss(*args)) or losses[-1])
    job()
    large, small = (4, 3, 32, 32), (16, 3, 16, 16)
    teacher = [(False, [large], False)]
    student = {
        CropEncoder: [(True, [large, small], True)],
        Separate: [(True, [large], True), (True, [small], False)],
        Remembered: [(True, [large, small], True)],
    }[encoder]
    assert seen == [*teacher, *student]
    job()
    assert len(seen) == len(teacher + student) * (1 if encoder is Remembered else 2)
    first, second = (value.item() for value, _ in losses)
    assert first == pytest.approx(second, rel=1e-5)


def test_a_pass_per_size_computes_the_same():
    settings = Settings(CPU, torch.float32, 2)
    torch.manual_seed(0)
    packed = dinov2_step(Shape("tiny", 16, 32, depth=2), settings, "h8", CropEncoder, drop_path=0.0)
    recipe = next(c.cell_contents for c in packed.__closure__ if isinstance(c.cell_contents, Dinov2))
    student = recipe.modules["student"]
    crops, mask = [torch.randn(4, 3, 32, 32), torch.randn(6, 3, 16, 16)], torch.rand(4, 4) < 0.5
    expected = student(crops, mask)
    student.__class__ = Separate
    for found, wanted in zip(student(crops, mask), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_dinov2_crops_have_whole_patches():
    crops = dinov2_crops(Shape("huge", 14))
    assert [(copies, shape.img_size) for copies, shape in crops] == [(2, 224), (8, 98)]
    crops = dinov2_crops(Shape("large", 16))
    assert [(copies, shape.img_size) for copies, shape in crops] == [(2, 224), (8, 96)]


def test_block():
    rows = run("block", replace(SMALL, families=("d8", "h2"))).rows
    check_times(rows)
    assert [row.name for row in rows] == ["vit", "d8", "h2"] * 2
    assert len({row.case for row in rows}) == 2


@pytest.mark.parametrize("family", ["d8", "h8", "i8", "h2"])
def test_the_block_of_every_family_is_octic(family):
    settings = Settings(CPU, torch.float32, 1)
    for folded, kind in ((False, OcticBlock), (True, OcticFoldedBlock)):
        form = bench_models.Form(family, folded)
        assert type(bench_models._create_block(form, Shape("tiny", 16, 32), settings)) is kind


def test_folded():
    """Beside each family itself with folded blocks, where there are no gradients."""
    asked = replace(SMALL, folded=True, families=("d8", "i8"))
    both = ["vit", "d8", "d8, folded", "i8", "i8, folded"]
    rows = run("model", asked).rows
    check_times(rows)
    assert names(rows, "forward") == both
    assert names(rows, "invariant answer") == [VIEWS, *both[1:]]
    _, d8, folded, *_ = rows
    assert d8.gflops == folded.gflops
    assert d8.floor_ms > folded.floor_ms
    rows = run("block", replace(asked, families=("d8",))).rows
    assert [row.name for row in rows] == ["vit", "d8", "d8, folded", "vit", "d8"]
    rows = run("memory", asked).rows
    assert [row.name for row in rows] == both


@pytest.mark.parametrize("folded", [False, True])
def test_folded_blocks_are_what_is_timed(folded, monkeypatch):
    seen = []
    monkeypatch.setattr(bench_models, "_answers", lambda model, *_: seen.extend(map(type, model.blocks)))
    bench_models.inference("h8", Shape("tiny", 16, 32, 4), Settings(CPU, torch.float32, 1), folded=folded)
    octic = OcticFoldedBlock if folded else OcticBlock
    assert seen == [octic, octic, StandardBlock, StandardBlock]


def test_memory():
    rows = run("memory", SMALL).rows
    assert [row.name for row in rows] == ["vit", "d8", "h8", "i8"]
    parameters = sum(p.numel() for p in quickvit.create_baseline("tiny", img_size=32, depth=2).parameters())
    assert rows[0].memory_mib > 4 * parameters / 2**20
    assert rows[0].memory_ratio == 1
    assert rows[1].memory_ratio > rows[3].memory_ratio > 1


def test_memory_needs_code_that_it_can_follow():
    with pytest.raises(ValueError, match="not reduce-overhead"):
        run("memory", replace(SMALL, compile="reduce-overhead"))
    with pytest.raises(ValueError, match=r"memory on a CPU .* not default"):
        run("memory", replace(SMALL, compile="default"))


def test_linear():
    rows = run("linear", replace(LAYERS, dtypes=("float32", "bfloat16"))).rows
    check_times(rows)
    assert [row.name for row in rows] == ["standard", "octic", "eight blocks"] * 4
    assert [row.dtype for row in rows[::6]] == ["float32", "bfloat16"]
    standard, octic, eight = rows[:3]
    assert octic.gflops / standard.gflops == 3 / 16
    assert eight.gflops / standard.gflops == 1 / 8
    assert standard.case == "linear, C = 16 → 64, 8 tokens"


def test_groups_are_measured_once():
    rows = run("linear", replace(LAYERS, groups=(8, 16, 8), widths=(16,))).rows
    assert [row.name for row in rows] == ["standard", "octic", "D16", "eight blocks"]


def test_linear_layers_of_larger_groups():
    rows = run("linear", replace(LAYERS, groups=(8, 16, 32), widths=(32,))).rows
    check_times(rows)
    assert [row.name for row in rows] == ["standard", "octic", "D16", "D32", "eight blocks"]
    saved = {row.name: rows[0].gflops / row.gflops for row in rows}
    assert saved["D16"] == pytest.approx(4 * 4**2 / 7)
    assert saved["D32"] == pytest.approx(4 * 8**2 / 15)


def test_gelu():
    rows = run("gelu", LAYERS).rows
    check_times(rows)
    assert names(rows, "GELU, C = 16") == ["standard", "octic", "copy"]
    assert names(rows, "MLP, C = 32") == ["standard", "octic"]


def test_both_gelus_are_compiled_alike(monkeypatch):
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: seen.append((module, options)))
    run("gelu", replace(LAYERS, widths=(16,), compile="default"))
    assert [type(module).__name__ for module, _ in seen] == ["GELU", "OcticGelu", "Sequential", "OcticMlp"]
    assert all(options == seen[0][1] for _, options in seen)


def test_flops():
    rows = run("flops", replace(LAYERS, widths=(64, 8192), tokens=197)).rows
    ratios = [row.ratio for row in rows if row.name == "octic"]
    assert 1 < ratios[0] < 4 < ratios[1] < 16 / 3


def test_operators():
    rows = run("ops", SMALL).rows
    check_times(rows)
    cases = {row.case.removeprefix("ViT-Tiny/16 32px, 2 blocks ") for row in rows if row.name == "octic"}
    products = {f"{name}{kind}" for name in ("qkv", "proj", "fc1", "fc2") for kind in ("", " input gradient")}
    others = {"GELU", "norm", "residual + norm", "attention"}
    assert cases == (
        products
        | {f"{name} weight gradient" for name in ("qkv", "proj", "fc1", "fc2")}
        | others
        | {f"{name} gradient" for name in others}
        | {"qkv + attention", "qkv + attention gradient"}
    )
    assert names(rows, "GELU")[:3] == ["standard", "octic", "copy"]


def test_a_gradient_is_that_of_the_named_arguments():
    chosen = list(operators(Shape("tiny", 16, 32), Settings(CPU, torch.float32, 2)))
    shapes = {
        o.label: [tuple(t.shape) for t in o.build(Settings(CPU, torch.float32, 2))()] for o in chosen if o.by
    }
    assert shapes["fc1 input gradient"] == [(10, 192)]
    assert shapes["fc1 weight gradient"] == [(4, 96, 24), (1, 192, 48)]
    assert shapes["residual + norm gradient"] == [(2, 5, 192)] * 2 + [(144,), (24,), (24,), (144,)]


@pytest.mark.parametrize(("enable", "experimental"), [(False, False), (True, False), (True, True)])
def test_timm_has_fused_attention_whatever_the_environment_says(monkeypatch, enable, experimental):
    fused = []
    create = bench_models.create_model

    def watched(name, *arguments, **options):
        model = create(name, *arguments, **options)
        fused.extend(m.fused_attn for m in model.modules() if hasattr(m, "fused_attn"))
        return model

    monkeypatch.setattr(bench_models, "create_model", watched)
    monkeypatch.setattr("timm.layers.config._USE_FUSED_ATTN", enable + experimental)
    run("block", replace(SMALL, families=("d8",)))
    assert fused
    assert all(fused)
    assert (use_fused_attn(), use_fused_attn(experimental=True)) == (enable, experimental)


def test_a_failing_model_is_a_row(monkeypatch):
    create = bench_models.create_model

    def broken(name, *arguments, **options):
        if name == "vit":
            raise torch.cuda.OutOfMemoryError("out of memory")
        return create(name, *arguments, **options)

    monkeypatch.setattr(bench_models, "create_model", broken)
    for kind in ("model", "memory"):
        rows = run(kind, replace(SMALL, families=("d8",), views=False)).rows
        assert rows[0].failure == "OutOfMemoryError: out of memory"
        assert rows[1].failure is None
        assert rows[1].ratio is None
        header, cells = table(rows, BENCHMARKS[kind].columns)
        assert header[-1] == "failed"
        assert cells[0][-1] == rows[0].failure


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("speed", {}, "unknown benchmark 'speed'; expected one of block, model"),
        ("model", {"families": ("h9",)}, "unknown family 'h9'; expected one of d8"),
        ("train", {"recipe": "mae"}, "unknown recipe 'mae'; expected one of deit3, dinov2"),
        ("train", {"drop_path": 0.1}, "^--drop-path is for dinov2, not for deit3"),
        (
            "train",
            {"drop_path": 0.1, "separate": True},
            "^--drop-path and --separate are for dinov2, not for deit3",
        ),
        ("train", {"recipe": "dinov2", "drop_path": 2.0}, "--drop-path must be at least 0 .* got 2"),
        ("train", {"recipe": "dinov2", "drop_path": -1.0}, "--drop-path must be at least 0 .* got -1"),
        ("train", {"recipe": "dinov2", "drop_path": 1.0}, "less than 1, got 1"),
        ("train", {"recipe": "dinov2", "batch": 3}, "--batch must be even for dinov2, .* got 3"),
        ("train", {"data": "nowhere"}, "no data at 'nowhere'"),
        ("train", {"data": "digits", "batch": 10**6}, "--batch must be at most the .* got 1000000"),
        ("train", {"data": "digits", "workers": -1}, "--workers must be at least 0, got -1"),
        ("train", {"batch": 0}, "batch must be at least 1, got 0"),
        ("block", {"families": ("h9",)}, "unknown family 'h9'"),
        ("model", {"dtypes": ("int8",)}, "unknown dtype 'int8'; expected one of float32"),
        ("linear", {"widths": (12,)}, "a width must be a positive multiple of 8, got 12"),
        ("linear", {"widths": (64, 72), "groups": (8, 16)}, "a positive multiple of 16, got 72"),
        ("linear", {"widths": (16,), "groups": (7,)}, "an even order of at least 2, got 7"),
        ("linear", {"groups": (8, 0)}, "an even order of at least 2, got 0"),
        ("linear", {"groups": (24,)}, "a positive multiple of 24, got 1024"),
        ("gelu", {"widths": (0,)}, "a positive multiple of 8, got 0"),
        ("flops", {"widths": (-64,)}, "a positive multiple of 8, got -64"),
        ("gelu", {"tokens": 0}, "tokens must be at least 1, got 0"),
        ("linear", {"tokens": -4}, "tokens must be at least 1, got -4"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_measured(monkeypatch, name, changes, message):
    def never(*arguments):
        raise AssertionError("this takes time")

    monkeypatch.setattr(bench_suite, "measure_ceilings", never)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(name, replace(SMALL, **changes))


def test_defaults_follow_the_device():
    gpu = Request(torch.device("cuda"))
    assert [shape.label for shape in gpu.shapes()] == ["ViT-Large/16", "ViT-Huge/14"]
    settings = gpu.settings("bfloat16", BENCHMARKS["gelu"])
    assert (settings.batch, settings.compile, settings.repeats) == (32, "default", 20)
    assert gpu.settings("bfloat16", BENCHMARKS["model"]).compile == "reduce-overhead"
    for name in ("ops", "memory", "linear"):
        assert gpu.settings("bfloat16", BENCHMARKS[name]).compile == "none"
    cpu = Request(CPU)
    assert [shape.label for shape in cpu.shapes()] == ["ViT-Base/16"]
    assert cpu.settings("float32", BENCHMARKS["model"]) == Settings(CPU, torch.float32, 8, "none", 5)


def test_eight_views_make_any_model_invariant():
    torch.manual_seed(0)
    model = EightViews(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5)))
    x = torch.randn(2, 3, 8, 8)
    for g in D8.elements:
        torch.testing.assert_close(model(act_on_image(x, g)), model(x))
    assert not torch.allclose(model.model(act_on_image(x, D8.elements[1])), model.model(x))


def test_eight_blocks_are_a_block_diagonal_map():
    layer = EightBlocks(16, 32)
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ torch.block_diag(*layer.weight).T)


def test_live_storages():
    with LiveStorages() as live:
        x = torch.ones(1000)
        y = x.view(10, 100)[2:] + 1
        del y
        live.peak = 0
        z = torch.ones(50)
    assert live.peak == 4 * 1050
    del x, z


def test_peak_memory_of_a_job():
    def build():
        weight = torch.ones(1000)
        torch.ones(10**6)
        return lambda: (weight * 2).sum() + (weight * 3).sum()

    _, peak = build_and_weigh(build, CPU)
    assert 8000 <= peak < 8100


def test_table_shows_what_there_is():
    header, cells = table(
        [Row("c", "a", ms=0.01234, ratio=1.0), Row("c", "b", ms=1234.5)], Row.__annotations__
    )
    assert header == ["case", "name", "ms", "ratio"]
    assert cells == [["c", "a", "0.01234", "1.00"], ["c", "b", "1234", None]]
    with pytest.raises(ValueError, match="no column speed"):
        table([], ["speed"])


def test_record():
    record = run("linear", LAYERS, "quickvit bench linear").as_dict()
    assert list(record) == [
        *("benchmark", "settings", "ceilings", "results", "hardware", "versions", "commit", "command", "date")
    ]
    assert record["settings"] == {"batch": 2, "compile": "none", "repeats": 1, "dtypes": ["float32"]}
    assert record["ceilings"] == {"float32": {"bytes_per_s": 1e10, "flops_per_s": 1e11}}
    assert set(record["results"][0]) == set(asdict(Row("", "")))
    assert record["hardware"] == hardware(CPU)
    assert {"device", "cpu", "cores", "threads"} <= set(record["hardware"])
    assert record["versions"] == versions()
    assert {"python", "torch", "triton", "timm", "quickvit"} <= set(record["versions"])
    assert record["command"] == "quickvit bench linear"
