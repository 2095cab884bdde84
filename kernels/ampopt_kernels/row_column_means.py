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

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.state import shape_of_lines
from ampopt_kernels.tensors import widest

__all__ = ["LineSums", "RowColumnMeans", "add_sums", "advance", "of_rows", "stacks_of", "zero_sums"]

_MANY = 1 << 15
"""Lines beyond which a matrix is not stacked: torch may divide their mean among threads, and then
rounds it differently in a stack. The operations on so many take longer than it takes to start them.
"""
_CHUNK_ON_CPU, _CHUNK_ON_DEVICES = 1 << 16, 1 << 24
"""Elements whose terms are in memory at a time; on a CPU, as many as fit the cache of a core."""


class RowColumnMeans:
    """The means that a step takes of one parameter, of two dimensions or more, and their results.

    Attributes:
        over: ``"rows"`` or ``"columns"`` for each mean: what there is one value for.
        states: the states that have a ``shape``, of the whole parameter, also if it is sharded.
        factors: for each mean, the tensor that kernels read: one value for each row, or column, of
            this rank's shard, contiguous, in the arithmetic dtype. Each step overwrites it.
        shape: shape of this rank's shard.
        whole_shape: shape of the whole parameter.
        shard: for a sharded parameter, its :class:`~ampopt._step.sharding.shards.ShardedMatrix`;
            else ``None``.
    """

    def __init__(
        self,
        over: tuple[str, ...],
        states: Sequence[Tensor],
        param: Tensor,
        dtype: torch.dtype,
        shard: Any = None,
    ) -> None:
        """Make factors of 0.

        Args:
            over: see the attribute.
            states: see the attribute.
            param: this rank's shard of the parameter, or the whole parameter.
            dtype: the arithmetic dtype.
            shard: see the attribute.
        """
        self.over, self.states, self.shard = over, states, shard
        self.shape = tuple(param.shape)
        self.whole_shape = self.shape if shard is None else shard.shape
        shapes = (shape_of_lines(self.shape, over) for over in self.over)
        self.factors = [torch.zeros(x, dtype=dtype, device=param.device) for x in shapes]

    @functools.cached_property
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


def stacks_of(rows: Iterable[Any]) -> list[list[int]]:
    """The indices of the ``rows`` of each stack: of one shape and kind. A shard is alone."""
    stacks: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        own = row.row_column_means
        if own is not None:
            alone = own.shard is not None or any(x.numel() > _MANY for x in own.factors)
            kind = row.kind, own.over, own.shape, index if alone else None
            stacks.setdefault(kind, []).append(index)
    return list(stacks.values())


class LineSums(NamedTuple):
    """The sums over lines of one step, and what else the new states are computed from.

    Attributes:
        of_stacks: for each of ``work.line_stacks`` and each mean, the sums: ``widest``, shape
            (parameters, *shape of the lines). Those of a parameter without a gradient are unused.
        h: for each row of the work the numbers that ``averages`` gets: tuples of Python's numbers,
            or a tensor: ``widest``, shape (rows of the work, numbers).
    """

    of_stacks: list[list[Tensor]]
    h: Tensor | Sequence[tuple[float, ...]]


def zero_sums(work: Any) -> list[list[Tensor]]:
    """Zeros like :attr:`LineSums.of_stacks`, for the shards of this rank."""
    wide, device = widest(work.device), work.device
    return [
        [
            torch.zeros((len(members), *factor.shape), dtype=wide, device=device)
            for factor in work.rows[members[0]].row_column_means.factors
        ]
        for members in work.line_stacks
    ]


def of_rows(work: Any, of_stacks: list[list[Tensor]]) -> dict[int, list[Tensor]]:
    """By the index of each row that has means, its part of :attr:`LineSums.of_stacks`."""
    return {
        index: own
        for members, sums in zip(work.line_stacks, of_stacks, strict=True)
        for index, *own in zip(members, *map(Tensor.unbind, sums), strict=True)
    }


