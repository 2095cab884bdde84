"""Blocks: rows whose scalar states advance together, divided into bundles; kept between steps.

The scalar states of the rows of a block, such as their step counts, are adjacent in memory, or are
copied to scratch and back. Step counts differ only where some step had no gradient for some row.
``Rule.scalars`` runs once for rows with equal counts, on Python numbers, and its results are kept
from step to step.
"""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from operator import not_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import Bundle, Copies, as_one
from ampopt_kernels.cpu.numbers import common
from ampopt_kernels.rule import Rule
from ampopt_kernels.sums import Sums
from ampopt_kernels.work import ParamRow, Work

__all__ = ["Block", "Bundles"]

MOST_RESULTS = 1 << 12
"""Results of ``Rule.scalars`` that are kept for a param group."""
FEW_RESULTS = 1 << 6
"""Results for which Python numbers take less time than tensors."""

Numbers = array | list[array]
"""The numbers that a function of a rule takes, in float64: for all rows of a block, or for each."""


class _Result(NamedTuple):
    """A result of ``Rule.scalars``.

    Attributes:
        scalars: the new scalar states.
        h: the numbers that ``Rule.update`` takes.
    """

    scalars: tuple[float, ...]
    h: array


@dataclass
class KnownResults:
    """Results of ``Rule.scalars`` for the rows of a param group.

    Attributes:
        hyper: the float64 bits of the hyperparameters. So -0.0 and 0.0 differ, and NaN equals
            itself.
        by_scalars: the results by the bits of the scalar states: bytes where all rows have the
            same, else integers.
    """

    hyper: bytes
    by_scalars: dict[Any, _Result] = field(default_factory=dict)

    def differs(self, hyper: array) -> bool:
        """Return whether no result is for ``hyper``, or there are too many to keep."""
        return self.hyper != hyper.tobytes() or len(self.by_scalars) > MOST_RESULTS


