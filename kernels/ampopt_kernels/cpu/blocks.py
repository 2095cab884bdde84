"""Blocks: rows whose scalar states advance together, divided into bundles; kept between steps.

The scalar states of the rows of a block, such as their step counts, are adjacent in memory. Step
counts differ only where some step had no gradient for some row. ``Rule.scalars`` runs once for rows
with equal counts, on Python numbers, and its results are kept from step to step.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import Bundle, adjoins, spanning
from ampopt_kernels.cpu.numbers import common
from ampopt_kernels.rule import Rule
from ampopt_kernels.sums import Sums
from ampopt_kernels.work import Row, Work

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
    h: tuple[float, ...]


KnownResults = dict[bytes, _Result]
"""Results of ``Rule.scalars`` for the rows of a param group, by the float64 bits of its arguments:
scalar states and hyperparameters. So -0.0 and 0.0 differ, and NaN equals itself."""


@dataclass
class Block:
    """Rows of one param group whose scalar states advance together.

    Attributes:
        group: the index of the param group.
        rows: the rows, in the order in which their scalar states lie in memory.
        start: the index of the first row in ``work.rows``.
        scalars: for each scalar state, a view of shape (rows,); ``None`` where the flags omit it.
        bundles: the bundles that the rows are divided into.
    """

    group: int
    rows: list[Row]
    start: int
    scalars: list[Tensor | None] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)

    @staticmethod
    def of(rows: list[Row], start: int) -> "Block":
        """Make a block of rows whose scalar states are adjacent.

        Args:
            rows: consecutive rows of a work.
            start: the index of the first row in ``work.rows``.
        """
        columns = zip(*(row.scalars for row in rows), strict=True)
        return Block(
            rows[0].group,
            rows,
            start,
            [None if column[0] is None else spanning(column) for column in columns],
            Bundle.all_of(rows, start),
        )

    def before_reduce(
        self, rule: Rule, hyper: Sequence[Sequence[Any]], coefficients: tuple[float, ...]
    ) -> Numbers:
        """Return ``coefficients`` and the ``h`` of ``Rule.reduce``, as :meth:`advance` does."""
        _, h = rule.host_before_reduce(*self._given(hyper))
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
        if present is not None:
            present = present[self.start : self.start + len(self.rows)]
        if sums is not None:
            s, h, flags = self._given(hyper)
            s, h = rule.host_before_reduce(s, h, flags)
            each = sums.each[self.start : self.start + len(self.rows)].unbind(1)
            new_s, h = rule.host_scalars(s, h, flags, each, sums.totals.unbind())
            self._store(new_s, present)
            return self._of_rows(coefficients, h)
        numbers, flags = tuple(map(float, hyper[self.group])), self.rows[0].flags
        known = results.setdefault(self.group, {})
        if len(known) > MOST_RESULTS:
            known.clear()
        counts: list[Any] = [0.0 if s is None else common(s) for s in self.scalars]
        if None in counts:
            return self._advance_each(rule, numbers, coefficients, known, present)
        key = array("d", (*counts, *numbers)).tobytes()
        if key not in known:
            known[key] = _result(rule, tuple(counts), numbers, flags)
        result = known[key]
        mask = None if present is None else torch.tensor(present, device="cpu")
        for stored, value in zip(self.scalars, result.scalars, strict=True):
            if stored is not None:
                stored.fill_(value) if mask is None else stored.masked_fill_(mask, value)
        return array("d", (*coefficients, *result.h))

    def _advance_each(
        self,
        rule: Rule,
        hyper: tuple[float, ...],
        coefficients: tuple[float, ...],
        known: KnownResults,
        present: Sequence[bool] | None,
    ) -> list[array]:
        """Do what :meth:`advance` does, for rows of different step counts."""
        n, flags = len(self.rows), self.rows[0].flags
        columns = [[0.0] * n if s is None else s.tolist() for s in self.scalars]
        rows = list(zip(*columns, strict=True))
        bits, bits_of_hyper = (array("d", x).tobytes() for x in (chain.from_iterable(rows), hyper))
        width = 8 * len(columns)
        keys = [bits[i : i + width] + bits_of_hyper for i in range(0, n * width, width)]
        unknown = {key: s for key, s in zip(keys, rows, strict=True) if key not in known}
        if len(unknown) <= FEW_RESULTS:
            known |= {key: _result(rule, s, hyper, flags) for key, s in unknown.items()}
        else:
            wide = _wide(zip(*unknown.values(), strict=True))
            results = (_rows(x, len(unknown)) for x in rule.host_scalars(wide, _wide(hyper), flags))
            known |= zip(unknown, map(_Result, *results), strict=True)
        for i, (stored, old) in enumerate(zip(self.scalars, columns, strict=True)):
            if stored is not None:
                column = [known[key].scalars[i] for key in keys]
                if present is not None:
                    column = [x if p else y for x, y, p in zip(column, old, present, strict=True)]
                stored.copy_(torch.frombuffer(array("d", column), dtype=torch.float64))
        # Rows of equal results share an array; see ``Bundle.alike``.
        h = {key: array("d", (*coefficients, *known[key].h)) for key in dict.fromkeys(keys)}
        return [h[key] for key in keys]

    def _given(self, hyper: Sequence[Sequence[Any]]) -> tuple[Any, Any, tuple[bool, ...]]:
        """Return scalar states and hyperparameters as float64 tensors, and the flags."""
        none = torch.zeros(len(self.rows), dtype=torch.float64, device="cpu")
        # Copies, also of float64 states: a rule may return a state as ``h``, which is read after
        # the state has been overwritten.
        s = tuple(none if s is None else s.to(torch.float64, copy=True) for s in self.scalars)
        return s, _wide(hyper[self.group]), self.rows[0].flags

    def _store(self, new_s: Sequence[Any], present: Sequence[bool] | None) -> None:
        """Write new scalar states, of the rows that are present."""
        mask = None if present is None else torch.tensor(present, device="cpu")
        for stored, value in zip(self.scalars, new_s, strict=True):
            if stored is not None:
                stored.copy_(value if mask is None else torch.where(mask, value, stored))

    def _of_rows(self, coefficients: tuple[float, ...], h: tuple[Any, ...]) -> Numbers:
        """Return what :meth:`advance` does, of 0-d tensors and tensors of shape (rows,)."""
        if not any(isinstance(x, Tensor) and x.ndim for x in h):
            return array("d", (*coefficients, *map(float, h)))
        return [array("d", (*coefficients, *own)) for own in _rows(h, len(self.rows))]


def _wide(numbers: Iterable[Any]) -> tuple[Tensor, ...]:
    # Tensors, not numbers: torch computes number / tensor as number * (1 / tensor), which rounds
    # twice. The result of a row would depend on the step counts of the others.
    return tuple(torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in numbers)


def _result(
    rule: Rule, s: tuple[float, ...], h: tuple[float, ...], flags: tuple[bool, ...]
) -> _Result:
    """Run ``Rule.scalars`` on Python numbers."""
    new_s, new_h = rule.scalars_on_numbers(s, h, flags)
    return _Result(tuple(map(float, new_s)), tuple(map(float, new_h)))


def _rows(columns: Sequence[Any], n: int) -> list[tuple[float, ...]]:
    """Return the n rows of ``columns``: numbers, 0-d tensors, and tensors of shape (n,)."""
    wide = [torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in columns]
    lists = [x.expand(n).tolist() for x in wide]
    return list(zip(*lists, strict=True)) if lists else [()] * n


@dataclass
class Bundles:
    """All rows of a work in bundles, kept between steps as ``work.table``.

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
        blocks: list[list[Row]] = []
        for row in work.rows:
            if blocks and _advance_together(blocks[-1][-1], row):
                blocks[-1].append(row)
            else:
                blocks.append([row])
        starts = accumulate((len(rows) for rows in blocks), initial=0)
        made = [Block.of(rows, start) for rows, start in zip(blocks, starts, strict=False)]
        return Bundles([(block, bundle) for block in made for bundle in block.bundles])


def _advance_together(last: Row, row: Row) -> bool:
    return last.group == row.group and all(
        adjoins(a, b) for a, b in zip(last.scalars, row.scalars, strict=True)
    )
