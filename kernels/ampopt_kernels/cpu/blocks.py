"""Blocks: rows whose scalar states advance together, divided into bundles; kept between steps.

The scalar states of the rows of a block, such as their step counts, are adjacent in memory, or are
copied to scratch and back. Step counts differ only where some step had no gradient for some row.
``Rule.scalars`` runs once for rows with equal counts, on Python numbers; where counts differ, its
results are kept from step to step.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.bundles import Bundle, Copies, Numbers, as_one
from ampopt_kernels.cpu.numbers import common
from ampopt_kernels.rule import Rule
from ampopt_kernels.sums import Sums
from ampopt_kernels.work import ParamRow, Work

__all__ = ["Block", "Bundles"]

MOST_STAGES = 1 << 12
"""Stages that are kept for a block, in addition to one for each row."""
FEW_STAGES = 1 << 6
"""Stages for which Python numbers take less time than tensors."""
AHEAD = 8
"""Steps for which ``Rule.scalars`` runs at a time, where hyperparameters do not change."""
_FORMATS = {torch.float32: "f", torch.float64: "d"}  # of ``array``, for scalar states


class Stages:
    """The scalar states of rows whose step counts differ, and the results of ``Rule.scalars``.

    A *stage* is a tuple of scalar states that rows have, or had in an earlier step. A step moves
    rows from one stage to the next. ``Rule.scalars`` runs once for each stage; what is done for
    each row are a few torch operations.

    Attributes:
        of_rows: the index of the stage of each row, int64.
    """

    def __init__(
        self,
        rule: Rule,
        flags: tuple[bool, ...],
        hyper: tuple[float, ...],
        scalars: Sequence[Tensor | None],
    ) -> None:
        """Find the stages of the rows.

        Args:
            rule: the update rule.
            flags: its flags.
            hyper: its hyperparameters.
            scalars: for each scalar state, its values, of shape (rows,), which a step overwrites;
                ``None`` where the flags omit it.
        """
        self._rule, self._flags, self._hyper, self._scalars = rule, flags, hyper, scalars
        self._last_scalars = [None if s is None else s.clone() for s in scalars]
        self._formats = [None if s is None else _FORMATS[s.dtype] for s in scalars]
        self._runs = 1  # as hyperparameters may change in every step
        self._width = 2 + rule.width(len(hyper))
        # Of each stage: its scalar states, the index of the next one, and the numbers of update.
        self._values, self._next, self._table = array("d"), array("q"), array("d")
        self._indices: dict[bytes, int] = {}
        columns = [None if s is None else s.to(torch.float64) for s in scalars]
        distinct, examples = _distinct([c.view(torch.int64) for c in columns if c is not None])
        none = [0.0] * len(examples)
        values = (none if c is None else c[examples].tolist() for c in columns)
        indices = list(map(self._index_of, zip(*values, strict=True)))
        self.of_rows = torch.tensor(indices, device="cpu")[distinct]

    def fit(self) -> bool:
        """Return whether the rows are where the last step left them."""
        pairs = zip(self._last_scalars, self._scalars, strict=True)
        return len(self._next) <= MOST_STAGES + len(self.of_rows) and all(
            old is None or s is None or torch.equal(old, s) for old, s in pairs
        )

    def advance(
        self, hyper: tuple[float, ...], coefficients: tuple[float, ...], mask: Tensor | None
    ) -> Numbers:
        """Move the rows in ``mask`` to their next stages, and store their scalar states.

        Returns:
            ``coefficients`` and the ``h`` of ``update`` for every row, until the next call.
        """
        if array("d", self._hyper).tobytes() != array("d", hyper).tobytes():  # tells -0.0 from 0.0
            self._hyper, self._runs = hyper, 1
            self._next = array("q", (-1,)) * len(self._next)  # results are for other numbers
        before = self.of_rows
        after = torch.frombuffer(self._next, dtype=torch.int64)[before]
        if after.min().item() < 0:
            stages = set(before[after < 0].tolist())
            for _ in range(self._runs):
                self._run(sorted(stages))
                stages = {self._next[i] for i in stages if self._next[self._next[i]] < 0}
            after = torch.frombuffer(self._next, dtype=torch.int64)[before]
        self._runs = AHEAD
        self.of_rows = after if mask is None else torch.where(mask, after, before)
        values = torch.frombuffer(self._values, dtype=torch.float64).view(
            -1, len(self._last_scalars)
        )
        for i, new in enumerate(values[self.of_rows].unbind(1)):
            if (scalar := self._scalars[i]) is not None:
                scalar.copy_(new)
                self._last_scalars[i] = scalar.clone()
        for i, coefficient in enumerate(coefficients):
            self._table[i :: self._width] = array("d", (coefficient,)) * len(self._next)
        table = torch.frombuffer(self._table, dtype=torch.float64).view(-1, self._width)
        return Numbers(table, before)

    def _run(self, stages: list[int]) -> None:
        """Run ``Rule.scalars`` for ``stages``, whose next ones become known."""
        n, width = len(self._last_scalars), self._width
        old = [tuple(self._values[n * i : n * (i + 1)]) for i in stages]
        if len(stages) <= FEW_STAGES:
            scalars, arguments = self._rule.scalars_on_numbers, (self._hyper, self._flags)
            results: Any = (scalars(s, *arguments) for s in old)
        else:
            arguments = _wide(self._hyper), self._flags
            columns = self._rule.host_scalars(_wide(zip(*old, strict=True)), *arguments)
            results = zip(*(_rows(x, len(stages)) for x in columns), strict=True)
        for i, (new_s, h) in zip(stages, results, strict=True):
            self._next[i] = self._index_of(new_s)
            self._table[width * i + 2 : width * (i + 1)] = array("d", map(float, h))

    def _index_of(self, scalars: Sequence[float]) -> int:
        """Return the index of the stage that has ``scalars`` once they are stored."""
        pairs = zip(self._formats, scalars, strict=True)
        stage = array("d", [array(format, (x,))[0] if format else 0.0 for format, x in pairs])
        # As bits, -0.0 and 0.0 differ, and NaN equals itself.
        index = self._indices.setdefault(stage.tobytes(), len(self._next))
        if index == len(self._next):
            self._next.append(-1)
            self._values.extend(stage)
            self._table.extend([0.0] * self._width)
        return index


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
        stages: those of the rows, where their step counts differ.
    """

    group: int
    rows: list[ParamRow]
    start: int
    scalars: list[Tensor | None] = field(default_factory=list)
    scattered: list[Copies] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)
    stages: Stages | None = None

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
        self,
        rule: Rule,
        hyper: Sequence[Sequence[Any]],
        coefficients: tuple[float, ...],
        present: bytearray | None,
    ) -> Numbers:
        """Return ``coefficients`` and the ``h`` of ``Rule.reduce``, as :meth:`advance` does."""
        for scalars in self.scattered:
            scalars.load()
        _, h = rule.host_before_reduce(*self._scalars_and_hyper(hyper))
        numbers = self._numbers((*coefficients, *h))
        return numbers if present is None else numbers.of_present(self._mask(present))

    def advance(
        self,
        rule: Rule,
        hyper: Sequence[Sequence[Any]],
        coefficients: tuple[float, ...],
        sums: Sums | None,
        present: bytearray | None,
    ) -> Numbers:
        """Advance the scalar states in place, of the rows that have a gradient.

        Args:
            rule: the update rule.
            hyper: the hyperparameters of every param group.
            coefficients: the reciprocal of the scale, and the clip coefficient.
            sums: the sums of all rows of the work, if the rule has a ``reduce``.
            present: :attr:`Work.present`, for all rows of the work.

        Returns:
            ``coefficients`` and the ``h`` of ``Rule.update``.
        """
        for scalars in self.scattered:
            scalars.load()
        mask = None if present is None else self._mask(present)
        if sums is not None:
            s, h, flags = self._scalars_and_hyper(hyper)
            s, h = rule.host_before_reduce(s, h, flags)
            each = sums.each[self.start : self.start + len(self.rows)].unbind(1)
            new_s, h = rule.host_scalars(s, h, flags, each, sums.totals.unbind())
            self._store(new_s, mask)
            numbers = self._numbers((*coefficients, *h))
        else:
            h, flags = tuple(map(float, hyper[self.group])), self.rows[0].flags
            counts: list[Any] = [0.0 if s is None else common(s) for s in self.scalars]
            if None in counts:
                if self.stages is None or not self.stages.fit():
                    self.stages = Stages(rule, flags, h, self.scalars)
                numbers = self.stages.advance(h, coefficients, mask)
            else:
                new_s, h = rule.scalars_on_numbers(tuple(counts), h, flags)
                self._store(new_s, mask)
                numbers = _same_numbers((*coefficients, *map(float, h)))
        for scalars in self.scattered:
            scalars.store()
        return numbers if mask is None else numbers.of_present(mask)

    def _store(self, new_s: Sequence[Any], mask: Tensor | None) -> None:
        """Write new scalar states, numbers or tensors, of the rows in ``mask``."""
        for scalar, value in zip(self.scalars, new_s, strict=True):
            if scalar is not None:
                new = value if mask is None else torch.where(mask, value, scalar)
                scalar.copy_(new) if isinstance(new, Tensor) else scalar.fill_(new)

    def _mask(self, present: bytearray) -> Tensor:
        """Return :attr:`Work.present` of the rows of this block, of shape (rows,)."""
        start, n = self.start, len(self.rows)
        return torch.frombuffer(present, dtype=torch.bool, offset=start, count=n)

    def _scalars_and_hyper(
        self, hyper: Sequence[Sequence[Any]]
    ) -> tuple[Any, Any, tuple[bool, ...]]:
        """Return scalar states and hyperparameters as float64 tensors, and the flags."""
        none = torch.zeros(len(self.rows), dtype=torch.float64, device="cpu")
        # Copies, also of float64 states: a rule may return a state as ``h``, which is read after
        # the state has been overwritten.
        s = tuple(none if s is None else s.to(torch.float64, copy=True) for s in self.scalars)
        return s, _wide(hyper[self.group]), self.rows[0].flags

    def _numbers(self, h: tuple[Any, ...]) -> Numbers:
        """Return the numbers ``h``, 0-d tensors, and tensors of shape (rows,)."""
        if not any(isinstance(x, Tensor) and x.ndim for x in h):
            return _same_numbers(tuple(map(float, h)))
        table = torch.stack([x.expand(len(self.rows)) for x in _wide(h)], 1)
        return Numbers(table, torch.arange(len(self.rows), device="cpu"))


