"""How the CPU takes the rows of a work: in pieces, small ones bundled; kept from step to step.

A network's small tensors cost a CPU more in calls than in arithmetic. Those whose states lie end
to end (``ampopt._step.rule_state`` lays them so) are gathered into one scratch that fits the
cache, the rule runs once over all of them, and the parameters are scattered back.

Rows whose scalars lie end to end are a block: the ``scalars`` of a rule run once, on Python
numbers, for all rows of a block whose step counts agree, which they do unless gradients come and
go.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.cpu.gather_scatter import Copies, TorchCopies
from ampopt_kernels.cpu.numbers import common
from ampopt_kernels.marginals import Marginals
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Row, Work
from ampopt_kernels.sums import Sums
from ampopt_kernels.tensors import flat

__all__ = ["BUNDLE", "SMALL", "Part", "Piece", "Pieces"]

SMALL = 1 << 14
"""Elements up to which a tensor is bundled: beyond it, a call costs less than a copy."""
BUNDLE = 1 << 16
"""Elements of a bundle: its float32 gradient, parameter and two states fit a core's cache."""


class Part(NamedTuple):
    """Elements of a piece that a rule is applied to with the same numbers.

    Attributes:
        start: the first.
        end: that behind the last.
        h: the reciprocal of the scale, the clip coefficient, and what the rule takes as ``h``.
        chances: the position of the first element, of a rule that draws random numbers, and a key
            to round a parameter stochastically by.
    """

    start: int
    end: int
    h: tuple[float, ...]
    chances: tuple[int, ...] = ()

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """These elements of the tensors of the piece."""
        return [t[self.start : self.end] for t in tensors]


@dataclass
class Piece:
    """Rows that are updated together: a bundle of small ones, or one alone.

    Attributes:
        rows: all of one kind and group.
        places: where each row is in its block.
        among: where each row is among all rows of its work.
        dtype: of the arithmetic.
        param: what the rule works on, flat: the parameter, or scratch for those of a bundle.
        rest: what the rule works on besides: the states of all rows, end to end, flat; and the
            low-precision copy, if there is one and it is alone.
        grad: scratch for all gradients; ``None`` if alone.
        copies: between the scratch and the tensors of the rows; ``None`` if alone.
        rounded: from the scratch to low-precision copies, of a bundle that has them.
        marginals: of each row, with factors that lie end to end; of a rule without any, empty.
        gathered_at: the stamp of the work whose gradients ``grad`` holds.
        compiled: what the compiled backend has made of functions of the rule for this piece, by
            their names.
    """

    rows: list[Row]
    places: list[int]
    among: range | list[int]
    dtype: torch.dtype
    param: Tensor
    rest: list[Tensor]
    grad: Tensor | None = None
    copies: Copies | None = None
    rounded: Copies | None = None
    marginals: list[Marginals] = field(default_factory=list)
    gathered_at: int | None = None
    compiled: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @staticmethod
    def of(rows: list[Row], places: list[int], start: int) -> "Piece":
        """Rows whose states adjoin, by their places in a block that begins at ``start``."""
        among = [start + place for place in places]
        whole = range(among[0], among[-1] + 1)
        where = (places, whole if len(whole) == len(among) else among, rows[0].compute_dtype)
        rest = [_spanning(column) for column in zip(*(row.state for row in rows), strict=True)]
        rounded = [row.copy for row in rows if row.copy is not None]
        params, marginals = _params(rows), _end_to_end([r.marginals for r in rows if r.marginals])
        if len(rows) == 1:
            alone = flat(params[0]), rest + [flat(c) for c in rounded]
            return Piece(rows, *where, *alone, marginals=marginals)
        size = sum(p.numel() for p in params)
        param = params[0].new_empty(size)
        grad = param.new_empty(size, dtype=rows[0].grad_dtype)
        return Piece(
            rows,
            *where,
            param,
            rest,
            grad,
            TorchCopies(params, param),
            TorchCopies(rounded, param) if rounded else None,
            marginals,
        )

    @property
    def flags(self) -> tuple[bool, ...]:
        """Of the rule, for every row."""
        return self.rows[0].flags

    @property
    def states(self) -> list[Tensor]:
        """Those of all rows: what there is in ``rest`` besides copies."""
        return self.rest[: len(self.rows[0].state)]

    @property
    def params(self) -> list[Tensor]:
        """The parameter of each row."""
        return _params(self.rows)

    def gather(self, work: Work) -> Tensor:
        """The gradients, end to end, flat; once for each step."""
        if self.grad is None or self.copies is None:
            return flat(work.grads[self.among[0]])
        if self.gathered_at != work.stamp:
            if isinstance(self.among, range):
                grads = work.grads[self.among.start : self.among.stop]
            else:
                grads = [work.grads[i] for i in self.among]
            self.copies.gather(grads, self.grad)
            self.gathered_at = work.stamp
        return self.grad

    def alike(self, h: tuple[Any, ...]) -> Iterator[Part]:
        """Parts whose rows have the same ``h``.

        There are several only where gradients come and go, or the rule reduces; of a rule with
        marginals, each row is one. A part is applied as if it were alone, so that a parameter's
        result does not depend on what it is bundled with.

        Args:
            h: of the block; numbers, and lists with one for each row.
        """
        rows = list(self.each(h))
        start = 0
        for row, (_, end, own, _) in enumerate(rows):
            if self.marginals or row + 1 == len(rows) or rows[row + 1].h != own:
                yield Part(start, end, own)
                start = end

    def each(self, h: tuple[Any, ...]) -> Iterator[Part]:
        """Each row as a part; ``h`` as for :meth:`alike`."""
        if self.copies is None:  # in less time
            place = self.places[0]
            own = tuple([x[place] if isinstance(x, list) else x for x in h])
            yield Part(0, self.param.numel(), own)
            return
        columns = ([x[i] for i in self.places] if isinstance(x, list) else repeat(x) for x in h)
        sizes = map(Tensor.numel, self.params)
        start = 0
        for size, *own in zip(sizes, *columns, strict=False):  # of which some have no end
            yield Part(start, start + size, tuple(own))
            start += size

    def beside(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Marginals | None]]:
        """Each of some parts with the marginals of its row, if there are any."""
        return zip(parts, self.marginals or repeat(None), strict=False)


