"""Means over the rows, or the columns, of a parameter, as Adafactor takes them.

A step sums terms over rows and columns (``Backend.sum_lines``), adds up the sums of all ranks, and
computes from the means new states, and *factors* (:func:`advance`). ``reduce`` and ``update`` read
the factors, broadcast over the parameter. Means are small, so all backends compute with them in
torch operations, on a *stack* at a time: all matrices of one shape. The sums read whole gradients:
the CPU backend has a compiled loop for them (``averages`` in ``cpu.loops``), Triton a kernel
(``triton.row_column_sums``).

A *line* is a row or a column. Rows and columns here are those of matrices: the last two dimensions
of a parameter.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.state import shape_of_lines
from ampopt_kernels.tensors import widest

__all__ = ["RowColumnMeans", "Stack", "add_sums", "advance", "stacks_of"]

_MANY = 1 << 15
"""Lines beyond which a matrix is not stacked: torch may divide their mean among threads, and then
rounds it differently in a stack. The operations on so many take longer than it takes to start them.
"""
_CHUNK_ON_CPU, _CHUNK_ON_DEVICES = 1 << 16, 1 << 24
"""Elements whose terms are in memory at a time; on a CPU, as many as fit the cache of a core."""


@dataclass(eq=False)
class RowColumnMeans:
    """The means that a step takes of one parameter, of two dimensions or more, and their results.

    Attributes:
        over: ``"rows"`` or ``"columns"`` for each mean: what there is one value for.
        states: the states that have a ``shape``, of the whole parameter, also if it is sharded.
        shape: shape of this rank's shard.
        shard: for a sharded parameter, its :class:`~ampopt._step.sharding.shards.ShardedMatrix`;
            else ``None``.
        factors: for each mean, the tensor that kernels read: one value for each row, or column, of
            this rank's shard, contiguous, in the arithmetic dtype. Each step overwrites it. A view
            of the :attr:`Stack.factors`, made with the work.
        sums: for each mean, the sums over the lines of this rank's shard: a view of the
            :attr:`Stack.sums`.
    """

    over: tuple[str, ...]
    states: Sequence[Tensor]
    shape: tuple[int, ...]
    shard: Any = None
    factors: list[Tensor] = field(init=False)
    sums: list[Tensor] = field(init=False)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.shape if self.shard is None else self.shard.shape

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the factors, then row and column count of the shard."""
        return (*map(Tensor.data_ptr, self.factors), *self.shape[-2:])

    def at(self, start: int, end: int) -> tuple[Tensor, ...]:
        """The factors of the elements from ``start`` to ``end``, each 1-d."""
        m, n = self.shape[-2:]
        places = torch.arange(start, end, device=self.factors[0].device)
        rows = places // n
        columns = rows // m * n + places % n
        return tuple(
            factor.reshape(-1)[rows if over == "rows" else columns]
            for factor, over in zip(self.factors, self.over, strict=True)
        )


