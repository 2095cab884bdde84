"""Parameters sharded over four ranks, compared with whole ones on one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import ampopt
from support.local_ranks import mesh_of

__all__ = ["layouts", "same_as_whole", "spread"]


def layouts() -> list[tuple[Any, list[Any]]]:
    """Device meshes and placements that FSDP2 and tensor parallelism make, on four ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    rows, columns, strided = Shard(0), Shard(-1), _StridedShard(0, split_factor=2)
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    return [
        (mesh_of(4), [rows]),
        (mesh_of(4), [columns]),
        (mesh, [Replicate(), columns]),
        (mesh, [rows, columns]),
        (mesh, [rows, rows]),
        (mesh, [strided, rows]),  # fully_shard after ColwiseParallel
        (mesh, [strided, columns]),
        (mesh["tp"], [columns]),
    ]


def spread(whole: Tensor, mesh: Any, placements: list[Any]) -> Any:
    """Distribute ``whole``, which all ranks have, without a collective."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def same_as_whole(
    make: Callable[[Any], Any],
    values: list[Tensor],
    grad: float,
    step: Callable[[Any], Any],
    backends: list[str],
) -> list[str]:
    """Compare steps on shards bitwise with steps on whole tensors.

    Args:
        make: function from parameters to the optimizer.
        values: initial parameters; each is distributed in every way of :func:`layouts`.
        grad: value of every gradient element.
        step: function that takes one of the optimizer's three steps.
        backends: backends to test.

    Returns:
        A description of each shard that differs.
    """
    places = [place for _ in values for place in layouts()]
    differing = []
    for backend in backends:
        ampopt.set_backend(backend)
        wholes = [Parameter(value.clone()) for value in values for _ in layouts()]
        parts: list[Any] = [
            Parameter(spread(p.detach(), *at)) for p, at in zip(wholes, places, strict=True)
        ]
        both = [make(parts), make(wholes)]
        for _ in range(3):
            for whole, part, place in zip(wholes, parts, places, strict=True):
                whole.grad = torch.full_like(whole, grad)
                part.grad = spread(whole.grad, *place)
            for optimizer in both:
                step(optimizer)
        for whole, part, place in zip(wholes, parts, places, strict=True):
            expected = spread(whole.detach(), *place).to_local()
            if not torch.equal(part.detach().to_local(), expected):
                differing.append(f"{backend}, {tuple(whole.shape)} as {place[1]}")
    ampopt.set_backend("auto")
    return differing
