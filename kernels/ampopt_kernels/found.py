"""What detect found of each parameter, for those who ask later which of them it was."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

__all__ = ["NOBODY", "Found", "Owner"]


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
    """Where the gradients of one device overflowed on this rank, whatever others found.

    Attributes:
        flags: shape (parts,), more than 0 where a part has a non-finite unscaled gradient; or
            truths, of a backend whose host sees them.
        rows: of each part, the row that it is a part of.
        owners: of each row.
    """

    flags: Tensor | Sequence[bool]
    rows: Sequence[int]
    owners: Sequence[Owner]

    def overflowed(self) -> list[str]:
        """The names of the parameters that did, in their order. Synchronizes."""
        flags = self.flags.tolist() if isinstance(self.flags, Tensor) else self.flags
        rows = {row for row, flag in zip(self.rows, flags, strict=True) if flag}
        return [self.owners[row].name for row in sorted(rows)]

    def kept(self) -> "Found":
        """The same in memory that no replayed graph writes over."""
        flags = self.flags
        return replace(self, flags=flags.clone() if isinstance(flags, Tensor) else flags)
