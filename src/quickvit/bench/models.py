"""Whole models and single blocks, ours and timm's standard ViT of the same size in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import set_fused_attn, use_fused_attn
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.nn import functional

from quickvit.bench import work
from quickvit.bench.flops import BASELINE, Variant
from quickvit.bench.memory import build_and_weigh
from quickvit.bench.table import Row, dtype_name, timed_rows, with_memory
from quickvit.bench.timing import Case, Failure, Job, Settings, attempt, measure, release
from quickvit.bench.work import Ceilings, Shape, Storage
from quickvit.group import D8, act_on_image
from quickvit.models import FAMILIES
from quickvit.train.compiling import has_graphs

VIEWS = "vit, mean of 8 views"


class EightViews(nn.Module):
    """An invariant answer from any model: the mean over the eight transformed images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, N, N] → logits [B, classes]."""
        views = torch.cat([act_on_image(x, g) for g in D8.elements])
        mean: Tensor = self.model(views).unflatten(0, (D8.order, -1)).mean(0)
        return mean


class Form(NamedTuple):
    """The baseline or a family, whose octic blocks may be folded."""

    name: str
    folded: bool = False

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.name}, folded" if self.folded else self.name

    @property
    def invariant(self) -> bool:
        """Whether poses do not change its answer."""
        return self.name != BASELINE and FAMILIES[self.name].invariant


# ---------------------------------------------------------------------- benchmarks


def bench_models(
    settings: Settings,
    ceilings: Ceilings,
    shapes: Sequence[Shape],
    families: Sequence[str],
    *,
    views: bool = True,
    folded: bool = False,
) -> list[Row]:
    """Forward passes of whole models, without gradients; on a GPU also their peak memory.

    With `views`, the invariant families are also compared with a ViT that is averaged over the eight views. With
    `folded` each family is also timed with its octic blocks folded.
    """
    forms = _forms(families, folded)
    rows = []
    for shape in shapes:
        peaks: dict[str, int] = {}

        def build(form: Form, shape: Shape = shape, peaks: dict[str, int] = peaks) -> Job:
            job = partial(inference, form.name, shape, settings, folded=form.folded)
            # A CUDA graph keeps its memory between calls, where the allocator does not see it used.
            if not settings.cuda or has_graphs(settings.compile):
                return job()
            result, peaks[form.label] = build_and_weigh(job, settings.device)
            return result

        storage = Storage.inference(settings.dtype)
        cases = []
        for form in forms:
            steps = model_work(shape, form.name, settings.batch, storage, folded=form.folded)
            cases.append(Case(form.label, partial(build, form), steps, settings.batch))
        invariant = [case for case, form in zip(cases, forms, strict=True) if form.invariant]
        answers: list[Case] = []
        if views and invariant:
            steps = model_work(shape, BASELINE, D8.order * settings.batch, storage)
            answers = [Case(VIEWS, partial(_views, shape, settings), steps, settings.batch)]
        outcomes = measure([*cases, *answers], settings, shape.label)
        timed = timed_rows(f"{shape.label} forward", cases, outcomes, settings, ceilings)
        rows += with_memory(timed, peaks)
        if answers:
            label = f"{shape.label} invariant answer"
            rows += timed_rows(label, [*answers, *invariant], outcomes, settings, ceilings)
    return rows


def bench_training(
    settings: Settings, ceilings: Ceilings, shapes: Sequence[Shape], families: Sequence[str]
) -> list[Row]:
    """Forward and backward passes of whole models; below float32 with autocast."""
    storage = Storage.training(settings.dtype)
    rows = []
    for shape in shapes:
        cases = []
        for name in competitors(families):
            steps = model_work(shape, name, settings.batch, storage, backward=True)
            cases.append(Case(name, partial(training, name, shape, settings), steps, settings.batch))
        label = f"{shape.label} deit3"
        outcomes = measure(cases, settings, label)
        rows += timed_rows(f"{label} forward + backward", cases, outcomes, settings, ceilings)
    return rows


def bench_blocks(
    settings: Settings,
    ceilings: Ceilings,
    shapes: Sequence[Shape],
    families: Sequence[str],
    *,
    folded: bool = False,
) -> list[Row]:
    """One transformer block: forward without gradients, also `folded`, and forward + backward as in training."""
    rows = []
    for shape in shapes:
        for backward in (False, True):
            storage = (Storage.training if backward else Storage.inference)(settings.dtype)
            cases = []
            for form in _forms(families, folded and not backward):
                group = None if form.name == BASELINE else FAMILIES[form.name].group
                steps = work.block(
                    shape.dims,
                    settings.batch,
                    shape.tokens,
                    storage,
                    group,
                    backward=backward,
                    folded=form.folded,
                )
                build = partial(_block_training if backward else _block_inference, form, shape, settings)
                cases.append(Case(form.label, build, steps, settings.batch))
            label = f"{shape.label} block forward{' + backward' if backward else ''}"
            rows += timed_rows(label, cases, measure(cases, settings, label), settings, ceilings)
    return rows


def bench_memory(
    settings: Settings, shapes: Sequence[Shape], families: Sequence[str], *, folded: bool = False
) -> list[Row]:
    """Peak memory of a forward pass without gradients, each model alone on the device."""
    if has_graphs(settings.compile):
        raise ValueError(
            "a CUDA graph keeps its memory between calls; measure memory with --compile none or default, "
            f"not {settings.compile}"
        )
    if not settings.cuda and settings.compile != "none":
        raise ValueError(
            "memory on a CPU is followed from operator to operator, which compiled code does not show; "
            f"measure it with --compile none, not {settings.compile}"
        )
    rows = []
    for shape in shapes:
        peaks: dict[str, int] = {}
        shape_rows = []
        for form in _forms(families, folded):
            build = partial(inference, form.name, shape, settings, folded=form.folded)
            # The job is dropped at once, so that the next model is alone again.
            peak = attempt(partial(_peak, build, settings))
            release(settings)
            failure = peak.reason if isinstance(peak, Failure) else None
            if not isinstance(peak, Failure):
                peaks[form.label] = peak
            label = f"{shape.label} inference"
            shape_rows.append(Row(label, form.label, dtype_name(settings), failure=failure))
        rows += with_memory(shape_rows, peaks)
    return rows


# ---------------------------------------------------------------------- jobs


def inference(name: str, shape: Shape, settings: Settings, *, folded: bool = False) -> Job:
    """A forward pass of a model, whose octic blocks may be folded, without gradients."""
    model = create_model(name, shape, settings)
    return _answers(reparameterize_model(model, inplace=True) if folded else model, shape, settings)


def _answers(model: nn.Module, shape: Shape, settings: Settings) -> Job:
    images = random_images(settings.batch, shape, settings).to(settings.dtype)
    return _forward(model.to(settings.dtype).eval(), images, settings)


def _forward(module: nn.Module, x: Tensor, settings: Settings) -> Job:
    step = settings.compiled(module)

    def job() -> Tensor:
        settings.begin_step()
        with torch.no_grad():
            return step(x)

    return job


def _views(shape: Shape, settings: Settings) -> Job:
    return _answers(EightViews(create_model(BASELINE, shape, settings)), shape, settings)


def training(name: str, shape: Shape, settings: Settings) -> Job:
    """A forward and a backward pass of a model."""
    images = random_images(settings.batch, shape, settings)
    labels = torch.randint(work.CLASSES, (settings.batch,), device=settings.device)
    return partial(train_step(create_model(name, shape, settings).train(), settings), images, labels)


def train_step(model: nn.Module, settings: Settings) -> Callable[[Tensor, Tensor], None]:
    """A forward and a backward pass for images and their labels; the gradients are dropped."""
    compiled = settings.compiled(model)

    def step(images: Tensor, labels: Tensor) -> None:
        settings.begin_step()
        with autocast(settings):
            loss = functional.cross_entropy(compiled(images).float(), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _block_inference(form: Form, shape: Shape, settings: Settings) -> Job:
    block = _create_block(form, shape, settings).to(settings.dtype).eval()
    return _forward(block, _tokens(shape, settings).to(settings.dtype), settings)


def _block_training(form: Form, shape: Shape, settings: Settings) -> Job:
    block = _create_block(form, shape, settings).train()
    x, grad = _tokens(shape, settings).requires_grad_(), _tokens(shape, settings)
    step = settings.compiled(block)

    def job() -> None:
        settings.begin_step()
        with autocast(settings):
            y = step(x)
        y.backward(grad)
        block.zero_grad(set_to_none=True)
        x.grad = None

    return job


def _peak(build: Callable[[], Job], settings: Settings) -> int:
    return build_and_weigh(build, settings.device)[1]


# ---------------------------------------------------------------------- parts


def competitors(families: Sequence[str]) -> list[str]:
    """The baseline, then the families."""
    for family in families:
        if family != BASELINE and family not in FAMILIES:
            raise ValueError(f"unknown family {family!r}; expected one of {', '.join(FAMILIES)}")
    return [BASELINE, *dict.fromkeys(family for family in families if family != BASELINE)]


def _forms(families: Sequence[str], folded: bool) -> list[Form]:
    """The baseline, then the families, each followed by itself with folded blocks."""
    baseline, *ours = competitors(families)
    states = (False, True) if folded else (False,)
    return [Form(baseline), *(Form(name, state) for name in ours for state in states)]


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within this context timm's models are made with fused attention, whatever TIMM_FUSED_ATTN says."""
    before = {"enable": use_fused_attn(), "experimental": use_fused_attn(experimental=True)}
    set_fused_attn()
    try:
        yield
    finally:
        set_fused_attn(**before)


