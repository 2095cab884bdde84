"""Check what callers pass as a loss scale, a number or a flag, and bring it to one form."""

import math
import numbers
import operator
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.base import AnyScale, LossScale
from ampopt.loss_scale.scalings import note_told
from ampopt.results import StepResult, Unscaled, is_flag
from ampopt_kernels.next_scale import PolicyConstants
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.uploads import Uploads

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "BareScale",
    "as_loss_scale",
    "check_bool",
    "check_count",
    "check_device_type",
    "check_flag",
    "check_max_norm",
    "check_number",
    "check_scale_number",
    "check_scale_tensor",
    "instead_of",
    "no_scale",
    "request_for",
    "rounded",
    "next_scale_of",
]

SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number. The reciprocal of a smaller scale may overflow float32."""

LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127
"""float32's largest number."""

_LARGEST_COUNT = 2**31 - 1


def check_bool(name: str, value: Any) -> bool:
    """``value``, if it is a bool. Other types are refused: ``"no"``, for instance, counts as true.

    Args:
        name: the name of the argument, for the message.
        value: the value to check.

    Raises:
        TypeError: ``value`` is not ``True`` or ``False``.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_device_type(name: str, value: Any) -> None:
    """Raise unless ``value`` names a type of device, or is a ``torch.device``.

    Args:
        name: the name of the argument, for the message.
        value: the value to check.

    Raises:
        TypeError: ``value`` is neither.
    """
    if not isinstance(value, (str, torch.device)):
        raise TypeError(f'{name} must be the type of a device, such as "cuda", got {value!r}')


def check_number(name: str, value: Any) -> float:
    """``value`` as a float.

    Args:
        name: the name of the argument, for the message.
        value: a real number of any type except bool. It may be infinite.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is NaN.
    """
    number = _as_float(name, value)
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got nan")
    return number


def _as_float(name: str, value: Any) -> float:
    """``value`` as a float (inf beyond its range); a ``TypeError`` if it is no real number."""
    # Python counts bool as an int, but a scale or factor of True is a misplaced argument.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value == abs(value) else -math.inf


def check_count(name: str, value: Any, least: int | None = 1) -> int:
    """``value`` as an int that fits int32, the type of counters on devices.

    Args:
        name: the name of the argument, for the message.
        value: an integer of any type except bool.
        least: the smallest value allowed; ``None`` for no limit but that of int32.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}"
        ) from None
    least = -_LARGEST_COUNT if least is None else least
    if not least <= count <= _LARGEST_COUNT:
        raise ValueError(f"{name} must be from {least} to {_LARGEST_COUNT}, got {count}")
    return count


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
    number = _as_float(name, value)
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
    norm = _as_float("max_norm", max_norm) if is_number else math.nan
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


def no_scale(name: str, value: Any) -> TypeError:
    """The error for an argument whose type no scale has.

    Args:
        name: the name of the argument, for the message.
        value: an argument that is not ``None``, a number, a tensor or a ``LossScale``.
    """
    return TypeError(
        f"{name} must be None, a positive number, a one-element tensor or a LossScale, got "
        f"{type(value).__name__}{instead_of(value)}"
    )


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


_HALVED_IN_CLOSURES = PolicyConstants(
    growth_factor=1.0,
    backoff_factor=0.5,
    first_growth=1.0,
    growth_period=1.0,
    hysteresis=1.0,
    refill_on_finite=1.0,
    refill_on_backoff=0.0,
    min_scale=2.0**-126,
    max_scale=float("inf"),
)
_HALVED = _HALVED_IN_CLOSURES._replace(kept_scale=1.0)
"""The policy without a closure: 1.0, which means no scaling, stays 1.0. A bare number never grows
again, so a loop that reuses the scale each step returns would otherwise end at the smallest one."""


