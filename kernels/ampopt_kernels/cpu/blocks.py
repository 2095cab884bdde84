"""Blocks: rows whose scalar states advance together, divided into bundles; kept between steps.

The scalar states of the rows of a block, such as their step counts, are adjacent in memory, or are
copied to scratch and back. Step counts differ only where some step had no gradient for some row.
``Rule.scalars`` runs once, on Python numbers, if all are equal, and else as ``scalars`` says.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import Bundle, Copies, Numbers, as_one
from ampopt_kernels.cpu.numbers import common
from ampopt_kernels.cpu.scalars import ScalarRows
from ampopt_kernels.rule import Rule
from ampopt_kernels.sums import Sums
from ampopt_kernels.work import ParamRow, Work

__all__ = ["Block", "Bundles"]

Scalars = Callable[[Rule, tuple[bool, ...], ScalarRows, Sequence[float]], Numbers]
"""Computes the numbers of rows, as :func:`ampopt_kernels.cpu.scalars.scalars_on_host` does."""


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
    """

    group: int
    rows: list[ParamRow]
    start: int
    scalars: list[Tensor | None] = field(default_factory=list)
    scattered: list[Copies] = field(default_factory=list)

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
        )

    def before_reduce(
        self,
        rule: Rule,
        hyper: Sequence[Sequence[Any]],
        coefficients: tuple[float, ...],
        present: bytearray | None,
        scalars: Scalars,
    ) -> Numbers:
        """Return ``coefficients`` and the ``h`` of ``Rule.reduce``; see :meth:`advance`."""
        for copies in self.scattered:
            copies.load()
        h = (*coefficients, *map(float, hyper[self.group]))
        return scalars(rule, self.rows[0].flags, self._scalar_rows(present), h)

    def advance(
        self,
        rule: Rule,
        hyper: Sequence[Sequence[Any]],
        coefficients: tuple[float, ...],
        sums: Sums | None,
        present: bytearray | None,
        scalars: Scalars,
    ) -> Numbers:
        """Advance the scalar states in place, of the rows that have a gradient.

        Args:
            rule: the update rule.
            hyper: the hyperparameters of every param group.
            coefficients: the reciprocal of the scale, and the clip coefficient.
            sums: the sums of all rows of the work, if the rule has a ``reduce``.
            present: :attr:`Work.present`, for all rows of the work.
            scalars: computes the numbers where rows have different ones.

        Returns:
            ``coefficients`` and the ``h`` of ``Rule.update``.
        """
        for copies in self.scattered:
            copies.load()
        rows, flags = self._scalar_rows(present, sums), self.rows[0].flags
        h = tuple(map(float, hyper[self.group]))
        counts: list[Any] = [0.0 if s is None else common(s) for s in self.scalars]
        if sums is not None or None in counts:
            numbers = scalars(rule, flags, rows, (*coefficients, *h))
        else:
            new_s, h = rule.scalars_on_numbers(tuple(counts), h, flags)
            rows.store(new_s)
            table = torch.frombuffer(array("d", (*coefficients, *h)), dtype=torch.float64)[None]
            numbers = Numbers(table) if rows.mask is None else Numbers(table).of_present(rows.mask)
        for copies in self.scattered:
            copies.store()
        return numbers

    def _scalar_rows(self, present: bytearray | None, sums: Sums | None = None) -> ScalarRows:
        """Return the rows, given :attr:`Work.present` and the sums of all rows of the work."""
        start, n = self.start, len(self.rows)
        mask = None
        if present is not None:
            mask = torch.frombuffer(present, dtype=torch.bool, offset=start, count=n)
        own = None if sums is None else Sums(sums.each[start : start + n], sums.totals)
        return ScalarRows(n, self.scalars, mask, own)


@dataclass
class Bundles:
    """All rows of a work in bundles, kept between steps as ``work.backend_rows``.

    Attributes:
        bundles: each bundle with its block.
        update_bundles: the same rows as ``update`` takes them; a backend may divide bundles more.
        prepared_by: the backend whose functions in the bundles are final; ``None`` if a backend
            has to prepare them again.
    """

    bundles: list[tuple[Block, Bundle]] = field(default_factory=list)
    update_bundles: list[tuple[Block, Bundle]] = field(default_factory=list)
    prepared_by: Any = None

    def gather(self, work: Work) -> list[Tensor]:
        """Return the gradients of this step as ``update`` reads them."""
        grads: list[Any] = [bundle.gather(work) for _, bundle in self.update_bundles]
        return grads if work.present is None else [grad for grad in grads if grad is not None]

    def take(self, work: Work) -> list[tuple[Block, Bundle]]:
        """Divide the rows of ``work`` into blocks and bundles."""
        blocks: list[list[ParamRow]] = []
        for row in work.rows:
            if blocks and _advance_together(blocks[-1][-1], row):
                blocks[-1].append(row)
            else:
                blocks.append([row])
        starts = accumulate(map(len, blocks), initial=0)
        self.bundles = [
            (block, bundle)
            for block in map(Block.of, blocks, starts)
            for bundle in Bundle.all_of(block.rows, block.start)
        ]
        return self.bundles


def _advance_together(last: ParamRow, row: ParamRow) -> bool:
    """Whether ``row`` may follow ``last`` in a block: same group, same scalars present."""
    return last.group == row.group and all(
        (a is None) is (b is None) for a, b in zip(last.scalars, row.scalars, strict=True)
    )
