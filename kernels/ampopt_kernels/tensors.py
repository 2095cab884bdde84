"""Tensors as engines see them: dense runs of real numbers, and the dtype that is computed in."""

import functools

import torch
from torch import Tensor

__all__ = ["arithmetic", "dense_like", "flat", "is_dense", "real", "times", "widest"]


def real(tensor: Tensor) -> Tensor:
    """``tensor``, with a complex one as its real view of shape ``(..., 2)``."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill one run of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def dense_like(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` itself if it is dense and laid out as ``like`` would be, else such a copy.

    ``like`` may be any strided tensor of the same shape; where it is not dense itself, the layout
    is the one that ``torch.empty_like`` gives.
    """
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor
    wanted = like if is_dense(like) else torch.empty_like(like, device="meta")
    if tensor.stride() == wanted.stride() and is_dense(tensor):
        return tensor
    copy = torch.empty_strided(
        wanted.shape, wanted.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense ``tensor`` in memory order, as a 1-d view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def times(tensor: Tensor, *factors: float) -> Tensor:
    """``tensor`` times one of ``factors`` after another, but for those that are 1."""
    for factor in factors:
        if factor != 1:
            tensor = tensor * factor
    return tensor


@functools.cache  # it is asked of each of hundreds of tensors
def arithmetic(*dtypes: torch.dtype) -> torch.dtype:
    """What a rule computes in on tensors of these ``dtypes``: float64 if one is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """What step counts, scales and norms are computed in on ``device``: float64 where it has it."""
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
