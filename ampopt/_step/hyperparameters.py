"""Hyperparameters as users give them: what is no number is refused before anything changes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["check_numbers", "forms_of"]


def check_numbers(name: str, value: Any, like: Any) -> None:
    """Refuse what is no number, or not as many as ``like`` has. Reads no tensor.

    Args:
        name: what messages call the value.
        value: a number, or a tensor of one element; or a tuple of these, if ``like`` is one.
        like: a value that is right.

    Raises:
        TypeError: it is something else, such as a string.
        ValueError: there are more or fewer, or a tensor has not one element.
    """
    several = isinstance(like, (tuple, list))
    given = value if isinstance(value, (tuple, list)) else (value,)
    wrong = None
    if (given is value) != several or not all(map(_is_number, given)):
        wrong = TypeError
    elif several and len(given) != len(like) or any(map(_is_long, given)):
        wrong = ValueError
    if wrong is not None:
        allowed = "a number or a tensor of one element"
        if several:
            allowed = f"a tuple of {len(like)}, each {allowed}"
        raise wrong(f"{name} must be {allowed}, got {value!r}")


def forms_of(hyper: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """What :func:`check_numbers` depends on, of the hyperparameters of each group, laid flat."""
    return [
        [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in values]
        for values in hyper
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_complex()
    return hasattr(value, "__float__") and not getattr(value, "shape", ())  # as NumPy's have


def _is_long(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1
