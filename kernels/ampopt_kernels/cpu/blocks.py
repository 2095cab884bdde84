"""How the CPU takes the rows of a work: in blocks of pieces, which are kept from step to step.

Rows whose scalars lie end to end are a block: the ``scalars`` of a rule run once, on Python
numbers, for all rows of a block whose step counts agree, which they do unless gradients come and
go.
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
    """Rows whose scalars advance together.

    Attributes:
        group: the param group of all of them.
        rows: in the order in which their scalars lie end to end.
        start: the place of the first among all rows of the work.
        scalars: the scalar states, an entry for each row; ``None`` where the flags leave one out.
        pieces: the same rows, as the rule takes them.
    """

    group: int
    rows: list[Row]
    start: int
    scalars: list[Tensor | None] = field(default_factory=list)
    pieces: list[Bundle] = field(default_factory=list)

    @staticmethod
    def of(rows: list[Row], start: int) -> "Block":
        """Rows whose scalars adjoin, the first of which has that place."""
        columns = zip(*(row.scalars for row in rows), strict=True)
        return Block(
            rows[0].group,
            rows,
            start,
            [None if column[0] is None else spanning(column) for column in columns],
            Bundle.all_of(rows, start),
        )

    def before_reduce(self, rule: Rule, hyper: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """The ``h`` of ``reduce``: numbers, or lists with one for each row."""
        return self._told_apart(rule.host_before_reduce(*self._given(hyper))[1])

    def advance(
        self,
        rule: Rule,
        hyper: Sequence[Sequence[Any]],
        advanced: "dict[int, _Advanced]",
        sums: Sums | None,
    ) -> tuple[tuple[Any, ...], bool]:
        """Advance the scalars; return ``h``, and whether it differs from row to row.

        Its entries are numbers, and, if it does, lists with one for each row.
        ``hyper`` is that of every group. ``advanced`` is the last result for each: blocks of one
        group share it, and so do steps of a rule that counts nothing. ``sums`` are those of all
        rows of the work, of a rule that reduces.
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
            # As bits, for which -0.0 is not 0.0.
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
        """Scalar states of each row, hyperparameters, and flags."""
        none = torch.zeros(len(self.rows), dtype=torch.float64, device="cpu")
        # Copies of those that are float64 too: a rule may hand on what will have been advanced.
        s = tuple(none if s is None else s.to(torch.float64, copy=True) for s in self.scalars)
        # As tensors: torch multiplies a number over a tensor by a reciprocal, and so rounds twice,
        # and the same step among others of the same count would have another result.
        wide = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in hyper[self.group])
        return s, tuple(wide), self.rows[0].flags

    def _stored(self, new_s: tuple[Any, ...], h: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
        """Store the scalars; return ``h`` as :meth:`advance` does."""
        for stored, value in zip(self.scalars, new_s, strict=True):
            if stored is not None:
                stored.copy_(value)
        h = self._told_apart(h)
        return h, any(isinstance(x, list) for x in h)

    def _told_apart(self, h: tuple[Any, ...]) -> tuple[Any, ...]:
        """``h`` as numbers where it is the same for all rows."""
        varies = (isinstance(x, Tensor) and x.ndim > 0 for x in h)
        return tuple(x.tolist() if v else float(x) for x, v in zip(h, varies, strict=True))


class _Advanced(NamedTuple):
    """What ``scalars`` of a rule made of step counts and hyperparameters.

    Attributes:
        key: the counts and hyperparameters, all numbers.
        scalars: the new values.
        h: what ``update`` takes, all numbers.
    """

    key: bytes
    scalars: tuple[float, ...]
    h: tuple[float, ...]


@dataclass
class Bundles:
    """The form of the rows that is kept from step to step: the ``table`` of a work.

    Attributes:
        pieces: what the rule is applied to at a time, with the block of each.
        prepared_by: the backend that has nothing left to do beforehand.
        advanced: see :meth:`Block.advance`.
    """

    pieces: list[tuple[Block, Bundle]]
    prepared_by: Any = None
    advanced: dict[int, _Advanced] = field(default_factory=dict)

    @staticmethod
    def of(work: Work) -> "Bundles":
        """All rows in pieces."""
        blocks: list[list[Row]] = []
        for row in work.rows:
            if blocks and _advance_together(blocks[-1][-1], row):
                blocks[-1].append(row)
            else:
                blocks.append([row])
        starts = accumulate((len(rows) for rows in blocks), initial=0)
        made = [Block.of(rows, start) for rows, start in zip(blocks, starts, strict=False)]
        return Bundles([(block, piece) for block in made for piece in block.pieces])


def _advance_together(last: Row, row: Row) -> bool:
    return last.group == row.group and all(
        adjoins(a, b) for a, b in zip(last.scalars, row.scalars, strict=True)
    )
