"""Bundles: small parameters that the CPU backends update together, as one tensor.

For the small tensors of a network, calls take longer than arithmetic. So small parameters form a
bundle: their gradients and values are gathered into flat scratch that fits the cache, the rule runs
once over the scratch and the states, and the values are scattered back. States that are adjacent in
memory are not copied: ``ampopt._step.rule_state`` allocates those of parameters that first have a
gradient in the same step so. A large parameter is a bundle by itself, which needs no scratch.
"""

import ctypes
import functools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress
from operator import is_not, ne, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.codecs import Codec
from ampopt_kernels.places import Places
from ampopt_kernels.row_column_states import RowColumnStates
from ampopt_kernels.tensors import flat
from ampopt_kernels.work import ParamRow, Work

__all__ = [
    "BUNDLE",
    "SMALL",
    "Bundle",
    "BundleSlice",
    "Copies",
    "TorchCopies",
    "as_one",
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

    def gather(self, grads: list[Any], scratch: Tensor) -> None:
        """See :meth:`Copies.gather`."""
        present = [grad is not None for grad in grads]
        self._present = None if all(present) else present
        if self._one_dimensional and self._present is None:
            torch.cat(grads, out=scratch)  # takes less than half as long as the copies below
            return
        if scratch is not self._grad_scratch:
            self._grad_scratch, self._grad_parts = scratch, _shaped(scratch, self.params)
        if self._present is not None:
            scratch.zero_()
        _foreach_copy(self._stepped(self._grad_parts), self._stepped(grads))

    def load(self) -> None:
        """See :meth:`Copies.load`. Copies the other parameters too, to no effect."""
        torch.cat(self._flat_params, out=self.scratch)

    def store(self) -> None:
        """See :meth:`Copies.store`."""
        _foreach_copy(self._stepped(self.params), self._stepped(self._parts))

    def _stepped(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors whose parameters have a gradient; ``tensors`` has one for each parameter."""
        return tensors if self._present is None else list(compress(tensors, self._present))


class BundleSlice(NamedTuple):
    """A range of elements of a bundle to which a rule is applied with the same numbers.

    Attributes:
        start: the index of the first element in the bundle.
        end: the index after the last element.
        h: the reciprocal of the scale, the clip coefficient, and the numbers of the rule, float64.
        places: the places of the elements in the whole parameter, from which random numbers and
            stochastic rounding follow; ``None`` where there are neither.
        key: the random key of stochastic rounding; ``None`` if nothing is rounded so.
        rounds: whether the parameter is rounded stochastically.
    """

    start: int
    end: int
    h: array
    places: Places | None = None
    key: int | None = None
    rounds: bool = False


@dataclass
class Bundle:
    """Rows that are updated together: several small ones, or a single row.

    Attributes:
        rows: the rows, all of one :attr:`ParamRow.kind` and param group.
        places: the index of each row in ``block.rows``.
        among: the index of each row in ``work.rows``.
        dtype: the arithmetic dtype.
        param: the flat tensor that the rule updates: of a single row its parameter, else scratch
            for all parameters.
        rest: the other flat tensors that the rule writes: the states, each a view over all rows,
            or scratch; and of a single row the low-precision copy of the parameter, or the low bits
            of its master, if it has one, and the scales of states with codecs.
        grad: flat scratch for all gradients; ``None`` for a single row.
        copies: copies parameters and gradients to scratch and back; ``None`` for a single row.
        rounded: copies the scratch to the low-precision copies of the parameters, if there are any.
        scattered: copies states that are not adjacent in memory to scratch and back.
        row_column_states: the row and column states of each parameter, with factors that are
            adjacent in memory; empty if the rule has none.
        gathered_at: the ``grads_version`` of the work when its gradients were copied to ``grad``.
        present: the positions of the rows that have a gradient in this step, in ascending order;
            set by :meth:`gather`. A step changes no tensor of the other rows.
        functions: ``"update"``, ``"reduce"`` and ``"averages"`` of the rule for this bundle, as
            torch operations or compiled. Each takes slices and the tensors of the bundle.
    """

    rows: list[ParamRow]
    places: list[int]
    among: range | list[int]
    dtype: torch.dtype
    param: Tensor
    rest: list[Tensor]
    grad: Tensor | None = None
    copies: Copies | None = None
    rounded: Copies | None = None
    scattered: Sequence[Copies] = ()
    row_column_states: list[RowColumnStates] = field(default_factory=list)
    gathered_at: int | None = None
    present: Sequence[int] = ()
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
        whole = range(among[0], among[-1] + 1)
        where = (places, whole if len(whole) == len(among) else among, rows[0].compute_dtype)
        states = [as_one(column) for column in zip(*(row.state for row in rows), strict=True)]
        rest = [state for state, _ in states]
        rounded = [row.copy for row in rows if row.copy is not None]
        params, row_column_states = (
            _params(rows),
            _end_to_end([r.row_column_states for r in rows if r.row_column_states]),
        )
        if len(rows) == 1:
            rest += [flat(c) for c in (*rounded, rows[0].low) if c is not None]
            rest += [s for s in rows[0].scales if s is not None]
            alone = flat(params[0]), rest
            return Bundle(rows, *where, *alone, row_column_states=row_column_states)
        size = sum(p.numel() for p in params)
        param = params[0].new_empty(size)
        grad = param.new_empty(size, dtype=rows[0].grad_dtype)
        return Bundle(
            rows,
            *where,
            param,
            rest,
            grad,
            TorchCopies(params, param),
            TorchCopies(rounded, param) if rounded else None,
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
    def bounds(self) -> list[int]:
        """The index of the first element of each row, and the number of all elements."""
        return list(accumulate(map(Tensor.numel, self.params), initial=0))

    def gather(self, work: Work) -> Tensor | None:
        """Return the gradients of all rows as one flat tensor; copies at most once a step.

        Rows without a gradient are 0. Of a single row, return its gradient, in its own shape.
        Returns ``None`` if no row has a gradient.
        """
        if self.grad is None or self.copies is None:
            grad = work.grads[self.among[0]]
            self.present = () if grad is None else (0,)
            return grad
        if self.gathered_at != work.grads_version:
            if isinstance(self.among, range):
                grads = work.grads[self.among.start : self.among.stop]
            else:
                grads = [work.grads[i] for i in self.among]
            self.present = range(len(grads))
            if work.present is not None:
                self.present = [i for i, grad in enumerate(grads) if grad is not None]
            if self.present:
                self.copies.gather(grads, self.grad)
            self.gathered_at = work.grads_version
        return self.grad if self.present else None

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
        if self.rounded is not None:
            self.rounded.store()
        for states in self.scattered:
            states.store()

    def alike(self, h: array | list[array]) -> list[BundleSlice]:
        """Return slices of consecutive rows that have a gradient and share ``h``, one object.

        There are several where step counts differ, the rule has a ``reduce``, or a row has no
        gradient. Of a rule with row and column statistics, each row is a slice. A rule runs on each
        slice by itself, so the result for a parameter does not depend on the other parameters of
        the bundle.

        Args:
            h: the numbers of the block, or a list with those of each of its rows.
        """
        if self.row_column_states:
            return self.each(h)
        bounds, own = self.bounds, self._numbers(h)
        starts = [bounds[i] for i in self.present]
        ends = [bounds[i + 1] for i in self.present]
        # What follows runs in C for each of hundreds of rows.
        jumps = map(ne, starts, chain((None,), ends))
        first = list(map(or_, jumps, map(is_not, own, chain((None,), own))))
        slices = map(compress, (starts, ends, own), (first, [*first[1:], True], first))
        return list(map(BundleSlice, *slices))

    def _numbers(self, h: array | list[array]) -> list[array]:
        """Return the numbers of each row that has a gradient."""
        if isinstance(h, list):
            return [h[self.places[i]] for i in self.present]
        return [h] * len(self.present)

    def each(self, h: array | list[array]) -> list[BundleSlice]:
        """Return each row that has a gradient as a slice; ``h`` is as for :meth:`alike`."""
        own = zip(self.present, self._numbers(h), strict=True)
        return [BundleSlice(self.bounds[i], self.bounds[i + 1], numbers) for i, numbers in own]

    def each_with_places(self, h: array | list[array]) -> list[BundleSlice]:
        """Return what :meth:`each` does, with the places and the random key of each row."""
        slices = []
        for i, numbers in zip(self.present, self._numbers(h), strict=True):
            row, key = self.rows[i], self._keys[i]
            given = row.places, None if key is None else key.value, row.rounds
            slices.append(BundleSlice(self.bounds[i], self.bounds[i + 1], numbers, *given))
        return slices

    @functools.cached_property
    def _keys(self) -> list[ctypes.c_int64 | None]:
        """The memory of each row's random key, which is read so in a fraction of torch's time."""
        keys = [row.keys for row in self.rows]
        return [
            None if key is None else ctypes.c_int64.from_address(key.data_ptr()) for key in keys
        ]


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
    for tensor in tensors:
        if runs and _adjoins(runs[-1][-1], tensor):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    views = [_spanning(run) for run in runs]
    if len(views) == 1:
        return views[0], None
    scratch = views[0].new_empty(sum(map(Tensor.numel, views)))
    return scratch, TorchCopies(views, scratch)


def _adjoins(a: Tensor, b: Tensor) -> bool:
    """Return whether ``b`` begins in memory where ``a`` ends."""
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
    )


def _spanning(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat view over all of ``tensors``, which are adjacent in memory."""
    if len(tensors) == 1:
        return flat(tensors[0])
    return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
