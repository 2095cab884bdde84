"""Tensors as backends use them: real views, memory layouts, and dtypes to compute in."""

import functools

import torch
from torch import Tensor

__all__ = [
    "arithmetic",
    "dense_like",
    "flat",
    "is_dense",
    "address_range",
    "overlaps_itself",
    "real",
    "share_memory",
    "times",
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


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements of a strided ``tensor`` share memory, as those of ``expand()`` do.

    Exact, also for ``as_strided`` tensors, such as shape (2, 3) with strides (2, 1).
    """
    return not tensor.is_contiguous() and _overlap(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=1024)
def _overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of a tensor with this shape and these strides share memory."""
    if 0 in shape:
        return False
    reach, apart = 0, True  # apart: each stride is longer than the span of all smaller ones
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride == 0:
                return True
            apart = apart and stride > reach
            reach += (size - 1) * stride
    if apart:
        return False
    places = _places(shape, strides)
    return places.unique().numel() < places.numel()


def _places(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The offset of each element from the first, in elements: int64, 1-d, on the CPU."""
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, stride in zip(shape, strides, strict=True):
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        places = (places[:, None] + steps).reshape(-1)
    return places


def address_range(tensor: Tensor) -> tuple[int, int]:
    """The address range of a strided ``tensor``: first byte, and first byte after its last element.

    ``(0, 0)`` for a tensor without elements, or without memory, as on meta.
    """
    start, n = tensor.data_ptr(), tensor.numel()
    if not (start and n):
        return 0, 0
    if not tensor.is_contiguous():
        n = 1 + sum((m - 1) * s for m, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + n * tensor.element_size()


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors of one device have elements that share memory. Exact."""
    starts, sizes = [], []
    for tensor in (one, other):
        size = tensor.element_size()
        places = _places(tuple(tensor.shape), tensor.stride()).unique()
        starts.append(places * size + tensor.data_ptr())
        sizes.append(torch.full_like(starts[-1], size))
    start, order = torch.cat(starts).sort()
    end = start + torch.cat(sizes)[order]
    return bool((start[1:] < end[:-1]).any())


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


def times(tensor: Tensor, *factors: float) -> Tensor:
    """``tensor`` multiplied by each of ``factors`` in turn, rounding each time; 1 is skipped."""
    for factor in factors:
        if factor != 1:
            tensor = tensor * factor
    return tensor


@functools.cache  # called for each of hundreds of tensors
def arithmetic(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype to compute a rule in: float64 if one of ``dtypes`` is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """The dtype for step counts, scales and norms: float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
