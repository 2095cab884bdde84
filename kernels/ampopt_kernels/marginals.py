"""States with one value for each row, or column, of a parameter: its marginals.

The averages that they are made of, and what becomes of the few values that there are, are torch
operations, on every backend the same ones, here. Kernels read *factors* of them, each for the whole
of its row or column.
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

__all__ = ["Marginals", "advance"]

_CHUNK_ON_CPU, _CHUNK_ON_DEVICES = 1 << 16, 1 << 24
"""Elements whose terms are held at a time: on a CPU what fits the cache of a core."""
_FEW = 7
"""Numbers, as in rows of a convolution's kernel, whose sum takes a CPU longer than adding them."""


@dataclass
class Marginals:
    """Those of one parameter of two dimensions or more.

    Attributes:
        parts: what they are, as the rule declares them.
        states: of the whole parameter, each of ``part.beside`` of its shape.
        factors: what kernels read in place of each: of what is here of the parameter, contiguous,
            in the arithmetic dtype; written anew by each step.
        shape: of what is here of the parameter.
        size: rows and columns of the whole.
        spread: of a parameter that is spread over ranks: ``whole(part, sums)`` adds up what all of
            them have, ``here(part, factors)`` are those of what is here.
    """

    parts: tuple[State, ...]
    states: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    shape: tuple[int, ...]
    size: tuple[int, int]
    spread: Any = None

    @staticmethod
    def of(
        parts: tuple[State, ...],
        states: Sequence[Tensor],
        param: Tensor,
        dtype: torch.dtype,
        size: tuple[int, int],
        spread: Any = None,
    ) -> "Marginals":
        """Those beside ``param``, with room for factors of ``dtype``."""
        shape = tuple(param.shape)
        factors = [torch.zeros(p.beside(shape), dtype=dtype, device=param.device) for p in parts]
        return Marginals(parts, tuple(states), tuple(factors), shape, size, spread)

    @functools.cached_property
    def of_rows(self) -> tuple[bool, ...]:
        """Of each, whether it is of rows, not columns."""
        return tuple(part.shape == "rows" for part in self.parts)

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """Of each, the dimension that it is averaged over."""
        return tuple(-1 if of_rows else -2 for of_rows in self.of_rows)

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the factors are, and how many rows and columns a matrix has here."""
        return (*map(Tensor.data_ptr, self.factors), *self.shape[-2:])

    def at(self, start: int, end: int) -> tuple[Tensor, ...]:
        """The factors of the elements from ``start`` to ``end``, flat."""
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
    own: Marginals,
    flags: tuple[bool, ...],
    tensors: Sequence[Tensor],
    h: Sequence[Any],
    skip: Tensor | None = None,
) -> None:
    """Advance the states by the means of this step's terms, and make the factors of it.

    Of a parameter that is spread over ranks each of them has to come by.

    Args:
        rule: whose.
        own: of one parameter.
        flags: of the rule.
        tensors: gradient, parameter and elementwise states, all contiguous.
        h: the reciprocal of the scale, the clip coefficient, then what ``reduce`` takes as ``h``;
            numbers, or 0-d tensors of the arithmetic dtype.
        skip: more than 0 to store nothing; ``None`` where the host has seen that it is not so.
    """
    if 0 in own.size or not own.states[0].numel():  # there are no elements anywhere
        return
    size = _CHUNK_ON_CPU if tensors[0].is_cpu else _CHUNK_ON_DEVICES
    read = [t.view(own.shape) for t in tensors]
    small = read[0].numel() <= size
    if small or own.spread is not None:
        sums = _sums(rule, own, flags, read if small else list(map(_stacked, read)), h, size)
        if own.spread is not None:
            shapes = (part.beside(own.shape) for part in own.parts)
            sums = list(map(own.spread.whole, own.parts, map(Tensor.view, sums, shapes)))
        factors = _taken_up(rule, own, flags, own.states, sums, h, skip)
        if own.spread is not None:
            factors = map(own.spread.here, own.parts, factors)
        for room, factor in zip(own.factors, factors, strict=True):
            room.copy_(factor)
        return
    read, states, rooms = (list(map(_stacked, x)) for x in (read, own.states, own.factors))
    matrices, m, n = read[0].shape
    # Matrices have nothing to do with each other: of small ones, as many at a time as fit a cache.
    some = max(size // (m * n), 1)
    for first in range(0, matrices, some):
        batch = slice(first, first + some)
        sums = _sums(rule, own, flags, [t[batch] for t in read], h, size)
        factors = _taken_up(rule, own, flags, [t[batch] for t in states], sums, h, skip)
        for room, factor in zip(rooms, factors, strict=True):
            room[batch].copy_(factor)


def _taken_up(
    rule: Rule,
    own: Marginals,
    flags: tuple[bool, ...],
    states: Sequence[Tensor],
    sums: Sequence[Tensor],
    h: Sequence[Any],
    skip: Tensor | None,
) -> tuple[Tensor, ...]:
    """Store what the states become by these sums; return the factors."""
    assert rule.factors is not None
    dtype = own.factors[0].dtype
    means = [(s / own.size[dim]).to(dtype) for s, dim in zip(sums, own.dims, strict=True)]
    old = tuple(state.to(dtype) for state in states)
    new, factors = rule.factors(tuple(means), old, tuple(h[2:]), flags)
    for state, value in zip(states, new, strict=True):
        value = value.to(state.dtype)
        state.copy_(value if skip is None else torch.where(skip > 0, state, value))
    return factors


def _stacked(tensor: Tensor) -> Tensor:
    """Of any number of dimensions, two or more, as a stack of matrices."""
    return tensor.view(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def _sums(
    rule: Rule,
    own: Marginals,
    flags: tuple[bool, ...],
    tensors: Sequence[Tensor],
    h: Sequence[Any],
    size: int,
) -> list[Tensor]:
    """Of each marginal, its term summed over rows, or columns, of some matrices, in float64."""
    dtype, device = own.factors[0].dtype, tensors[0].device
    wide = widest(device)
    factors = [x for x in h[:2] if isinstance(x, Tensor) or x != 1]
    rest = tuple(h[2:])
    averages = rule.torch_averages_in(dtype)
    # One for all chunks: to be given new memory may take longer than to fill it.
    at_most = min(tensors[0].numel(), max(size, own.shape[-1]))
    room = torch.empty(at_most, dtype=wide, device=device)

    def summed(given: Sequence[Tensor]) -> list[Tensor]:
        g, p, *state = (t.to(dtype) for t in given)
        g = functools.reduce(torch.mul, factors, g)
        terms = averages(p, g, tuple(state), rest, flags)
        sums, widened = [], None
        for term, dim in zip(terms, own.dims, strict=True):
            in_room = room[: term.numel()].view(term.shape)
            if term is not widened:  # rows and columns may be of one
                in_room.copy_(term)
                widened = term
            sums.append(_summed(in_room, dim))
        return sums

    if tensors[0].numel() <= size:
        return summed(tensors)
    matrices, m, n = tensors[0].shape
    sums = [
        torch.zeros(part.beside((matrices, m, n)), dtype=wide, device=device) for part in own.parts
    ]
    for some, rows in _chunks(matrices, m, n, size):
        found = summed([t[some, rows] for t in tensors])
        for total, dim, part in zip(sums, own.dims, found, strict=True):
            total[some, rows if dim == -1 else slice(None)] += part
    return sums


def _summed(term: Tensor, dim: int) -> Tensor:
    """The sum over ``dim``, which stays, as one element."""
    if term.device.type == "cpu" and 1 < term.shape[dim] <= _FEW:
        return functools.reduce(torch.add, term.unbind(dim)).unsqueeze(dim)
    return term.sum(dim, keepdim=True)


def _chunks(matrices: int, m: int, n: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of whole matrices, or of the rows of one, of about ``size`` elements."""
    some, rows = max(size // (m * n), 1), max(size // n, 1)
    for first in range(0, matrices, some):
        for row in range(0, m, rows):
            yield slice(first, first + some), slice(row, row + rows)
