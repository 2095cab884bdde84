"""The part of ``ampopt.GradScaler`` that deals with its scale: read, change, save and load it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.arguments import check_scale_number
from ampopt.loss_scale.base import LossScale, host_may_read
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale
from ampopt_kernels.devices import to_device

__all__ = ["ScheduledScaler", "at", "on", "with_settings"]


class ScheduledScaler(torch.amp.GradScaler):
    """Base of :class:`ampopt.GradScaler`: the methods that read or change the scale.

    A subclass's constructor calls :meth:`_adopt` with a scale if the scaler is enabled. Settings
    that change between ``unscale_`` or ``step`` and ``update`` apply from the next iteration on.
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
        """The factor by which the scale grows."""
        return self._setting("growth_factor")

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows, more than 1."""
        self._change(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The factor by which the scale is multiplied after an overflow."""
        return self._setting("backoff_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale is multiplied after an overflow, less than 1."""
        self._change(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """The number of consecutive finite steps after which the scale grows."""
        return self._setting("growth_interval")

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of finite steps after which the scale grows; steps so far count."""
        self._change(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The state, which ``torch.amp.GradScaler`` loads too. Synchronizes.

        It has torch's five entries and, if these do not describe the whole schedule,
        ``loss_scale``, which torch ignores. Empty if disabled. Call it after :meth:`update`.
        """
        if not self._enabled:
            return {}
        scale, torchs = self._loss_scale, DynamicLossScale()._settings()
        entries = scale.grad_scaler_state_dict()
        others = {k: v for k, v in scale._settings().items() if k not in ("init_scale", *entries)}
        is_dynamic = isinstance(scale, DynamicLossScale)
        if not is_dynamic or any(torchs[k] != v for k, v in others.items()):
            entries["loss_scale"] = scale.state_dict()
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state of this class or of ``torch.amp.GradScaler``. Does nothing if disabled.

        Settings that torch's state does not have, such as ``min_scale``, stay as they are. A number
        may be a tensor of one element; one on a GPU synchronizes.

        Raises:
            RuntimeError: the state is empty, like that of a disabled scaler.
            ValueError: an entry is missing or out of range, or the state is of another type of
                scale. Nothing has changed then.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled "
                "instance of GradScaler. To keep the scale of this instance, do not load that state"
            )
        state_dict = {
            name: entry.item() if isinstance(entry, Tensor) and entry.numel() == 1 else entry
            for name, entry in state_dict.items()
        }
        loss_scale = copy.copy(self._loss_scale)
        loss_scale.load_state_dict(state_dict)
        self._adopt(loss_scale)
        self._init_growth_tracker = state_dict.get("_growth_tracker", 0)  # torch's tests read it

    def _adopt(self, scale: LossScale) -> None:
        """Use ``scale`` from now on, also as the ``_scale`` that frameworks read."""
        self._loss_scale = scale
        # Frameworks read this private attribute of torch's scaler.
        self._scale = None if scale.device is None else scale.value

    def _change(self, **settings: Any) -> None:
        """Change settings of the scale, such as ``growth_factor``; nothing if disabled."""
        if self._enabled:
            self._adopt(with_settings(self._loss_scale, **settings))

    def _setting(self, name: str) -> Any:
        """The setting ``name`` of the scale.

        Raises:
            RuntimeError: the scaler is disabled, or its scale is static and has no such setting.
        """
        if not self._enabled:
            raise RuntimeError(f"this scaler is disabled and has no {name}: pass enabled=True")
        value = self._loss_scale._settings().get(name)
        if value is None:
            raise RuntimeError(f"a {type(self._loss_scale).__name__} has no {name}: it is constant")
        return value


def on(device: torch.device, scale: LossScale) -> LossScale:
    """A copy of ``scale`` on ``device``; ``scale`` itself if it is there. Does not synchronize."""
    if scale.device == device:
        return scale
    new, counters = copy.copy(scale), scale._counters
    if counters is not None:
        counters = to_device(counters, device)
    new._set(to_device(scale.value, device), counters, placed=True)
    return new


def at(scale: LossScale, value: Any) -> LossScale:
    """A copy of ``scale`` with another value. A static scale synchronizes to read a tensor.

    Args:
        scale: the scale.
        value: a number, or a floating-point tensor of one element. A tensor on an accelerator is
            not compared with the bounds of a dynamic scale, which would synchronize.

    Raises:
        TypeError: ``value`` is neither a number nor a tensor.
        ValueError: ``value`` is out of range, or a tensor that is not floating-point, has not
            exactly one element, or requires grad.
    """
    is_static = isinstance(scale, StaticLossScale)
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point() or value.requires_grad:
            raise ValueError(
                "new_scale must be a number, or a floating-point tensor of one element that needs "
                f"no gradient, got shape {tuple(value.shape)} of {value.dtype}"
            )
        value = value.item() if is_static or host_may_read(value) else value.reshape(())
    if isinstance(value, Tensor):
        new = to_device(value, scale.value.device, scale.value.dtype).clone()
    else:
        number = check_scale_number(value, "new_scale")
        if is_static:
            return StaticLossScale(number, scale.drop_overflow_update, device=scale.device)
        low, high = (scale._settings()[name] for name in ("min_scale", "max_scale"))
        if not low <= number <= high:
            raise ValueError(
                f"new_scale must be from min_scale={low!r} to max_scale={high!r}, got {value!r}"
            )
        new = torch.full_like(scale.value, number)
    assert scale._counters is not None
    return scale._with(new, scale._counters)


def with_settings(scale: LossScale, **settings: Any) -> LossScale:
    """A copy of ``scale`` with other settings, such as ``growth_factor``. Does not synchronize.

    Raises:
        RuntimeError: ``scale`` is static.
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of range.
    """
    if not isinstance(scale, DynamicLossScale):
        raise RuntimeError(f"{scale!r} has no {', '.join(settings)}: it is constant")
    new = type(scale)(**{**scale._settings(), **settings})
    assert scale._counters is not None
    growth, budget = scale._counters.unbind()
    growth = growth.clamp(max=new._schedule.first_growth - 1)  # it grows at the next finite step
    new._set(scale.value, torch.stack((growth, budget)), scale.device is not None)
    return new
