"""Means over the rows, or the columns, of a parameter, as Adafactor takes them.

A step sums terms over rows and columns (``Backend.sum_lines``), adds up the sums of all ranks, and
computes from the means new states, and *factors* (:func:`advance`). ``reduce`` and ``update`` read
the factors, broadcast over the parameter. Means are small, so all backends compute with them in
torch operations. The sums read whole gradients: the CPU backend has a compiled loop for them
(``averages`` in ``cpu.loops``), Triton a kernel (``triton.lines``).

A *line* is a row or a column. Rows and columns here are those of matrices: the last two dimensions
of a parameter.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.state import shape_of_lines
from ampopt_kernels.tensors import widest

__all__ = ["EVEN", "LineSums", "RowColumnMeans", "advance", "sums_of"]

_CHUNK_ON_CPU, _CHUNK_ON_DEVICES = 1 << 16, 1 << 24
"""Elements whose terms are in memory at a time; on a CPU, as many as fit the cache of a core."""

EVEN = 1 << 4
"""A number that divides most row lengths: that many neighbours are in one row, and are read at
once."""


@dataclass
class RowColumnMeans:
    """The means that a step takes of one parameter, of two dimensions or more, and their results.

    Attributes:
        over: ``"rows"`` or ``"columns"`` for each mean: what there is one value for.
        states: the states that have a ``shape``, of the whole parameter, also if it is sharded.
        factors: for each mean, the tensor that kernels read: one value for each row, or column, of
            this rank's shard, contiguous, in the arithmetic dtype. Each step overwrites it.
        shape: shape of this rank's shard.
        shard: for a sharded parameter, its :class:`~ampopt._step.sharding.shards.ShardedMatrix`;
            else ``None``.
    """

    over: tuple[str, ...]
    states: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    shape: tuple[int, ...]
    shard: Any = None

    @staticmethod
    def of(
        over: tuple[str, ...],
        states: Sequence[Tensor],
        param: Tensor,
        dtype: torch.dtype,
        shard: Any = None,
    ) -> "RowColumnMeans":
        """The means of ``param``, this rank's shard or the whole parameter, with factors of 0."""
        shape = tuple(param.shape)
        factors = [
            torch.zeros(shape_of_lines(shape, lines), dtype=dtype, device=param.device)
            for lines in over
        ]
        return RowColumnMeans(over, tuple(states), tuple(factors), shape, shard)

    @property
    def is_even(self) -> bool:
        """Whether ``EVEN`` divides the length of a row."""
        return self.shape[-1] % EVEN == 0

    @functools.cached_property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.shape if self.shard is None else self.shard.shape

    @functools.cached_property
    def of_rows(self) -> tuple[bool, ...]:
        """For each mean, whether there is one for each row, not for each column."""
        return tuple(lines == "rows" for lines in self.over)

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the factors, then row and column count of the shard."""
        return (*map(Tensor.data_ptr, self.factors), *self.shape[-2:])

    def zero_sums(self) -> list[Tensor]:
        """For each mean, zeros of the shard's shape of lines, in a stack of one: ``widest``."""
        device = self.factors[0].device
        shapes = (shape_of_lines(self.shape, lines) for lines in self.over)
        return [torch.zeros(1, *shape, dtype=widest(device), device=device) for shape in shapes]

    def at(self, start: int, end: int) -> tuple[Tensor, ...]:
        """The factors of the elements from ``start`` to ``end``, each 1-d."""
        m, n = self.shape[-2:]
        places = torch.arange(start, end, device=self.factors[0].device)
        rows = places // n
        columns = rows // m * n + places % n
        return tuple(
            factor.reshape(-1)[rows if of_rows else columns]
            for factor, of_rows in zip(self.factors, self.of_rows, strict=True)
        )


class LineSums(NamedTuple):
    """The sums over the lines of the parameters that have gradients; none in a skipped step.

    Attributes:
        stacks: the sums of parameters of one shape, as ``Backend.sum_lines`` stacks them. The key
            has the index of each parameter's row in the work, of one alone if it is sharded. The
            sums are, for each mean, ``widest``: shape (parameters, *shape of the lines).
        h: the numbers that ``averages`` gets: a tensor, shape (rows, width), or for each index a
            sequence of numbers, or 0-d tensors, for parameters that are not stacked.
    """

    stacks: dict[tuple[int, ...], list[Tensor]]
    h: Any


