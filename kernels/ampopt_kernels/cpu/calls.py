"""Python callables on tensors around the compiled C functions of a rule."""

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
    """A compiled function of a rule that is called with slices and tensors."""

    def __init__(self, function: Any, *gives: type) -> None:
        """Declare the C arguments of ``function``.

        Args:
            function: a function of a library that ``ctypes`` has loaded.
            gives: the ctypes types of further arguments: pointers to memory for results.
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
        """Run the function.

        Args:
            parts: slices that together have every element of ``tensors``.
            tensors: flat gradient, parameter and other tensors.
            gives: the further arguments: addresses of memory for results.
            beside: integers that follow the addresses of ``tensors``: the addresses of row and
                column statistics, and the sizes of their matrix.
        """
        h = array("d")
        for part in parts:
            h.extend(part.h)
            if part.places is not None:
                h.append(part.places.first - part.start)  # the place of the bundle's first element
                if part.key is not None:
                    h.append(part.key)
                for period, phase, size in part.places.jumps:
                    h.extend((period, phase - part.start, size))
        where = array("q", map(Tensor.data_ptr, tensors))
        where.extend(beside)
        ends = array("q", map(_end_of, parts))
        starts = h.buffer_info()[0], where.buffer_info()[0], ends.buffer_info()[0]
        # For less than that, starting threads takes longer than the work.
        threads = torch.get_num_threads() if ends[-1] > BUNDLE else 1
        self._function(*starts, len(parts), threads, *gives)


_end_of = operator.attrgetter("end")


class CompiledSums:
    """The compiled ``reduce`` of a rule."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the function in ``library``."""
        self._loop = Loop(library.sums, ctypes.c_void_p)
        self._n_terms = ctypes.c_int64.in_dll(library, "n_terms").value

    def __call__(
        self, rows: Sequence[BundleSlice], tensors: Sequence[Tensor], beside: Iterable[int] = ()
    ) -> Tensor:
        """Return the terms summed over each row: float64, shape (rows, terms).

        The arguments are as for :class:`Loop`.
        """
        sums = torch.empty(len(rows), self._n_terms, dtype=torch.float64, device="cpu")
        self._loop(rows, tensors, sums.data_ptr(), beside=beside)
        return sums


class Averages:
    """The compiled sums over matrix rows and columns of the ``averages`` of a rule."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the function in ``library``."""
        self._loop = Loop(library.averages, ctypes.c_void_p)
        self._band = ctypes.c_int64.in_dll(library, "band_rows").value

    def __call__(
        self, rows: Sequence[BundleSlice], tensors: Sequence[Tensor], own: Marginals
    ) -> list[Tensor]:
        """Return the sums of each term: float64, shape (rows, *shape of the statistic).

        Args:
            rows: a slice for each row of the bundle.
            tensors: flat gradient, parameter and states.
            own: the statistics of the first row; those of the others have the same shapes.
        """
        *stack, m, n = own.shape
        matrices, bands = len(rows) * math.prod(stack), -(-m // self._band)
        shapes = [(matrices, m) if of_rows else (matrices, bands, n) for of_rows in own.of_rows]
        sums = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        to = array("q", map(Tensor.data_ptr, sums))
        self._loop(rows, tensors, to.buffer_info()[0], beside=(m, n))
        # The function has added up all bands in the place of the first one.
        return [
            (x if of_rows else x[:, 0]).reshape(len(rows), *part.beside(own.shape))
            for part, of_rows, x in zip(own.parts, own.of_rows, sums, strict=True)
        ]


CALLS: dict[str, Callable[[ctypes.CDLL], Any]] = {
    "update": lambda library: Loop(library.update),
    "reduce": CompiledSums,
    "averages": Averages,
}
"""For each role of a rule's function, what makes a callable of its compiled library."""
