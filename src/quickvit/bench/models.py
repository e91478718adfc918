"""Whole models and single blocks, ours and timm's standard ViT of the same size in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from timm.layers import set_fused_attn, use_fused_attn
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


# ---------------------------------------------------------------------- benchmarks


def bench_models(
    settings: Settings,
    ceilings: Ceilings,
    shapes: Sequence[Shape],
    families: Sequence[str],
    *,
    views: bool = True,
) -> list[Row]:
    """Forward passes of whole models, without gradients; on a GPU also their peak memory.

    With `views`, the invariant families are also compared with a ViT that is averaged over the eight views.
    """
    names = competitors(families)
    rows = []
    for shape in shapes:
        peaks: dict[str, int] = {}

        def build(name: str, shape: Shape = shape, peaks: dict[str, int] = peaks) -> Job:
            job = partial(inference, name, shape, settings)
            # A CUDA graph keeps its memory between calls, where the allocator does not see it used.
            if not settings.cuda or has_graphs(settings.compile):
                return job()
            result, peaks[name] = build_and_weigh(job, settings.device)
            return result

        storage = Storage.inference(settings.dtype)
        cases = [
            Case(n, partial(build, n), model_work(shape, n, settings.batch, storage), settings.batch)
            for n in names
        ]
        invariant = [c for c in cases if c.name != BASELINE and FAMILIES[c.name].invariant]
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
    settings: Settings, ceilings: Ceilings, shapes: Sequence[Shape], families: Sequence[str]
) -> list[Row]:
    """One transformer block: forward without gradients, and forward + backward as in training."""
    rows = []
    for shape in shapes:
        for backward in (False, True):
            storage = (Storage.training if backward else Storage.inference)(settings.dtype)
            cases = []
            for name in competitors(families):
                group = None if name == BASELINE else FAMILIES[name].group
                steps = work.block(
                    shape.dims, settings.batch, shape.tokens, storage, group, backward=backward
                )
                build = partial(_block_training if backward else _block_inference, name, shape, settings)
                cases.append(Case(name, build, steps, settings.batch))
            label = f"{shape.label} block forward{' + backward' if backward else ''}"
            rows += timed_rows(label, cases, measure(cases, settings, label), settings, ceilings)
    return rows


def bench_memory(settings: Settings, shapes: Sequence[Shape], families: Sequence[str]) -> list[Row]:
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
        for name in competitors(families):
            build = partial(inference, name, shape, settings)
            # The job is dropped at once, so that the next model is alone again.
            peak = attempt(partial(_peak, build, settings))
            release(settings)
            failure = peak.reason if isinstance(peak, Failure) else None
            if not isinstance(peak, Failure):
                peaks[name] = peak
            label = f"{shape.label} inference"
            shape_rows.append(Row(label, name, dtype_name(settings), failure=failure))
        rows += with_memory(shape_rows, peaks)
    return rows


# ---------------------------------------------------------------------- jobs


def inference(name: str, shape: Shape, settings: Settings) -> Job:
    """A forward pass of a model, without gradients."""
    return _answers(create_model(name, shape, settings), shape, settings)


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


def _block_inference(name: str, shape: Shape, settings: Settings) -> Job:
    block = _create_block(name, shape, settings).to(settings.dtype).eval()
    return _forward(block, _tokens(shape, settings).to(settings.dtype), settings)


def _block_training(name: str, shape: Shape, settings: Settings) -> Job:
    block = _create_block(name, shape, settings).train()
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


def _create_block(name: str, shape: Shape, settings: Settings) -> nn.Module:
    """The first block of a model, octic in all families."""
    octic = {} if name == BASELINE else {"octic_depth": 1}
    model = create_model(name, replace(shape, depth=1), settings, **octic)
    block: nn.Module = model.get_submodule("blocks.0")
    return block


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
