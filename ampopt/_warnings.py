"""Warnings with the line of the user's code, however far above the warning that is."""

import sys
import warnings

__all__ = ["warn_user"]

_BETWEEN = frozenset({"ampopt", "ampopt_kernels", "contextlib", "functools", "torch"})
"""The packages whose functions may stand between the user's code and a warning."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """:func:`warnings.warn` at the line of the innermost caller outside of ampopt and torch."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
