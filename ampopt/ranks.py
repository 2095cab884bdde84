"""Gradients that are spread over ranks: each rank judges the part that it has, and all agree."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["agreement", "is_spread", "local"]


def is_spread(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which this rank has a part or a copy."""
    # Who has made one has imported this; nobody else should have to wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """The part of ``tensor`` that this rank has, in the same memory; an ordinary one itself.

    Raises:
        RuntimeError: it is a sum that is still to be taken, which no rank can judge.
    """
    if not is_spread(tensor):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        raise RuntimeError(
            f"a gradient is placed {tensor.placements}, so that its values are not there yet: "
            "redistribute it as its parameter is"
        )
    return tensor.to_local()


def agreement(tensors: Iterable[Any]) -> Callable[[Tensor], Tensor] | None:
    """What makes the flags of one rank those of all: their maximum over every mesh in use.

    Every dimension of every mesh counts, however each tensor is placed on it. All ranks have to
    call it, and then wait for each other where the flags are, not on the host.

    Args:
        tensors: the gradients or parameters of one decision.

    Returns:
        A function of the flags, as many as one rank likes, with one flag as its result. ``None`` if
        no tensor is spread.
    """
    meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if is_spread(tensor)))
    if not meshes:
        return None

    def agree(flags: Tensor) -> Tensor:
        flag = torch.cat((flags.reshape(-1), flags.new_zeros(1))).amax(0, keepdim=True)
        for mesh in meshes:
            for dimension in range(mesh.ndim):
                group = mesh.get_group(dimension)
                torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)
        return flag

    return agree
