"""What every recipe shares: the loop, optimisers, schedules, checkpoints, several processes."""

from quickvit.train.average import averaged_copy, follow
from quickvit.train.checkpoint import Store
from quickvit.train.distributed import World, bare, connected
from quickvit.train.journal import Journal, read_metrics
from quickvit.train.optimizers import Lamb, build_optimizer, parameter_group, parameter_groups
from quickvit.train.recipe import Precision, Recipe
from quickvit.train.replay import Replay, read_capture, replay
from quickvit.train.schedules import Schedule, constant, cosine, scaled, warmup_cosine, warmup_then_cosine
from quickvit.train.signals import EXIT_REQUEUE
from quickvit.train.trainer import NonFinite, Outcome, RunConfig, Trainer

__all__ = [
    "EXIT_REQUEUE",
    "Journal",
    "Lamb",
    "NonFinite",
    "Outcome",
    "Precision",
    "Recipe",
    "Replay",
    "RunConfig",
    "Schedule",
    "Store",
    "Trainer",
    "World",
    "averaged_copy",
    "bare",
    "build_optimizer",
    "connected",
    "constant",
    "cosine",
    "follow",
    "parameter_group",
    "parameter_groups",
    "read_capture",
    "read_metrics",
    "replay",
    "scaled",
    "warmup_cosine",
    "warmup_then_cosine",
]
