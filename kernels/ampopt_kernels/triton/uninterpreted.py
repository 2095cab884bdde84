"""Triton's compiler where ``TRITON_INTERPRET=1`` has ``jit`` make functions for the interpreter.

Elsewhere there is nothing to do.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ampopt_kernels import torch_language
from ampopt_kernels.language import INTERPRETED, tl

__all__ = ["compilable", "compiler"]


def compilable(function: Any) -> Any:
    """A ``jit`` function as the compiler takes it: made anew, with all that it calls."""
    if not INTERPRETED:
        return function
    from ampopt_kernels.triton.correctly_rounded import CorrectlyRounded

    def replaced(value: Any) -> Any:
        if value is tl:
            return _language()
        return compilable(value) if value is not function and _is_interpreted(value) else value

    return CorrectlyRounded(torch_language.copied(function.fn, replaced))


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """Around the compiler's work: what the interpreter left of itself in the language is away.

    It puts functions of its own in the place of the language's, and takes them back after a launch,
    but for those that Triton's library calls.
    """
    left = {
        name: value.__kwdefaults__["member"]
        for name, value in vars(tl.core).items()
        if getattr(value, "__module__", None) == "triton.runtime.interpreter"
        and "member" in (getattr(value, "__kwdefaults__", None) or ())
    }
    with mock.patch.dict(vars(tl.core), left):
        yield


@functools.cache
def _language() -> types.ModuleType:
    """``tl`` with those of its functions that are written in itself."""
    language = types.ModuleType(tl.__name__)
    for name, value in vars(tl).items():
        setattr(language, name, compilable(value) if _is_interpreted(value) else value)
    return language


def _is_interpreted(value: Any) -> bool:
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(value, InterpretedFunction)
