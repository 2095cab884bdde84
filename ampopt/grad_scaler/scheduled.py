"""``torch.amp.GradScaler`` whose schedule is a loss scale: read, changed, saved and loaded."""

from collections.abc import Mapping
from typing import Any

import torch

from ampopt.grad_scaler import state as schedules
from ampopt.loss_scale.base import LossScale

__all__ = ["ScheduledScaler"]


class ScheduledScaler(torch.amp.GradScaler):
    """What of :class:`ampopt.GradScaler` is about its scale, and not about optimizers.

    Its constructor calls :meth:`_adopt` with a scale, if it is enabled. What is set between
    ``unscale_`` or ``step`` and ``update`` is heeded from the next iteration on.
    """

    _loss_scale: LossScale

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale in use; ``None`` if the scaler is disabled. Does not synchronize."""
        return self._loss_scale if self._enabled else None

    def get_scale(self) -> float:
        """The scale as a Python number, 1.0 if disabled. Synchronizes."""
        return self._loss_scale.item() if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by on growth."""
        return self._setting("growth_factor")

    def set_growth_factor(self, new_factor: float) -> None:
        """Multiply by ``new_factor`` on growth, from now on."""
        self._change(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after an overflow."""
        return self._setting("backoff_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Multiply by ``new_factor`` after an overflow, from now on."""
        self._change(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """After how many finite steps the scale grows."""
        return self._setting("growth_interval")

    def set_growth_interval(self, new_interval: int) -> None:
        """Grow after ``new_interval`` finite steps, those already counted included."""
        self._change(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The state, which ``torch.amp.GradScaler`` loads too. Synchronizes.

        Torch's five entries; and ``loss_scale``, which torch ignores, if the schedule is more than
        they can say. Empty if disabled. Call it after :meth:`update`.
        """
        if not self._enabled:
            return {}
        return schedules.to_torch(self._loss_scale)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state of this class or of ``torch.amp.GradScaler``. Nothing, if disabled.

        What torch's state does not say, such as a floor, stays as it is.

        Raises:
            RuntimeError: the state is empty, as that of a disabled scaler is.
            ValueError: an entry is missing or out of range, or the state is that of another kind of
                scale. Nothing has changed then.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled "
                "instance of GradScaler. To go on with the scale of this one, do not load it"
            )
        self._adopt(schedules.from_torch(self._loss_scale, state_dict))

    def _adopt(self, scale: LossScale) -> None:
        self._loss_scale = scale
        # Where those look who know torch's scaler from inside.
        self._scale = None if scale.device is None else scale.value

    def _change(self, **settings: Any) -> None:
        if self._enabled:
            self._adopt(schedules.changed(self._loss_scale, **settings))

    def _setting(self, name: str) -> Any:
        if not self._enabled:
            raise RuntimeError(f"this scaler is disabled, and has no {name}")
        value = self._loss_scale._settings().get(name)
        if value is None:
            raise RuntimeError(f"a {type(self._loss_scale).__name__} has no {name}: it stays")
        return value
