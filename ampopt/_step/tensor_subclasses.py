"""Tensors whose values are in other tensors, such as the 8-bit states of torchao, and ``DTensor``s.

Such a subclass names its inner tensors in ``__tensor_flatten__``, as ``torch.compile`` requires,
and usually implements few operators.
"""

from typing import Any

from torch import Tensor

from ampopt._step.sharding import dtensor

__all__ = ["copy_of", "inner_names", "memory_of"]


def inner_names(tensor: Any) -> list[str]:
    """The names of the attributes of ``tensor`` that are its inner tensors; empty if it has none.

    A ``DTensor`` has a local shard instead, which may have inner tensors.
    """
    if not hasattr(type(tensor), "__tensor_flatten__") or dtensor.is_dtensor(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    return list(names)


def memory_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the values of ``tensor``: itself, its local shard or inner tensors."""
    tensor = dtensor.local(tensor)
    names = inner_names(tensor)
    if not names:
        return [tensor]
    return [inner for name in names for inner in memory_of(getattr(tensor, name))]


def copy_of(tensor: Any) -> Tensor:
    """A detached copy of ``tensor`` that shares no memory with it.

    Inner tensors are copied one by one, because a subclass may not implement ``clone``.
    """
    names = inner_names(tensor)
    if not names:
        return tensor.detach().clone()
    inner = {name: copy_of(getattr(tensor, name)) for name in names}
    _, context = tensor.__tensor_flatten__()
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
