"""Copies of CPU tensors, tests for inf/NaN, sums of squares and other measures, by loops of C++.

One call reads all tensors once. The loops, in ``numbers.cpp``, need only the standard headers of
C++, and take a compiler half a second.
"""

import ctypes
import functools
import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import Copies
from ampopt_kernels.cpu.dtypes import DTYPES
from ampopt_kernels.native.build import Library
from ampopt_kernels.native.objects import addresses
from ampopt_kernels.watch_statistics import CAUSES, COLUMNS, COUNTS, RING

__all__ = [
    "PART",
    "NativeCopies",
    "all_finite",
    "common",
    "library",
    "loops",
    "measures",
    "sums_of_squares",
]

PART = 1 << 12
"""Elements that a thread processes at a time; their float64 squares fit the cache of a core."""
_INDICES = {dtype: index for index, dtype in enumerate(DTYPES)}
_CONSTANTS = {
    "PART": PART,
    "COLUMNS": COLUMNS,
    "COUNTS": COUNTS,
    "CAUSES": len(CAUSES),
    "RING": RING,
    "NOT_GIVEN": "-INFINITY",
}


@functools.cache
def library(*options: str) -> Library:
    """Return the library of the loops, which may not have been compiled yet.

    Args:
        options: compiler options in addition to those of every library.

    Raises:
        OSError: there is no C++ compiler.
    """
    source = Path(__file__).with_name("numbers.cpp").read_text(encoding="utf-8")
    constants = (f"-D{name}={value}" for name, value in _CONSTANTS.items())
    return Library(source, (*constants, *options), can_wait=True)


loaded: ctypes.CDLL | None = None
"""The result of :func:`loops`; ``None`` until it has been called."""


def loops() -> ctypes.CDLL:
    """Load the loops; waits for the compiler unless they were compiled before.

    Raises:
        OSError: there is no C++ compiler.
        RuntimeError: the compiler failed.
    """
    global loaded
    if loaded is not None:
        return loaded
    cdll = library().load()
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for loop in (cdll.gather, cdll.scatter):
        loop.argtypes, loop.restype = (pointer, pointer, count, pointer, pointer), None
    cdll.all_finite.argtypes = (pointer, pointer, pointer, count, count)
    tensors = pointer, pointer, pointer, count, count
    cdll.measure.argtypes = (*tensors, pointer, ctypes.c_double, pointer, pointer)
    cdll.measure.restype = None
    cdll.sums_of_squares.argtypes = (*tensors, pointer)
    cdll.sums_of_squares.restype = None
    cdll.note.argtypes = (*(pointer, pointer, pointer, count), *(pointer, pointer, count, count))
    cdll.note.argtypes += (ctypes.c_bool,)
    cdll.note.restype = None
    cdll.common.argtypes, cdll.common.restype = (pointer, count), ctypes.c_double
    loaded = cdll
    return cdll


class NativeCopies(Copies):
    """Copies by two loops of C++, which leave torch's version counters as they are."""

    def __init__(self, params: Sequence[Tensor], scratch: Tensor) -> None:
        """Store the addresses of ``params`` and ``scratch``.

        Args:
            params: contiguous, of one dtype; their memory must stay in place.
            scratch: flat, of that dtype, as long as all of them.

        Raises:
            OSError: there is no C++ compiler.
            RuntimeError: the compiler failed.
        """
        self._loops = loops()
        self._bytes = {
            width: array("q", [p.numel() * width for p in params]) for width in (2, 4, 8)
        }
        where, sizes = addresses(list(params)), self._bytes[scratch.element_size()]
        starts = where.buffer_info()[0], sizes.buffer_info()[0]
        self._arguments = (*starts, len(where), scratch.data_ptr())
        self._alive = where, scratch, params  # the arguments are pointers into these
        self._grads = where  # as if every gradient had been there

    def gather(self, grads: list[Any], scratch: Tensor) -> None:
        """See :meth:`Copies.gather`."""
        self._grads, sizes = addresses(grads), self._bytes[scratch.element_size()]
        where = self._grads.buffer_info()[0]
        self._loops.gather(where, sizes.buffer_info()[0], len(grads), scratch.data_ptr(), where)

    def load(self) -> None:
        """See :meth:`Copies.load`."""
        self._loops.gather(*self._arguments, self._grads.buffer_info()[0])

    def store(self) -> None:
        """See :meth:`Copies.store`."""
        self._loops.scatter(*self._arguments, self._grads.buffer_info()[0])


