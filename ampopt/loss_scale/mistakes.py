"""What people give as a scale that is none, or in the wrong place, and what to give instead."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.results import StepResult, Unscaled, is_flag

__all__ = ["check_scale_tensor", "instead_of", "no_scale"]


def no_scale(name: str, given: Any) -> TypeError:
    """The error for what is of no type that a scale has.

    Args:
        name: what the message calls it.
        given: neither ``None`` nor a number, a tensor or a ``LossScale``.
    """
    return TypeError(
        f"{name} must be None, a positive number, a one-element tensor or a LossScale, got "
        f"{type(given).__name__}{instead_of(given)}"
    )


def check_scale_tensor(name: str, given: Tensor) -> None:
    """Refuse a tensor that cannot be a scale. Does not synchronize.

    Raises:
        ValueError: it has not one floating-point element, or is a ``found_inf`` of ours.
    """
    if given.numel() != 1 or not given.is_floating_point():
        raise ValueError(
            f"{name}: a scale tensor has one floating-point element, got shape "
            f"{tuple(given.shape)} of {given.dtype}"
        )
    if is_flag(given):
        raise ValueError(
            f"{name}: this is the found_inf that an earlier call returned, not its scale, which "
            "comes last: unpack `_, found_inf, scale = optimizer.unscale_and_step(...)`, or "
            "`found_inf, scale = optimizer.unscale(...)`"
        )


def instead_of(given: Any) -> str:
    """How to come by a scale from ``given``, to end a message with; empty if nobody knows."""
    if isinstance(given, (StepResult, Unscaled)):
        return ", which has one: give its .scale"
    if isinstance(given, torch.amp.GradScaler):  # pyright: ignore[reportPrivateImportUsage]
        return (
            ": either the scaler steps, by scaler.step(optimizer), or the optimizer does, with a "
            "scale that goes on from the scaler's: scale = ampopt.DynamicLossScale(), "
            "scale.load_state_dict(scaler.state_dict())"
        )
    if isinstance(given, Mapping):
        return (
            ": if it is a saved state, load it: scale = ampopt.DynamicLossScale(), "
            "scale.load_state_dict(state)"
        )
    return ""