@dataclass
class Block:
    """Rows of one param group whose scalar states advance together.

    Attributes:
        group: the index of the param group.
        rows: the rows.
        start: the index of the first row in ``work.rows``.
        scalars: for each scalar state, a view or scratch of shape (rows,); ``None`` where the flags
            omit it.
        scattered: copies scalar states that are not adjacent in memory to scratch and back.
        bundles: the bundles that the rows are divided into.
    """

    group: int
    rows: list[ParamRow]
    start: int
    scalars: list[Tensor | None] = field(default_factory=list)
    scattered: list[Copies] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)

    @staticmethod
    def of(rows: list[ParamRow], start: int) -> "Block":
        """Make a block of rows that have the same scalar states.

        Args:
            rows: consecutive rows of a work.
            start: the index of the first row in ``work.rows``.
        """
        columns = zip(*(row.scalars for row in rows), strict=True)
        scalars = [(None, None) if column[0] is None else as_one(column) for column in columns]
        return Block(
            rows[0].group,
            rows,
            start,
            [values for values, _ in scalars],
            [copies for _, copies in scalars if copies is not None],
            Bundle.all_of(rows, start),
        )

    def before_reduce(
        self, rule: Rule, hyper: Sequence[Sequence[Any]], coefficients: tuple[float, ...]
    ) -> Numbers:
        """Return ``coefficients`` and the ``h`` of ``Rule.reduce``, as :meth:`advance` does."""
        for scalars in self.scattered:
            scalars.load()
        _, h = rule.host_before_reduce(*self._scalars_and_hyper(hyper))
        return self._of_rows(coefficients, h)

    def advance(
        self,
        rule: Rule,
        hyper: Sequence[Sequence[Any]],
        coefficients: tuple[float, ...],
        results: dict[int, KnownResults],
        sums: Sums | None,
        present: Sequence[bool] | None,
    ) -> Numbers:
        """Advance the scalar states in place, of the rows that have a gradient.

        Args:
            rule: the update rule.
            hyper: the hyperparameters of every param group.
            coefficients: the reciprocal of the scale, and the clip coefficient.
            results: known results for each param group, read and written. Blocks of one group
                share them, and so do steps whose hyperparameters do not change.
            sums: the sums of all rows of the work, if the rule has a ``reduce``.
            present: :attr:`Work.present`, for all rows of the work.

        Returns:
            ``coefficients`` and the ``h`` of ``Rule.update``.
        """
        for scalars in self.scattered:
            scalars.load()
        if present is not None:
            present = present[self.start : self.start + len(self.rows)]
        numbers: Numbers
        if sums is not None:
            s, h, flags = self._scalars_and_hyper(hyper)
            s, h = rule.host_before_reduce(s, h, flags)
            each = sums.each[self.start : self.start + len(self.rows)].unbind(1)
            new_s, h = rule.host_scalars(s, h, flags, each, sums.totals.unbind())
            self._store(new_s, present)
            numbers = self._of_rows(coefficients, h)
        else:
            of_group = array("d", map(float, hyper[self.group]))
            known = results.get(self.group)
            if known is None or known.differs(of_group):
                known = results[self.group] = KnownResults(of_group.tobytes())
            counts: list[Any] = [0.0 if s is None else common(s) for s in self.scalars]
            if None in counts:
                found = known.by_scalars
                numbers = self._advance_each(rule, tuple(of_group), coefficients, found, present)
            else:
                key = array("d", counts).tobytes()
                if (result := known.by_scalars.get(key)) is None:
                    result = _result(rule, tuple(counts), tuple(of_group), self.rows[0].flags)
                    known.by_scalars[key] = result
                mask = None if present is None else _mask(present)
                for stored, value in zip(self.scalars, result.scalars, strict=True):
                    if stored is not None:
                        stored.fill_(value) if mask is None else stored.masked_fill_(mask, value)
                numbers = array("d", coefficients) + result.h
        for scalars in self.scattered:
            scalars.store()
        return numbers

    def _advance_each(
        self,
        rule: Rule,
        hyper: tuple[float, ...],
        coefficients: tuple[float, ...],
        known: dict[Any, _Result],
        present: Sequence[bool] | None,
    ) -> list[array]:
        """Do what :meth:`advance` does, for rows of different step counts.

        What runs for each of hundreds of rows runs in C; Python runs for each distinct count.
        """
        flags = self.rows[0].flags
        columns = [None if s is None else _wide_elements(s) for s in self.scalars]
        bits = [column.cast("B").cast("q").tolist() for column in columns if column is not None]
        rows: list[Any] = bits[0] if len(bits) == 1 else list(zip(*bits, strict=True))
        distinct = dict.fromkeys(rows)
        unknown = [key for key in distinct if key not in known]
        if unknown:
            old = [
                tuple([0.0 if column is None else column[i] for column in columns])
                for i in map(rows.index, unknown)
            ]
            if len(unknown) <= FEW_RESULTS:
                made = [_result(rule, s, hyper, flags) for s in old]
            else:
                wide = _wide(zip(*old, strict=True))
                new_s, h = (
                    _rows(x, len(old)) for x in rule.host_scalars(wide, _wide(hyper), flags)
                )
                made = map(_Result, new_s, (array("d", own) for own in h))
            known |= zip(unknown, made, strict=True)
        absent = () if present is None else list(compress(range(len(rows)), map(not_, present)))
        for i, (stored, column) in enumerate(zip(self.scalars, columns, strict=True)):
            if stored is not None and column is not None:
                values = {key: known[key].scalars[i] for key in distinct}
                new = array("d", map(values.__getitem__, rows))
                for place in absent:
                    new[place] = column[place]
                stored.copy_(torch.frombuffer(new, dtype=torch.float64))
        # Rows of equal results share an array; see ``Bundle.alike``.
        first = array("d", coefficients)
        h = {key: first + known[key].h for key in distinct}
        return list(map(h.__getitem__, rows))

    def _scalars_and_hyper(
        self, hyper: Sequence[Sequence[Any]]
    ) -> tuple[Any, Any, tuple[bool, ...]]:
        """Return scalar states and hyperparameters as float64 tensors, and the flags."""
        none = torch.zeros(len(self.rows), dtype=torch.float64, device="cpu")
        # Copies, also of float64 states: a rule may return a state as ``h``, which is read after
        # the state has been overwritten.
        s = tuple(none if s is None else s.to(torch.float64, copy=True) for s in self.scalars)
        return s, _wide(hyper[self.group]), self.rows[0].flags

    def _store(self, new_s: Sequence[Any], present: Sequence[bool] | None) -> None:
        """Write new scalar states, of the rows that are present."""
        mask = None if present is None else _mask(present)
        for stored, value in zip(self.scalars, new_s, strict=True):
            if stored is not None:
                stored.copy_(value if mask is None else torch.where(mask, value, stored))

    def _of_rows(self, coefficients: tuple[float, ...], h: tuple[Any, ...]) -> Numbers:
        """Return what :meth:`advance` does, of 0-d tensors and tensors of shape (rows,)."""
        if not any(isinstance(x, Tensor) and x.ndim for x in h):
            return array("d", (*coefficients, *map(float, h)))
        return [array("d", (*coefficients, *own)) for own in _rows(h, len(self.rows))]


