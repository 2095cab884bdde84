"""What can be said of the numbers in CPU tensors by reading them once, in loops of C++.

However many tensors there are, it is one call, and its threads start once. The loops, of
``numbers.cpp``, need no header but C++'s own, and half a second of a compiler.
"""

import ctypes
import functools
import math
import operator
from array import array
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ampopt_kernels.ledger import CAUSES, COLUMNS, COUNTS, NOT_GIVEN
from ampopt_kernels.native.build import Library
from ampopt_kernels.native.objects import addresses

__all__ = [
    "INFINITY",
    "PART",
    "all_finite",
    "common",
    "library",
    "loops",
    "measures",
    "sums_of_squares",
]

PART = 1 << 12
"""Elements that a thread takes at once, with room for their squares in a core's cache."""
INFINITY = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
"""Its bits in each dtype that rules take."""
_DTYPES = {dtype: number for number, dtype in enumerate(INFINITY)}


_CONSTANTS = {
    "PART": PART,
    "COLUMNS": COLUMNS,
    "COUNTS": COUNTS,
    "CAUSES": len(CAUSES),
    "NOT_GIVEN": NOT_GIVEN,
}


@functools.cache
def library(*options: str) -> Library:
    """What holds the loops over numbers.

    Args:
        options: of the compiler, besides those for every library.

    Raises:
        OSError: there is no compiler.
    """
    source = Path(__file__).with_name("numbers.cpp").read_text(encoding="utf-8")
    constants = (f"-D{name}={value}" for name, value in _CONSTANTS.items())
    return Library(source, (*constants, *options), can_wait=True)


loaded: ctypes.CDLL | None = None
"""What :func:`loops` has returned; ``None`` while nobody has called it."""


def loops() -> ctypes.CDLL:
    """The loops over numbers, compiled at once, or found among those compiled before.

    Raises:
        OSError: there is no compiler.
        RuntimeError: it failed.
    """
    global loaded
    if loaded is not None:
        return loaded
    made = library().load()
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for loop in (made.gather, made.scatter):
        loop.argtypes, loop.restype = (pointer, pointer, count, pointer), None
    made.all_finite.argtypes = (pointer, pointer, pointer, count, count)
    tensors = pointer, pointer, pointer, count, count
    made.measure.argtypes = (*tensors, pointer, ctypes.c_double, pointer, pointer)
    made.measure.restype = None
    made.note.argtypes = (*(pointer, pointer, pointer, count), *(pointer, pointer, count, count))
    made.note.argtypes += (ctypes.c_bool,)
    made.note.restype = None
    made.common.argtypes, made.common.restype = (pointer, count), ctypes.c_double
    loaded = made
    return made


def all_finite(tensors: list[Tensor]) -> bool:
    """Of dense CPU tensors of dtypes that rules take."""
    where, dtypes, sizes = _located(tensors)
    starts = where.buffer_info()[0], dtypes.buffer_info()[0], sizes.buffer_info()[0]
    return bool(loops().all_finite(*starts, len(where), torch.get_num_threads()))


def sums_of_squares(tensors: list[Tensor]) -> list[float]:
    """In float64, of each of some dense CPU tensors of dtypes that rules take.

    The same for any number of threads, and whatever tensors there are besides.
    """
    _, found = measures(tensors, [(1, 1, INFINITY[tensor.dtype], 1) for tensor in tensors], 1.0)
    return found[:, 3].tolist()


def measures(
    tensors: list[Tensor], bounds: Iterable[tuple[int, ...]], inverse: float
) -> tuple[list[bool], Tensor]:
    """Of dense CPU tensors of dtypes that rules take, as they are.

    Args:
        tensors: to be read once.
        bounds: three magnitudes of each, as the integers that have their bits, and whether its
            arithmetic is float64.
        inverse: that largest magnitudes are multiplied by, in that arithmetic.

    Returns:
        Of each tensor whether a magnitude reaches the third bound, and float64, shape (tensors, 4):
        the largest that does not, times ``inverse``; how many of these reach the first; how many
        of those do not reach the second; the sum of all squares.
    """
    flags = array("b", bytes(len(tensors)))
    found = torch.empty(len(tensors), 4, dtype=torch.float64, device="cpu")
    numbers = (*_located(tensors), array("q", chain.from_iterable(bounds)), flags)
    where, dtypes, sizes, four, flagged = (x.buffer_info()[0] for x in numbers)
    given = where, dtypes, sizes, len(tensors), torch.get_num_threads()
    loops().measure(*given, four, inverse, flagged, found.data_ptr())
    return list(map(bool, flags)), found


def common(tensor: Tensor) -> float | None:
    """What all elements of a dense CPU tensor are, if they are all the same.

    Needs no loops, but is faster with them.
    """
    if loaded is None or tensor.dtype != torch.float32:
        low, high = (x.item() for x in tensor.aminmax())
        return low if low == high else None
    value = loaded.common(tensor.data_ptr(), tensor.numel())
    return None if math.isnan(value) else value


def _located(tensors: list[Tensor]) -> tuple[array, array, array]:
    """Where they are, of what dtypes, and how many elements they have."""
    dtypes, sizes = map(_DTYPES.__getitem__, map(_dtype_of, tensors)), map(Tensor.numel, tensors)
    return addresses(tensors), array("q", dtypes), array("q", sizes)


_dtype_of = operator.attrgetter("dtype")
