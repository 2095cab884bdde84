"""Check the flags, counts and numbers that callers pass."""

import math
import numbers
import operator
from typing import Any

import torch

__all__ = ["as_float", "check_bool", "check_count", "check_device_type", "check_number"]

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
    number = as_float(name, value)
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got nan")
    return number


def as_float(name: str, value: Any) -> float:
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
