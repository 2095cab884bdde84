"""The table of the compiled backend: addresses of tensors, one row of integers for a parameter.

The functions that are compiled from a rule take all rows of one kind in one call. Their table has
one row for each parameter, of these columns, all int64:

=============  =========  =====================================================================
name           columns    meaning
=============  =========  =====================================================================
place          1          index of the row in the work, and so of its gradient's address
param          1          address of the parameter or of its master weight
states         1 each     addresses of the elementwise states
copy or low    0 or 1     address of the low-precision copy, or low bits, of a master weight
scales         0 or more  addresses of the scales of states with codecs; see ``codecs``
factors        1 each     addresses of the factors of rows and columns; see ``row_column_means``
m, n           0 or 2     rows and columns of a matrix, if there are factors
scalar states  1 each     addresses of the 0-d states; 0 where the flags omit one
numel          1          number of elements
variant        1          index of its hyperparameters in ``Work.hyper``
first, key     0 or 2     position of the first element in the whole parameter, and address of the
                          random key (0 for none), if random numbers are computed
jumps          3 each     period, phase and size; see ``element_indices``
=============  =========  =====================================================================

The addresses of the gradients are apart, as they change from step to step: one for each row of the
work, 0 for a row that this step leaves unchanged.
"""

import ctypes
import functools
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.cpp import OPTIONS, Kind, source_of
from ampopt_kernels.cpu.gradients import GradientTable
from ampopt_kernels.native.build import Library
from ampopt_kernels.native.objects import EMPTY, addresses
from ampopt_kernels.rule import Rule
from ampopt_kernels.step_tensors import ParamRow, Work

__all__ = ["KindTable", "Table"]


@functools.cache
def _library(kind: Kind) -> ctypes.CDLL:
    """The compiled functions of a kind. Waits for the compiler if they are new to this machine."""
    library = Library(source_of(kind), OPTIONS).load()
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    rows = pointer, pointer, count
    coefficients = pointer, number, number
    numbers = pointer, pointer
    sums, unscales = (pointer, pointer), ctypes.c_bool
    library.update.argtypes = (*rows, *coefficients, *sums, *numbers, count, unscales)
    library.update.restype = None
    if "before_sums" in kind.roles:
        library.before_sums.argtypes = (*rows, *coefficients, *numbers)
        library.before_sums.restype = None
    for role in {"reduce", "averages"} & {*kind.roles}:
        function = getattr(library, role)
        function.argtypes, function.restype = (*rows, *numbers, count, pointer), None
    return library


class KindTable:
    """The rows of a work that are of one kind, and calls of their compiled functions.

    Attributes:
        kind: the kind.
        members: the indices of the rows in the work.
    """

    def __init__(self, kind: Kind, members: list[int], rows: Sequence[ParamRow]) -> None:
        """Make the table of the rows ``members`` of ``rows``. Waits for the compiler.

        Raises:
            Exception: as :func:`source_of` and :meth:`Library.load`.
        """
        self.kind, self.members = kind, members
        self._library = _library(kind)
        columns = list(self._columns([rows[place] for place in members]))
        self._table = array("q", chain.from_iterable(zip(*columns, strict=True)))
        widths = [kind.width_of(role) for role in ("update", "reduce")]
        self._numbers = array("d", bytes(8 * max(widths) * len(members)))
        self._which = array("q", bytes(8 * len(members)))
        self._rows = self._table.buffer_info()[0], len(members)
        self._results = self._numbers.buffer_info()[0], self._which.buffer_info()[0]
        means = (rows[place].row_column_means for place in members)
        self._sums = addresses([sums for own in means if own is not None for sums in own.sums])

    def _columns(self, rows: list[ParamRow]) -> Iterator[Sequence[int]]:
        """The columns of the table of ``rows``, those of the members."""
        yield self.members
        for tensors in zip(*(row.outputs for row in rows), strict=True):
            yield addresses(list(tensors))
        for scales in zip(*(row.scales for row in rows), strict=True):
            if scales[0] is not None:
                yield addresses(list(scales))
        means = [row.row_column_means for row in rows if row.row_column_means is not None]
        yield from zip(*(own.addresses for own in means), strict=True)
        for scalars in zip(*(row.scalars for row in rows), strict=True):
            yield addresses(list(scalars))
        yield [row.param.numel() for row in rows if row.param is not None]
        yield [row.variant for row in rows]
        if self.kind.has_indices:
            yield [row.indices.first for row in rows]
            yield addresses([row.random_key for row in rows])
            yield from zip(*(chain(*row.indices.jumps) for row in rows), strict=True)

    def update(
        self, table: "Table", coefficients: tuple[float, float], sums: Any, *, unscales: bool
    ) -> None:
        """Advance the scalar states, and apply the rule, of all rows that have a gradient.

        Args:
            table: has the gradients and hyperparameters of this step.
            coefficients: the reciprocal of the scale, and the clip coefficient.
            sums: the addresses of :class:`Sums`, or ``(None, None)``.
            unscales: whether to store the gradients unscaled.
        """
        inputs = table.hyper_at, *coefficients, *sums
        last = torch.get_num_threads(), unscales
        self._library.update(table.grads_at, *self._rows, *inputs, *self._results, *last)

    def before_sums(self, table: "Table", coefficients: tuple[float, float]) -> None:
        """Compute the numbers of ``reduce`` and ``averages``; arguments as for :meth:`update`."""
        inputs = table.hyper_at, *coefficients
        self._library.before_sums(table.grads_at, *self._rows, *inputs, *self._results)

    def reduce(self, table: "Table", sums: Tensor) -> None:
        """Write the sums of the terms of ``reduce``, after :meth:`before_sums`.

        Args:
            table: has the gradients of this step.
            sums: zeros: float64, shape (rows of the work, terms).
        """
        to = torch.get_num_threads(), sums.data_ptr()
        self._library.reduce(table.grads_at, *self._rows, *self._results, *to)

    def sum_lines(self, table: "Table", h: array) -> None:
        """Add each term of ``averages``, summed over lines, to the sums; after :meth:`before_sums`.

        Args:
            table: has the gradients of this step.
            h: gets the numbers of ``averages`` of each row of the work, one row after another.
        """
        to = torch.get_num_threads(), self._sums.buffer_info()[0]
        self._library.averages(table.grads_at, *self._rows, *self._results, *to)
        width = self.kind.width_of("reduce")
        n_h = width - 2  # after the coefficients
        for place, result in zip(self.members, self._which, strict=True):
            if result >= 0:
                numbers = self._numbers[result * width + 2 : (result + 1) * width]
                h[place * n_h : (place + 1) * n_h] = numbers


