"""What is usual of a norm or a loss, kept on the device, and whether a new one is out of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.tensors import widest

__all__ = ["Running", "RunningStatistics", "WindowStatistics"]


class RunningStatistics:
    """Values of earlier steps, as one vector of numbers on the device, written in place."""

    def __init__(self, size: int) -> None:
        """Start with ``size`` zeros, on the CPU until the first value comes."""
        self._numbers = torch.zeros(size, dtype=torch.float64, device="cpu")

    def numbers_on(self, device: torch.device) -> Tensor:
        """The vector, which stays on ``device``, in its widest dtype."""
        if self._numbers.device != device:
            self._numbers = to_device(self._numbers, device, widest(device))
        return self._numbers

    def state_dict(self) -> list[float]:
        """All numbers. Synchronizes."""
        return self._numbers.tolist()

    def check(self, state: Sequence[float]) -> None:
        """Refuse what is no state of such a history.

        Raises:
            ValueError: it has another length.
        """
        if not isinstance(state, Sequence) or len(state) != len(self._numbers):
            raise ValueError(f"a history here has {len(self._numbers)} numbers, got {state!r}")

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state."""
        self._numbers.copy_(torch.tensor(state, dtype=torch.float64))


class Running(RunningStatistics):
    """Count, mean and sum of squared differences of all steps taken.

    :mod:`ampopt_kernels.skip_checks` reads and updates them.
    """

    def __init__(self, deviations: float, warmup: int) -> None:
        """Start without any value.

        Args:
            deviations: the number of standard deviations above the mean that is too large.
            warmup: the number of steps to be taken before any value is.
        """
        super().__init__(3)
        self.deviations, self.warmup = deviations, max(warmup, 2)


class WindowStatistics(RunningStatistics):
    """Mean and deviation of the last steps, skipped ones among them, as other systems take them.

    The vector is: values so far, outliers in a row, and the last values in a ring.
    """

    def __init__(self, deviations: float, settings: Mapping[str, Any]) -> None:
        """Begin.

        Args:
            deviations: so many are out of the ordinary.
            settings: ``length`` of the window; ``first``, the value, counted from 1, that is judged
                first; ``latest``, whether the window has the value itself; ``correction`` of the
                deviation; ``both_sides``, whether small values are out of the ordinary, too;
                ``leaves_out``, how many outliers in a row are not taken in.
        """
        super().__init__(2 + settings["length"])
        self._deviations, self._settings = deviations, settings

    def _with(self, value: Tensor) -> Tensor:
        ring = self._numbers[2:]
        at = torch.arange(len(ring), device=ring.device) == self._numbers[0] % len(ring)
        return torch.where(at, value, ring)

    def evaluate(self, value: Tensor) -> Tensor:
        """Whether ``value``, 0-d, is out of the ordinary: bool, 0-d. Changes nothing."""
        given, count = self._settings, self.numbers_on(value.device)[0]
        ring = self._with(value) if given["latest"] else self._numbers[2:]
        known = (count + given["latest"]).clamp(max=len(ring))
        held = torch.arange(len(ring), device=ring.device) < known
        mean = torch.where(held, ring, 0.0).sum() / known
        squares = torch.where(held, (ring - mean).square(), 0.0).sum()
        deviation = (squares / (known - given["correction"])).sqrt()
        away = (value - mean).abs() if given["both_sides"] else value - mean
        usual = away <= self._deviations * deviation  # which NaN is not
        return (count + 1 >= given["first"]) & ~usual

    def update_from(self, value: Tensor, judged: Tensor, finite: Tensor) -> None:
        """Take ``value`` in, unless this window leaves such a value out.

        Args:
            value: 0-d.
            judged: the result of :meth:`evaluate` for it.
            finite: whether no gradient overflowed: bool, 0-d.
        """
        in_a_row = (self._numbers[1] + 1) * judged
        takes_in = ~judged | (in_a_row > self._settings["leaves_out"])
        numbers = torch.stack([self._numbers[0] + takes_in, in_a_row])
        new = torch.cat([numbers, torch.where(takes_in, self._with(value), self._numbers[2:])])
        self._numbers.copy_(torch.where(finite & value.isfinite(), new, self._numbers))
