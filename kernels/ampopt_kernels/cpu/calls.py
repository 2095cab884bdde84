"""Calls of the compiled functions of a rule, with the addresses of tensors as arguments."""

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import BUNDLE, Slices
from ampopt_kernels.cpu.scalars import CompiledScalars
from ampopt_kernels.native.objects import addresses
from ampopt_kernels.row_column_states import RowColumnStates

__all__ = ["CALLS", "CompiledAverages", "CompiledSums", "CompiledUpdate", "Loop"]


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
        function.argtypes = (pointer, pointer, pointer, pointer, count, count, *gives)
        function.restype = None

    def __call__(
        self,
        slices: Slices,
        tensors: Sequence[Tensor],
        *gives: int,
        beside: Iterable[int] = (),
    ) -> None:
        """Run the function.

        Args:
            slices: slices of ``tensors``.
            tensors: flat gradient, parameter and other tensors.
            gives: the further arguments: addresses of memory for results.
            beside: integers that follow the addresses of ``tensors``: the addresses of row and
                column statistics, and the sizes of their matrix.
        """
        where = array("q", map(Tensor.data_ptr, tensors))
        where.extend(beside)
        table, of_rows = slices.with_places() if slices.rows else slices.numbers
        self._function(
            table.data_ptr(),
            None if of_rows is None else of_rows.data_ptr(),
            where.buffer_info()[0],
            slices.bounds.buffer_info()[0],
            len(slices.bounds) - 1,
            threads_for(slices.bounds[-1]),
            *gives,
        )


def threads_for(elements: int) -> int:
    """Return how many threads to start: for less than a bundle, that takes longer than the work."""
    return torch.get_num_threads() if elements > BUNDLE else 1


class CompiledUpdate(Loop):
    """The compiled ``update`` of a rule: called with slices of the same tensors, or whole rows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up both functions in ``library``."""
        super().__init__(library.update)
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._whole = library.update_whole
        self._whole.argtypes = (pointer, pointer, pointer, count, count)
        self._whole.restype = None

    def whole(self, h: Sequence[Sequence[float]], tensors: Sequence[Sequence[Tensor]]) -> None:
        """Update several parameters in one call.

        Args:
            h: the numbers of each parameter; see :func:`ampopt_kernels.cpu.bundles.placed`.
            tensors: for each parameter, dense: its gradient, the parameter, and its other tensors.
        """
        numbers = array("d", chain.from_iterable(h))
        sizes = array("q", [own[0].numel() for own in tensors])
        where = addresses(list(chain.from_iterable(tensors)))
        pointers = (x.buffer_info()[0] for x in (numbers, where, sizes))
        self._whole(*pointers, len(sizes), threads_for(sum(sizes)))


class CompiledSums:
    """The compiled ``reduce`` of a rule."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the function in ``library``."""
        self._loop = Loop(library.sums, ctypes.c_void_p)
        self._n_terms = ctypes.c_int64.in_dll(library, "n_terms").value

    def __call__(
        self, slices: Slices, tensors: Sequence[Tensor], beside: Iterable[int] = ()
    ) -> Tensor:
        """Return the terms summed over each slice: float64, shape (slices, terms).

        The arguments are as for :class:`Loop`.
        """
        n = len(slices.present)
        sums = torch.empty(n, self._n_terms, dtype=torch.float64, device="cpu")
        self._loop(slices, tensors, sums.data_ptr(), beside=beside)
        return sums


class CompiledAverages:
    """The compiled sums over matrix rows and columns of the ``averages`` of a rule."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the function in ``library``."""
        self._loop = Loop(library.averages, ctypes.c_void_p)
        self._band = ctypes.c_int64.in_dll(library, "band_rows").value

    def __call__(
        self, slices: Slices, tensors: Sequence[Tensor], own: RowColumnStates
    ) -> list[Tensor]:
        """Return the sums of each term: float64, shape (slices, *shape of the statistic).

        Args:
            slices: the rows of the bundle that have a gradient.
            tensors: flat gradient, parameter and states.
            own: the statistics of the first row; those of the others have the same shapes.
        """
        m, n = own.shape[-2:]
        matrices, bands = slices.bounds[-1] // (m * n), -(-m // self._band)
        shapes = [(matrices, m) if of_rows else (matrices, bands, n) for of_rows in own.of_rows]
        sums = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        to = array("q", map(Tensor.data_ptr, sums))
        self._loop(slices, tensors, to.buffer_info()[0], beside=(m, n))
        # The function has added up all bands in the place of the first one.
        line_sums = [
            (x if of_rows else x[:, 0]).reshape(-1, *part.beside(own.shape))
            for part, of_rows, x in zip(own.parts, own.of_rows, sums, strict=True)
        ]
        present = slices.present
        return [x if len(x) == len(present) else x[present] for x in line_sums]


CALLS: dict[str, Callable[[ctypes.CDLL], Any]] = {
    "update": CompiledUpdate,
    "reduce": CompiledSums,
    "averages": CompiledAverages,
    "scalars": CompiledScalars,
}
"""For each role of a rule's function, what makes a callable of its compiled library."""
