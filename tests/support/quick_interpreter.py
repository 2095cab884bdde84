"""Triton's interpreter, which looks at the whole language at each call, told what to look at."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["remember_builtins"]


def remember_builtins() -> None:
    """Look once for the builtins that the interpreter replaces at each call of a function.

    Two fifths of the time of a small kernel go into that. What is replaced, and when, is as ever;
    a Triton that does it otherwise is left alone.
    """
    from triton.runtime import interpreter

    ours: Any = interpreter
    replace: Callable[..., None] | None = getattr(ours, "_patch_attr", None)
    original = getattr(ours, "_patch_builtin", None)
    if replace is None or original is None:
        return
    if list(inspect.signature(original).parameters) != ["pkg", "builder", "scope"]:
        return
    is_builtin = ours.tl.core.is_builtin
    names: dict[Any, list[str]] = {}

    @functools.wraps(original)
    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:  # nothing of it has been replaced yet
            names[pkg] = [name for name, it in inspect.getmembers(pkg) if is_builtin(it)]
        if names[pkg] and not is_builtin(getattr(pkg, names[pkg][0])):
            return  # all of them are replaced already: a kernel has called the function
        for name in names[pkg]:
            if is_builtin(member := getattr(pkg, name)):
                replace(pkg, name, member, builder, scope)

    ours._patch_builtin = patch_builtin