def _params(rows: Sequence[Row]) -> list[Tensor]:
    return [row.param for row in rows if row.param is not None]


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
    pieces: list[Piece] = field(default_factory=list)

    @staticmethod
    def of(rows: list[Row], start: int) -> "Block":
        columns = zip(*(row.scalars for row in rows), strict=True)
        return Block(
            rows[0].group,
            rows,
            start,
            [None if column[0] is None else _spanning(column) for column in columns],
            [Piece.of([rows[i] for i in places], places, start) for places in _runs(rows)],
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
class Pieces:
    """The form of the rows that is kept from step to step: the ``table`` of a work.

    Attributes:
        pieces: what the rule is applied to at a time, with the block of each.
        prepared_by: the backend that has nothing left to do beforehand.
        advanced: see :meth:`Block.advance`.
    """

    pieces: list[tuple[Block, Piece]]
    prepared_by: Any = None
    advanced: dict[int, _Advanced] = field(default_factory=dict)

    @staticmethod
    def of(work: Work) -> "Pieces":
        """All rows in pieces."""
        blocks: list[list[Row]] = []
        for row in work.rows:
            if blocks and _advance_together(blocks[-1][-1], row):
                blocks[-1].append(row)
            else:
                blocks.append([row])
        starts = accumulate((len(rows) for rows in blocks), initial=0)
        made = [Block.of(rows, start) for rows, start in zip(blocks, starts, strict=False)]
        return Pieces([(block, piece) for block in made for piece in block.pieces])


def _advance_together(last: Row, row: Row) -> bool:
    return last.group == row.group and all(
        _adjoins(a, b) for a, b in zip(last.scalars, row.scalars, strict=True)
    )


def _runs(rows: Sequence[Row]) -> list[list[int]]:
    """The places of the rows in runs that can be a piece each; small ones pass over large ones."""
    runs: list[list[int]] = []
    bundle: list[int] | None = None
    total = 0
    for place, (row, param) in enumerate(zip(rows, _params(rows), strict=True)):
        size = param.numel()
        if not 0 < size <= SMALL:
            runs.append([place])
        elif bundle is not None and total + size <= BUNDLE and _joins(rows[bundle[-1]], row):
            bundle.append(place)
            total += size
        else:
            bundle, total = [place], size
            runs.append(bundle)
    return runs


def _joins(last: Row, row: Row) -> bool:
    return (
        last.kind == row.kind
        and _stackable(last.marginals, row.marginals)
        and last.counted == row.counted
        and all(t.is_contiguous() for r in (last, row) for t in r.written)
        and all(_adjoins(a, b) for a, b in zip(last.state, row.state, strict=True))
    )


def _stackable(last: Marginals | None, own: Marginals | None) -> bool:
    """Whether their parameters, end to end, are a stack of matrices."""
    if last is None or own is None:
        return last is own
    return last.shape == own.shape and last.spread is own.spread is None


def _end_to_end(several: list[Marginals]) -> list[Marginals]:
    """The same, with room for their factors end to end."""
    if len(several) < 2:
        return several
    columns = zip(*(own.factors for own in several), strict=True)
    rooms = zip(*(torch.stack(column).unbind() for column in columns), strict=True)
    return [replace(own, factors=room) for own, room in zip(several, rooms, strict=True)]


def _adjoins(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether ``b`` begins where ``a`` ends."""
    if a is None or b is None:
        return a is b
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
    )


def _spanning(tensors: Sequence[Tensor]) -> Tensor:
    """One flat view over tensors that adjoin."""
    if len(tensors) == 1:
        return flat(tensors[0])
    return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
