"""Bundles: small parameters that the CPU backends update together, as one tensor.

For the small tensors of a network, calls take longer than arithmetic. So small parameters form a
bundle: their gradients and values are gathered into flat scratch that fits the cache, the rule runs
once over the scratch and the states, and the values are scattered back. States that are adjacent in
memory are not copied: ``ampopt._step.rule_state`` allocates those of parameters that first have a
gradient in the same step so. A large parameter is a bundle by itself, which needs no scratch.
"""

import functools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.codecs import Codec
from ampopt_kernels.native.objects import addresses
from ampopt_kernels.row_column_states import RowColumnStates
from ampopt_kernels.tensors import flat
from ampopt_kernels.work import ParamRow, Work

__all__ = [
    "BUNDLE",
    "SMALL",
    "Bundle",
    "Copies",
    "Numbers",
    "Slice",
    "Slices",
    "TorchCopies",
    "as_one",
    "placed",
]

_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


SMALL = 1 << 14
"""Elements of the largest tensor that is bundled with others: beyond, torch operations on each
tensor cost less than a copy. Compiled code takes larger rows out again; see
``compiled.IN_PLACE``."""
BUNDLE = 1 << 16
"""Elements of the largest bundle: its float32 gradient, parameter and two states fit the cache of
a core."""


class Copies(ABC):
    """Copies between contiguous CPU parameters and flat scratch, which has one after another.

    :meth:`load` and :meth:`store` copy the parameters whose gradients :meth:`gather` got last.

    For small tensors a torch call costs more than the copy that it makes. :class:`TorchCopies`
    makes few calls; ``numbers.NativeCopies``, once its loops are compiled, makes one.
    """

    @abstractmethod
    def gather(self, grads: list[Any], scratch: Tensor) -> None:
        """Copy ``grads`` into ``scratch``, a flat tensor of their dtype.

        Args:
            grads: for each parameter, a contiguous tensor of its shape, or ``None`` for zeros.
            scratch: as long as all of them.
        """

    @abstractmethod
    def load(self) -> None:
        """Copy the parameters into the scratch."""

    @abstractmethod
    def store(self) -> None:
        """Copy the scratch into the parameters."""


