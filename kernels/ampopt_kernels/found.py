"""What detect found of each parameter, for those who ask later which of them it was."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.tensors import widest

__all__ = [
    "FLUSHED",
    "MEASURES",
    "NOBODY",
    "Found",
    "FoundByRanks",
    "Owner",
    "measured",
    "named_ranks",
]

FLUSHED = 2.0**-25
"""The largest magnitude that float16 rounds to zero."""
MEASURES = 4
"""What is measured of gradients: see :attr:`Found.measures`."""


class Owner(NamedTuple):
    """Whose gradient a row has.

    Attributes:
        name: what messages call the parameter.
        key: its ``id``.
    """

    name: str
    key: int


NOBODY = Owner("unknown parameter", 0)


@dataclass(frozen=True)
class Found:
    """What there is in the gradients of one device, on this rank, whatever others found.

    Attributes:
        flags: shape (parts,), more than 0 where a part has a non-finite unscaled gradient; or
            truths, of a backend whose host sees them.
        rows: of each part, the row that it is a part of. Parts of a row follow each other.
        owners: of each row.
        measures: ``widest``, shape (parts, 4), if asked for. Of the finite unscaled gradients the
            largest magnitude; how many are not 0; how many of these are ``FLUSHED`` or less; the
            sum of squares, 0 where a row is not counted, and of no use where a part overflows.
    """

    flags: Tensor | Sequence[bool]
    rows: Sequence[int]
    owners: Sequence[Owner]
    measures: Tensor | None = None

    @property
    def surely_finite(self) -> bool:
        """Whether the host sees, without waiting, that no part has overflowed."""
        return not isinstance(self.flags, Tensor) and not any(self.flags)

    def overflowed(self) -> list[str]:
        """The names of the parameters that did, in their order. Synchronizes."""
        flags = self.flags.tolist() if isinstance(self.flags, Tensor) else self.flags
        rows = {row for row, flag in zip(self.rows, flags, strict=True) if flag}
        return [self.owners[row].name for row in sorted(rows)]

    def flags_on(self, device: torch.device) -> Tensor:
        """:attr:`flags` as a tensor on ``device``."""
        if isinstance(self.flags, Tensor):
            return to_device(self.flags, device, torch.float32)
        return torch.tensor(self.flags, dtype=torch.float32, device=device)

    def kept(self) -> "Found":
        """The flags alone, in memory that no replayed graph writes over."""
        flags = self.flags
        flags = flags.clone() if isinstance(flags, Tensor) else flags
        return replace(self, flags=flags, measures=None)


@dataclass(frozen=True)
class FoundByRanks:
    """Which of the ranks that decide together have found an overflow.

    Attributes:
        flags: shape (ranks,), more than 0 where a rank has.
        ranks: their numbers.
        here: the place of this rank among them.
        measures: none; see :class:`Found`.
    """

    flags: Tensor
    ranks: Sequence[int]
    here: int
    measures: None = None

    def others(self) -> list[int]:
        """The numbers of the ranks that have, but for this one. Synchronizes."""
        pairs = zip(self.ranks, self.flags.tolist(), strict=True)
        return [rank for rank, flag in pairs if flag > 0 and rank != self.ranks[self.here]]

    def kept(self) -> "FoundByRanks":
        """A copy, in memory that no replayed graph writes over."""
        return replace(self, flags=self.flags.clone())


def named_ranks(ranks: Sequence[int]) -> str:
    """``ranks``, in rising order, for people: ``"rank 1"``, or ``"ranks 0, 2-5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def measured(unscaled: Tensor, in_norm: bool) -> Tensor:
    """The measures of a part that is not empty, by torch's operations; see :class:`Found`."""
    wide = widest(unscaled.device)
    magnitudes = unscaled.abs()
    finite: Any = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    used = finite > 0
    squares = finite.to(wide).square().sum() if in_norm else finite.new_zeros(())
    each = (finite.max(), used.sum(), (used & (finite <= FLUSHED)).sum(), squares)
    return torch.stack([x.to(wide) for x in each])
