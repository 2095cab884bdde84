"""The compiled functions of a rule, as calls on tensors."""

import ctypes
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import BUNDLE, BundleSlice
from ampopt_kernels.marginals import Marginals

__all__ = ["CALLS", "Averages", "Loop", "CompiledSums"]


class Loop:
    """A compiled function of a rule, as a call on tensors."""

    def __init__(self, function: Any, *gives: type) -> None:
        """Declare its arguments.

        Args:
            function: of a library.
            gives: the types of what it takes besides, to write to.
        """
        self._function = function
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = (pointer, pointer, pointer, count, count, *gives)
        function.restype = None

    def __call__(
        self,
        parts: Sequence[BundleSlice],
        tensors: Sequence[Tensor],
        *gives: int,
        beside: Iterable[int] = (),
    ) -> None:
        """Run it over ``parts``, which are all of the tensors: gradient, parameter and others.

        ``beside`` is what stands behind their addresses: those of marginals, and their sizes.
        """
        h = array("d")
        for part in parts:
            h.extend(part.h)
            if part.places is not None:
                h.append(part.places.first - part.start)  # where the piece begins
                if part.key is not None:
                    h.append(part.key)
                for period, phase, size in part.places.jumps:
                    h.extend((period, phase - part.start, size))
        where = array("q", map(Tensor.data_ptr, tensors))
        where.extend(beside)
        ends = array("q", map(_end_of, parts))
        starts = h.buffer_info()[0], where.buffer_info()[0], ends.buffer_info()[0]
        # As many threads as are worth the time they take to start.
        threads = torch.get_num_threads() if ends[-1] > BUNDLE else 1
        self._function(*starts, len(parts), threads, *gives)


_end_of = operator.attrgetter("end")


class CompiledSums:
    """The compiled ``reduce`` of a rule, as a call on tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take it from ``library``."""
        self._loop = Loop(library.sums, ctypes.c_void_p)
        self._n_terms = ctypes.c_int64.in_dll(library, "n_terms").value

    def __call__(
        self, rows: Sequence[BundleSlice], tensors: Sequence[Tensor], beside: Iterable[int] = ()
    ) -> Tensor:
        """Of gradient, parameter and states; see :class:`Loop`."""
        sums = torch.empty(len(rows), self._n_terms, dtype=torch.float64, device="cpu")
        self._loop(rows, tensors, sums.data_ptr(), beside=beside)
        return sums


class Averages:
    """The compiled sums of ``averages`` of a rule, as a call on tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take it from ``library``."""
        self._loop = Loop(library.averages, ctypes.c_void_p)
        self._band = ctypes.c_int64.in_dll(library, "band_rows").value

    def __call__(
        self, rows: Sequence[BundleSlice], tensors: Sequence[Tensor], own: Marginals
    ) -> list[Tensor]:
        """Of gradient, parameter and states; see :class:`Loop`.

        ``own`` are the marginals of the first row, as which the others are shaped.
        """
        *stack, m, n = own.shape
        matrices, bands = len(rows) * math.prod(stack), -(-m // self._band)
        shapes = [(matrices, m) if of_rows else (matrices, bands, n) for of_rows in own.of_rows]
        sums = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        to = array("q", map(Tensor.data_ptr, sums))
        self._loop(rows, tensors, to.buffer_info()[0], beside=(m, n))
        # Where those of the first band were are now those of all.
        return [
            (x if of_rows else x[:, 0]).reshape(len(rows), *part.beside(own.shape))
            for part, of_rows, x in zip(own.parts, own.of_rows, sums, strict=True)
        ]


CALLS: dict[str, Callable[[ctypes.CDLL], Any]] = {
    "update": lambda library: Loop(library.update),
    "reduce": CompiledSums,
    "averages": Averages,
}
"""Made of what a function of a rule was compiled to, by its name."""
