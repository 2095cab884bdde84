"""What callers pass as a loss scale, a number or a flag: checked, and in one form."""

import math
import numbers
import operator
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.base import AnyScale, LossScale
from ampopt.results import StepResult, Unscaled, is_flag
from ampopt_kernels.policy import PolicyConstants
from ampopt_kernels.step import Decision, Request
from ampopt_kernels.triton.uploads import Uploads

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "BareScale",
    "as_loss_scale",
    "check_bool",
    "check_count",
    "check_flag",
    "check_number",
    "check_scale_number",
    "check_scale_tensor",
    "instead_of",
    "no_scale",
    "request_for",
    "rounded",
    "successor_of",
]

SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number; the reciprocal of a smaller scale may overflow float32."""

LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127
"""float32's largest number."""

_LARGEST_COUNT = 2**31 - 1


def check_bool(name: str, value: Any) -> bool:
    """``value``, if it is a bool. To Python, ``"no"`` is true, too.

    Args:
        name: what messages call the value.
        value: given for a bool.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_number(name: str, value: Any) -> float:
    """``value`` as a float.

    Args:
        name: what messages call the value.
        value: a real number of any type but bool. It may be infinite.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is NaN.
    """
    number = _as_float(name, value)
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got nan")
    return number


def _as_float(name: str, value: Any) -> float:
    # bool is an int to Python, but True as a scale or factor is a misplaced argument.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value == abs(value) else -math.inf


def check_count(name: str, value: Any, least: int | None = 1) -> int:
    """``value`` as an int that fits int32, which is what devices count in.

    Args:
        name: what messages call the value.
        value: an integer of any type but bool.
        least: the smallest allowed; ``None`` for any.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
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
    """A Python number that is to be used as a loss scale, rounded to float32.

    Scales live on the device as float32. The number is rounded here, so that whoever multiplies
    by it and whoever divides by it later, in float32 or float64, use the same one.

    Args:
        value: a number in float32's normal range, from ``2**-126`` to ``3.4028234663852886e38``.
        name: what messages call it.

    Returns:
        The nearest float32 number.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: it is NaN or out of range.
    """
    number = _as_float(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must be positive, finite and in float32's normal range, from 2**-126 to "
            f"{LARGEST_SCALE!r}, got {value!r}. Powers of two such as 2.0**16 are usual; "
            "1.0 checks without scaling, and None instead of a number turns scaling off."
        )
    return struct.unpack("f", struct.pack("f", number))[0]


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
"""Outside of closures 1, which scales nothing, stays 1: a number never grows, so that a loop which
goes on with what a step returns would end at the smallest scale and stay there."""


class BareScale(AnyScale):
    """A number or a tensor given as a scale. It has no history: its successor is a tensor."""

    def __init__(self, value: Tensor, held: Uploads, *, in_closure: bool = False) -> None:
        """Wrap a floating tensor of one element.

        Args:
            value: that tensor.
            held: what its device holds of earlier calls.
            in_closure: whether a closure is run again under its successor after an overflow.
        """
        self._value = value
        self._policy = _HALVED_IN_CLOSURES if in_closure else _HALVED
        self._counters = held.get("counters of a bare scale", [0, 0], torch.int32, value.device)

    def _successor(self, value: Tensor, counters: Tensor) -> Tensor:
        return value

    def _unstepped(self) -> Tensor:
        return self._value.clone()


def rounded(given: Any) -> Any:
    """``given`` as a closure gets it: of a number, the float32 that gradients are divided by.

    A closure that multiplies a float64 loss by the scale would see the difference.

    Raises:
        ValueError: ``given`` is a number that cannot be a scale.
    """
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        return given
    return check_scale_number(given)


def as_loss_scale(
    given: Any,
    device: torch.device,
    uploads: dict[torch.device, Uploads],
    *,
    in_closure: bool = False,
) -> AnyScale | None:
    """The scale that ``given`` stands for, on ``device``.

    Args:
        given: by the caller.
        device: where decisions are made.
        uploads: what devices hold of earlier calls, a number that was given again among it.
        in_closure: see :class:`BareScale`.

    Raises:
        TypeError: ``given`` is not a scale.
        ValueError: it is a number that cannot be one, a tensor that has not one floating element,
            or lives on another device.
    """
    if given is None:
        return None
    if isinstance(given, LossScale):
        if not given._placed or given._value.device != device:
            given._place(device)
        return given
    if isinstance(given, Tensor):
        check_scale_tensor("grads_scaled_by", given)
        if given.is_meta and device.type != "meta":
            raise ValueError(
                f"grads_scaled_by: the scale is on meta, where it has no number; make it on "
                f"{str(device)!r}, where the parameters are"
            )
        if given.device != device:
            raise ValueError(
                f"grads_scaled_by: the scale is on {given.device}, the parameters on {device}; "
                f"move it there with scale.to({str(device)!r})"
            )
        dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
        held = uploads.setdefault(device, Uploads())
        return BareScale(given.detach().to(dtype), held, in_closure=in_closure)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise no_scale("grads_scaled_by", given)
    held = uploads.setdefault(device, Uploads())
    (value,) = held.get("bare scale", [check_scale_number(given)], torch.float32, device)
    return BareScale(value, held, in_closure=in_closure)


def request_for(scale: AnyScale | None, **asked: Any) -> Request:
    """What to ask of a step whose gradients carry ``scale``; ``asked`` are further fields."""
    if scale is None:
        return Request(check=False, **asked)
    return Request(
        scale=scale._value,
        drop=scale._drop,
        policy=scale._policy,
        counters=scale._counters,
        **asked,
    )


def successor_of(scale: AnyScale | None, decision: Decision | None) -> Any:
    """The scale to use next, as the caller gets it; ``decision`` is ``None`` without gradients."""
    if scale is None:
        return None
    if decision is None:
        return scale._unstepped()
    decided: Any = decision  # it has a successor where the scale has a policy
    successor = scale._successor(decided.scale, decided.counters)
    seen = decision.factors  # by the host, for which the scale is at hand too
    if not isinstance(seen, Tensor) and seen.skip > 0 and isinstance(successor, LossScale):
        successor._warn_if_collapsed()
    return successor
