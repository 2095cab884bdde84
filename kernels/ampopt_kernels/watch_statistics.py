"""Statistics of parameters and steps that :mod:`ampopt.watching` keeps on a device.

One vector holds them all, so that one copy brings them to the host::

    parameters   COLUMNS numbers each: largest gradient magnitude, UNSEEN before the first gradient;
                 overflows; gradients that were not 0; those of them that float16 would flush to 0;
                 norm of the parameter when the watch began; then a ring buffer of the numbers of
                 the last 16 steps in which the parameter overflowed
    totals       skips in a row; skips by each cause
    steps        RING numbers for each of the last steps, a ring buffer: cause of the skip, loss
                 scale, global norm, sum of squares of the watched gradients, loss
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.tensors import widest
from ampopt_kernels.uploads import Uploads

__all__ = [
    "CAUSES",
    "COLUMNS",
    "COUNTS",
    "NOT_GIVEN",
    "RING",
    "UNSEEN",
    "RecordedStep",
    "WatchStatistics",
    "ChunkRange",
    "note",
    "zeros",
]

COUNTS = 5
"""Numbers of a parameter before its ring buffer of steps; steps count from 1, and 0 is empty."""
COLUMNS = COUNTS + 16
"""Numbers of a parameter. The step numbers let a report over ranks count an overflow of several
shards in one step once."""
CAUSES = ("overflow", "norm", "loss")
"""Reasons to skip a step, counted from 1; 0 is a step that was applied."""
RING = 5
"""Numbers of a step; a number that the step does not have is ``NOT_GIVEN``."""
NOT_GIVEN = -math.inf
UNSEEN = -1.0
"""The largest gradient magnitude of a parameter that has had no gradient yet."""


class ChunkRange(NamedTuple):
    """The chunks of one parameter in :class:`GradientReport`, and its row in the statistics.

    Attributes:
        first: index of the first chunk.
        parts: number of chunks.
        place: index of the parameter in :attr:`WatchStatistics.parameters`.
    """

    first: int
    parts: int
    place: int


@dataclass(frozen=True)
class WatchStatistics:
    """The statistics of one device: one vector, and views of it.

    Attributes:
        numbers: the whole vector: ``widest``, 1-d.
        places: number of parameters.
    """

    numbers: Tensor
    places: int

    @property
    def parameters(self) -> Tensor:
        """The numbers of each parameter: shape (places, COLUMNS)."""
        return self.numbers[: COLUMNS * self.places].view(-1, COLUMNS)

    @property
    def totals(self) -> Tensor:
        """Skips in a row, then skips by each cause: shape (1 + len(CAUSES),)."""
        start = COLUMNS * self.places
        return self.numbers[start : start + 1 + len(CAUSES)]

    @property
    def ring(self) -> Tensor:
        """The numbers of the last steps: shape (last, RING). Step n is in row (n - 1) % last."""
        return self.numbers[COLUMNS * self.places + 1 + len(CAUSES) :].view(-1, RING)


def zeros(places: int, last: int, device: torch.device) -> WatchStatistics:
    """Empty statistics of ``places`` parameters and the ``last`` steps, on ``device``."""
    size = COLUMNS * places + 1 + len(CAUSES) + RING * last
    return WatchStatistics(torch.zeros(size, dtype=widest(device), device=device), places)


@dataclass(frozen=True)
class RecordedStep:
    """One step, applied or skipped. Tensors have one element, of any dtype.

    Attributes:
        number: number of the step, counted from 1.
        skip: more than 0 if the step was skipped; ``None`` if it was certainly applied.
        cause: index in ``CAUSES``, counted from 1, if a skip condition other than overflow held;
            0 or ``None`` otherwise.
        scale: the loss scale of the gradients; ``None`` if they had none.
        norm: global norm of the unscaled gradients; ``None`` if it was not computed.
        loss: the loss of the step; ``None`` if the optimizer does not know it.
    """

    number: int
    skip: Tensor | None = None
    cause: Tensor | None = None
    scale: Tensor | None = None
    norm: Tensor | None = None
    loss: Tensor | None = None


def note(
    statistics: WatchStatistics,
    attempt: RecordedStep,
    report: GradientReport | None,
    parts: Sequence[ChunkRange],
    uploads: Uploads,
    *,
    notes_step: bool,
) -> None:
    """Record one step, in torch operations. Does not synchronize.

    Args:
        statistics: the statistics to update in place.
        attempt: the step; its tensors are on the device of the statistics.
        report: flags and measures of the gradients, one chunk for each row; ``None`` if the
            gradients were not measured.
        parts: the chunk of each parameter of these statistics.
        uploads: tables that are on the device already.
        notes_step: whether to update totals and ring too, which one device of a step does.
    """
    device, wide = statistics.numbers.device, statistics.numbers.dtype
    zero = torch.zeros((), dtype=wide, device=device)
    skipped = zero if attempt.skip is None else (attempt.skip.reshape(()) > 0).to(wide)
    squares = torch.full_like(zero, NOT_GIVEN)
    if report is not None and report.measures is not None and parts:
        firsts = uploads.get("parts", [p.first for p in parts], torch.int64, device)
        places = uploads.get("places", [p.place for p in parts], torch.int64, device)
        measures = report.measures.to(device, wide)[firsts]
        table = statistics.parameters[places]
        table[:, 0] = torch.maximum(table[:, 0], measures[:, 0])
        table[:, 2:4] += measures[:, 1:3] * (1 - skipped)
        squares = _in_order(measures[:, 3])
        if not report.surely_finite:
            flags = report.flags_on(device).to(wide)[firsts]
            order = torch.arange(COLUMNS - COUNTS, device=device)
            oldest = order == (table[:, 1:2] % len(order))
            table[:, COUNTS:].masked_fill_(oldest & (flags > 0)[:, None], attempt.number)
            table[:, 1] += flags
            squares = squares.masked_fill((flags > 0).any(), float("inf"))
        statistics.parameters[places] = table
    if not notes_step:
        return
    cause = skipped
    if attempt.cause is not None:
        cause = skipped * attempt.cause.reshape(()).to(wide).clamp(min=1)
    totals = statistics.totals
    totals[0] = (totals[0] + 1) * skipped
    totals[1:] += torch.arange(1, 1 + len(CAUSES), device=device) == cause
    scale, norm, loss = (
        _or_not_given(x, zero) for x in (attempt.scale, attempt.norm, attempt.loss)
    )
    entry = torch.stack([cause, scale, norm, squares, loss])
    statistics.ring[(attempt.number - 1) % len(statistics.ring)] = entry


def _in_order(squares: Tensor) -> Tensor:
    """The sum of a 1-d tensor; on the CPU, in order, with the bits of the compiled backend's loop.

    On CUDA the order is torch's, because ``cumsum`` raises there under
    ``torch.use_deterministic_algorithms``.
    """
    return squares.cumsum(0)[-1] if squares.device.type == "cpu" else squares.sum()


def _or_not_given(value: Tensor | None, like: Tensor) -> Tensor:
    """``value`` as a 0-d tensor with dtype and device of ``like``; ``NOT_GIVEN`` for ``None``."""
    return torch.full_like(like, NOT_GIVEN) if value is None else value.reshape(()).to(like)
