"""Let Triton's compiler run under ``TRITON_INTERPRET=1`` too, to compile without a launch.

There ``triton.jit`` makes functions for the interpreter, which the compiler cannot compile. Where
the interpreter is off, the functions of this module do nothing.
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
    """A new ``jit`` function for the compiler, and one for each ``jit`` function that it calls."""
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
    """Within this, the compiler can run: what the interpreter has patched in ``tl`` is restored.

    The interpreter patches functions of ``tl`` during a launch and restores them after it, but not
    those that Triton's own library calls.
    """
    originals = {
        name: value.__kwdefaults__["member"]
        for name, value in vars(tl.core).items()
        if getattr(value, "__module__", None) == "triton.runtime.interpreter"
        and "member" in (getattr(value, "__kwdefaults__", None) or ())
    }
    with mock.patch.dict(vars(tl.core), originals):
        yield


@functools.cache
def _language() -> types.ModuleType:
    """``tl``, with its functions that are themselves ``jit`` functions made compilable."""
    language = types.ModuleType(tl.__name__)
    for name, value in vars(tl).items():
        setattr(language, name, compilable(value) if _is_interpreted(value) else value)
    return language


def _is_interpreted(value: Any) -> bool:
    """Whether ``value`` is a function that ``triton.jit`` made for the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(value, InterpretedFunction)
