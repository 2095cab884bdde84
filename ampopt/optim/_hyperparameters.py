"""Checks of hyperparameters, for optimizers that are not in torch; they raise what torch raises."""

from typing import Any

from ampopt._argument_checks import check_bool
from ampopt._step.hyperparameters import check_numbers

__all__ = ["checked"]


def checked(numbers: dict[str, Any], flags: dict[str, Any], n_betas: int = 2) -> dict[str, Any]:
    """The defaults of an optimizer: ``numbers`` and ``flags``. Reads tensors, as torch does.

    Args:
        numbers: numbers of 0 or more by name; ``"betas"`` is a tuple of numbers below 1.
        flags: bools by name.
        n_betas: the length of ``"betas"``.

    Raises:
        TypeError: a number is not a number, or a flag not a bool; the message names it.
        ValueError: a number is out of range, ``"betas"`` has another length, or a tensor has
            several elements.
    """
    for name, value in numbers.items():
        check_numbers(name, value, (0.0,) * n_betas if name == "betas" else 0.0)
        if name == "betas":
            for index, beta in enumerate(value):
                if not 0.0 <= beta < 1.0:
                    raise ValueError(
                        f"Invalid beta parameter at index {index}: {beta}; it must be 0 or more "
                        "and below 1"
                    )
        elif not value >= 0.0:
            what = "learning rate" if name == "lr" else f"{name} value"
            raise ValueError(f"Invalid {what}: {value}; it must be 0 or more")
    for name, value in flags.items():
        check_bool(name, value)
    return {**numbers, **flags}
