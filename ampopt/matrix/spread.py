"""Ways to put a model on ranks: DDP, FSDP2 and tensor parallelism, in a group of one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

__all__ = ["ddp", "fsdp2", "tensor_parallel"]

_Spread = Callable[[Module], Any]

_held: list[Any] = []
"""The group of one that was made last, which so outlives its models.

Where ``DistributedDataParallel`` is the last to let go of a group, its reducer ends the group's
threads and waits for them with Python's lock held, which one of them may be waiting for.
"""


@contextmanager
def ddp() -> Iterator[_Spread]:
    """``DistributedDataParallel``."""
    with _group_of_one():
        yield torch.nn.parallel.DistributedDataParallel


@contextmanager
def fsdp2() -> Iterator[_Spread]:
    """``fully_shard``."""
    from torch.distributed.fsdp import fully_shard

    with _group_of_one() as mesh:
        yield lambda model: fully_shard(model, mesh=mesh)


@contextmanager
def tensor_parallel() -> Iterator[_Spread]:
    """``parallelize_module``, by columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with _group_of_one() as mesh:
        yield lambda model: parallelize_module(model, mesh, ColwiseParallel())


@contextmanager
def _group_of_one() -> Iterator[Any]:
    """This process is all ranks there are; a mesh of it."""
    from torch.distributed.device_mesh import init_device_mesh

    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _held[:] = [dist.group.WORLD]
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
