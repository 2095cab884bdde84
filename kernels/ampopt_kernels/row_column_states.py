"""States with one value for each row, or each column, of a parameter, as Adafactor has them.

A step sums terms over rows and columns (:func:`sums_of`), divides the sums by the lengths, and
computes new states and *factors* from these means (:func:`advance`). ``reduce`` and ``update`` read
the factors, broadcast over the parameter. The states are small, so all backends advance them with
torch operations. The sums read whole gradients: the CPU backend has a compiled loop for them
(``averages`` in ``cpu.loops``), Triton a kernel (``triton.lines``).

A *line* is a row or a column. Rows and columns here are those of matrices: the last two dimensions
of a parameter.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.rule import Rule
from ampopt_kernels.state import State
from ampopt_kernels.tensors import widest

__all__ = [
    "EVEN",
    "LineSums",
    "RowColumnStates",
    "advance",
    "advance_stack",
    "sums_of",
]

LineSums = dict[int, list[Tensor]]
"""Sums over lines. The key is the index of a row of a work. Parameters of one shape may share an
entry, under the first one's index: their results of :func:`sums_of`, joined in dimension 0."""

_CHUNK_ON_CPU, _CHUNK_ON_DEVICES = 1 << 16, 1 << 24
"""Elements whose terms are in memory at a time; on a CPU, as many as fit the cache of a core."""


EVEN = 1 << 4
"""A number that divides most row lengths: that many neighbours are in one row, and are read at
once."""


@dataclass
class RowColumnStates:
    """The row and column states of one parameter, which has two dimensions or more.

    Attributes:
        parts: the declaration of each state.
        states: the states, of the whole parameter, also if it is sharded: for a parameter of shape
            ``[..., m, n]``, shape ``[..., m, 1]`` (rows) or ``[..., 1, n]`` (columns).
        factors: for each state, the tensor that kernels read: shaped like a state of this rank's
            shard, contiguous, in the arithmetic dtype. Each step overwrites it.
        shape: shape of this rank's shard.
        size: row count m and column count n of the whole parameter.
        shard: for a sharded parameter, an object whose ``here(part, factors)`` returns the slice
            of whole-parameter factors that belongs to this rank's shard; else ``None``.
    """

    parts: tuple[State, ...]
    states: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    shape: tuple[int, ...]
    size: tuple[int, int]
    shard: Any = None

    @staticmethod
    def of(
        parts: tuple[State, ...],
        states: Sequence[Tensor],
        param: Tensor,
        dtype: torch.dtype,
        size: tuple[int, int],
        shard: Any = None,
    ) -> "RowColumnStates":
        """The row and column states of ``param``, with factors of 0.

        Args:
            parts: the declaration of each state.
            states: the states of the whole parameter.
            param: this rank's shard, or the whole parameter.
            dtype: dtype of the factors.
            size: row and column count of the whole parameter.
            shard: as :attr:`shard`.
        """
        shape = tuple(param.shape)
        factors = [torch.zeros(p.beside(shape), dtype=dtype, device=param.device) for p in parts]
        return RowColumnStates(parts, tuple(states), tuple(factors), shape, size, shard)

    @property
    def numel(self) -> int:
        """Number of elements of this rank's shard."""
        return math.prod(self.shape)

    @property
    def is_even(self) -> bool:
        """Whether ``EVEN`` divides the length of a row."""
        return self.shape[-1] % EVEN == 0

    def lines(self, place: int) -> int:
        """How many rows, or columns, of the shard the state number ``place`` has a value for."""
        return math.prod(self.parts[place].beside(self.shape))

    @functools.cached_property
    def of_rows(self) -> tuple[bool, ...]:
        """For each state, whether it has a value for each row, not for each column."""
        return tuple(part.shape == "rows" for part in self.parts)

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """For each state, the dimension that its terms are averaged over: -1 or -2."""
        return tuple(-1 if of_rows else -2 for of_rows in self.of_rows)

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the factors, then row and column count of the shard."""
        return (*map(Tensor.data_ptr, self.factors), *self.shape[-2:])

    @property
    def is_empty(self) -> bool:
        """Whether the whole parameter has no elements, and so no means."""
        return 0 in self.size or not self.states[0].numel()

    def means(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The means over rows and columns, from the sums over the whole parameter.

        Args:
            sums: for each state, as :func:`sums_of` returns them; several parameters of one shape
                may be joined in dimension 0.
        """
        dtype = self.factors[0].dtype
        return [(s / self.size[dim]).to(dtype) for s, dim in zip(sums, self.dims, strict=True)]

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


