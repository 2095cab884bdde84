"""The index of each element of a row in the whole, contiguous parameter.

Random numbers are computed from these indices, so that they do not depend on how a parameter is
sharded.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CPP", "NUMBERS", "Jump", "ElementIndices"]


class Jump(NamedTuple):
    """A gap that recurs: elements of the parameter that another shard has.

    Attributes:
        period: number of elements of the row from one gap to the next; 1 or more.
        phase: number of elements of the first period that come before the row; 0 or more.
        size: number of elements that each gap skips. May be negative.
    """

    period: int
    phase: int
    size: int


NUMBERS = len(Jump._fields)
"""Numbers that compiled code reads for each jump."""


@dataclass(frozen=True)
class ElementIndices:
    """The indices of all elements of a row, in the order of memory.

    The element ``i`` of the row has the index ``first + i + sum((i + phase) // period * size)``,
    over all jumps. A row that is a whole parameter, or a shard of its first dimension, has no
    jumps; a shard of columns has one, after each of its rows.

    Attributes:
        first: the index of the first element, if the jumps before it are 0.
        jumps: gaps of different periods, whose sizes add up.
    """

    first: int = 0
    jumps: tuple[Jump, ...] = ()

    def after(self, start: int) -> "ElementIndices":
        """The indices of the elements from ``start`` on."""
        jumps = tuple(jump._replace(phase=jump.phase + start) for jump in self.jumps)
        return ElementIndices(self.first + start, jumps)

    def of(self, n: int, device: torch.device) -> Tensor:
        """The indices of the first ``n`` elements: int64, shape (n,), on ``device``."""
        indices = torch.arange(self.first, self.first + n, device=device)
        for period, phase, size in self.jumps:
            indices += torch.arange(phase, phase + n, device=device) // period * size
        return indices


CPP = """
// The indices of the elements from ``start`` on; see element_indices.py.
static inline void indices_of(
    const double* numbers, int64_t n_jumps, uint64_t first, int64_t start, int64_t n, uint64_t* out
) {
    for (int64_t j = 0; j < n; ++j) out[j] = first + start + j;
    for (; n_jumps > 0; --n_jumps, numbers += 3) {
        const int64_t period = numbers[0], at = start + (int64_t)numbers[1], size = numbers[2];
        int64_t skipped = at / period * size;
        for (int64_t j = 0, next = period - at % period; j < n; next += period, skipped += size)
            for (const int64_t end = lesser(next, n); j < end; ++j) out[j] += skipped;
    }
}
"""
"""C++ that computes indices; ``numbers`` are period, phase and size of each jump."""
