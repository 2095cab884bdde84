"""Blocks: rows whose scalar states advance together, divided into bundles; kept between steps.

The scalar states of the rows of a block, such as their step counts, are adjacent in memory. Step
counts differ only where some step had no gradient for some row. If all are equal, ``Rule.scalars``
runs once for the block, on Python numbers.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import Bundle, adjoins, spanning
from ampopt_kernels.cpu.numbers import common
from ampopt_kernels.rule import Rule
from ampopt_kernels.sums import Sums
from ampopt_kernels.work import Row, Work

__all__ = ["Block", "Bundles"]


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

    def before_reduce(self, rule: Rule, hyper: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """Return the ``h`` of ``Rule.reduce``: numbers, or lists with a number for each row."""
        return self._told_apart(rule.host_before_reduce(*self._given(hyper))[1])

    def advance(
        self,
        rule: Rule,
        hyper: Sequence[Sequence[Any]],
        advanced: "dict[int, _Advanced]",
        sums: Sums | None,
    ) -> tuple[tuple[Any, ...], bool]:
        """Advance the scalar states in place.

        Args:
            rule: the update rule.
            hyper: the hyperparameters of every param group.
            advanced: the last result for each param group, read and written. Blocks of one group
                with the same step count share it, and so do steps whose numbers do not change.
            sums: the sums of all rows of the work, if the rule has a ``reduce``.

        Returns:
            The ``h`` of ``Rule.update``, as numbers or lists with a number for each row; and
            whether there is a list.
        """
        if sums is not None:
            s, h, flags = self._given(hyper)
            s, h = rule.host_before_reduce(s, h, flags)
            each = sums.each[self.start : self.start + len(self.rows)].unbind(1)
            return self._stored(*rule.host_scalars(s, h, flags, each, sums.totals.unbind()))
        given, flags = hyper[self.group], self.rows[0].flags
        found = [0.0 if s is None else common(s) for s in self.scalars]
        counts = [count for count in found if count is not None]
        if len(counts) == len(found):
            numbers = list(map(float, given))
            # Compare bits: -0.0 and 0.0 differ, and NaN equals itself.
            key = array("d", [*counts, *numbers]).tobytes()
            last = advanced.get(self.group)
            if last is None or last.key != key:
                new_s, new_h = rule.scalars_on_numbers(tuple(counts), tuple(numbers), flags)
                last = _Advanced(key, tuple(map(float, new_s)), tuple(map(float, new_h)))
                advanced[self.group] = last
            for stored, value in zip(self.scalars, last.scalars, strict=True):
                if stored is not None:
                    stored.fill_(value)
            return last.h, False
        return self._stored(*rule.host_scalars(*self._given(hyper)))

    def _given(self, hyper: Sequence[Sequence[Any]]) -> tuple[Any, Any, tuple[bool, ...]]:
        """Return scalar states and hyperparameters as float64 tensors, and the flags."""
        none = torch.zeros(len(self.rows), dtype=torch.float64, device="cpu")
        # Copies, also of float64 states: a rule may return a state as ``h``, which is read after
        # the state has been overwritten.
        s = tuple(none if s is None else s.to(torch.float64, copy=True) for s in self.scalars)
        # Tensors, not numbers: torch computes number / tensor as number * (1 / tensor), which
        # rounds twice. The result of a row would depend on the step counts of the others.
        wide = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in hyper[self.group])
        return s, tuple(wide), self.rows[0].flags

    def _stored(self, new_s: tuple[Any, ...], h: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
        """Write new scalar states; return ``h`` as :meth:`advance` does."""
        for stored, value in zip(self.scalars, new_s, strict=True):
            if stored is not None:
                stored.copy_(value)
        h = self._told_apart(h)
        return h, any(isinstance(x, list) for x in h)

    def _told_apart(self, h: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``h`` with 0-d tensors as numbers, and tensors of shape (rows,) as lists."""
        varies = (isinstance(x, Tensor) and x.ndim > 0 for x in h)
        return tuple(x.tolist() if v else float(x) for x, v in zip(h, varies, strict=True))


class _Advanced(NamedTuple):
    """A result of ``Rule.scalars`` on Python numbers.

    Attributes:
        key: the bits of its arguments: step counts and other scalar states, and hyperparameters.
        scalars: the new scalar states.
        h: the numbers that ``Rule.update`` takes.
    """

    key: bytes
    scalars: tuple[float, ...]
    h: tuple[float, ...]


@dataclass
class Bundles:
    """All rows of a work in bundles, kept between steps as ``work.table``.

    Attributes:
        bundles: each bundle with its block.
        updated: the same rows as ``update`` takes them: a backend may divide bundles further.
        prepared_by: the backend whose functions in the bundles are final; ``None`` if a backend
            has to prepare them again.
        advanced: the last result for each param group; see :meth:`Block.advance`.
    """

    bundles: list[tuple[Block, Bundle]]
    prepared_by: Any = None
    advanced: dict[int, _Advanced] = field(default_factory=dict)
    updated: list[tuple[Block, Bundle]] = field(init=False)

    def __post_init__(self) -> None:
        """Update bundles as they are, until a backend divides them."""
        self.updated = self.bundles

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
