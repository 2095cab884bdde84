"""What optimizers that torch lacks refuse of their hyperparameters, as torch's optimizers do."""

from typing import Any

from ampopt._step.hyperparameters import check_numbers
from ampopt.loss_scale.numbers import check_bool

__all__ = ["check_betas", "check_flags", "check_lr", "check_not_negative", "check_positive"]


def check_lr(lr: Any) -> None:
    """Refuse a learning rate below 0. Looks at a tensor, as torch does.

    Raises:
        TypeError: it is no number, as for all that is checked here.
        ValueError: it is, or is a tensor of several elements.
    """
    check_numbers("lr", lr, 0.0)
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}; it must be 0 or more")


def check_betas(betas: Any, count: int = 2) -> None:
    """Refuse decay rates of averages that are not ``count`` numbers from 0 to below 1.

    Raises:
        ValueError: they are not.
    """
    check_numbers("betas", betas, (0.0,) * count)
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(
                f"Invalid beta parameter at index {index}: {beta}; it must be 0 or more and below 1"
            )


def check_flags(**values: Any) -> None:
    """Refuse what is no bool of the hyperparameters that are to be, which are given by name.

    Raises:
        TypeError: one is none.
    """
    for name, value in values.items():
        check_bool(name, value)


def check_not_negative(**values: Any) -> None:
    """Refuse hyperparameters below 0, which are given by name.

    Raises:
        ValueError: one is.
    """
    for name, value in values.items():
        check_numbers(name, value, 0.0)
        if not value >= 0.0:
            raise ValueError(f"Invalid {name} value: {value}; it must be 0 or more")


def check_positive(**values: Any) -> None:
    """Refuse hyperparameters that are not above 0, which are given by name.

    Raises:
        ValueError: one is not.
    """
    for name, value in values.items():
        check_numbers(name, value, 0.0)
        if not value > 0.0:
            raise ValueError(f"Invalid {name} value: {value}; it must be above 0")
