"""Tensors as backends use them: real views, memory layouts, and dtypes to compute in."""

import functools
import operator
from itertools import compress

import torch
from torch import Tensor

__all__ = [
    "all_have_memory",
    "arithmetic",
    "dense_like",
    "flat",
    "is_dense",
    "address_range",
    "may_overlap",
    "overlaps_itself",
    "real",
    "share_memory",
    "sharing_memory",
    "times",
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
    return start, start + _span(tensor) * tensor.element_size()


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last place in memory of a strided ``tensor``, not empty."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((m - 1) * s for m, s in zip(tensor.shape, tensor.stride(), strict=True))


def all_have_memory(tensors: list[Tensor]) -> bool:
    """Whether the storages of strided ``tensors`` hold all of their elements: none was freed."""
    have = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))
    sizes = _extents(tensors)
    if any(map(Tensor.storage_offset, tensors)):
        before = (t.storage_offset() * t.element_size() for t in tensors)
        sizes = [size and size + skipped for size, skipped in zip(sizes, before, strict=True)]
    return all(map(operator.le, sizes, have))


def was_freed(tensor: Tensor) -> bool:
    """Whether the storage of a strided ``tensor`` was freed, so that it has no address."""
    of_storage = tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize
    return not of_storage and bool(tensor.numel()) and not tensor.is_meta


def _extents(tensors: list[Tensor]) -> list[int]:
    """Bytes from the first to the last element of each of strided ``tensors``; 0 without any."""
    if all(map(Tensor.is_contiguous, tensors)):
        return list(map(_nbytes, tensors))
    return [_span(t) * t.element_size() if t.numel() else 0 for t in tensors]


def may_overlap(tensors: list[Tensor]) -> bool:
    """Whether the address ranges of two of ``tensors``, strided, overlap."""
    if len(tensors) < 2:
        return False
    starts, sizes = list(map(Tensor.data_ptr, tensors)), _extents(tensors)
    ends = sorted(compress(map(operator.add, starts, sizes), sizes))  # of ranges with elements
    starts = sorted(compress(starts, sizes))
    # Else as many ranges end before each start as begin before it, so none goes on.
    return any(map(operator.gt, ends, starts[1:]))


def sharing_memory(tensors: list[Tensor]) -> set[int]:
    """The indices of those of strided ``tensors`` that share memory with one before them. Exact."""
    if not may_overlap(tensors):
        return set()
    ranges, found = list(map(address_range, tensors)), set()
    open_: list[int] = []  # tensors that may end after the start of the next one
    for index in sorted(range(len(tensors)), key=ranges.__getitem__):
        start, end = ranges[index]
        open_ = [other for other in open_ if ranges[other][1] > start]
        for other in open_:
            pair = tensors[index], tensors[other]
            if pair[0].device == pair[1].device and (
                all(map(is_dense, pair)) or share_memory(*pair)
            ):
                found.add(max(index, other))
        if end > start:
            open_.append(index)
    return found


_nbytes = operator.attrgetter("nbytes")


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
