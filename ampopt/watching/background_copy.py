"""Copies what one step found from the device to the host, without waiting."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ampopt_kernels.devices import copied_together
from ampopt_kernels.watch_statistics import Statistics

__all__ = ["BackgroundCopy"]


class BackgroundCopy:
    """A copy of what one step found, which the statistics of a watch record once it has arrived.

    Tensors of an accelerator are copied in the background. So recording launches no kernel, and
    the step does not wait.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], record: Callable[[Statistics, list[Any]], None]
    ) -> None:
        """Start to copy. Does not synchronize.

        Args:
            tensors: the tensors.
            record: ``record(statistics, copies)`` records the copies of ``tensors``.
        """
        self._copies, self._events = copied_together(tensors)
        self._record = record

    def done(self) -> bool:
        """Whether everything has arrived. Does not synchronize."""
        return all(event.query() for event in self._events)

    def add_to(self, statistics: Statistics) -> None:
        """Record the tensors. Waits until everything has arrived."""
        for event in self._events:
            event.synchronize()
        self._record(statistics, self._copies)
