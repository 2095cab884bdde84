"""The memory of strided tensors: whether it is there, and whether two tensors share it."""

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ampopt_kernels.native import objects
from ampopt_kernels.tensors import is_dense

__all__ = [
    "address_range",
    "all_have_memory",
    "may_overlap",
    "overlapping_ranges",
    "overlaps_itself",
    "share_memory",
    "turns_of",
]


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
    loops = objects.loops.loaded
    if loops is not None and loops.all_have_memory(tensors):
        return True
    return all(map(_has_memory, tensors))


def _has_memory(tensor: Tensor) -> bool:
    """Whether the storage of a strided ``tensor`` holds all of its elements."""
    if not tensor.numel():
        return True
    n = tensor.storage_offset() + _span(tensor)
    return n * tensor.element_size() <= tensor.untyped_storage().nbytes()


def may_overlap(tensors: list[Tensor]) -> bool:
    """Whether the address ranges of two of ``tensors``, strided, overlap."""
    loops = objects.loops.loaded
    if loops is not None and loops.are_apart(tensors):
        return False
    ranges = sorted(map(address_range, tensors))
    return any(end > start for (_, end), (start, _) in pairwise(ranges))


def overlapping_ranges(tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the indices of each two strided ``tensors`` whose address ranges overlap.

    The one that begins later in memory comes first.
    """
    if not may_overlap(tensors):
        return
    ranges = list(map(address_range, tensors))
    open_: list[int] = []  # tensors that may end after the start of the next one
    for index in sorted(range(len(tensors)), key=lambda index: ranges[index][0]):
        start, end = ranges[index]
        open_ = [other for other in open_ if ranges[other][1] > start]
        yield from ((index, other) for other in open_)
        if end > start:
            open_.append(index)


def turns_of(tensors: list[Tensor]) -> list[int]:
    """In which turn each of strided ``tensors`` is written, where those of a turn share no memory.

    0 for a tensor that shares none with a tensor before it; else one more than the last of their
    turns. Exact.
    """
    turns = [0] * len(tensors)
    for first, second in sorted(map(sorted, overlapping_ranges(tensors))):
        if share_memory(tensors[first], tensors[second]):
            turns[second] = max(turns[second], turns[first] + 1)
    return turns


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors have elements that share memory. Exact."""
    if one.device != other.device:
        return False
    if is_dense(one) and is_dense(other):
        (start, end), (other_start, other_end) = address_range(one), address_range(other)
        return start < other_end and other_start < end
    starts, sizes = [], []
    for tensor in (one, other):
        size = tensor.element_size()
        places = _places(tuple(tensor.shape), tensor.stride()).unique()
        starts.append(places * size + tensor.data_ptr())
        sizes.append(torch.full_like(starts[-1], size))
    start, order = torch.cat(starts).sort()
    end = start + torch.cat(sizes)[order]
    return bool((start[1:] < end[:-1]).any())
