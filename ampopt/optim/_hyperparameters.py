"""Checks of hyperparameters, for optimizers that are not in torch; they raise what torch raises."""

import inspect
from typing import Any

from ampopt._argument_checks import check_bool
from ampopt._step.hyperparameters import check_numbers

__all__ = ["checked"]


def checked(cls: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters among the arguments of a constructor, checked. Reads tensors, as torch.

    The default of an argument says what it is: a flag; a number of 0 or more; or a tuple of as many
    numbers below 1. An argument without a default is no hyperparameter.

    Args:
        cls: the class that has the constructor.
        arguments: the ``locals()`` of its constructor.

    Raises:
        TypeError: a number is not a number, or a flag not a bool; the message names it.
        ValueError: a number is out of range, a tuple has another length, or a tensor has several
            elements.
    """
    hyperparameters: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        like = parameter.default
        # The options that all optimizers have are in the signature, and here in `options`.
        if like is parameter.empty or name not in arguments:
            continue
        value = hyperparameters[name] = arguments[name]
        if isinstance(like, bool):
            check_bool(name, value)
            continue
        check_numbers(name, value, like)
        if isinstance(like, tuple):
            for index, beta in enumerate(value):
                if not 0.0 <= beta < 1.0:
                    raise ValueError(
                        f"Invalid beta parameter at index {index}: {beta}; it must be 0 or more "
                        "and below 1"
                    )
        elif not value >= 0.0:
            what = "learning rate" if name == "lr" else f"{name} value"
            raise ValueError(f"Invalid {what}: {value}; it must be 0 or more")
    return hyperparameters
