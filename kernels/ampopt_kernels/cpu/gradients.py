"""Reads the gradients of a step by C++: tests for inf/NaN, sums of squares, measures; unscales.

The gradients of one dtype are read in one call, once each. Results do not depend on the number of
threads.
"""

import ctypes
import functools
from array import array
from pathlib import Path

import torch
from torch import Tensor

from ampopt_kernels.cpu.dtypes import DTYPES, preamble
from ampopt_kernels.gradient_terms import FLUSHED, MEASURES
from ampopt_kernels.native.build import Library

__all__ = ["PART", "GradientTable"]

PART = 1 << 12
"""Elements that a thread processes at a time."""
_INFINITY = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}
"""For each dtype the integer dtype of the same width, and infinity in it: the same bits."""
_TESTS, _SQUARES, _MEASURES = range(3)
"""Values of ``LEVEL`` in ``gradients.cpp``."""


@functools.cache
def _functions(dtype: torch.dtype, level: int) -> ctypes.CDLL:
    """The functions for gradients of ``dtype``. Waits for the compiler if they are new here."""
    source = Path(__file__).with_name("gradients.cpp").read_text(encoding="utf-8")
    source = source.replace('#include "preamble.h"', preamble())
    constants = {"FORMAT": list(DTYPES).index(dtype), "LEVEL": level, "PART": PART}
    library = Library(source, tuple(f"-D{k}={v}" for k, v in constants.items())).load()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    rows = pointer, pointer, number, number
    test = *rows, number, pointer
    library.all_below.argtypes, library.all_below.restype = test, number
    if level >= _SQUARES:
        library.sums_of_squares.argtypes = (*rows, pointer)
        library.sums_of_squares.restype = None
        library.unscale.argtypes, library.unscale.restype = (*test, ctypes.c_double), number
    if level >= _MEASURES:
        library.measure.argtypes = (*rows, pointer, ctypes.c_double, pointer, pointer)
        library.measure.restype = None
    return library


class GradientTable:
    """The rows of a work whose gradients have one dtype and one arithmetic dtype.

    Each method reads the gradients at ``grads``: the address of an array of int64, with the address
    of the gradient of each row of the work; 0 for a row without one. Results have one entry for
    each row of the work. The entries of other rows stay as they are.
    """

    def __init__(self, dtype: torch.dtype, compute_dtype: torch.dtype, rows: array) -> None:
        """Store the rows.

        Args:
            dtype: dtype of the gradients: one of :data:`DTYPES`.
            compute_dtype: the arithmetic dtype, in which they are unscaled.
            rows: for each row its index in the work and its number of elements: int64.
        """
        self._dtypes, self._rows = (dtype, compute_dtype), rows
        self._at = rows.buffer_info()[0], len(rows) // 2

    def compile(self, *, squares: bool = False, measures: bool = False) -> None:
        """Wait for the compiler, if what a step needs has not been compiled on this machine.

        Args:
            squares: whether a step needs :meth:`add_squares` or :meth:`unscale`.
            measures: whether it needs :meth:`measure`.
        """
        for level in (_TESTS, *[_SQUARES] * squares, *[_MEASURES] * measures):
            _functions(self._dtypes[0], level)

    def all_finite(self, grads: int, inverse: float, flags: bytearray) -> bool:
        """Whether all gradients are finite once unscaled. Else sets the flags of rows to 1.

        Args:
            grads: see the class.
            inverse: the reciprocal of the scale.
            flags: 0 for each row of the work; written.
        """
        below = _functions(self._dtypes[0], _TESTS).all_below
        return bool(below(*self._test_arguments(grads, inverse, flags)))

    def unscale(self, grads: int, inverse: float, flags: bytearray) -> bool:
        """As :meth:`all_finite`; also multiplies all gradients in place by ``inverse``."""
        unscale = _functions(self._dtypes[0], _SQUARES).unscale
        return bool(unscale(*self._test_arguments(grads, inverse, flags), inverse))

    def _test_arguments(self, grads: int, inverse: float, flags: bytearray) -> tuple[int, ...]:
        """The arguments of ``test`` of ``gradients.cpp``, but for its last."""
        if 0 <= inverse <= 1:  # this makes nothing larger
            _, bound = _INFINITY[self._dtypes[0]]
        else:
            bound = _bounds(*self._dtypes, inverse)[2]
        own = ctypes.addressof(ctypes.c_char.from_buffer(flags))
        return grads, *self._at, torch.get_num_threads(), bound, own

    def add_squares(self, grads: int, sums: Tensor) -> None:
        """Add the sum of squares of each gradient to ``sums``, float64."""
        add = _functions(self._dtypes[0], _SQUARES).sums_of_squares
        add(grads, *self._at, torch.get_num_threads(), sums.data_ptr())

    def measure(self, grads: int, inverse: float, flags: bytearray, measures: Tensor) -> None:
        """Write :attr:`GradientReport.measures`, transposed; the squares are of scaled gradients.

        Args:
            grads: see the class.
            inverse: the reciprocal of the scale.
            flags: 0 for each row of the work; set to 1 where a gradient is not finite once
                unscaled.
            measures: zeros: float64, shape (rows of the work, 4).
        """
        assert measures.shape[1] == MEASURES
        bounds = array("q", _bounds(*self._dtypes, inverse))
        own = ctypes.addressof(ctypes.c_char.from_buffer(flags))
        measure = _functions(self._dtypes[0], _MEASURES).measure
        to = bounds.buffer_info()[0], inverse, own, measures.data_ptr()
        measure(grads, *self._at, torch.get_num_threads(), *to)


@functools.lru_cache(maxsize=64)  # a scale is used for many steps
def _bounds(dtype: torch.dtype, compute_dtype: torch.dtype, inverse: float) -> tuple[int, ...]:
    """The bounds that ``measure`` of ``gradients.cpp`` takes.

    They are found by bisection over the bits of magnitudes: the smallest magnitudes that, once
    unscaled, are not 0, above :data:`FLUSHED`, and not finite.

    Args:
        dtype: the dtype of the gradients.
        compute_dtype: the arithmetic dtype, in which they are unscaled.
        inverse: the reciprocal of the scale.

    Returns:
        The bits of the three magnitudes, and whether ``compute_dtype`` is float64.
    """
    # The lower ends of the three intervals. Only an invalid scale makes 0 times ``inverse`` NaN.
    low = torch.tensor([1, 1, 0], dtype=torch.int64, device="cpu")
    integer, infinity = _INFINITY[dtype]
    high = torch.full_like(low, infinity)  # the upper ends
    flushed = torch.tensor(
        [0.0, FLUSHED, torch.finfo(compute_dtype).max], dtype=compute_dtype, device="cpu"
    )
    while (low < high).any():
        middle = low + (high - low) // 2  # low + high may overflow int64
        unscaled = (middle.to(integer).view(dtype).to(compute_dtype) * inverse).abs()
        below = unscaled <= flushed
        low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
    return *low.tolist(), compute_dtype == torch.float64
