"""Check what callers pass as a loss scale, or with one."""

import math
import numbers
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt._argument_checks import as_float, check_number
from ampopt.loss_scale.base import LossScale
from ampopt.results import StepResult, Unscaled, is_flag

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "check_flag",
    "check_max_norm",
    "check_scale",
    "check_scale_number",
    "check_scale_tensor",
    "instead_of",
]

SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number. The reciprocal of a smaller scale may overflow float32."""

LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127
"""float32's largest number."""


def check_scale_number(value: Any, name: str = "the loss scale") -> float:
    """``value`` as a loss scale: a Python number, rounded to float32.

    Scales on the device are float32. The number is rounded here, so that the loss is multiplied and
    the gradients are divided by the same number, whether that happens in float32 or float64.

    Args:
        value: a number in float32's normal range, from ``2**-126`` to ``3.4028234663852886e38``.
        name: the name of the argument, for the message.

    Returns:
        The nearest float32 number.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is NaN or out of range.
    """
    number = as_float(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must be positive, finite and in float32's normal range, from 2**-126 to "
            f"{LARGEST_SCALE!r}, got {value!r}. Powers of two such as 2.0**16 are usual; "
            "1.0 checks without scaling, and None instead of a number turns scaling off."
        )
    return struct.unpack("f", struct.pack("f", number))[0]


def check_max_norm(max_norm: Any) -> float | None:
    """``max_norm`` as a float, or ``None``.

    Raises:
        ValueError: ``max_norm`` is neither ``None`` nor a number that is 0 or more.
    """
    if max_norm is None:
        return None
    is_number = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool)
    norm = as_float("max_norm", max_norm) if is_number else math.nan
    if not norm >= 0:
        raise ValueError(f"max_norm must be a number, 0 or more, or None, got {max_norm!r}")
    return norm


def check_flag(found_inf: Any) -> float | Tensor:
    """``found_inf`` as a number or a tensor of one element; see :meth:`LossScale.next`."""
    if isinstance(found_inf, Tensor):
        if found_inf.numel() != 1:
            raise ValueError(
                f"found_inf must have one element, got shape {tuple(found_inf.shape)}. For one "
                "flag from several, take their sum."
            )
        if found_inf.is_complex():
            raise TypeError(f"found_inf must be a real number, got a tensor of {found_inf.dtype}")
        return found_inf.detach()
    if isinstance(found_inf, bool):
        return float(found_inf)
    flag = check_number("found_inf", found_inf)
    if flag < 0:
        raise ValueError(f"found_inf must be 0, or more than 0 for an overflow, got {found_inf!r}")
    return flag


def check_scale(name: str, scale: Any) -> Any:
    """``scale``, or the nearest float32 number if it is a number. Does not synchronize.

    Args:
        name: the name of the argument, for the messages.
        scale: the argument that a caller passed as a scale.

    Raises:
        TypeError: ``scale`` is not ``None``, a number, a tensor or a ``LossScale``.
        ValueError: see :func:`check_scale_number` and :func:`check_scale_tensor`.
    """
    if scale is None or isinstance(scale, LossScale):
        return scale
    if isinstance(scale, Tensor):
        check_scale_tensor(name, scale)
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"{name} must be None, a positive number, a one-element tensor or a LossScale, got "
            f"{type(scale).__name__}{instead_of(scale)}"
        )
    return check_scale_number(scale, name)


def check_scale_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that cannot be a scale. Does not synchronize.

    Raises:
        ValueError: ``tensor`` is not one floating-point element, or is a ``found_inf`` that ampopt
            returned.
    """
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise ValueError(
            f"{name}: a scale tensor has one floating-point element, got shape "
            f"{tuple(tensor.shape)} of {tensor.dtype}"
        )
    if is_flag(tensor):
        raise ValueError(
            f"{name}: this is the found_inf that an earlier call returned, not its scale, which "
            "comes last: unpack `_, found_inf, scale = optimizer.unscale_and_step(...)`, or "
            "`found_inf, scale = optimizer.unscale(...)`"
        )


def instead_of(value: Any) -> str:
    """The end of a message: how to get a scale from ``value``; empty if ``value`` has none."""
    if isinstance(value, (StepResult, Unscaled)):
        return ", which has one: pass its .scale"
    if isinstance(value, torch.amp.GradScaler):  # pyright: ignore[reportPrivateImportUsage]
        return (
            ": either call scaler.step(optimizer), or continue with a scale that has the scaler's "
            "state: scale = ampopt.DynamicLossScale(), scale.load_state_dict(scaler.state_dict())"
        )
    if isinstance(value, Mapping):
        return (
            ": if it is a saved state, load it: scale = ampopt.DynamicLossScale(), "
            "scale.load_state_dict(state)"
        )
    return ""