def advance(work: Any, lines: LineSums, skip: Tensor | None) -> None:
    """Compute new states and factors from the sums of this step, and store them.

    As many launches for a stack as for one parameter. A mean that ``Rule.factors`` computes may be
    rounded differently in a stack.

    Args:
        work: the rows of one device.
        lines: the sums over lines, of whole parameters.
        skip: more than 0 to keep the old states: 0-d. ``None`` if the host knows that the step is
            not skipped.
    """
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    keeps = None if skip is None else skip > 0
    for members, sums in lines.stacks.items():
        several = [work.rows[i].row_column_means for i in members]
        first, flags = several[0], work.rows[members[0]].flags
        dtype, (m, n) = first.factors[0].dtype, first.whole_shape[-2:]
        means = [(s / (n if r else m)).to(dtype) for s, r in zip(sums, first.of_rows, strict=True)]
        old = [_stack(states) for states in zip(*(own.states for own in several), strict=True)]
        new, factors = (), means
        if work.rule.factors is not None:
            h = _numbers_of(work, members, lines.h, dtype)
            states = tuple(state.to(dtype) for state in old)
            new, factors = work.rule.factors(tuple(means), states, h, flags)
        if first.shard is not None:
            here = zip(first.over, factors, strict=True)
            factors = [first.shard.here(over, factor[0])[None] for over, factor in here]
        targets = zip(*(own.states for own in several), strict=True)
        for tensors, state, value in zip(targets, old, new, strict=True):
            value = value.to(state.dtype)
            copy(tensors, (value if keeps is None else torch.where(keeps, state, value)).unbind())
        rooms = zip(*(own.factors for own in several), strict=True)
        for tensors, factor in zip(rooms, factors, strict=True):
            copy(tensors, factor.unbind())


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` along a new first dimension."""
    return torch.stack(tuple(tensors)) if len(tensors) > 1 else tensors[0][None]


def _numbers_of(work: Any, members: tuple[int, ...], h: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """The numbers of a stack, each of which broadcasts over it; see :attr:`LineSums.h`."""
    if not isinstance(h, Tensor):
        return tuple(h[members[0]])
    if len(members) < len(work.rows):
        name = f"rows averaged with {members[0]}"
        h = h[work.uploads.get(name, members, torch.int64, work.device)]
    dims = len(work.rows[members[0]].row_column_means.shape)
    return h.to(dtype).T.reshape(h.shape[1], -1, *[1] * dims).unbind()


def sums_of(work: Any, index: int, coefficients: Sequence[Any]) -> list[Tensor]:
    """For each mean, the term of ``rule.averages`` summed over the lines of one row's shard.

    Args:
        work: the rows of one device.
        index: the index of the row.
        coefficients: the reciprocal of the loss scale, the clip coefficient, then the numbers that
            ``averages`` gets; numbers, or 0-d tensors of the arithmetic dtype.

    Returns:
        As in :attr:`LineSums.stacks`, for one parameter.
    """
    row = work.rows[index]
    own, (inverse, clip, *h) = row.row_column_means, coefficients
    dtype, device, sums = row.compute_dtype, work.device, own.zero_sums()
    averages = work.rule.torch_averages_in(dtype)
    *batch, m, n = own.shape
    stack = math.prod(batch), m, n
    tensors = [t.view(stack) for t in (work.grads[index], *row.decoded_inputs)]
    totals = [s.view(shape_of_lines(stack, over)) for s, over in zip(sums, own.over, strict=True)]
    for some, rows in _chunks(*stack, _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK_ON_DEVICES):
        g, p, *state = (t[some, rows].to(dtype) for t in tensors)
        terms = averages(p, g * inverse * clip, tuple(state), tuple(h), row.flags)
        for total, of_rows, term in zip(totals, own.of_rows, terms, strict=True):
            at = (some, rows) if of_rows else some
            total[at] += term.sum(-1 if of_rows else -2, keepdim=True, dtype=total.dtype)
    return sums


def _chunks(matrices: int, m: int, n: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of whole matrices, or of the rows of one, of about ``size`` elements."""
    some, rows = max(size // max(m * n, 1), 1), max(size // max(n, 1), 1)
    for first in range(0, matrices, some):
        for row in range(0, m, rows):
            yield slice(first, first + some), slice(row, row + rows)
