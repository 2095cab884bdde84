"""Tensors as engines see them: dense runs of real numbers, and the dtype that is computed in."""

import functools

import torch
from torch import Tensor

__all__ = [
    "arithmetic",
    "dense_like",
    "flat",
    "is_dense",
    "memory_of",
    "overlaps_itself",
    "real",
    "share_memory",
    "times",
    "widest",
]


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


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements of a strided ``tensor`` share one place, as in an expanded one.

    Exact, also of what ``as_strided`` makes, such as shape (2, 3) with strides (2, 1).
    """
    return not tensor.is_contiguous() and _overlap(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=1024)
def _overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return False
    reach, apart = 0, True  # each stride goes beyond all that the smaller ones reach
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
    """How far each element is behind the first, int64, flat, on the CPU."""
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, stride in zip(shape, strides, strict=True):
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        places = (places[:, None] + steps).reshape(-1)
    return places


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a strided ``tensor`` and of that behind its last one.

    Equal where it has no element, and where it has no memory, as on meta.
    """
    start, n = tensor.data_ptr(), tensor.numel()
    if not (start and n):
        return 0, 0
    if not tensor.is_contiguous():
        n = 1 + sum((m - 1) * s for m, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + n * tensor.element_size()


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors of one device have an element in the same place. Exact."""
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
