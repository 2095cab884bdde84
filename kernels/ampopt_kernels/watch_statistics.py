"""Statistics of parameters and steps that :mod:`ampopt.watching` keeps.

One vector holds them all::

    parameters   COLUMNS numbers each: largest gradient magnitude, UNSEEN before the first gradient;
                 overflows; gradients that were not 0; those of them that float16 would flush to 0;
                 norm of the parameter when the watch began; then a ring buffer of the numbers of
                 the last 16 steps in which the parameter overflowed
    totals       skips in a row; skips by each cause
    steps        RING numbers for each of the last steps, a ring buffer: cause of the skip, loss
                 scale, global norm, sum of squares of the watched gradients, loss
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.gradient_reports import GradientReport, flags_on
from ampopt_kernels.tensors import widest

__all__ = [
    "CAUSES",
    "COLUMNS",
    "COUNTS",
    "NOT_GIVEN",
    "RING",
    "UNSEEN",
    "RecordedStep",
    "WatchStatistics",
    "Chunks",
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


class Chunks(NamedTuple):
    """Which chunks of a :class:`GradientReport` are counted, and for which parameters.

    Attributes:
        chunks: the indices of the chunks: int64, 1-d.
        owners: for each of them, the index of its parameter in :attr:`places`.
        places: the indices of the parameters in :attr:`WatchStatistics.parameters`.
    """

    chunks: Tensor
    owners: Tensor
    places: Tensor


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


class RecordedStep(NamedTuple):
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
    chunks: Chunks | None,
    *,
    notes_step: bool,
) -> None:
    """Record one step, in torch operations. Does not synchronize.

    Args:
        statistics: the statistics to update in place.
        attempt: the step.
        report: flags and measures of the gradients; ``None`` if they were not measured.
        chunks: the chunks of ``report`` to count, on the device of the statistics.
        notes_step: whether to update totals and ring too, which one device of a step does.
    """
    device, wide = statistics.numbers.device, statistics.numbers.dtype
    zero = torch.zeros((), dtype=wide, device=device)
    skipped = zero if attempt.skip is None else (attempt.skip.reshape(()) > 0).to(zero)
    squares = torch.full_like(zero, NOT_GIVEN)
    if report is not None and report.measures is not None and chunks and len(chunks.places):
        measures = report.measures.to(device, wide)[:, chunks.chunks]
        squares, largest = _in_order(measures[0]), _reduced(measures[1], chunks, largest=True)
        table = statistics.parameters[chunks.places]
        table[:, 0] = torch.maximum(table[:, 0], largest)
        table[:, 2:4] += _reduced(measures[2:].T, chunks, largest=False) * (1 - skipped)
        if not report.surely_finite:
            of_chunks = flags_on(device, report.flags).to(wide)[chunks.chunks]
            flags = _reduced(of_chunks, chunks, largest=True)
            order = torch.arange(COLUMNS - COUNTS, device=device)
            oldest = order == (table[:, 1:2] % len(order))
            table[:, COUNTS:].masked_fill_(oldest & (flags > 0)[:, None], attempt.number)
            table[:, 1] += flags
            squares = squares.masked_fill((flags > 0).any(), float("inf"))
        statistics.parameters[chunks.places] = table
    if not notes_step:
        return
    cause = skipped
    if attempt.cause is not None:
        cause = skipped * attempt.cause.reshape(()).to(zero).clamp(min=1)
    totals = statistics.totals
    totals[0] = (totals[0] + 1) * skipped
    totals[1:] += torch.arange(1, 1 + len(CAUSES), device=device) == cause
    scale, norm, loss = (
        _or_not_given(x, zero) for x in (attempt.scale, attempt.norm, attempt.loss)
    )
    entry = torch.stack([cause, scale, norm, squares, loss])
    statistics.ring[(attempt.number - 1) % len(statistics.ring)] = entry


def _reduced(numbers: Tensor, chunks: Chunks, *, largest: bool) -> Tensor:
    """The sum, or the largest, of the ``numbers`` of each parameter's chunks, none negative."""
    if len(chunks.places) == len(chunks.chunks):
        return numbers
    result = numbers.new_zeros((len(chunks.places), *numbers.shape[1:]))
    if largest:
        return result.scatter_reduce_(0, chunks.owners, numbers, "amax")
    return result.index_add_(0, chunks.owners, numbers)


def _in_order(squares: Tensor) -> Tensor:
    """The sum of a 1-d tensor; on the CPU, in order, with the bits of the compiled backend's loop.

    On CUDA the order is torch's, because ``cumsum`` raises there under
    ``torch.use_deterministic_algorithms``.
    """
    return squares.cumsum(0)[-1] if squares.device.type == "cpu" else squares.sum()


def _or_not_given(value: Tensor | None, like: Tensor) -> Tensor:
    """``value`` as a 0-d tensor with dtype and device of ``like``; ``NOT_GIVEN`` for ``None``."""
    return torch.full_like(like, NOT_GIVEN) if value is None else value.reshape(()).to(like)
