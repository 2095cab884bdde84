"""Statistics of parameters and steps that :mod:`ampopt.watching` keeps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.tensors import widest

__all__ = [
    "CAUSES",
    "COLUMNS",
    "COUNTS",
    "NOT_GIVEN",
    "RING",
    "Findings",
    "RecordedStep",
    "Statistics",
    "number_of_cause",
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
_UNSEEN = -1.0
"""The largest gradient magnitude of a parameter of which no gradient is known yet."""


def number_of_cause(cause: str) -> float:
    """The number that stands for ``cause``, one of ``CAUSES``, in decisions and statistics."""
    return 1.0 + CAUSES.index(cause)


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


class Findings(NamedTuple):
    """What one pass found in the gradients of one device, and which parameters they are of.

    Attributes:
        flags: more than 0 for each chunk that overflowed: 1-d; ``None`` if surely none did.
        measures: as :attr:`~ampopt_kernels.gradient_reports.GradientReport.measures`; ``None`` for
            a micro-batch, of which the sum is measured.
        chunks: the indices of the chunks to count: int64, 1-d.
        places: for each of these, the index of its parameter in :attr:`Statistics.parameters`.
    """

    flags: Tensor | None
    measures: Tensor | None
    chunks: Tensor
    places: Tensor


@dataclass
class Statistics:
    """Everything that a watch has recorded. Numbers are of the ``widest`` dtype of their device.

    Attributes:
        parameters: ``COLUMNS`` numbers for each parameter: largest gradient magnitude, -1 until
            one is known; overflows; gradients that were not 0; those of them that float16
            would flush to 0; norm of the parameter when the watch began; then a ring buffer of the
            numbers of the last 16 steps in which the parameter overflowed.
        totals: skips in a row; skips by each cause.
        ring: ``RING`` numbers for each of the last steps: cause of the skip, loss scale, global
            norm, sum of squares of the watched gradients, loss. Step n is in row (n - 1) % last.
            The cause of an empty row is ``NOT_GIVEN``.
        by_rank: by ranks, in how many steps each of them found an overflow: 1-d.
        steps: number of steps.
    """

    parameters: Tensor
    totals: Tensor
    ring: Tensor
    by_rank: dict[tuple[int, ...], Tensor]
    steps: int = 0

    @classmethod
    def empty(cls, last: int, device: torch.device) -> "Statistics":
        """Statistics of no parameter, on ``device``, which keep the ``last`` steps."""
        parameters = torch.zeros(0, COLUMNS, dtype=widest(device), device=device)
        totals = parameters.new_zeros(1 + len(CAUSES))
        return cls(parameters, totals, parameters.new_full((last, RING), NOT_GIVEN), {})

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Statistics":
        """A copy that has ``function(tensor)`` in place of each tensor."""
        return Statistics(
            function(self.parameters),
            function(self.totals),
            function(self.ring),
            {ranks: function(counts) for ranks, counts in self.by_rank.items()},
            self.steps,
        )

    def grow(self, n_parameters: int) -> None:
        """Add parameters, until there are ``n_parameters``."""
        new = self.parameters.new_zeros(n_parameters - len(self.parameters), COLUMNS)
        new[:, 0] = _UNSEEN
        self.parameters = torch.cat([self.parameters, new])

    def add(self, step: RecordedStep, findings: Sequence[Findings], *, is_over: bool) -> None:
        """Record one step, in torch operations. Does not synchronize.

        Args:
            step: the step.
            findings: what was found in its gradients.
            is_over: whether to count the step, and not only what was found.
        """
        zero = self.totals.new_zeros(())
        skipped = zero if step.skip is None else (step.skip.reshape(()) > 0).to(zero)
        measured = [found for found in findings if found.measures is not None]
        squares = [self._add_measures(found, 1 - skipped) for found in measured]
        flagged = [found for found in findings if found.flags is not None]
        if flagged:
            self._add_overflows(step.number, flagged)
        if not is_over:
            return
        cause = skipped
        if step.cause is not None:
            cause = skipped * step.cause.reshape(()).to(zero).clamp(min=1)
        self.steps = step.number
        self.totals[0] = (self.totals[0] + 1) * skipped
        self.totals[1:] += torch.arange(1, 1 + len(CAUSES), device=zero.device) == cause
        sum_of_squares = torch.stack(squares).sum() if squares else None
        numbers = (step.scale, step.norm, sum_of_squares, step.loss)
        entry = torch.stack([cause, *(_or_not_given(x, zero) for x in numbers)])
        self.ring[(step.number - 1) % len(self.ring)] = entry

    def _add_measures(self, found: Findings, applied: Tensor) -> Tensor:
        """Record the measures of one device; ``applied`` is 1 if their step was, else 0.

        Returns:
            The sum of the squares; infinity if a gradient overflowed.
        """
        assert found.measures is not None
        table, places = self.parameters, found.places
        square, largest, *counts = found.measures.to(table)[:, found.chunks]
        # If all micro-batches were dropped, the sum is 0, and no gradient is known to be.
        largest.masked_fill_((largest == 0) & (applied == 0), _UNSEEN)
        table[:, 0].scatter_reduce_(0, places, largest, "amax")
        table[:, 2:4].index_add_(0, places, torch.stack(counts, 1) * applied)
        squares = _in_order(square)
        if found.flags is None:
            return squares
        overflow = (found.flags.to(table.device)[found.chunks] > 0).any()
        return squares.masked_fill(overflow, math.inf)

    def _add_overflows(self, number: int, flagged: Sequence[Findings]) -> None:
        """Record which parameters overflowed in step ``number``, each once."""
        table = self.parameters
        overflows = table.new_zeros(len(table))
        for found in flagged:
            assert found.flags is not None
            flags = (found.flags.to(table.device)[found.chunks] > 0).to(table)
            overflows.scatter_reduce_(0, found.places, flags, "amax")
        order = torch.arange(COLUMNS - COUNTS, device=table.device)
        oldest = order == (table[:, 1:2] % len(order))
        table[:, COUNTS:].masked_fill_(oldest & (overflows > 0)[:, None], number)
        table[:, 1] += overflows

    def add_ranks(self, ranks: tuple[int, ...], flags: Tensor) -> None:
        """Count a step in which the flags of ``ranks`` are more than 0. Does not synchronize."""
        known = self.by_rank.setdefault(ranks, torch.zeros_like(flags, dtype=torch.float32))
        known.add_(flags > 0)


def _in_order(squares: Tensor) -> Tensor:
    """The sum of a 1-d tensor; on the CPU, in order, with the bits of the compiled backend's loop.

    On CUDA the order is torch's, because ``cumsum`` raises there under
    ``torch.use_deterministic_algorithms``.
    """
    return squares.cumsum(0)[-1] if squares.device.type == "cpu" else squares.sum()


def _or_not_given(value: Tensor | None, like: Tensor) -> Tensor:
    """``value`` as a 0-d tensor with dtype and device of ``like``; ``NOT_GIVEN`` for ``None``."""
    return torch.full_like(like, NOT_GIVEN) if value is None else value.reshape(()).to(like)
