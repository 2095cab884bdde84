"""Tensors as backends use them: real views, memory layouts, and dtypes to compute in."""

import functools

import torch
from torch import Tensor

__all__ = [
    "arithmetic",
    "dense_like",
    "flat",
    "is_dense",
    "real",
    "was_freed",
    "widest",
]


def real(tensor: Tensor) -> Tensor:
    """``tensor``, or the real view of a complex one: shape ``(..., 2)``."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill one range of memory, each once, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def was_freed(tensor: Tensor) -> bool:
    """Whether the storage of a strided ``tensor`` was freed, so that it has no address."""
    of_storage = tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize
    return not of_storage and bool(tensor.numel()) and not tensor.is_meta


def dense_like(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` if it is dense and has the strides of ``like``, else a copy that has.

    Args:
        tensor: any strided tensor.
        like: a strided tensor of the same shape. If it is not dense, its strides are those of
            ``torch.empty_like(like)``.
    """
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor
    target = like if is_dense(like) else torch.empty_like(like, device="meta")
    if tensor.stride() == target.stride() and is_dense(tensor):
        return tensor
    copy = torch.empty_strided(
        target.shape, target.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense ``tensor`` in memory order, as a 1-d view."""
    if tensor.ndim == 1 and tensor.is_contiguous():
        return tensor  # a fifth of the time of a view
    return tensor.as_strided((tensor.numel(),), (1,))


@functools.cache  # called for each of hundreds of tensors
def arithmetic(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype to compute a rule in: float64 if one of ``dtypes`` is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """The dtype for step counts, scales and norms: float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
