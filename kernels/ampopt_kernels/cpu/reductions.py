"""What can be said of the numbers in CPU tensors by reading them once, in loops of C++.

However many tensors there are, it is one call, and its threads start once.
"""

import math
from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from ampopt_kernels.cpu.native import loops
from ampopt_kernels.cpu.objects import addresses

__all__ = ["all_finite", "can_square", "common", "sums_of_squares"]

_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


def all_finite(tensors: list[Tensor]) -> bool:
    """Of dense CPU tensors of dtypes that rules take."""
    where, dtypes, sizes = _located(tensors)
    threads = torch.get_num_threads()
    return bool(loops().all_finite(*map(_start, (where, dtypes, sizes)), len(where), threads))


def can_square(tensors: Iterable[Tensor]) -> bool:
    """Whether :func:`sums_of_squares` takes their dtypes."""
    return all(t.dtype in (torch.float32, torch.float64) for t in tensors)


def sums_of_squares(tensors: list[Tensor]) -> list[float]:
    """In float64, of each of some dense float32 or float64 CPU tensors.

    The same for any number of threads, and whatever tensors there are besides.
    """
    located, sums = _located(tensors), array("d", bytes(8 * len(tensors)))
    threads = torch.get_num_threads()
    loops().sums_of_squares(*map(_start, located), len(sums), threads, _start(sums))
    return sums.tolist()


def common(tensor: Tensor) -> float | None:
    """What all elements of a dense float32 CPU tensor are, if they are all the same."""
    value = loops().common(tensor.data_ptr(), tensor.numel())
    return None if math.isnan(value) else value


def _located(tensors: list[Tensor]) -> tuple[array, array, array]:
    """Where they are, of what dtypes, and how many elements they have."""
    dtypes, sizes = ([_DTYPES[t.dtype] for t in tensors], [t.numel() for t in tensors])
    return addresses(tensors), array("q", dtypes), array("q", sizes)


def _start(numbers: array) -> int:
    return numbers.buffer_info()[0]
