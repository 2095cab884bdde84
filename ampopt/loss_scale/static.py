"""The loss scale that never changes."""

from collections.abc import Mapping
from typing import Any

import torch

from ampopt._argument_checks import check_bool
from ampopt.loss_scale.arguments import check_flag, check_scale_number
from ampopt.loss_scale.base import Device, LossScale
from ampopt.loss_scale.schedule import check_entries

__all__ = ["StaticLossScale"]


class StaticLossScale(LossScale):
    """A scale that never changes: the next scale is the same object.

    ``StaticLossScale(1.0)`` replaces ``GradScaler(enabled=False)`` in a script that can do without
    scaling: it has a state dict, loads that of any scale or scaler, and stays 1.0. Steps with inf
    or NaN are skipped unless ``drop_overflow_update`` is ``False``; a disabled scaler applies them.

    Example:
        >>> scale = StaticLossScale(2.0**10)
        >>> scale.next(found_inf=1.0) is scale
        True
    """

    def __init__(
        self, value: float, drop_overflow_update: bool = True, *, device: Device | None = None
    ) -> None:
        """Check the number, and round it to float32.

        Args:
            value: the scale: a positive number in float32's normal range, 2**-126 or more.
            drop_overflow_update: ``False`` applies an update even if its gradients are not finite.
            device: the device of the scale; ``None`` for the device where it is first used.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: ``value`` is out of range.
        """
        drop = check_bool("drop_overflow_update", drop_overflow_update)
        self._take(check_scale_number(value, "value"), drop, placed=False)
        if device is not None:
            self._place(device)

    def _take(self, number: float, drop: bool, placed: bool) -> None:
        """Store the number and the option; the tensor stays on its device if it has one."""
        device = self._value.device if placed else "cpu"
        value = torch.full((), number, dtype=torch.float32, device=device)
        self._number, self._drop = number, drop
        self._set(value, None, placed)

    def next(self, found_inf: Any) -> "StaticLossScale":
        """This scale, whatever ``found_inf`` is; see :meth:`LossScale.next`."""
        check_flag(found_inf)
        return self

    def item(self) -> float:
        """The scale as a Python number. Does not synchronize: the host has kept the number."""
        return self._number

    @property
    def _host_number(self) -> float:
        """The number, which the host always has."""
        return self._number

    def state_dict(self) -> dict[str, Any]:
        """All that has to be saved, as plain Python objects. Does not synchronize."""
        return {"type": type(self).__name__, **self._settings()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace number and settings; see :meth:`LossScale.load_state_dict`.

        A scale of 1.0 takes the state of any other scale or scaler, and stays as it is: that run
        scaled its losses, and this one does not.
        """
        if self._number == 1.0 and _is_of_dynamic_scale(state_dict):
            return
        saved = StaticLossScale(**check_entries(self, state_dict, tuple(self._settings())))
        if self._number != 1.0 or saved._number == 1.0:
            self._take(saved._number, saved._drop, self._placed)

    def _settings(self) -> dict[str, Any]:
        """The arguments of the constructor, without ``device``."""
        return {"value": self._number, "drop_overflow_update": self._drop}


def _is_of_dynamic_scale(state_dict: Any) -> bool:
    """Whether ``state_dict`` is that of a dynamic scale, or of a scaler without a static one."""
    if not isinstance(state_dict, Mapping):
        return False
    state = state_dict.get("loss_scale", state_dict)  # ampopt.GradScaler saves its scale whole
    dynamic = ("growth", "_growth_tracker")  # of a scale, and of a scaler
    return not state or any(name in state for name in dynamic)
