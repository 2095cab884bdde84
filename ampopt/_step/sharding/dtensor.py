"""``DTensor``s: their local tensors, and gradients and states with the same placements."""

import sys
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ampopt._step.torch_private import LOCAL_TENSOR, SPEC

__all__ = [
    "as_replicated",
    "from_local_like",
    "is_awaited",
    "is_dtensor",
    "local",
    "local_of_each",
    "placements",
    "redistribute_gradient",
    "replicated_like",
    "waited_for",
]


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``, sharded or replicated."""
    # Not imported here, as that takes time: whoever made a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """The local shard of a ``DTensor``, in the same memory; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    part = getattr(tensor, LOCAL_TENSOR)
    return part if type(part) is Tensor else waited_for(part)


def is_awaited(tensor: Any) -> bool:
    """Whether ``tensor`` is the result of an asynchronous collective, which may still write it."""
    return hasattr(tensor, "wait")


def waited_for(part: Any) -> Tensor:
    """``part``; if it :func:`is_awaited`, after a wait on the device."""
    return part.wait() if is_awaited(part) else part


def local_of_each(tensors: list[Any]) -> list[Any]:
    """:func:`local` of each tensor, and ``None`` for each ``None``; fast for hundreds."""
    if _THERE.issuperset(map(type, tensors)):
        return tensors
    parts = list(map(getattr, tensors, repeat(LOCAL_TENSOR), tensors))
    return parts if _THERE.issuperset(map(type, parts)) else list(map(waited_for, parts))


_THERE = {Tensor, torch.nn.Parameter, type(None)}
"""Types of tensors that are no ``DTensor``s, and whose values no collective still writes."""


def placements(tensors: list[Any]) -> list[Any]:
    """The spec (mesh, placements, shape) of each ``DTensor``; ``None`` for any other tensor."""
    return list(map(getattr, tensors, repeat(SPEC), repeat(None)))


def redistribute_gradient(param: Any) -> None:
    """Redistribute the gradient of ``param`` to the placements of ``param``, if they differ.

    For a ``Partial`` gradient that is a collective, which all ranks of its mesh have to call.
    """
    grad = param.grad
    if is_dtensor(grad) and is_dtensor(param) and grad.placements != param.placements:
        param.grad = grad.redistribute(param.device_mesh, param.placements)


def from_local_like(part: Tensor, like: Any, shape: Sequence[int] | None = None) -> Any:
    """A ``DTensor`` with the local shard ``part``, placed as ``like``; ``part`` if it is none.

    Args:
        part: the local shard.
        like: a ``DTensor``, or any other tensor.
        shape: the shape of the whole tensor, contiguous; ``None`` for that of ``like``.
    """
    if not is_dtensor(like):
        return part
    # A DTensor made from a view into a larger buffer takes over its storage offset, and cannot be
    # deep-copied. So it is made from another tensor, whose place the view then takes.
    from torch.distributed.tensor import DTensor

    layout = like if shape is None else torch.empty(shape, device="meta")
    whole = DTensor.from_local(
        torch.empty_like(part),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=layout.shape,
        stride=layout.stride(),
    )
    setattr(whole, LOCAL_TENSOR, part)
    return whole


def as_replicated(state: Any) -> Any:
    """``state``, redistributed if it is not replicated, as a loaded one may be."""
    if not is_dtensor(state) or all(p.is_replicate() for p in state.placements):
        return state
    from torch.distributed.tensor import Replicate

    return state.redistribute(placements=[Replicate()] * state.device_mesh.ndim)


def replicated_like(tensor: Tensor, param: Any) -> Any:
    """``tensor``, equal on all ranks, as a replicated ``DTensor`` on the mesh of ``param``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
