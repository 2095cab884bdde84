"""Checks of hyperparameters, for optimizers that are not in torch; they raise what torch raises."""

from typing import Any

from ampopt._step.hyperparameters import check_numbers
from ampopt.loss_scale.arguments import check_bool

__all__ = ["check_betas", "check_flags", "check_lr", "check_not_negative", "check_positive"]


def check_lr(lr: Any) -> None:
    """Raise unless ``lr`` is a number of 0 or more. Reads a tensor, as torch does.

    Raises:
        TypeError: ``lr`` is not a number.
        ValueError: ``lr`` is negative, or a tensor of several elements.
    """
    check_numbers("lr", lr, 0.0)
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}; it must be 0 or more")


def check_betas(betas: Any, count: int = 2) -> None:
    """Raise unless ``betas`` is a tuple of ``count`` numbers, each at least 0 and below 1.

    Raises:
        TypeError: an element is not a number.
        ValueError: an element is out of range, or there are not ``count`` of them.
    """
    check_numbers("betas", betas, (0.0,) * count)
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(
                f"Invalid beta parameter at index {index}: {beta}; it must be 0 or more and below 1"
            )


def check_flags(**values: Any) -> None:
    """Raise unless every value is a bool.

    Raises:
        TypeError: a value is not a bool; the message names it.
    """
    for name, value in values.items():
        check_bool(name, value)


def check_not_negative(**values: Any) -> None:
    """Raise unless every value is a number of 0 or more.

    Raises:
        TypeError: a value is not a number; the message names it.
        ValueError: a value is negative.
    """
    for name, value in values.items():
        check_numbers(name, value, 0.0)
        if not value >= 0.0:
            raise ValueError(f"Invalid {name} value: {value}; it must be 0 or more")


def check_positive(**values: Any) -> None:
    """Raise unless every value is a number above 0.

    Raises:
        TypeError: a value is not a number; the message names it.
        ValueError: a value is 0 or negative.
    """
    for name, value in values.items():
        check_numbers(name, value, 0.0)
        if not value > 0.0:
            raise ValueError(f"Invalid {name} value: {value}; it must be above 0")
