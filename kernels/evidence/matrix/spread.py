"""Ways to distribute a model over ranks: DDP, FSDP2 and tensor parallelism, on a single rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

__all__ = ["ddp", "fsdp2", "tensor_parallel"]

_Spread = Callable[[Module], Any]

_groups: list[Any] = []
"""The last process group of one rank, kept alive so that it outlives its models.

If ``DistributedDataParallel`` held the last reference to a group, its reducer would join the
group's threads while it holds the GIL, which one of them may be waiting for: a deadlock.
"""


@contextmanager
def ddp() -> Iterator[_Spread]:
    """Yield ``DistributedDataParallel``, in a process group of one rank."""
    with _group_of_one():
        yield torch.nn.parallel.DistributedDataParallel


@contextmanager
def fsdp2() -> Iterator[_Spread]:
    """Yield a function that applies ``fully_shard``, on a mesh of one rank."""
    from torch.distributed.fsdp import fully_shard

    with _group_of_one() as mesh:
        yield lambda model: fully_shard(model, mesh=mesh)


@contextmanager
def tensor_parallel() -> Iterator[_Spread]:
    """Yield a function that applies ``parallelize_module`` (columnwise), on one rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with _group_of_one() as mesh:
        yield lambda model: parallelize_module(model, mesh, ColwiseParallel())


@contextmanager
def _group_of_one() -> Iterator[Any]:
    """Make a process group of this process alone, and yield its device mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _groups[:] = [dist.group.WORLD]
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