def _same_numbers(h: tuple[float, ...]) -> Numbers:
    """Return the numbers ``h``, the same for all rows."""
    return Numbers(torch.frombuffer(array("d", h), dtype=torch.float64)[None])


def _distinct(columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Find the rows that have the same integers.

    Args:
        columns: int64, of shape (rows,); at least one.

    Returns:
        For each row a number, the same for rows with the same integers; and by this number, the
        index of such a row.
    """
    numbers = torch.zeros_like(columns[0])
    for column in columns:
        values, places = torch.unique(column, return_inverse=True)
        _, numbers = torch.unique(numbers * len(values) + places, return_inverse=True)
    examples = torch.empty(int(numbers.max()) + 1, dtype=torch.int64, device="cpu")
    return numbers, examples.scatter_(0, numbers, torch.arange(len(numbers), device="cpu"))


def _wide(numbers: Iterable[Any]) -> tuple[Tensor, ...]:
    """Each number as a 0-d float64 tensor."""
    # Tensors, not numbers: torch computes number / tensor as number * (1 / tensor), which rounds
    # twice. The result of a row would depend on the step counts of the others.
    return tuple(torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in numbers)


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
        update_bundles: the same rows as ``update`` takes them; a backend may divide bundles more.
        prepared_by: the backend whose functions in the bundles are final; ``None`` if a backend
            has to prepare them again.
    """

    bundles: list[tuple[Block, Bundle]]
    prepared_by: Any = None
    update_bundles: list[tuple[Block, Bundle]] = field(init=False)

    def __post_init__(self) -> None:
        """Update bundles as they are, until a backend divides them."""
        self.update_bundles = self.bundles

    def gather(self, work: Work) -> list[Tensor]:
        """Return the gradients of this step as ``update`` reads them."""
        grads: list[Any] = [bundle.gather(work) for _, bundle in self.update_bundles]
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
        block_list = [Block.of(rows, start) for rows, start in zip(blocks, starts, strict=False)]
        return Bundles([(block, bundle) for block in block_list for bundle in block.bundles])


def _advance_together(last: ParamRow, row: ParamRow) -> bool:
    """Whether ``row`` may follow ``last`` in a block: same group, same scalars present."""
    return last.group == row.group and all(
        (a is None) is (b is None) for a, b in zip(last.scalars, row.scalars, strict=True)
    )
