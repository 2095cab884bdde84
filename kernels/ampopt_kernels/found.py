"""What detect found of each parameter, for those who ask later which of them it was."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.tensors import widest
from ampopt_kernels.transfers import carried

__all__ = ["FLUSHED", "MEASURES", "NOBODY", "Found", "Owner", "measured"]

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
            return carried(self.flags, device, torch.float32)
        return torch.tensor(self.flags, dtype=torch.float32, device=device)

    def kept(self) -> "Found":
        """The flags alone, in memory that no replayed graph writes over."""
        flags = self.flags
        flags = flags.clone() if isinstance(flags, Tensor) else flags
        return replace(self, flags=flags, measures=None)


def measured(unscaled: Tensor, counted: bool) -> Tensor:
    """The measures of a part that is not empty, by torch's operations; see :class:`Found`."""
    wide = widest(unscaled.device)
    magnitudes = unscaled.abs()
    finite: Any = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    used = finite > 0
    squares = finite.to(wide).square().sum() if counted else finite.new_zeros(())
    each = (finite.max(), used.sum(), (used & (finite <= FLUSHED)).sum(), squares)
    return torch.stack([x.to(wide) for x in each])
