"""What one step found, on its way from the device to the statistics of a watch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import copied_together
from ampopt_kernels.gradient_reports import GradientReport, RankFlags
from ampopt_kernels.watch_statistics import Chunks, RecordedStep, WatchStatistics, note

__all__ = ["Found", "Gradients", "StartingNorms", "Statistics"]


class Gradients(NamedTuple):
    """What was found in the gradients of one device, and which parameter each chunk is of."""

    device: torch.device
    report: GradientReport
    chunks: Chunks


@dataclass
class Statistics:
    """Everything that a watch has recorded.

    Attributes:
        by_device: the statistics of the parameters of each device, in the order of devices.
        by_rank: by ranks, in how many steps each of them found an overflow: float32, 1-d.
    """

    by_device: dict[torch.device, WatchStatistics]
    by_rank: dict[tuple[int, ...], Tensor]

    def copy(self) -> "Statistics":
        """A copy, which later steps do not change."""
        by_device = {
            device: replace(known, numbers=known.numbers.clone())
            for device, known in self.by_device.items()
        }
        return Statistics(by_device, {r: counts.clone() for r, counts in self.by_rank.items()})


class StartingNorms:
    """The norms of parameters when their watch began, on their way as those of :class:`Found`."""

    def __init__(self, device: torch.device, first: int, norms: Tensor) -> None:
        """Start to copy. Does not synchronize.

        Args:
            device: the device of the parameters.
            first: the index of the first one in the statistics of ``device``.
            norms: the norm of each.
        """
        self._device, self._places = device, slice(first, first + len(norms))
        (self._norms,), self._events = copied_together([norms])

    def done(self) -> bool:
        """Whether they have arrived. Does not synchronize."""
        return all(event.query() for event in self._events)

    def add_to(self, statistics: Statistics) -> None:
        """Record them. Waits until they have arrived."""
        for event in self._events:
            event.synchronize()
        assert self._norms is not None
        statistics.by_device[self._device].parameters[self._places, 4] = self._norms


class Found:
    """What one step found.

    From an accelerator, each tensor is copied to the host in the background, and recorded there
    once it has arrived: so recording launches no kernel, and the step waits for nothing.
    """

    def __init__(
        self,
        attempt: RecordedStep,
        gradients: Sequence[Gradients],
        of_ranks: Sequence[RankFlags],
        *,
        counted_on: torch.device | None,
    ) -> None:
        """Start to copy. Does not synchronize.

        Args:
            attempt: the step.
            gradients: what was found on each device.
            of_ranks: which ranks found an overflow.
            counted_on: the device whose statistics count the step; ``None`` if it is not over.
        """
        self._events: list[Any] = []
        self._attempt = RecordedStep(attempt.number, *self._copied(attempt[1:]))
        self._gradients: list[Gradients] = []
        for of in gradients:
            flags = of.report.flags if isinstance(of.report.flags, Tensor) else None
            flags, measures = self._copied((flags, of.report.measures))
            report = replace(of.report, measures=measures)
            if flags is not None:
                report = replace(report, flags=flags)
            self._gradients.append(of._replace(report=report))
        flags = self._copied([each.flags for each in of_ranks])
        self._of_ranks = list(zip((tuple(each.ranks) for each in of_ranks), flags, strict=True))
        self._counted_on = counted_on

    def _copied(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """Copies of ``tensors``, complete once :attr:`_events` have happened."""
        copies, events = copied_together(tensors)
        self._events += events
        return copies

    def done(self) -> bool:
        """Whether everything has arrived. Does not synchronize."""
        return all(event.query() for event in self._events)

    def add_to(self, statistics: Statistics) -> None:
        """Record the step. Waits until everything has arrived."""
        for event in self._events:
            event.synchronize()
        found: dict[torch.device, Any] = {
            of.device: (of.report, of.chunks) for of in self._gradients
        }
        if self._counted_on is not None:
            found.setdefault(self._counted_on, (None, None))
        for device, (report, chunks) in found.items():
            own, counts = statistics.by_device[device], device == self._counted_on
            note(own, self._attempt, report, chunks, notes_step=counts)
        for ranks, flags in self._of_ranks:
            known = statistics.by_rank.setdefault(
                ranks, torch.zeros_like(flags, dtype=torch.float32)
            )
            known.add_(flags > 0)
