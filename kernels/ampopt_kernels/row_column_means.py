"""Means over the rows, or the columns, of a parameter, as Adafactor takes them.

A step sums terms over rows and columns (``Backend.sum_lines``), adds up the sums of all ranks, and
computes from the means new states, and *factors* (:func:`advance`). ``reduce`` and ``update`` read
the factors, broadcast over the parameter. Means are small, so all backends compute with them in
torch operations. The sums read whole gradients: the CPU backend has a compiled loop for them
(``averages`` in ``cpu.loops``), Triton a kernel (``triton.row_column_sums``).

A *line* is a row or a column. Rows and columns here are those of matrices: the last two dimensions
of a parameter.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.state import shape_of_lines
from ampopt_kernels.tensors import widest

__all__ = ["LineSums", "RowColumnMeans", "advance", "sums_of"]

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

    def zero_sums(self) -> list[Tensor]:
        """As :attr:`LineSums.sums` for this rank's shard, in a stack of one: zeros."""
        device = self.factors[0].device
        shapes = ((1, *factor.shape) for factor in self.factors)
        return [torch.zeros(shape, dtype=widest(device), device=device) for shape in shapes]

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


class LineSums(NamedTuple):
    """The sums over the lines of a stack: parameters of one shape that have gradients.

    Attributes:
        members: the index of each parameter's row in the work; of one alone if it is sharded.
        sums: for each mean, the sums: ``widest``, shape (parameters, *shape of the lines).
        h: the numbers that ``averages`` gets, each of which broadcasts over the stack.
    """

    members: tuple[int, ...]
    sums: list[Tensor]
    h: tuple[Any, ...]


def advance(work: Any, lines: LineSums, skipped: Tensor | None) -> None:
    """Compute new states and factors from the sums of this step, and store them.

    As many launches for a stack as for one parameter. A mean that ``Rule.factors`` computes may be
    rounded differently in a stack.

    Args:
        work: the rows of one device.
        lines: the sums over lines, of whole parameters.
        skipped: whether to keep the old states: bool, 0-d. ``None`` if the host knows that the
            step is not skipped.
    """
    several = [work.rows[i].row_column_means for i in lines.members]
    first, flags = several[0], work.rows[lines.members[0]].flags
    if 0 in first.whole_shape:  # there is nothing to average over
        return
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    dtype, (m, n) = first.factors[0].dtype, first.whole_shape[-2:]
    means = tuple(
        (sums / (n if over == "rows" else m)).to(dtype)
        for sums, over in zip(lines.sums, first.over, strict=True)
    )
    states: list[Any] = list(zip(*(own.states for own in several), strict=True))
    old = [torch.stack(own) if len(own) > 1 else own[0][None] for own in states]
    new, factors = (), means
    if work.rule.factors is not None:
        new, factors = work.rule.factors(means, tuple(x.to(dtype) for x in old), lines.h, flags)
    for tensors, before, after in zip(states, old, new, strict=True):
        after = after.to(before.dtype)
        copy(tensors, (after if skipped is None else torch.where(skipped, before, after)).unbind())
    for i, factor in enumerate(factors):
        if first.shard is None:
            copy([own.factors[i] for own in several], factor.unbind())
        else:
            first.shard.take(first.over[i], factor[0], first.factors[i])


def sums_of(work: Any, index: int, coefficients: Sequence[Any]) -> list[Tensor]:
    """For each mean, the term of ``rule.averages`` summed over the lines of one row's shard.

    Args:
        work: the rows of one device.
        index: the index of the row.
        coefficients: the reciprocal of the loss scale, the clip coefficient, then the numbers that
            ``averages`` gets; numbers, or 0-d tensors of the arithmetic dtype.

    Returns:
        As :attr:`LineSums.sums`, in a stack of one.
    """
    row = work.rows[index]
    own, (inverse, clip, *h) = row.row_column_means, coefficients
    dtype, device, sums = row.compute_dtype, work.device, own.zero_sums()
    averages = work.rule.on_tensors("averages", dtype)
    *batch, m, n = own.shape
    stack = math.prod(batch), m, n
    tensors = [t.view(stack) for t in (work.grads[index], *row.decoded_inputs)]
    totals = [s.view(shape_of_lines(stack, over)) for s, over in zip(sums, own.over, strict=True)]
    for some, rows in _chunks(*stack, _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK_ON_DEVICES):
        g, p, *state = (t[some, rows].to(dtype) for t in tensors)
        terms = averages(p, g * inverse * clip, tuple(state), tuple(h), row.flags)
        for total, over, term in zip(totals, own.over, terms, strict=True):
            at, dim = ((some, rows), -1) if over == "rows" else (some, -2)
            total[at] += term.sum(dim, keepdim=True, dtype=total.dtype)
    return sums


def _chunks(matrices: int, m: int, n: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of whole matrices, or of the rows of one, of about ``size`` elements."""
    some, rows = max(size // max(m * n, 1), 1), max(size // max(n, 1), 1)
    for first in range(0, matrices, some):
        for row in range(0, m, rows):
            yield slice(first, first + some), slice(row, row + rows)
