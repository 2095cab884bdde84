"""The scale of ``ampopt.GradScaler``: moved, set to a value, with other settings, saved, loaded."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.numbers import check_scale_number
from ampopt.loss_scale.static import StaticLossScale
from ampopt_kernels.transfers import carried

__all__ = ["at", "changed", "from_torch", "on", "to_torch"]


def on(device: torch.device, scale: LossScale) -> LossScale:
    """``scale`` on another device."""
    if scale.device == device:
        return scale
    moved, counters = copy.copy(scale), scale._counters
    if counters is not None:
        counters = carried(counters, device)
    moved._set(carried(scale.value, device), counters, placed=True)
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
        new = carried(value, scale.value.device, scale.value.dtype).clone()
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


def to_torch(scale: LossScale) -> dict[str, Any]:
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


def from_torch(scale: LossScale, state_dict: Mapping[str, Any]) -> LossScale:
    """What ``torch.amp.GradScaler`` or :func:`to_torch` saved, where ``scale`` was in use.

    What torch's entries do not say, such as a floor, is that of ``scale``.

    Raises:
        ValueError: an entry is missing or out of range, or the kinds of scale differ.
        TypeError: an entry is of the wrong type.
    """
    loaded = copy.copy(scale)
    loaded.load_state_dict(state_dict)
    return loaded