class TorchCopies(Copies):
    """Copies by torch operations."""

    def __init__(self, params: Sequence[Tensor], scratch: Tensor) -> None:
        """Store what to copy.

        Args:
            params: contiguous, of one dtype.
            scratch: flat, as long as all of them. If its dtype is not that of ``params``, only
                :meth:`store` may be called.
        """
        self.params, self.scratch = params, scratch
        self._one_dimensional = all(p.ndim == 1 for p in params)
        self._grad_scratch: Tensor | None = None
        self._grad_parts: list[Tensor] = []
        self._present: list[bool] | None = None  # None if every gradient is there

    # Compiled copies take the place of these before most of these views are used.

    @functools.cached_property
    def _flat_params(self) -> list[Tensor]:
        """Each parameter as a view of one dimension."""
        return [flat(p) for p in self.params]

    @functools.cached_property
    def _parts(self) -> list[Tensor]:
        """The part of the scratch of each parameter, in its shape."""
        return _shaped(self.scratch, self.params)

    def choose(self, grads: list[Any]) -> None:
        """Have :meth:`store` copy the parameters whose entry in ``grads`` is not ``None``."""
        present = [grad is not None for grad in grads]
        self._present = None if all(present) else present

    def gather(self, grads: list[Any], scratch: Tensor) -> None:
        """See :meth:`Copies.gather`."""
        self.choose(grads)
        if self._one_dimensional and self._present is None:
            torch.cat(grads, out=scratch)  # takes less than half as long as the copies below
            return
        if scratch is not self._grad_scratch:
            self._grad_scratch, self._grad_parts = scratch, _shaped(scratch, self.params)
        if self._present is not None:
            scratch.zero_()
        _foreach_copy(self._with_gradients(self._grad_parts), self._with_gradients(grads))

    def load(self) -> None:
        """See :meth:`Copies.load`. Copies the other parameters too, to no effect."""
        torch.cat(self._flat_params, out=self.scratch)

    def store(self) -> None:
        """See :meth:`Copies.store`."""
        _foreach_copy(self._with_gradients(self.params), self._with_gradients(self._parts))

    def _with_gradients(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors whose parameters have a gradient; ``tensors`` has one for each parameter."""
        return tensors if self._present is None else list(compress(tensors, self._present))


class Numbers(NamedTuple):
    """The numbers that a function of a rule takes for each row of a block, in float64.

    Attributes:
        table: shape (results, width). In each result, the reciprocal of the scale, the clip
            coefficient, and the numbers of the rule.
        of_rows: for each row the index of its result, int64; -1 for a row without a gradient.
            ``None`` if there is one result, for all rows.
    """

    table: Tensor
    of_rows: Tensor | None = None

    def of_present(self, mask: Tensor) -> "Numbers":
        """Return the numbers of the rows in ``mask``, of shape (rows,)."""
        results: Any = 0 if self.of_rows is None else self.of_rows
        return Numbers(self.table, torch.where(mask, results, -1))

    def of_each(self, n: int) -> list[list[float]]:
        """Return the numbers of each of ``n`` rows; of a row without a gradient, any numbers."""
        results = self.table.tolist()
        return results * n if self.of_rows is None else [results[i] for i in self.of_rows.tolist()]


class Slice(NamedTuple):
    """A range of elements of a bundle to which a rule is applied with the same numbers.

    Attributes:
        row: the index of the first row in the bundle.
        start: the index of the first element in the bundle.
        end: the index after the last element.
        h: the reciprocal of the scale, the clip coefficient, and the numbers of the rule.
    """

    row: int
    start: int
    end: int
    h: Sequence[float]


class Slices(NamedTuple):
    """The rows of a bundle that have a gradient, each with its numbers.

    A rule runs on slices by themselves, so the result for a parameter does not depend on the other
    parameters of the bundle.

    Attributes:
        bounds: the index of the first element of each row in the bundle; then the number of all
            elements.
        numbers: the numbers of each row.
        rows: the rows, if the function computes random numbers from their places; else empty.
    """

    bounds: array
    numbers: Numbers
    rows: Sequence[ParamRow] = ()

    @staticmethod
    def of_one(n: int, h: Sequence[float], rows: Sequence[ParamRow] = ()) -> "Slices":
        """Return the slice of a single row that has ``n`` elements and the numbers ``h``."""
        table = torch.frombuffer(array("d", h), dtype=torch.float64)[None]
        return Slices(array("q", (0, n)), Numbers(table), rows)

    def each(self, *, joined: bool = False) -> Iterator[Slice]:
        """Yield slices of the rows that have a gradient, in ascending order.

        Args:
            joined: whether consecutive rows with the same numbers are one slice.
        """
        h, results = self.numbers.table.tolist(), self.numbers.of_rows
        n = len(self.bounds) - 1
        if results is None:
            indices, counts = ([0], [n]) if joined else ([0] * n, [1] * n)
        elif joined:
            indices, counts = (
                x.tolist() for x in torch.unique_consecutive(results, return_counts=True)
            )
        else:
            indices, counts = results.tolist(), [1] * n
        row = 0
        for index, count in zip(indices, counts, strict=True):
            if index >= 0:
                yield Slice(row, self.bounds[row], self.bounds[row + count], h[index])
            row += count

    @property
    def present(self) -> list[int]:
        """The indices of the rows that have a gradient, in ascending order."""
        return [part.row for part in self.each()]

    def with_places(self) -> Numbers:
        """Return the numbers of rows with :attr:`rows`, as compiled functions take them.

        See :func:`placed`.
        """
        results, each = self.numbers.of_rows, self.numbers.of_each(len(self.rows))
        own = list(map(placed, each, self.rows, self.bounds))
        of_rows = torch.arange(len(own), device="cpu")
        if results is not None:
            of_rows.masked_fill_(results < 0, -1)
        return Numbers(torch.tensor(own, dtype=torch.float64, device="cpu"), of_rows)


def placed(h: Sequence[float], row: ParamRow, start: int = 0) -> list[float]:
    """Return ``h`` with the places of ``row`` behind it, and its random key if it has one.

    Args:
        h: the numbers of the row.
        row: the row.
        start: the index of its first element in the bundle. The place that is returned is that of
            the bundle's first element.
    """
    key = () if row.keys is None else (row.keys.item(),)
    jumps = ((period, phase - start, size) for period, phase, size in row.places.jumps)
    return [*h, row.places.first - start, *key, *chain.from_iterable(jumps)]


@dataclass
class Bundle:
    """Rows that are updated together: several small ones, or a single row.

    Attributes:
        rows: the rows, all of one :attr:`ParamRow.kind` and param group.
        places: where the rows are in ``block.rows``.
        among: the index of each row in ``work.rows``.
        dtype: the arithmetic dtype.
        param: the flat tensor that the rule updates: of a single row its parameter, else scratch
            for all parameters.
        rest: the other flat tensors that the rule writes: the states, each a view over all rows,
            or scratch; and of a single row the low-precision copy of the parameter, or the low bits
            of its master, if it has one, and the scales of states with codecs.
        grad: flat scratch for all gradients; ``None`` for a single row.
        copies: copies parameters and gradients to scratch and back; ``None`` for a single row.
        low_copies: copies the scratch to the low-precision copies of the parameters, if any.
        scattered: copies states that are not adjacent in memory to scratch and back.
        row_column_states: the row and column states of each parameter, with factors that are
            adjacent in memory; empty if the rule has none.
        gathered_at: the ``grads_version`` of the work when its gradients were copied to ``grad``.
        functions: ``"update"``, ``"reduce"`` and ``"averages"`` of the rule for this bundle, as
            torch operations or compiled. Each takes :class:`Slices` and the tensors of the bundle.
    """

    rows: list[ParamRow]
    places: slice | list[int]
    among: range | list[int]
    dtype: torch.dtype
    param: Tensor
    rest: list[Tensor]
    grad: Tensor | None = None
    copies: Copies | None = None
    low_copies: TorchCopies | None = None
    scattered: Sequence[Copies] = ()
    row_column_states: list[RowColumnStates] = field(default_factory=list)
    gathered_at: int | None = None
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @staticmethod
    def all_of(rows: list[ParamRow], start: int) -> "list[Bundle]":
        """Divide a block into bundles.

        Args:
            rows: the rows of the block.
            start: the index of its first row in ``work.rows``.
        """
        return [Bundle.of([rows[i] for i in places], places, start) for places in _runs(rows)]

    @staticmethod
    def of(rows: list[ParamRow], places: list[int], start: int) -> "Bundle":
        """Make a bundle.

        Args:
            rows: rows of a block that can be updated together.
            places: the indices of ``rows`` in the block.
            start: the index of the block's first row in ``work.rows``.
        """
        among = [start + place for place in places]
        where: tuple[Any, Any] = places, among
        if among[-1] - among[0] < len(among):
            where = slice(places[0], places[-1] + 1), range(among[0], among[-1] + 1)
        states = [as_one(column) for column in zip(*(row.state for row in rows), strict=True)]
        rest = [state for state, _ in states]
        low_copies = [row.copy for row in rows if row.copy is not None]
        params = _params(rows)
        row_column_states = _end_to_end([r.row_column_states for r in rows if r.row_column_states])
        if len(rows) == 1:
            rest += [flat(c) for c in (*low_copies, rows[0].low) if c is not None]
            rest += [s for s in rows[0].scales if s is not None]
            alone = flat(params[0]), rest
            return Bundle(
                rows, *where, rows[0].compute_dtype, *alone, row_column_states=row_column_states
            )
        size = sum(p.numel() for p in params)
        param = params[0].new_empty(size)
        grad = param.new_empty(size, dtype=rows[0].grad_dtype)
        return Bundle(
            rows,
            *where,
            rows[0].compute_dtype,
            param,
            rest,
            grad,
            TorchCopies(params, param),
            TorchCopies(low_copies, param) if low_copies else None,
            [copies for _, copies in states if copies is not None],
            row_column_states,
        )

    @property
    def flags(self) -> tuple[bool, ...]:
        """The flags of the rule, the same for every row."""
        return self.rows[0].flags

    @property
    def states(self) -> list[Tensor]:
        """The flat states: :attr:`rest` without the low-precision copy and scales."""
        return self.rest[: len(self.rows[0].state)]

    @property
    def inputs(self) -> list[Tensor]:
        """The flat states, the low bits of a master, and the scales of states that have some."""
        n = len(self.rows[0].state) + (self.rows[0].copy is not None and self.copies is None)
        return self.states + self.rest[n:]

    @property
    def codecs(self) -> tuple[Codec | None, ...]:
        """The codec of each state, or ``None``: those of the only row, if any has one."""
        return self.rows[0].codecs

    @property
    def params(self) -> list[Tensor]:
        """The parameter of each row."""
        return _params(self.rows)

    @functools.cached_property
    def bounds(self) -> array:
        """The index of the first element of each row, and the number of all elements."""
        return array("q", accumulate(map(Tensor.numel, self.params), initial=0))

    def gather(self, work: Work) -> Tensor | None:
        """Return the gradients of all rows as one flat tensor; copies at most once a step.

        Rows without a gradient are 0. Of a single row, return its gradient, in its own shape.
        Returns ``None`` if no row has a gradient.
        """
        if self.grad is None or self.copies is None:
            return work.grads[self.among[0]]
        if isinstance(self.among, range):
            grads = work.grads[self.among.start : self.among.stop]
        else:
            grads = [work.grads[i] for i in self.among]
        if work.present is not None and all(grad is None for grad in grads):
            return None
        if self.gathered_at != work.grads_version:
            self.copies.gather(grads, self.grad)
            if self.low_copies is not None:
                self.low_copies.choose(grads)
            self.gathered_at = work.grads_version
        return self.grad

    def load(self) -> None:
        """Copy parameters and states to scratch, where the rule runs on scratch."""
        if self.copies is not None:
            self.copies.load()
        for states in self.scattered:
            states.load()

    def store(self) -> None:
        """Copy parameters and states from scratch back, after an update."""
        if self.copies is not None:
            self.copies.store()
        if self.low_copies is not None:
            self.low_copies.store()
        for states in self.scattered:
            states.store()

    def slices(self, numbers: Numbers, rows: Sequence[ParamRow] = ()) -> Slices:
        """Return the rows that have a gradient.

        Args:
            numbers: the numbers of all rows of the block.
            rows: as :attr:`Slices.rows`.
        """
        if (of_rows := numbers.of_rows) is not None:
            numbers = Numbers(numbers.table, of_rows[self.places])
        return Slices(self.bounds, numbers, rows)


def _shaped(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the flat ``buffer`` with the shapes of the tensors ``like``."""
    parts = buffer.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def _params(rows: Sequence[ParamRow]) -> list[Tensor]:
    """The parameters of ``rows``."""
    return [row.param for row in rows if row.param is not None]


def _runs(rows: Sequence[ParamRow]) -> list[list[int]]:
    """Return lists of row indices, one for each bundle.

    A bundle continues past large rows that stand between its small ones.
    """
    runs: list[list[int]] = []
    bundle: list[int] | None = None
    total, last = 0, None
    for place, (row, param) in enumerate(zip(rows, _params(rows), strict=True)):
        size, kind = param.numel(), (row.kind, row.in_norm)
        fits = 0 < size <= SMALL and not row.is_coded and row.low is None
        if not fits or not all(map(Tensor.is_contiguous, row.outputs)):
            runs.append([place])
            continue
        if (
            bundle is not None
            and (kind == last and total + size <= BUNDLE)
            and _stackable(rows[bundle[-1]].row_column_states, row.row_column_states)
        ):
            bundle.append(place)
            total += size
        else:
            bundle, total, last = [place], size, kind
            runs.append(bundle)
    return runs


def _stackable(last: RowColumnStates | None, own: RowColumnStates | None) -> bool:
    """Return whether two parameters, one after the other in memory, form a stack of matrices."""
    if last is None or own is None:
        return last is own
    return last.shape == own.shape and last.shard is own.shard is None


def _end_to_end(several: list[RowColumnStates]) -> list[RowColumnStates]:
    """Return copies of ``several`` whose factors are adjacent in new memory."""
    if len(several) < 2:
        return several
    columns = zip(*(own.factors for own in several), strict=True)
    rooms = zip(*(torch.stack(column).unbind() for column in columns), strict=True)
    return [replace(own, factors=room) for own, room in zip(several, rooms, strict=True)]


def as_one(tensors: Sequence[Tensor]) -> tuple[Tensor, Copies | None]:
    """Return one flat tensor for contiguous ``tensors`` of one dtype.

    Returns:
        A view, and ``None``, if all of them are adjacent in memory. Else scratch, and the copies
        between it and the tensors.
    """
    runs: list[list[Tensor]] = []
    expected = end_of_storage = -1
    sizes, width = map(Tensor.numel, tensors), tensors[0].element_size()
    for tensor, start, size in zip(tensors, addresses(list(tensors)), sizes, strict=True):
        end = start + size * width
        if start != expected or end > end_of_storage:
            runs.append([])
            storage = tensor.untyped_storage()
            end_of_storage = storage.data_ptr() + storage.nbytes()
        runs[-1].append(tensor)
        expected = end
    views = [_spanning(run) for run in runs]
    if len(views) == 1:
        return views[0], None
    scratch = views[0].new_empty(sum(map(Tensor.numel, views)))
    return scratch, TorchCopies(views, scratch)


def _spanning(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat view over all of ``tensors``, which are adjacent in memory."""
    if len(tensors) == 1:
        return flat(tensors[0])
    return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
