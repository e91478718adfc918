"""The processes that train together: who they are, what they agree on, and how they share a module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from quickvit.train.compiling import Compile, blocks_of, compile_module

Parallel = Literal["ddp", "fsdp"]
T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """This process's place among those of the run; without others, every agreement is its own word."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def main(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.rank == 0

    def any(self, *flags: Tensor | bool) -> tuple[bool, ...]:
        """For each flag, whether it is raised on any rank."""
        raised = torch.stack([torch.as_tensor(flag, device=self.device).float() for flag in flags])
        return tuple(bool(value) for value in self.max(raised).tolist())

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the ranks."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        """The maximum of each entry of a tensor over the ranks."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, operation: Any) -> Tensor:
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value, operation)
        return value

    def gather(self, value: T) -> list[T]:
        """A small object of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, items: Iterable[T]) -> Iterator[T | None]:
        """Items until no rank has any left; None where only others have, so that all can do the same steps."""
        iterator = iter(items)
        item = next(iterator, None)
        while self.any(item is not None)[0]:
            yield item
            item = next(iterator, None)

    def barrier(self) -> None:
        """Wait for all."""
        self.gather(None)


@contextmanager
def connected(device: str | None = None) -> Iterator[World]:
    """The processes that `torchrun` started, or this one alone.

    device: by default a GPU of its own for each process where there are any, else the CPU.
    """
    rank, size, place = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if chosen.type == "cuda":
            chosen = torch.device("cuda", place if chosen.index is None else chosen.index)
            torch.cuda.set_device(chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {device!r}: {str(error).splitlines()[0]}") from error
    if size == 1:
        yield World(device=chosen)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    world = World(rank, size, chosen)
    try:
        yield world
        # A process that leaves early would break the others' connections.
        world.barrier()
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- modules


def spread(
    module: nn.Module, world: World, parallel: Parallel = "ddp", compile: Compile = "none"
) -> nn.Module:
    """A module on this rank's device, shared with the other ranks if there are any.

    ddp: every rank has all weights. fsdp: every rank has a part of each (FSDP2), gathered block by block, and the
    blocks are compiled one by one.
    """
    if world.size > 1 and parallel == "fsdp":
        _shard(module, world, compile)
        return module
    module.to(world.device)
    if world.size > 1 and trained(module):
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    compile_module(module, compile)
    return module


def trained(module: nn.Module) -> bool:
    """Whether any parameter of a module is trained."""
    return any(p.requires_grad for p in module.parameters())


def bare(module: nn.Module) -> nn.Module:
    """The module without DDP's wrapper."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, nn.Module)
    return inner


@contextmanager
def gradients_shared(modules: Iterable[nn.Module], share: bool) -> Iterator[None]:
    """Whether backward passes inside average the gradients over the ranks, or let them add up for the next."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(share)
            elif isinstance(module, DistributedDataParallel) and not share:
                stack.enter_context(module.no_sync())
        yield


def _shard(module: nn.Module, world: World, compile: Compile) -> None:
    mesh = init_device_mesh(world.device.type, (world.size,))

    def placement(parameter: nn.Parameter) -> Shard | None:
        """The longest axis that divides evenly: the first one, FSDP's choice, often counts a few irreps only."""
        even = [axis for axis, length in enumerate(parameter.shape) if length % world.size == 0]
        return Shard(max(even, key=lambda axis: parameter.shape[axis])) if even else None

    # After every forward pass all that is left is this rank's part, also where no backward pass follows: averages
    # and checkpoints are made of the parts.
    sharing: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": True,
        "shard_placement_fn": placement,
    }
    for block in blocks_of(module):
        compile_module(block, compile)
        fully_shard(block, **sharing)
    fully_shard(module, **sharing)
