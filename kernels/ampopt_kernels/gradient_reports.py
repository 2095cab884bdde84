"""Overflow flags and measures of single gradients, to report later which parameters overflowed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NOBODY", "GradientReport", "RankFlags", "Owner", "named_ranks"]


class Owner(NamedTuple):
    """The parameter that a row belongs to.

    Attributes:
        name: name of the parameter in messages.
        key: ``id`` of the parameter.
    """

    name: str
    key: int


NOBODY = Owner("unknown parameter", 0)


@dataclass(frozen=True)
class GradientReport:
    """Flags and measures of the gradients of one device, on this rank alone.

    A gradient is read in chunks; a chunk is a tensor or a slice of one.

    Attributes:
        flags: more than 0 for each chunk that has a non-finite unscaled gradient: float32, shape
            (chunks,). A list of bool from a backend that computes on the host.
        rows: index of the row that each chunk belongs to; chunks of a row are adjacent.
        owners: the parameter of each row.
        measures: four numbers for each chunk, if requested: ``widest``, shape (4, chunks): the sum
            of squares, 0 for rows that are not ``in_norm``, and undefined if the chunk overflows;
            and over the finite unscaled gradients the largest magnitude, the count of those that
            are not 0, and the count of those that are not 0 and at most
            :data:`~ampopt_kernels.gradient_terms.FLUSHED`.
    """

    flags: Tensor | Sequence[bool]
    rows: Sequence[int]
    owners: Sequence[Owner]
    measures: Tensor | None = None

    @property
    def flag_tensor(self) -> Tensor | None:
        """:attr:`flags`; ``None`` if the host knows already that no chunk overflowed."""
        if isinstance(self.flags, Tensor):
            return self.flags
        return torch.tensor(self.flags, device="cpu") if any(self.flags) else None

    def overflowed(self) -> list[str]:
        """The names of the parameters that overflowed, in the order of the rows. Synchronizes."""
        flags = self.flags.tolist() if isinstance(self.flags, Tensor) else self.flags
        rows = {row for row, flag in zip(self.rows, flags, strict=True) if flag}
        return [self.owners[row].name for row in sorted(rows)]

    def copy(self) -> "GradientReport":
        """A copy without measures, whose flags a replayed CUDA graph does not overwrite."""
        flags = self.flags
        flags = flags.clone() if isinstance(flags, Tensor) else flags
        return replace(self, flags=flags, measures=None)


@dataclass(frozen=True)
class RankFlags:
    """The overflow flag of each rank of the process group.

    Attributes:
        flags: more than 0 for each rank that found an overflow: shape (ranks,).
        ranks: global rank numbers.
        here: index of this rank in ``ranks``.
        measures: always ``None``; :class:`GradientReport` has measures.
    """

    flags: Tensor
    ranks: Sequence[int]
    here: int
    measures: None = None

    def others(self) -> list[int]:
        """The numbers of the other ranks that found an overflow. Synchronizes."""
        pairs = zip(self.ranks, self.flags.tolist(), strict=True)
        return [rank for rank, flag in pairs if flag > 0 and rank != self.ranks[self.here]]

    def copy(self) -> "RankFlags":
        """A copy that a replayed CUDA graph does not overwrite."""
        return replace(self, flags=self.flags.clone())


def named_ranks(ranks: Sequence[int]) -> str:
    """Ascending rank numbers as text: ``"rank 1"``, or ``"ranks 0, 2-5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
