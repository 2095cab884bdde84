"""What a watch keeps on a device: numbers of each parameter and of each step, and how they add up.

All of them are in one vector, so that one copy brings them to the host::

    largest, overflows, used, flushed, and in a ring     of each parameter
        the attempts in which it overflowed lately
    skips in a row, skips by each cause                  of the steps
    cause, scale, norm, squares                          of each of the last steps, in a ring
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.found import Found
from ampopt_kernels.tensors import widest
from ampopt_kernels.uploads import Uploads

__all__ = [
    "CAUSES",
    "COLUMNS",
    "COUNTS",
    "NOT_GIVEN",
    "RING",
    "RecordedStep",
    "Ledger",
    "ChunkRange",
    "note",
    "zeros",
]

COUNTS = 4
"""Numbers of each parameter before the attempts, which are counted from 1, and 0 is none."""
COLUMNS = COUNTS + 16
"""All of them. So many overflows of the shards of a parameter are told apart when ranks are read:
those of one attempt are one."""
CAUSES = ("overflow", "norm", "loss")
"""Why a step is skipped; counted from 1, and 0 is a step that was taken."""
RING = 4
"""Numbers of each step; what it has not is ``NOT_GIVEN``."""
NOT_GIVEN = -1.0


class ChunkRange(NamedTuple):
    """Where what was found of one parameter is, and where it goes.

    Attributes:
        first: of its parts.
        parts: how many they are.
        place: of the parameter in the ledger.
    """

    first: int
    parts: int
    place: int


@dataclass(frozen=True)
class Ledger:
    """The vector of one device, and its parts as views.

    Attributes:
        numbers: ``widest``, all that there is.
        places: how many parameters there is room for.
    """

    numbers: Tensor
    places: int

    @property
    def parameters(self) -> Tensor:
        """Shape (places, COLUMNS)."""
        return self.numbers[: COLUMNS * self.places].view(-1, COLUMNS)

    @property
    def totals(self) -> Tensor:
        """Skips in a row, and skips by cause."""
        start = COLUMNS * self.places
        return self.numbers[start : start + 1 + len(CAUSES)]

    @property
    def ring(self) -> Tensor:
        """Shape (last, RING)."""
        return self.numbers[COLUMNS * self.places + 1 + len(CAUSES) :].view(-1, RING)


def zeros(places: int, last: int, device: torch.device) -> Ledger:
    """A ledger of nothing yet, with a ring for ``last`` steps."""
    size = COLUMNS * places + 1 + len(CAUSES) + RING * last
    return Ledger(torch.zeros(size, dtype=widest(device), device=device), places)


@dataclass(frozen=True)
class RecordedStep:
    """One step that was taken or skipped, as a ledger notes it. Tensors are of one element.

    Attributes:
        number: counted from 1.
        skip: more than 0 if it was skipped; ``None`` if certainly not.
        cause: of a skip for something else, counted as in ``CAUSES``; 0 or ``None`` for none.
        scale: that the gradients carried; ``None`` for none.
        norm: of all gradients, if somebody asked for it.
    """

    number: int
    skip: Tensor | None = None
    cause: Tensor | None = None
    scale: Tensor | None = None
    norm: Tensor | None = None


def note(
    ledger: Ledger,
    attempt: RecordedStep,
    found: Found | None,
    parts: Sequence[ChunkRange],
    uploads: Uploads,
    *,
    notes_step: bool,
) -> None:
    """Add one step to a ledger, by torch's operations. Does not synchronize.

    Args:
        ledger: to add to.
        attempt: that was made; its tensors are on the ledger's device.
        found: in the gradients, measured, part by part a row; ``None`` if nobody has looked.
        parts: of parameters of this ledger.
        uploads: what the device holds of earlier steps.
        notes_step: whether the step itself is noted here too.
    """
    device, wide = ledger.numbers.device, ledger.numbers.dtype
    zero = torch.zeros((), dtype=wide, device=device)
    skipped = zero if attempt.skip is None else (attempt.skip.reshape(()) > 0).to(wide)
    squares = torch.full_like(zero, NOT_GIVEN)
    if found is not None and found.measures is not None and parts:
        firsts = uploads.get("parts", [p.first for p in parts], torch.int64, device)
        places = uploads.get("places", [p.place for p in parts], torch.int64, device)
        measures = found.measures.to(device, wide)[firsts]
        table = ledger.parameters[places]
        table[:, 0] = torch.maximum(table[:, 0], measures[:, 0])
        table[:, 2:COUNTS] += measures[:, 1:3] * (1 - skipped)
        squares = _in_order(measures[:, 3])
        if not found.surely_finite:
            flags = found.flags_on(device).to(wide)[firsts]
            order = torch.arange(COLUMNS - COUNTS, device=device)
            oldest = order == (table[:, 1:2] % len(order))
            table[:, COUNTS:].masked_fill_(oldest & (flags > 0)[:, None], attempt.number)
            table[:, 1] += flags
            squares = squares.masked_fill((flags > 0).any(), float("inf"))
        ledger.parameters[places] = table
    if not notes_step:
        return
    cause = skipped
    if attempt.cause is not None:
        cause = skipped * attempt.cause.reshape(()).to(wide).clamp(min=1)
    totals = ledger.totals
    totals[0] = (totals[0] + 1) * skipped
    totals[1:] += torch.arange(1, 1 + len(CAUSES), device=device) == cause
    entry = [cause, *(_given(x, zero) for x in (attempt.scale, attempt.norm)), squares]
    ledger.ring[(attempt.number - 1) % len(ledger.ring)] = torch.stack(entry)


def _in_order(squares: Tensor) -> Tensor:
    """The sum, on the CPU to the bit as a loop has it.

    CUDA has no deterministic ``cumsum``, and refuses it where somebody asked for such operations.
    """
    return squares.cumsum(0)[-1] if squares.device.type == "cpu" else squares.sum()


def _given(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.full_like(like, NOT_GIVEN) if value is None else value.reshape(()).to(like)