def create_model(name: str, shape: Shape, settings: Settings, **options: object) -> nn.Module:
    """A model with random weights in float32, made on the device."""
    with torch.device(settings.device):
        return Variant(name, shape.size, shape.patch).create(
            img_size=shape.img_size, depth=shape.blocks, **options
        )


def _create_block(form: Form, shape: Shape, settings: Settings) -> nn.Module:
    """The first block of a model, octic in all families."""
    octic = {} if form.name == BASELINE else {"octic_depth": 1}
    model = create_model(form.name, replace(shape, depth=1), settings, **octic)
    block: Any = model.get_submodule("blocks.0")
    return block.fuse() if form.folded else block


def model_work(shape: Shape, name: str, batch: int, storage: Storage, **options: bool) -> list[work.Work]:
    """The steps of a family or of the baseline, see `work.model`."""
    return work.model(shape, None if name == BASELINE else name, batch, storage, **options)


def random_images(number: int, shape: Shape, settings: Settings) -> Tensor:
    """Noise in the shape of images."""
    return torch.randn(number, work.CHANNELS, shape.img_size, shape.img_size, device=settings.device)


def _tokens(shape: Shape, settings: Settings) -> Tensor:
    return torch.randn(settings.batch, shape.tokens, shape.dims.embed_dim, device=settings.device)


def autocast(settings: Settings) -> torch.autocast:
    """The precision of training, weights staying in float32."""
    return torch.autocast(settings.device.type, settings.dtype, enabled=settings.dtype != torch.float32)