def advance(work: Any, lines: LineSums, skipped: Tensor | None) -> None:
    """Compute new states and factors from the sums of this step, and store them.

    As many launches for a stack as for one parameter. On a GPU, a mean that ``Rule.factors``
    computes may be rounded differently in a stack.

    Args:
        work: the rows of one device.
        lines: the sums over lines, of whole parameters.
        skipped: whether to keep the old states: bool, 0-d. ``None`` if the host knows that the
            step is not skipped.
    """
    for members, sums in zip(work.line_stacks, lines.of_stacks, strict=True):
        if 0 in work.rows[members[0]].row_column_means.whole_shape:
            continue  # there is nothing to average over
        alike: dict[Any, list[int]] = {}  # by their numbers, if the host has them
        for place, index in enumerate(members):
            if work.is_present(index):
                numbers = None if isinstance(lines.h, Tensor) else lines.h[index]
                alike.setdefault(numbers, []).append(place)
        for numbers, places in alike.items():
            present = [members[place] for place in places]
            chosen = [_chosen(work, x, f"sums with {present[0]}", places) for x in sums]
            if numbers is None:
                row = work.rows[present[0]]
                h = _chosen(work, lines.h, f"rows with {present[0]}", present).to(row.compute_dtype)
                each = len(present), *[1] * len(row.row_column_means.shape)
                numbers = h.T.reshape(-1, *each).unbind()  # each broadcasts over the stack
            _advance_stack(work, present, chosen, numbers, skipped)


def _chosen(work: Any, tensor: Any, name: str, indices: list[int]) -> Tensor:
    """The entries of ``tensor`` at the ``indices`` of this name, which increase."""
    if len(indices) == len(tensor):
        return tensor
    return tensor[work.uploads.get(name, indices, torch.int64, work.device)]


def _advance_stack(
    work: Any, members: list[int], sums: list[Tensor], h: tuple[Any, ...], skipped: Tensor | None
) -> None:
    """:func:`advance` the rows ``members`` of one stack, which have gradients."""
    several = [work.rows[i].row_column_means for i in members]
    first, row = several[0], work.rows[members[0]]
    dtype, (m, n) = row.compute_dtype, first.whole_shape[-2:]
    means = tuple(
        (total / (n if over == "rows" else m)).to(dtype)
        for total, over in zip(sums, first.over, strict=True)
    )
    states: list[Any] = list(zip(*(own.states for own in several), strict=True))
    old = [torch.stack(own) if len(own) > 1 else own[0][None] for own in states]
    new, factors = (), means
    if work.rule.factors is not None:
        new, factors = work.rule.factors(means, tuple(x.to(dtype) for x in old), h, row.flags)
    written: list[Tensor] = []
    values: list[Tensor] = []
    for tensors, before, after in zip(states, old, new, strict=True):
        written += tensors
        values += (after if skipped is None else torch.where(skipped, before, after)).unbind()
    for i, factor in enumerate(factors):
        if first.shard is None:
            written += [own.factors[i] for own in several]
            values += factor.unbind()
        else:
            first.shard.take(first.over[i], factor[0], first.factors[i])
    if written:
        torch._foreach_copy_(written, values)  # pyright: ignore[reportPrivateImportUsage]


def add_sums(work: Any, index: int, coefficients: Sequence[Any], sums: Sequence[Tensor]) -> None:
    """Add, for each mean, the term of ``rule.averages`` summed over the lines of one row's shard.

    Args:
        work: the rows of one device.
        index: the index of the row.
        coefficients: the reciprocal of the loss scale, the clip coefficient, then the numbers that
            ``averages`` gets; numbers, or 0-d tensors of the arithmetic dtype.
        sums: for each mean the sums, added to in place: ``widest``, of the shape of the lines.
    """
    row = work.rows[index]
    own, (inverse, clip, *h), dtype = row.row_column_means, coefficients, row.compute_dtype
    averages = work.rule.on_tensors("averages", dtype)
    *batch, m, n = own.shape
    stack = math.prod(batch), m, n
    tensors = [t.view(stack) for t in (work.grads[index], *row.decoded_inputs)]
    totals = [s.view(shape_of_lines(stack, over)) for s, over in zip(sums, own.over, strict=True)]
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