def all_finite(tensors: list[Tensor]) -> bool:
    """Return whether every element is finite.

    Args:
        tensors: dense CPU tensors of the dtypes in :data:`DTYPES`.
    """
    where, dtypes, sizes = _located(tensors)
    starts = where.buffer_info()[0], dtypes.buffer_info()[0], sizes.buffer_info()[0]
    return bool((loaded or loops()).all_finite(*starts, len(where), torch.get_num_threads()))


def sums_of_squares(tensors: list[Tensor]) -> list[float]:
    """Return the sum of squares of each tensor, in float64.

    A sum depends neither on the number of threads nor on the other tensors.

    Args:
        tensors: dense CPU tensors of the dtypes in :data:`DTYPES`.
    """
    sums, numbers = array("d", bytes(8 * len(tensors))), _located(tensors)
    where, dtypes, sizes, sums_at = (x.buffer_info()[0] for x in (*numbers, sums))
    arguments = where, dtypes, sizes, len(tensors), torch.get_num_threads()
    (loaded or loops()).sums_of_squares(*arguments, sums_at)
    return sums.tolist()


def measures(
    tensors: list[Tensor], bounds: Iterable[tuple[int, ...]], inverse: float
) -> tuple[list[bool], Tensor]:
    """Measure tensors without changing them, reading each once.

    Args:
        tensors: dense CPU tensors of the dtypes in :data:`DTYPES`.
        bounds: for each tensor three magnitudes, as integers of the same bits, and whether its
            arithmetic is float64 (1) or float32 (0).
        inverse: the reciprocal of the scale, by which the largest magnitude is multiplied in the
            arithmetic of its tensor.

    Returns:
        For each tensor whether any magnitude is at least the third bound; and a float64 tensor of
        shape (tensors, 4). Its columns: the largest magnitude below the third bound, times
        ``inverse``; how many magnitudes are at least the first and below the third bound; how many
        of these are below the second bound; the sum of squares of all elements.
    """
    flags = array("b", bytes(len(tensors)))
    columns = torch.empty(len(tensors), 4, dtype=torch.float64, device="cpu")
    numbers = (*_located(tensors), array("q", chain.from_iterable(bounds)), flags)
    where, dtypes, sizes, four, flagged = (x.buffer_info()[0] for x in numbers)
    arguments = where, dtypes, sizes, len(tensors), torch.get_num_threads()
    (loaded or loops()).measure(*arguments, four, inverse, flagged, columns.data_ptr())
    return list(map(bool, flags)), columns


def common(tensor: Tensor) -> float | None:
    """Return the value of all elements of a dense CPU tensor; ``None`` if they differ or are NaN.

    Runs torch operations until the loops are loaded.
    """
    if loaded is None or tensor.dtype != torch.float32:
        low, high = map(Tensor.item, tensor.aminmax())
        return low if low == high else None
    value = loaded.common(tensor.data_ptr(), tensor.numel())
    return None if math.isnan(value) else value


def _located(tensors: list[Tensor]) -> tuple[array, array, array]:
    """Return the addresses, the indices of the dtypes, and the sizes of ``tensors``."""
    dtypes, sizes = map(_INDICES.__getitem__, map(_dtype_of, tensors)), map(Tensor.numel, tensors)
    return addresses(tensors), array("q", dtypes), array("q", sizes)


_dtype_of = operator.attrgetter("dtype")
