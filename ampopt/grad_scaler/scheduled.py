"""``torch.amp.GradScaler`` whose schedule is a loss scale: read, changed, saved and loaded."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.arguments import check_scale_number
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale
from ampopt_kernels.devices import to_device

__all__ = ["ScheduledScaler", "at", "changed", "on"]


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
        return _to_torch(self._loss_scale)

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
        loaded = copy.copy(self._loss_scale)
        loaded.load_state_dict(state_dict)
        self._adopt(loaded)

    def _adopt(self, scale: LossScale) -> None:
        self._loss_scale = scale
        # Where those look who know torch's scaler from inside.
        self._scale = None if scale.device is None else scale.value

    def _change(self, **settings: Any) -> None:
        if self._enabled:
            self._adopt(changed(self._loss_scale, **settings))

    def _setting(self, name: str) -> Any:
        if not self._enabled:
            raise RuntimeError(f"this scaler is disabled, and has no {name}")
        value = self._loss_scale._settings().get(name)
        if value is None:
            raise RuntimeError(f"a {type(self._loss_scale).__name__} has no {name}: it stays")
        return value


def on(device: torch.device, scale: LossScale) -> LossScale:
    """``scale`` on another device."""
    if scale.device == device:
        return scale
    moved, counters = copy.copy(scale), scale._counters
    if counters is not None:
        counters = to_device(counters, device)
    moved._set(to_device(scale.value, device), counters, placed=True)
    return moved


def at(scale: LossScale, value: Any) -> LossScale:
    """``scale`` at another value, a number or a tensor. For a tensor, a static one synchronizes.

    Raises:
        TypeError: ``value`` is neither.
        ValueError: it is out of range, or a tensor that has not one floating element.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point() or value.requires_grad:
            raise ValueError(
                "new_scale must be a number, or a floating-point tensor of one element that needs "
                f"no gradient, got shape {tuple(value.shape)} of {value.dtype}"
            )
        value = value.reshape(())
    if isinstance(scale, StaticLossScale):
        number = value.item() if isinstance(value, Tensor) else value
        number = check_scale_number(number, "new_scale")
        return StaticLossScale(number, scale.drop_overflow_update, device=scale.device)
    if isinstance(value, Tensor):
        new = to_device(value, scale.value.device, scale.value.dtype).clone()
    else:
        number = check_scale_number(value, "new_scale")
        low, high = (scale._settings()[name] for name in ("min_scale", "max_scale"))
        if not low <= number <= high:
            raise ValueError(f"new_scale must be from {low!r} to {high!r}, got {value!r}")
        new = torch.full_like(scale.value, number)
    assert scale._counters is not None
    return scale._successor(new, scale._counters)


def changed(scale: LossScale, **settings: Any) -> LossScale:
    """``scale`` with other settings, from now on. Does not synchronize.

    Raises:
        RuntimeError: it is static.
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """
    if not isinstance(scale, DynamicLossScale):
        raise RuntimeError(f"{scale!r} has no {', '.join(settings)}: it stays what it is")
    new = type(scale)(**{**scale._settings(), **settings})
    assert scale._counters is not None
    growth, budget = scale._counters.unbind()
    growth = growth.clamp(max=new._schedule.first_growth - 1)  # it grows at the next finite step
    new._set(scale.value, torch.stack((growth, budget)), scale.device is not None)
    return new


def _to_torch(scale: LossScale) -> dict[str, Any]:
    """``scale`` as ``torch.amp.GradScaler`` saves it, and what more there is. Synchronizes."""
    state = scale.state_dict()
    dynamic = isinstance(scale, DynamicLossScale)
    entries = {
        "scale": state["scale"] if dynamic else scale.item(),
        # By factors of 1, torch's scaler stays what it is.
        "growth_factor": state["growth_factor"] if dynamic else 1.0,
        "backoff_factor": state["backoff_factor"] if dynamic else 1.0,
        "growth_interval": state["growth_interval"] if dynamic else 2000,
        "_growth_tracker": state["growth"] if dynamic else 0,
    }
    others = {k: v for k, v in scale._settings().items() if k not in ("init_scale", *entries)}
    torchs = DynamicLossScale()._settings()
    if not (dynamic and all(torchs[name] == value for name, value in others.items())):
        entries["loss_scale"] = state
    return entries