class Table:
    """All rows of a work, kept from step to step as ``work.backend_rows``.

    Attributes:
        gradients: the rows that have elements, by the dtypes of their gradients.
        kinds: all rows, by kind; empty until :meth:`compile`.
        prepared: which steps :meth:`Compiled.prepare` has compiled everything for.
        grads: the addresses of the gradients of this step.
        grads_at: where :attr:`grads` are.
        hyper_at: where the hyperparameters of this step are: float64, one variant after another.
    """

    def __init__(self, work: Work) -> None:
        """Take the rows of ``work``, which may have no parameters."""
        self.kinds: list[KindTable] = []
        self.prepared: set[tuple[bool, ...]] = set()
        by_dtypes: dict[tuple[torch.dtype, torch.dtype], array] = {}
        rows = zip(work.rows, work.grads, work.compute_dtypes, strict=True)
        for place, (row, grad, compute_dtype) in enumerate(rows):
            if numel := (grad if row.param is None else row.param).numel():
                dtypes = row.grad_dtype, compute_dtype
                by_dtypes.setdefault(dtypes, array("q")).extend((place, numel))
        self.gradients = [GradientTable(own, to, rows) for (own, to), rows in by_dtypes.items()]
        counts = [row.in_norm for row in work.rows]
        self._counts = None if all(counts) else torch.tensor(counts, device="cpu")
        self._grads_version = -1

    @staticmethod
    def of(work: Work) -> "Table":
        """The table of ``work``, with the gradients and hyperparameters of this step."""
        table = work.backend_rows
        if not isinstance(table, Table):
            work.backend_rows = table = Table(work)
        if table._grads_version != work.grads_version:
            table._take(work)
        return table

    def _take(self, work: Work) -> None:
        """Take the gradients and hyperparameters of this step."""
        self.grads = work.addresses
        self._hyper = array("d", map(float, chain.from_iterable(work.hyper)))
        self.grads_at, self.hyper_at = self.grads.buffer_info()[0], self._hyper.buffer_info()[0]
        self._grads_version = work.grads_version

    def compile(self, work: Work, rule: Rule | None, *, squares: bool, measures: bool) -> None:
        """Compile what a step needs. Waits for the compiler.

        Args:
            work: the rows.
            rule: the rule of :attr:`kinds`, which are made; ``None`` to make none.
            squares: see :meth:`GradientTable.compile`.
            measures: see :meth:`GradientTable.compile`.

        Raises:
            Exception: as :class:`KindTable`.
        """
        for rows in self.gradients:
            rows.compile(squares=squares, measures=measures)
        if rule is None:
            return
        kinds: dict[Any, list[int]] = {}
        for place, row in enumerate(work.rows):
            kinds.setdefault(row.kind, []).append(place)
        self.kinds = [
            KindTable(_kind(work, rule, work.rows[members[0]]), members, work.rows)
            for members in kinds.values()
        ]

    def with_elements(self) -> list[int]:
        """The indices of the rows that have a gradient with elements in this step."""
        return [place for place, grad in enumerate(self.grads) if grad and grad != EMPTY]

    def counted(self, squares: Tensor) -> Tensor:
        """``squares``, one for each row, with 0 for rows that the norm does not count."""
        return squares if self._counts is None else torch.where(self._counts, squares, 0.0)


def _kind(work: Work, rule: Rule, row: ParamRow) -> Kind:
    """The kind of a row of ``work``, on which ``rule`` runs."""
    return Kind(
        rule,
        row.flags,
        row.dtypes,
        tuple(None if scalar is None else scalar.dtype for scalar in row.scalars),
        len(work.hyper[row.variant]) if work.hyper else 0,
        row.rounds,
        row.codecs if row.is_coded else (),
        len(row.indices.jumps),
    )
