"""Parameters that are spread over ranks, beside the same on one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import ampopt

__all__ = ["same_as_whole"]


def same_as_whole(
    make: Callable[[Any], Any], values: list[Tensor], grad: float, step: Callable[[Any], Any]
) -> list[bool]:
    """Whether steps of parts on all ranks end bit for bit where those of whole parameters do.

    Args:
        make: an optimizer, of parameters.
        values: to begin with; all but the last are sharded, and each rank has that.
        grad: every element of the gradients.
        step: takes one step of an optimizer, of three.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ampopt.set_backend("eager")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    places: list[Any] = [*[Shard(0)] * (len(values) - 1), Replicate()]
    wholes = [Parameter(value.clone()) for value in values]
    parts: list[Any] = [
        Parameter(distribute_tensor(value.clone(), mesh, [place]))
        for value, place in zip(values, places, strict=True)
    ]
    both = [make(parts), make(wholes)]
    for _ in range(3):
        for whole, part, place in zip(wholes, parts, places, strict=True):
            whole.grad = torch.full_like(whole, grad)
            part.grad = distribute_tensor(whole.grad.clone(), mesh, [place])
        for optimizer in both:
            step(optimizer)
    ampopt.set_backend("auto")
    return [torch.equal(a.detach().full_tensor(), b) for a, b in zip(parts, wholes, strict=True)]