def _mask(present: Sequence[bool]) -> Tensor:
    """Return ``present`` as a tensor of shape (rows,)."""
    return torch.frombuffer(bytearray(present), dtype=torch.bool)


def _wide_elements(tensor: Tensor) -> "memoryview[float]":
    """Return the elements of a tensor of shape (rows,) in float64; ``tolist`` takes far longer."""
    wide = tensor.to(torch.float64)
    in_bytes = memoryview(ctypes.string_at(wide.data_ptr(), 8 * len(wide)))
    return cast("memoryview[float]", in_bytes.cast("d"))


def _wide(numbers: Iterable[Any]) -> tuple[Tensor, ...]:
    """Each number as a 0-d float64 tensor."""
    # Tensors, not numbers: torch computes number / tensor as number * (1 / tensor), which rounds
    # twice. The result of a row would depend on the step counts of the others.
    return tuple(torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in numbers)


def _result(
    rule: Rule, s: tuple[float, ...], h: tuple[float, ...], flags: tuple[bool, ...]
) -> _Result:
    """Run ``Rule.scalars`` on Python numbers."""
    new_s, new_h = rule.scalars_on_numbers(s, h, flags)
    return _Result(tuple(map(float, new_s)), array("d", map(float, new_h)))


def _rows(columns: Sequence[Any], n: int) -> list[tuple[float, ...]]:
    """Return the n rows of ``columns``: numbers, 0-d tensors, and tensors of shape (n,)."""
    wide = [torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in columns]
    lists = [x.expand(n).tolist() for x in wide]
    return list(zip(*lists, strict=True)) if lists else [()] * n


@dataclass
class Bundles:
    """All rows of a work in bundles, kept between steps as ``work.backend_rows``.

    Attributes:
        bundles: each bundle with its block.
        updated: the same rows as ``update`` takes them: a backend may divide bundles further.
        prepared_by: the backend whose functions in the bundles are final; ``None`` if a backend
            has to prepare them again.
        scalar_results: known results for each param group; see :meth:`Block.advance`.
    """

    bundles: list[tuple[Block, Bundle]]
    prepared_by: Any = None
    scalar_results: dict[int, KnownResults] = field(default_factory=dict)
    updated: list[tuple[Block, Bundle]] = field(init=False)

    def __post_init__(self) -> None:
        """Update bundles as they are, until a backend divides them."""
        self.updated = self.bundles

    def gather(self, work: Work) -> list[Tensor]:
        """Return the gradients of this step as ``update`` reads them."""
        grads: list[Any] = [bundle.gather(work) for _, bundle in self.updated]
        return grads if work.present is None else [grad for grad in grads if grad is not None]

    @staticmethod
    def of(work: Work) -> "Bundles":
        """Divide the rows of ``work`` into blocks and bundles."""
        blocks: list[list[ParamRow]] = []
        for row in work.rows:
            if blocks and _advance_together(blocks[-1][-1], row):
                blocks[-1].append(row)
            else:
                blocks.append([row])
        starts = accumulate((len(rows) for rows in blocks), initial=0)
        made = [Block.of(rows, start) for rows, start in zip(blocks, starts, strict=False)]
        return Bundles([(block, bundle) for block in made for bundle in block.bundles])


def _advance_together(last: ParamRow, row: ParamRow) -> bool:
    """Whether ``row`` may follow ``last`` in a block: same group, same scalars present."""
    return last.group == row.group and all(
        (a is None) is (b is None) for a, b in zip(last.scalars, row.scalars, strict=True)
    )
