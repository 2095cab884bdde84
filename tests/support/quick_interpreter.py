"""Triton's interpreter, which looks up at each call what stays the same, told to remember it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["remember_builtins", "remember_dtypes", "remember_shapes"]


def remember_builtins() -> None:
    """Look once for the builtins that the interpreter replaces at each call of a function.

    Two fifths of the time of a small kernel go into that. What is replaced, and when, is as ever;
    a Triton that does it otherwise is left alone.
    """
    from triton.runtime import interpreter

    ours: Any = interpreter
    replace: Callable[..., None] | None = getattr(ours, "_patch_attr", None)
    original = getattr(ours, "_patch_builtin", None)
    replace_all = getattr(ours, "_patch_lang", None)
    if replace is None or original is None or replace_all is None:
        return
    if list(inspect.signature(original).parameters) != ["pkg", "builder", "scope"]:
        return
    tl = ours.tl
    is_builtin = tl.core.is_builtin
    names: dict[Any, list[str]] = {}
    languages: dict[Any, list[Any]] = {}

    @functools.wraps(original)
    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:  # nothing of it has been replaced yet
            names[pkg] = [name for name, it in inspect.getmembers(pkg) if is_builtin(it)]
        for name in names[pkg]:
            if is_builtin(member := getattr(pkg, name)):
                replace(pkg, name, member, builder, scope)

    @functools.wraps(replace_all)
    def patch_lang(function: Any) -> Any:
        if function not in languages:
            seen = function.__globals__.values()
            languages[function] = [it for it in seen if it is tl or it is tl.core]
        if any(is_builtin(language.load) for language in languages[function]):
            return replace_all(function)
        return ours._LangPatchScope()  # a kernel, which has called the function, has replaced them

    ours._patch_builtin, ours._patch_lang = patch_builtin, patch_lang


def remember_dtypes() -> None:
    """Look once which of NumPy's dtypes is which of Triton's: a table is made for each look."""
    from triton.runtime import interpreter

    ours: Any = interpreter
    original = getattr(ours, "_get_np_dtype", None)
    if original is None:
        return
    known: dict[Any, Any] = {}

    @functools.wraps(original)
    def get_np_dtype(dtype: Any) -> Any:
        key = type(dtype), dtype.name
        if key not in known:
            known[key] = original(dtype)
        return known[key]

    ours._get_np_dtype = get_np_dtype


def remember_shapes() -> None:
    """Make the shape and the size of a type once, not for each tensor that is of it.

    A Triton whose tensors have other attributes is left alone.
    """
    from triton.language import core

    tensor: Any = core.tensor
    original = tensor.__init__
    known: dict[str, Any] = {}

    @functools.wraps(original)
    def init(self: Any, handle: Any, type: Any) -> None:
        key = type.name if type.is_block() else "scalar"
        if key in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[key]
            return
        original(self, handle, type)
        if set(vars(self)) == {"handle", "type", "dtype", "shape", "numel"}:
            known[key] = self.shape, self.numel

    tensor.__init__ = init