class BareScale(AnyScale):
    """A number or tensor passed as a scale. It has no history: the next scale is a tensor."""

    def __init__(self, value: Tensor, constants: Uploads, *, in_closure: bool = False) -> None:
        """Wrap a floating-point tensor of one element.

        Args:
            value: the scale: a floating-point tensor of one element, on the device of the step.
            constants: the constants that were sent to that device in earlier calls.
            in_closure: whether a closure is evaluated again, under half the scale, after an
                overflow.
        """
        self._value = value
        self._policy = _HALVED_IN_CLOSURES if in_closure else _HALVED
        self._counters = constants.get(
            "counters of a bare scale", [0, 0], torch.int32, value.device
        )

    def _with(self, value: Tensor, counters: Tensor) -> Tensor:
        """The value that the device computed, a plain tensor as the caller passed one."""
        return value

    def _unstepped(self) -> Tensor:
        """A copy of the scale, so that the caller never gets the tensor that it passed."""
        return self._value.clone()


def rounded(scale: Any) -> Any:
    """The scale to pass to a closure: a number is rounded to float32, as for the gradients.

    A closure that multiplied a float64 loss by the unrounded number would use another factor than
    the gradients are divided by. Scales that are not numbers are returned unchanged.

    Raises:
        ValueError: ``scale`` is a number out of range.
    """
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        return scale
    return check_scale_number(scale)


def as_loss_scale(
    scale: Any,
    device: torch.device,
    uploads: dict[torch.device, Uploads],
    *,
    in_closure: bool = False,
) -> AnyScale | None:
    """Convert the argument ``grads_scaled_by`` to a loss scale on ``device``.

    Args:
        scale: the scale as the caller passed it.
        device: the device on which overflows are detected.
        uploads: for each device, the constants that were sent there in earlier calls. A number that
            is passed again is not sent again.
        in_closure: see :class:`BareScale`.

    Raises:
        TypeError: ``scale`` is not ``None``, a number, a tensor or a ``LossScale``.
        ValueError: ``scale`` is a number out of range, a tensor that is not one floating-point
            element, or lives on another device.
    """
    if scale is None:
        return None
    if isinstance(scale, LossScale):
        if not scale._placed or scale._value.device != device:
            scale._place(device)
        return scale
    if isinstance(scale, Tensor):
        check_scale_tensor("grads_scaled_by", scale)
        if scale.is_meta and device.type != "meta":
            raise ValueError(
                f"grads_scaled_by: the scale is on meta, where it has no number; make it on "
                f"{str(device)!r}, where the parameters are"
            )
        if scale.device != device:
            raise ValueError(
                f"grads_scaled_by: the scale is on {scale.device}, the parameters on {device}; "
                f"move it there with scale.to({str(device)!r})"
            )
        dtype = torch.float64 if scale.dtype == torch.float64 else torch.float32
        constants = uploads.setdefault(device, Uploads())
        return BareScale(scale.detach().to(dtype), constants, in_closure=in_closure)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise no_scale("grads_scaled_by", scale)
    constants = uploads.setdefault(device, Uploads())
    (value,) = constants.get("bare scale", [check_scale_number(scale)], torch.float32, device)
    return BareScale(value, constants, in_closure=in_closure)


def request_for(scale: AnyScale | None, **fields: Any) -> Request:
    """The request for a step that is told of ``scale``; ``fields`` are its other fields."""
    if scale is None:
        return Request(check=False, **fields)
    note_told()
    return Request(
        scale=scale._value,
        drop=scale._drop,
        policy=scale._policy,
        counters=scale._counters,
        **fields,
    )


def next_scale_of(scale: AnyScale | None, decision: Decision | None) -> Any:
    """The next scale, as the caller gets it; ``decision`` is ``None`` without gradients."""
    if scale is None:
        return None
    if decision is None:
        return scale._unstepped()
    policy_decision: Any = decision  # has the next scale and counters if the scale has a policy
    next_scale = scale._with(policy_decision.scale, policy_decision.counters)
    coefficients = decision.coefficients  # no tensor if the host has read it, and so the scale, too
    if (
        not isinstance(coefficients, Tensor)
        and coefficients.skip > 0
        and isinstance(next_scale, LossScale)
    ):
        next_scale._warn_if_collapsed()
    return next_scale
