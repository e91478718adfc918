"""Schedules at given steps, and timm's scheduler."""

import math

import pytest
import torch
from timm.scheduler import CosineLRScheduler

from quickvit.train import constant, cosine, warmup_cosine, warmup_then_cosine


def test_constant():
    assert constant(0.3)(0) == constant(0.3)(10**6) == 0.3


def test_cosine():
    schedule = cosine(1.0, 0.2, 100)
    assert [schedule(step) for step in (0, 50, 100, 500)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert schedule(25) == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
    assert cosine(1.0, 0.2, 0)(0) == 0.2
    assert cosine(0.04, 0.4, 10)(10) == pytest.approx(0.4)  # rising, as DINOv2's weight decay


def test_warmup():
    schedule = warmup_cosine(3e-3, 1e-5, total=400, warmup=5, start=1e-6)
    assert schedule(0) == 1e-6
    assert schedule(2) == pytest.approx(1e-6 + (3e-3 - 1e-6) * 2 / 5)
    assert schedule(5) == cosine(3e-3, 1e-5, 400)(5)
    assert schedule(200) == pytest.approx((3e-3 + 1e-5) / 2)
    assert schedule(400) == pytest.approx(1e-5)


def test_warmup_cosine_is_the_scheduler_of_deit():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=400, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6, t_in_epochs=False
    )
    schedule = warmup_cosine(3e-3, 1e-5, total=400, warmup=5, start=1e-6)
    for step in range(400):
        scheduler.step_update(step)
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


@pytest.mark.parametrize(
    ("peak", "end", "total", "warmup", "start"),
    [(4e-3, 1e-6, 125, 13, 0.0), (0.07, 0.07, 38, 38, 0.04), (0.04, 0.4, 125, 0, 0.0), (1.0, 0.0, 9, 1, 0.5)],
    ids=["learning rate", "temperature", "weight decay", "one step"],
)
def test_warmup_then_cosine_is_the_plain_rule_of_dinov2(peak, end, total, warmup, start):
    line = (
        [start + (peak - start) * i / (warmup - 1) for i in range(warmup)] if warmup > 1 else [start] * warmup
    )
    rest = total - warmup
    wave = [end + 0.5 * (peak - end) * (1 + math.cos(math.pi * i / rest)) for i in range(rest)]
    expected = [*line, *wave, end, end]
    schedule = warmup_then_cosine(peak, end, total, warmup, start)
    assert [schedule(step) for step in range(total + 2)] == pytest.approx(expected, rel=0, abs=1e-15)
