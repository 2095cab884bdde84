"""Calls of the compiled functions of a rule, with the addresses of tensors as arguments."""

import ctypes
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import BUNDLE, BundleSlice
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
            parts: slices of ``tensors`` in ascending order, at least one.
            tensors: flat gradient, parameter and other tensors.
            gives: the further arguments: addresses of memory for results.
            beside: integers that follow the addresses of ``tensors``: the addresses of row and
                column statistics, and the sizes of their matrix.
        """
        where = array("q", map(Tensor.data_ptr, tensors))
        where.extend(beside)
        bounds = array("q", chain.from_iterable(map(_bounds_of, parts)))
        self.run(parts, where, bounds, bounds[-1], *gives)

    def run(
        self, parts: Sequence[BundleSlice], where: array, sizes: array, total: int, *gives: int
    ) -> None:
        """Run the function on addresses.

        Args:
            parts: slices or rows, with the numbers of each.
            where: the addresses of the tensors, and what follows them.
            sizes: the third argument of the function: where each slice starts and ends, or how many
                elements each row has.
            total: how many elements there are.
            gives: the further arguments.
        """
        # A function takes places in every part, or in none.
        own = map(_h_of if parts[0].places is None else _with_places, parts)
        h = array("d", b"".join(own))
        starts = h.buffer_info()[0], where.buffer_info()[0], sizes.buffer_info()[0]
        # For less than that, starting threads takes longer than the work.
        threads = torch.get_num_threads() if total > BUNDLE else 1
        self._function(*starts, len(parts), threads, *gives)


def _with_places(part: BundleSlice) -> array:
    """Return the numbers of ``part``, and behind them its places and its random key."""
    assert part.places is not None
    h = part.h[:]
    h.append(part.places.first - part.start)  # the place of the bundle's first element
    if part.key is not None:
        h.append(part.key)
    for period, phase, size in part.places.jumps:
        h.extend((period, phase - part.start, size))
    return h


_h_of: Any = operator.attrgetter("h")
_bounds_of, _end_of = operator.attrgetter("start", "end"), operator.attrgetter("end")


class CompiledUpdate(Loop):
    """The compiled ``update`` of a rule: called with slices of the same tensors, or whole rows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up both functions in ``library``."""
        super().__init__(library.update)
        self._whole = Loop(library.update_whole)

    def whole(self, parts: Sequence[BundleSlice], tensors: Sequence[Sequence[Tensor]]) -> None:
        """Update several parameters in one call.

        Args:
            parts: for each parameter the slice that has all of its elements.
            tensors: for each parameter, dense: its gradient, the parameter, and its other tensors.
        """
        sizes = array("q", map(_end_of, parts))
        where = addresses(list(chain.from_iterable(tensors)))
        self._whole.run(parts, where, sizes, sum(sizes))


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


class CompiledAverages:
    """The compiled sums over matrix rows and columns of the ``averages`` of a rule."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the function in ``library``."""
        self._loop = Loop(library.averages, ctypes.c_void_p)
        self._band = ctypes.c_int64.in_dll(library, "band_rows").value

    def __call__(
        self, rows: Sequence[BundleSlice], tensors: Sequence[Tensor], own: RowColumnStates
    ) -> list[Tensor]:
        """Return the sums of each term: float64, shape (rows, *shape of the statistic).

        Args:
            rows: a slice for each row of the bundle that has a gradient.
            tensors: flat gradient, parameter and states.
            own: the statistics of the first row; those of the others have the same shapes.
        """
        m, n = own.shape[-2:]
        matrices, bands = rows[-1].end // (m * n), -(-m // self._band)
        shapes = [(matrices, m) if of_rows else (matrices, bands, n) for of_rows in own.of_rows]
        sums = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        to = array("q", map(Tensor.data_ptr, sums))
        self._loop(rows, tensors, to.buffer_info()[0], beside=(m, n))
        # The function has added up all bands in the place of the first one.
        summed = [
            (x if of_rows else x[:, 0]).reshape(-1, *part.beside(own.shape))
            for part, of_rows, x in zip(own.parts, own.of_rows, sums, strict=True)
        ]
        present = [row.start // own.numel for row in rows]
        return [x if len(x) == len(rows) else x[present] for x in summed]


CALLS: dict[str, Callable[[ctypes.CDLL], Any]] = {
    "update": CompiledUpdate,
    "reduce": CompiledSums,
    "averages": CompiledAverages,
}
"""For each role of a rule's function, what makes a callable of its compiled library."""
