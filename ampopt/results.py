"""What the control points return."""

from typing import Any, NamedTuple

from torch import Tensor

from ampopt.loss_scale.base import LossScale, drops

__all__ = ["StepResult", "Unscaled", "as_flag", "is_flag"]


class Unscaled(NamedTuple):
    """What :meth:`ampopt.Optimizer.unscale` found.

    Attributes:
        found_inf: float32, 0-d, on the parameters' device; more than 0 if a gradient was not
            finite after unscaling.
        scale: what to scale the next loss by; see :meth:`ampopt.Optimizer.unscale`.
    """

    found_inf: Tensor
    scale: Any


class StepResult(NamedTuple):
    """What a step did.

    Attributes:
        loss: what the closure returned; without one, what an ordinary ``step()`` returned, which
            is ``None`` as a rule.
        found_inf: float32, 0-d, on the parameters' device; more than 0 if a gradient was not
            finite after unscaling.
        scale: what to scale the next loss by.
    """

    loss: Any
    found_inf: Tensor
    scale: Any

    @property
    def skipped(self) -> bool:
        """Whether the update was left out. Synchronizes: the host waits for the device."""
        # A static scale may have been told to apply an overflowed update all the same.
        skipped = drops(self.scale) and bool(self.found_inf > 0)
        if skipped and isinstance(self.scale, LossScale):
            self.scale._warn_if_collapsed()  # the host has waited anyway
        return skipped


def as_flag(found_inf: Tensor) -> Tensor:
    """``found_inf``, marked, for it is easily unpacked where the scale is meant to be."""
    found_inf._is_overflow_flag = True  # type: ignore[attr-defined]
    return found_inf


def is_flag(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``found_inf`` that a control point returned."""
    return getattr(tensor, "_is_overflow_flag", False)
