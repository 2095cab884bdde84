"""What is usual of a norm or a loss, kept on the device, and whether a new one is out of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.tensors import widest

__all__ = ["RunningStatistics", "Running", "WindowStatistics"]


class RunningStatistics(ABC):
    """Values of earlier steps, as one vector of numbers on the device, written in place.

    Attributes:
        numbers: the vector, on the CPU until the first value comes.
    """

    def __init__(self, size: int) -> None:
        """Begin with zeros."""
        self.numbers = torch.zeros(size, dtype=torch.float64, device="cpu")

    def evaluate(self, value: Tensor) -> Tensor:
        """Whether ``value`` is out of the ordinary: bool, 0-d. Learns nothing."""
        device = value.device
        if self.numbers.device != device:
            self.numbers = to_device(self.numbers, device, widest(device))
        return self._judge(value)

    @abstractmethod
    def update_from(self, value: Tensor, judged: Tensor, taken: Tensor, finite: Tensor) -> None:
        """Take ``value`` in, if this history is to.

        Args:
            value: 0-d.
            judged: what :meth:`evaluate` has said of it.
            taken: whether the step was not skipped: bool, 0-d.
            finite: whether nothing overflowed: likewise.
        """

    @abstractmethod
    def _judge(self, value: Tensor) -> Tensor: ...

    def state_dict(self) -> list[float]:
        """All numbers. Synchronizes."""
        return self.numbers.tolist()

    def check(self, state: Sequence[float]) -> None:
        """Refuse what is no state of such a history.

        Raises:
            ValueError: it has another length.
        """
        if not isinstance(state, Sequence) or len(state) != len(self.numbers):
            raise ValueError(f"a history here has {len(self.numbers)} numbers, got {state!r}")

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state."""
        self.numbers.copy_(torch.tensor(state, dtype=torch.float64))


class Running(RunningStatistics):
    """Mean and deviation of all steps that were taken, by Welford's method."""

    def __init__(self, deviations: float, warmup: int) -> None:
        """Begin.

        Args:
            deviations: above the mean by more than so many is out of the ordinary.
            warmup: steps that have to be taken before anything is.
        """
        super().__init__(3)
        self._deviations, self._warmup = deviations, max(warmup, 2)

    def _judge(self, value: Tensor) -> Tensor:
        count, mean, squares = self.numbers.unbind()
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        usual = value - mean <= self._deviations * deviation  # which NaN is not
        return (count >= self._warmup) & ~usual

    def update_from(self, value: Tensor, judged: Tensor, taken: Tensor, finite: Tensor) -> None:
        """See :meth:`RunningStatistics.update_from`."""
        count, mean, squares = self.numbers.unbind()
        delta = value - mean
        new_mean = mean + delta / (count + 1)
        new = torch.stack([count + 1, new_mean, squares + delta * (value - new_mean)])
        self.numbers.copy_(torch.where(taken & value.isfinite(), new, self.numbers))


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
        ring = self.numbers[2:]
        at = torch.arange(len(ring), device=ring.device) == self.numbers[0] % len(ring)
        return torch.where(at, value, ring)

    def _judge(self, value: Tensor) -> Tensor:
        given, count = self._settings, self.numbers[0]
        ring = self._with(value) if given["latest"] else self.numbers[2:]
        known = (count + given["latest"]).clamp(max=len(ring))
        held = torch.arange(len(ring), device=ring.device) < known
        mean = torch.where(held, ring, 0.0).sum() / known
        squares = torch.where(held, (ring - mean).square(), 0.0).sum()
        deviation = (squares / (known - given["correction"])).sqrt()
        away = (value - mean).abs() if given["both_sides"] else value - mean
        usual = away <= self._deviations * deviation  # which NaN is not
        return (count + 1 >= given["first"]) & ~usual

    def update_from(self, value: Tensor, judged: Tensor, taken: Tensor, finite: Tensor) -> None:
        """See :meth:`RunningStatistics.update_from`."""
        in_a_row = (self.numbers[1] + 1) * judged
        takes_in = ~judged | (in_a_row > self._settings["leaves_out"])
        numbers = torch.stack([self.numbers[0] + takes_in, in_a_row])
        new = torch.cat([numbers, torch.where(takes_in, self._with(value), self.numbers[2:])])
        self.numbers.copy_(torch.where(finite & value.isfinite(), new, self.numbers))
