"""States with one value for each row, or column, of a parameter: its marginals.

What becomes of the few values that there are is torch's operations, on every backend; so are the
sums that they are averages of, but that the CPU has them compiled (``cpu.calls``) and that Triton
has a kernel for them (``triton.lines``). Kernels read *factors* of them, each for the whole of its
row or column.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampopt_kernels.rule import Rule
from ampopt_kernels.state import State
from ampopt_kernels.tensors import widest

if TYPE_CHECKING:
    from ampopt_kernels.work import Work

__all__ = [
    "EVEN",
    "AgreeOnLines",
    "LineSums",
    "Marginals",
    "advance",
    "advance_stack",
    "sums_of",
]

LineSums = dict[int, list[Tensor]]
"""What :func:`sums_of` gives for rows of a work that are averaged together, joined, by the number
of the first of them."""
AgreeOnLines = Callable[[Sequence["Work"], Sequence[LineSums]], list[LineSums]]
"""Makes of the sums over what is here of parameters, of each work, those over whole parameters. All
ranks that parameters are spread over have to come by, once."""

_CHUNK_ON_CPU, _CHUNK_ON_DEVICES = 1 << 16, 1 << 24
"""Elements whose terms are held at a time: on a CPU what fits the cache of a core."""


EVEN = 1 << 4
"""What divides the length of most rows: so many neighbours are in one row, and are read at once."""


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
        spread: of a parameter that is spread over ranks: ``here(part, factors)`` are the factors
            of what is here.
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

    @property
    def numel(self) -> int:
        """Elements that are here of the parameter."""
        return math.prod(self.shape)

    @property
    def is_even(self) -> bool:
        """Whether ``EVEN`` divides the length of a row."""
        return self.shape[-1] % EVEN == 0

    def lines(self, place: int) -> int:
        """How many rows, or columns, the marginal at ``place`` has here."""
        return math.prod(self.parts[place].beside(self.shape))

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

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements anywhere, which have no means."""
        return 0 in self.size or not self.states[0].numel()

    def means(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Those of the whole parameter, of ``sums`` over it; see :func:`sums_of`.

        Also of others that are alike, behind the first dimension.
        """
        dtype = self.factors[0].dtype
        return [(s / self.size[dim]).to(dtype) for s, dim in zip(sums, self.dims, strict=True)]

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
    several: Sequence[Marginals],
    flags: tuple[bool, ...],
    sums: Sequence[Tensor],
    h: Sequence[Sequence[Any]],
    skip: Tensor | None = None,
) -> None:
    """Advance the states by the means of this step's terms, and make the factors of it.

    Args:
        rule: whose.
        several: of one parameter each, all of one shape; of one alone if it is spread.
        flags: of the rule.
        sums: what :func:`sums_of` gives for each of them, joined; of a parameter that is spread
            over ranks, what :data:`AgreeOnLines` makes of that.
        h: as :func:`sums_of` takes it, for each of them.
        skip: more than 0 to store nothing; ``None`` where the host has seen that it is not so.
    """
    first = several[0]
    if first.is_empty:
        return
    assert rule.factors is not None
    dtype, spread = first.factors[0].dtype, first.spread
    means = first.means(sums)
    # Each by itself: torch's functions may have other bits on a stack.
    for own, numbers, *mean in zip(several, h, *means, strict=True):
        old = tuple(state.to(dtype) for state in own.states)
        new, factors = rule.factors(tuple(mean), old, tuple(numbers[2:]), flags)
        for state, value in zip(own.states, new, strict=True):
            value = value.to(state.dtype)
            state.copy_(value if skip is None else torch.where(skip > 0, state, value))
        if spread is not None:
            factors = map(spread.here, own.parts, factors)
        for room, factor in zip(own.factors, factors, strict=True):
            room.copy_(factor)


def advance_stack(
    rule: Rule,
    several: Sequence[Marginals],
    flags: tuple[bool, ...],
    sums: Sequence[Tensor],
    h: Tensor,
    skip: Tensor,
) -> None:
    """As :func:`advance`, by as many operations as for one, however many there are.

    A mean within ``factors`` may be rounded otherwise than alone, as torch sums in another order.

    Args:
        rule: whose.
        several: as for :func:`advance`.
        flags: likewise.
        sums: likewise.
        h: what ``reduce`` takes, of each: shape (several, width).
        skip: whether to store nothing: bool, 0-d.
    """
    first = several[0]
    if first.is_empty:
        return
    assert rule.factors is not None
    dtype, spread = first.factors[0].dtype, first.spread
    means = first.means(sums)
    old = [torch.stack(states) for states in zip(*(own.states for own in several), strict=True)]
    numbers = h.to(dtype).T.reshape(h.shape[1], -1, *[1] * len(first.shape)).unbind()
    before = tuple(state.to(dtype) for state in old)
    new, factors = rule.factors(tuple(means), before, numbers, flags)
    if spread is not None:
        here = zip(first.parts, factors, strict=True)
        factors = [spread.here(part, factor[0])[None] for part, factor in here]
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    states, rooms = ([*own.states] for own in several), ([*own.factors] for own in several)
    for kept, state, value in zip(zip(*states, strict=True), old, new, strict=True):
        copy(kept, torch.where(skip, state, value.to(state.dtype)).unbind())
    for room, factor in zip(zip(*rooms, strict=True), factors, strict=True):
        copy(room, factor.unbind())


def sums_of(
    rule: Rule,
    own: Marginals,
    flags: tuple[bool, ...],
    tensors: Sequence[Tensor],
    h: Sequence[Any],
) -> list[Tensor]:
    """Of each marginal, its term summed over what is here of rows, or columns.

    Args:
        rule: whose.
        own: of one parameter.
        flags: of the rule.
        tensors: gradient, parameter and elementwise states, all contiguous.
        h: the reciprocal of the scale, the clip coefficient, then what ``reduce`` takes as ``h``;
            numbers, or 0-d tensors of the arithmetic dtype.

    Returns:
        ``widest``, each of the shape of its factors behind a first dimension of 1, in which those
        of several parameters can be joined.
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
