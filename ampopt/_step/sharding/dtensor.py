"""Tensors that are spread over ranks: what is here of each."""

import sys
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ampopt._step.torch_private import LOCAL_TENSOR, SPEC

__all__ = [
    "is_spread",
    "local",
    "local_of_each",
    "placed_as",
    "placements",
    "settle",
    "spread_like",
]


def is_spread(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which this rank has a part or a copy."""
    # Who has made one has imported this; nobody else should have to wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """The part of ``tensor`` that this rank has, in the same memory; an ordinary one itself."""
    if not is_spread(tensor):
        return tensor
    part = getattr(tensor, LOCAL_TENSOR)
    return part if type(part) is Tensor else _waited_for(part)


def _waited_for(part: Any) -> Tensor:
    """``part``, if a collective is to bring it, once that has been waited for on the device."""
    return part.wait() if hasattr(part, "wait") else part


def local_of_each(tensors: list[Any]) -> list[Any]:
    """:func:`local` of hundreds, in no Python for each; of ``None`` that is ``None``."""
    parts = list(map(getattr, tensors, repeat(LOCAL_TENSOR), tensors))
    return parts if _THERE.issuperset(map(type, parts)) else list(map(_waited_for, parts))


_THERE = {Tensor, torch.nn.Parameter, type(None)}
"""Types of what is not on its way."""


def placements(tensors: list[Any]) -> list[Any]:
    """Where each is placed, to be compared with; ``None`` for one that is not spread."""
    return list(map(getattr, tensors, repeat(SPEC), repeat(None)))


def settle(param: Any) -> None:
    """Place the gradient of ``param`` as ``param`` is: a sum still to be taken is taken.

    That is a collective for each such gradient, so that all ranks have to come by.
    """
    grad = param.grad
    if (placed := placed_as(grad, param)) is not grad:
        param.grad = placed


def placed_as(tensor: Any, like: Any) -> Any:
    """``tensor`` placed as ``like``; itself where it is so already, or one of them not spread."""
    if not (is_spread(tensor) and is_spread(like)) or tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(like.device_mesh, like.placements)


def spread_like(part: Tensor, like: Any) -> Any:
    """``part`` as what this rank has of a tensor that is spread as ``like`` is, if it is."""
    if not is_spread(like):
        return part
    # Where the part begins inside a larger buffer, what is made around it would take over that
    # offset, and could not be copied. So it is made around another, and given the part.
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(
        torch.empty_like(part),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    setattr(whole, LOCAL_TENSOR, part)
    return whole