class Stack:
    """Parameters of one shape and kind, whose means are computed together. A shard is alone.

    Attributes:
        members: the indices of their rows in the work.
        factors: for each mean, the factors of all members: shape (members, *shape of the lines).
        sums: for each mean, the sums over lines of this step: ``widest``, with the same shape.
            Those of a parameter without a gradient are unused.
        whole_sums: the sums over lines of whole parameters, from which the means are computed.
    """

    def __init__(self, members: list[int], rows: Sequence[Any]) -> None:
        """Make factors and sums, zeros, of ``members`` of ``rows``, which get views of them."""
        self.members, row = members, rows[members[0]]
        own, device = row.row_column_means, row.param.device
        shapes = [(len(members), *shape_of_lines(own.shape, over)) for over in own.over]
        self.factors, self.sums = (
            [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
            for dtype in (row.compute_dtype, widest(device))
        )
        self.whole_sums = self.sums
        for place, index in enumerate(members):
            own = rows[index].row_column_means
            own.factors, own.sums = ([x[place] for x in t] for t in (self.factors, self.sums))


def stacks_of(rows: Sequence[Any]) -> list[Stack]:
    """The stacks of all ``rows`` that have means."""
    stacks: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        own = row.row_column_means
        if own is not None:
            lines = (math.prod(shape_of_lines(own.shape, over)) for over in own.over)
            alone = own.shard is not None or max(lines) > _MANY
            kind = row.kind, own.over, own.shape, index if alone else None
            stacks.setdefault(kind, []).append(index)
    return [Stack(members, rows) for members in stacks.values()]


def advance(work: Any, h: Tensor, skipped: Tensor | None) -> None:
    """Compute new states and factors from the sums of this step, and store them.

    As many launches for a stack as for one parameter. On a GPU, a mean that ``Rule.factors``
    computes may be rounded differently in a stack.

    Args:
        work: the rows of one device.
        h: as :meth:`~ampopt_kernels.step.Backend.sum_lines` returns it.
        skipped: whether to keep the old states: bool, 0-d. ``None`` if the host knows that the
            step is not skipped.
    """
    for stack in work.line_stacks:
        members, several = stack.members, [work.rows[i].row_column_means for i in stack.members]
        present, first = [work.is_present(i) for i in members], several[0]
        if 0 in first.whole_shape or not any(present):
            continue  # there is nothing to average over
        row = work.rows[members[0]]
        dtype, (m, n) = row.compute_dtype, first.whole_shape[-2:]
        own_h = h
        if len(members) < len(h):
            at = work.uploads.get(f"rows with {members[0]}", members, torch.int64, work.device)
            own_h = h[at]
        # Each number broadcasts over the stack.
        own_h = own_h.to(dtype).view(*own_h.shape, *[1] * len(first.shape)).unbind(1)
        means = tuple(
            (total / (n if over == "rows" else m)).to(dtype)
            for total, over in zip(stack.whole_sums, first.over, strict=True)
        )
        states: list[Any] = list(zip(*(own.states for own in several), strict=True))
        old = [torch.stack(own) if len(own) > 1 else own[0][None] for own in states]
        new, factors = (), means
        if work.rule.factors is not None:
            new, factors = work.rule.factors(
                means, tuple(x.to(dtype) for x in old), own_h, row.flags
            )
        written: list[Tensor] = []
        values: list[Tensor] = []
        for tensors, before, after in zip(states, old, new, strict=True):
            kept = after if skipped is None else torch.where(skipped, before, after)
            written += compress(tensors, present)
            values += compress(kept.unbind(), present)
        if first.shard is None:
            written += stack.factors
            values += factors
        else:
            for over, factor, own in zip(first.over, factors, first.factors, strict=True):
                first.shard.take(over, factor[0], own)
        if written:
            torch._foreach_copy_(written, values)  # pyright: ignore[reportPrivateImportUsage]


def add_sums(work: Any, index: int, coefficients: Sequence[Any]) -> None:
    """Add each term of ``rule.averages``, summed over the lines of a row's shard, to its sums.

    Args:
        work: the rows of one device.
        index: the index of the row.
        coefficients: the reciprocal of the loss scale, the clip coefficient, then the numbers that
            ``averages`` gets; numbers, or 0-d tensors of the arithmetic dtype.
    """
    row = work.rows[index]
    own, (inverse, clip, *h), dtype = row.row_column_means, coefficients, row.compute_dtype
    averages = work.rule.on_tensors("averages", dtype)
    *batch, m, n = own.shape
    stack = math.prod(batch), m, n
    tensors = [t.view(stack) for t in (work.grads[index], *row.decoded_inputs)]
    totals = [x.view(shape_of_lines(stack, o)) for x, o in zip(own.sums, own.over, strict=True)]
    chunk = _CHUNK_ON_CPU if work.device.type == "cpu" else _CHUNK_ON_DEVICES
    for some, rows in _chunks(*stack, chunk):
        g, p, *state = (t[some, rows].to(dtype) for t in tensors)
        terms = averages(p, g * inverse * clip, tuple(state), tuple(h), row.flags)
        for total, over, term in zip(totals, own.over, terms, strict=True):
            at, dim = ((some, rows), -1) if over == "rows" else (some, -2)
            total[at] += term.sum(dim, keepdim=True, dtype=total.dtype)


def _chunks(matrices: int, m: int, n: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of whole matrices, or of the rows of one, of about ``size`` elements."""
    some, rows = max(size // max(m * n, 1), 1), max(size // max(n, 1), 1)
    for first in range(0, matrices, some):
        for row in range(0, m, rows):
            yield slice(first, first + some), slice(row, row + rows)
