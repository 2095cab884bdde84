"""Gradients that are spread over ranks: each rank judges the part that it has, and all agree."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["agreement", "is_spread", "local", "settle"]


def is_spread(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which this rank has a part or a copy."""
    # Who has made one has imported this; nobody else should have to wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """The part of ``tensor`` that this rank has, in the same memory; an ordinary one itself."""
    if not is_spread(tensor):
        return tensor
    part = tensor._local_tensor
    return part if type(part) is Tensor else _waited_for(part)


def _waited_for(part: Any) -> Tensor:
    """``part``, if a collective is to bring it, once that has been waited for on the device."""
    return part.wait() if hasattr(part, "wait") else part


def settle(param: Any) -> None:
    """Place the gradient of ``param`` as ``param`` is: a sum still to be taken is taken.

    That is a collective for each such gradient, so that all ranks have to come by.
    """
    grad = param.grad
    if is_spread(grad) and is_spread(param) and grad.placements != param.placements:
        param.grad = grad.redistribute(param.device_mesh, param.placements)


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
