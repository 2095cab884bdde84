"""Checks of what users hand over for a number or a truth, which say what is allowed instead."""

import math
import numbers
import operator
import struct
from typing import Any

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "check_bool",
    "check_count",
    "check_number",
    "check_scale_number",
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
