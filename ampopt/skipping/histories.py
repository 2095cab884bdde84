"""Statistics of the norms or losses of earlier steps, by which outliers are detected."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.tensors import widest

__all__ = ["Running", "RunningStatistics", "WindowStatistics"]


class RunningStatistics:
    """Statistics of earlier steps: one vector on the device, which is written in place."""

    def __init__(self, size: int) -> None:
        """Start with ``size`` zeros, on the CPU until the first value is checked."""
        self._numbers = torch.zeros(size, dtype=torch.float64, device="cpu")

    def numbers_on(self, device: torch.device) -> Tensor:
        """The vector, moved to ``device`` if it is elsewhere, in the widest dtype of ``device``."""
        if self._numbers.device != device:
            self._numbers = to_device(self._numbers, device, widest(device))
        return self._numbers

    def state_dict(self) -> list[float]:
        """The numbers of the vector. Synchronizes."""
        return self._numbers.tolist()

    def check(self, state: Sequence[float]) -> None:
        """Raise if :meth:`load` cannot load ``state``.

        Raises:
            ValueError: ``state`` is not a sequence of as many numbers as the vector has.
        """
        if not isinstance(state, Sequence) or len(state) != len(self._numbers):
            raise ValueError(
                f"statistics of earlier steps must have {len(self._numbers)} numbers, got {state!r}"
            )

    def load(self, state: Sequence[float]) -> None:
        """Replace the numbers by ``state``, which :meth:`state_dict` returned."""
        self._numbers.copy_(torch.tensor(state, dtype=torch.float64))


class Running(RunningStatistics):
    """Count, mean and sum of squared deviations over all steps that were applied.

    :mod:`ampopt_kernels.skip_checks` reads and updates the three numbers.
    """

    def __init__(self, deviations: float, warmup: int) -> None:
        """Start without any value.

        Args:
            deviations: a value is an outlier if it is more than this number of standard deviations
                above the mean.
            warmup: the number of applied steps before which no value is an outlier; at least 2.
        """
        super().__init__(3)
        self.deviations, self.warmup = deviations, max(warmup, 2)


class WindowStatistics(RunningStatistics):
    """Mean and standard deviation over a window of the last steps, also skipped ones.

    Other systems compute them so. The vector has the number of values so far, the number of
    consecutive outliers, and a ring buffer of the last values.
    """

    def __init__(self, deviations: float, settings: Mapping[str, Any]) -> None:
        """Start with an empty window.

        Args:
            deviations: a value is an outlier if it is more than this number of standard deviations
                from the mean.
            settings: the rules of the other system: ``length``, the number of values in the window;
                ``first``, the number of the first value that is tested, counted from 1; ``latest``,
                whether the window includes the tested value; ``correction``, what is subtracted
                from the number of values in the variance; ``both_sides``, whether values below the
                mean may be outliers too; ``leaves_out``, how many consecutive outliers are not
                added to the window.
        """
        super().__init__(2 + settings["length"])
        self._deviations, self._settings = deviations, settings

    def _with(self, value: Tensor) -> Tensor:
        """The ring buffer, in which ``value`` replaces the oldest value."""
        ring = self._numbers[2:]
        at = torch.arange(len(ring), device=ring.device) == self._numbers[0] % len(ring)
        return torch.where(at, value, ring)

    def evaluate(self, value: Tensor) -> Tensor:
        """Whether ``value``, a 0-d tensor, is an outlier: bool, 0-d. Changes nothing."""
        settings, count = self._settings, self.numbers_on(value.device)[0]
        ring = self._with(value) if settings["latest"] else self._numbers[2:]
        known = (count + settings["latest"]).clamp(max=len(ring))
        is_used = torch.arange(len(ring), device=ring.device) < known
        mean = torch.where(is_used, ring, 0.0).sum() / known
        squares = torch.where(is_used, (ring - mean).square(), 0.0).sum()
        deviation = (squares / (known - settings["correction"])).sqrt()
        away = (value - mean).abs() if settings["both_sides"] else value - mean
        usual = away <= self._deviations * deviation  # NaN is an outlier
        return (count + 1 >= settings["first"]) & ~usual

    def update_from(self, value: Tensor, is_outlier: Tensor, finite: Tensor) -> None:
        """Add ``value`` to the window, unless it is one of the outliers that are not added.

        Changes nothing if ``value`` is not finite.

        Args:
            value: the value, 0-d.
            is_outlier: the result of :meth:`evaluate` for ``value``.
            finite: whether no gradient overflowed, bool, 0-d; if one did, nothing changes.
        """
        in_a_row = (self._numbers[1] + 1) * is_outlier
        is_added = ~is_outlier | (in_a_row > self._settings["leaves_out"])
        numbers = torch.stack([self._numbers[0] + is_added, in_a_row])
        new = torch.cat([numbers, torch.where(is_added, self._with(value), self._numbers[2:])])
        self._numbers.copy_(torch.where(finite & value.isfinite(), new, self._numbers))