def advance(
    rule: Rule,
    several: Sequence[RowColumnStates],
    flags: tuple[bool, ...],
    sums: Sequence[Tensor],
    h: Sequence[Sequence[Any]],
    skip: Tensor | None = None,
) -> None:
    """Compute new states and factors from the sums of this step, and store them.

    Args:
        rule: the update rule.
        several: the row and column states of parameters of one shape; only one if it is sharded.
        flags: values of ``rule.flags``.
        sums: for each state, the results of :func:`sums_of` for all of ``several``, joined in
            dimension 0; all-reduced if the parameter is sharded.
        h: for each of ``several``, ``h`` as in :func:`sums_of`.
        skip: more than 0 to keep the old states: 0-d. ``None`` if the host knows that the step is
            not skipped.
    """
    first = several[0]
    if first.is_empty:
        return
    assert rule.factors is not None
    dtype, shard = first.factors[0].dtype, first.shard
    means = first.means(sums)
    # One at a time: on a stack, torch may sum in another order, and so round differently.
    for own, numbers, *mean in zip(several, h, *means, strict=True):
        old = tuple(state.to(dtype) for state in own.states)
        new, factors = rule.factors(tuple(mean), old, tuple(numbers[2:]), flags)
        for state, value in zip(own.states, new, strict=True):
            value = value.to(state.dtype)
            state.copy_(value if skip is None else torch.where(skip > 0, state, value))
        if shard is not None:
            factors = map(shard.here, own.parts, factors)
        for room, factor in zip(own.factors, factors, strict=True):
            room.copy_(factor)


def advance_stack(
    rule: Rule,
    several: Sequence[RowColumnStates],
    flags: tuple[bool, ...],
    sums: Sequence[Tensor],
    h: Tensor,
    skip: Tensor,
) -> None:
    """Like :func:`advance`, on stacks of states: as many launches as for one parameter.

    A mean that ``Rule.factors`` computes may be rounded differently than for one parameter.

    Args:
        rule: as in :func:`advance`.
        several: as in :func:`advance`.
        flags: as in :func:`advance`.
        sums: as in :func:`advance`.
        h: the numbers that ``reduce`` takes, for each parameter: shape (len(several), width).
        skip: whether to keep the old states: bool, 0-d.
    """
    first = several[0]
    if first.is_empty:
        return
    assert rule.factors is not None
    dtype, shard = first.factors[0].dtype, first.shard
    means = first.means(sums)
    old = [torch.stack(states) for states in zip(*(own.states for own in several), strict=True)]
    numbers = h.to(dtype).T.reshape(h.shape[1], -1, *[1] * len(first.shape)).unbind()
    before = tuple(state.to(dtype) for state in old)
    new, factors = rule.factors(tuple(means), before, numbers, flags)
    if shard is not None:
        here = zip(first.parts, factors, strict=True)
        factors = [shard.here(part, factor[0])[None] for part, factor in here]
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    states, rooms = ([*own.states] for own in several), ([*own.factors] for own in several)
    for targets, state, value in zip(zip(*states, strict=True), old, new, strict=True):
        copy(targets, torch.where(skip, state, value.to(state.dtype)).unbind())
    for room, factor in zip(zip(*rooms, strict=True), factors, strict=True):
        copy(room, factor.unbind())


def sums_of(
    rule: Rule,
    own: RowColumnStates,
    flags: tuple[bool, ...],
    tensors: Sequence[Tensor],
    h: Sequence[Any],
) -> list[Tensor]:
    """For each state, the term of ``rule.averages`` summed over the rows, or columns, of the shard.

    Args:
        rule: the update rule.
        own: the row and column states of one parameter.
        flags: values of ``rule.flags``.
        tensors: gradient, parameter and elementwise states of the shard, all contiguous.
        h: the reciprocal of the loss scale, the clip coefficient, then what ``reduce`` takes as
            ``h``; numbers, or 0-d tensors of the arithmetic dtype.

    Returns:
        One tensor for each state: ``widest``, shape ``(1, *factor.shape)``. Sums of several
        parameters can be joined in dimension 0.
    """
    dtype, device = own.factors[0].dtype, tensors[0].device
    wide, averages = widest(device), rule.torch_averages_in(dtype)
    *batch, m, n = own.shape
    stack = math.prod(batch), m, n
    sums = [torch.zeros(part.beside(stack), dtype=wide, device=device) for part in own.parts]
    size = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK_ON_DEVICES
    for some, rows in _chunks(*stack, size):
        g, p, *state = (t.view(stack)[some, rows].to(dtype) for t in tensors)
        terms = averages(p, g * h[0] * h[1], tuple(state), tuple(h[2:]), flags)
        for total, dim, term in zip(sums, own.dims, terms, strict=True):
            at = (some, rows) if dim == -1 else some
            total[at] += term.sum(dim, keepdim=True, dtype=wide)
    shapes = (part.beside(own.shape) for part in own.parts)
    return [total.view(1, *shape) for total, shape in zip(sums, shapes, strict=True)]


def _chunks(matrices: int, m: int, n: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of whole matrices, or of the rows of one, of about ``size`` elements."""
    some, rows = max(size // max(m * n, 1), 1), max(size // max(n, 1), 1)
    for first in range(0, matrices, some):
        for row in range(0, m, rows):
            yield slice(first, first + some), slice(row, row + rows)
