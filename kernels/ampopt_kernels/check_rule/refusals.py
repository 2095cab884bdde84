"""Turn a compilation error of Triton into the line of the rule and what to write instead."""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["explained"]

_INSTEAD = {
    r"\*\*|__pow__": (
        "Write x * x, tl.sqrt(x) or, for x >= 0 and y > 0, power(x, y) of ampopt_kernels"
    ),
    r"Cannot access global variable": (
        "Write the number in the function, as NAME: tl.constexpr = NUMBER; one that may change "
        "is a hyperparameter"
    ),
    r"[Ss]tarred|[` ]\*\w": "Write h[0], h[1] for each, and a + (b,) to make a longer tuple",
    r"attribute 'to'": "The seed and the step of rand are numbers of h, such as hyperparameters",
    r"Unsupported function referenced|real number|is not defined": (
        "Call functions of tl and of ampopt_kernels, and your own marked with jit: the sign of x, "
        "for one, is tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))"
    ),
}
"""Advice by a pattern in Triton's message or in the line of code."""


def explained(function: Any, error: Any) -> str:
    """File, line and code of the error in the author's function, and advice.

    Args:
        function: a function of a rule, marked with ``jit``.
        error: the ``triton.CompilationError`` of a kernel that calls ``function``.
    """
    errors = [error]
    while hasattr(errors[-1].__cause__, "node"):  # from the caller to the called function
        errors.append(errors[-1].__cause__)
    said = next((e.error_message for e in reversed(errors) if e.error_message), str(error))
    sources = {source.text: source for source in map(_Source, _authored(function))}
    places = [(source, call) for source in sources.values() for call in source.foreign_calls()]
    if not (places and "Unsupported function" in said):  # Triton names only the caller for these
        # The innermost function that is the author's own.
        places = [(sources[e.src], e.node) for e in reversed(errors) if e.src in sources]
    where = places[0][0].place(places[0][1]) if places else _Source(function.fn).place(None)
    # Triton 3.6 has assertions without a message for some errors: then search the line of code.
    searched = where if said == "AssertionError()" else said
    instead = [advice for pattern, advice in _INSTEAD.items() if re.search(pattern, searched)]
    advice = [*instead[:1], "See ampopt_kernels.Rule for all that a rule may use"]
    return ". ".join([f"{where}: {_plain(said)}", *advice])


class _Source:
    """The source of a function from its ``def`` on, as Triton cuts it.

    Attributes:
        text: the source; different for each function.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        """Read the source of ``fn``."""
        lines, first = inspect.getsourcelines(fn)
        text = textwrap.dedent("".join(lines))
        start = text.index("def ") if text.startswith("def ") else text.index("\ndef ") + 1
        self.text = text[start:]
        self._fn = fn
        self._line = first + text.count("\n", 0, start)

    def place(self, node: Any) -> str:
        """File, line and function of ``node``, and its code; those of the ``def`` for ``None``."""
        name, file = self._fn.__name__, self._fn.__code__.co_filename
        if not hasattr(node, "lineno"):
            return f"{file}:{self._line}, {name}"
        code = ast.unparse(self._written(node)).splitlines()[0]
        return f"{file}:{self._line + node.lineno - 1}, in {name}: `{code}`"

    def _written(self, node: Any) -> Any:
        """The author's node at the position of ``node``; ``jit`` rewrites divisions and roots."""
        where = _position(node)
        written = (n for n in ast.walk(ast.parse(self.text)) if _position(n) == where)
        return next(written, node)

    def foreign_calls(self) -> Iterator[ast.Call]:
        """The calls of functions of other modules, or not marked ``jit``: Triton refuses them."""
        scope = _scope(self._fn)
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.Call):
                root: Any = node.func
                while isinstance(root, ast.Attribute):
                    root = root.value
                value = scope.get(root.id) if isinstance(root, ast.Name) else None
                if isinstance(value, types.FunctionType) and not hasattr(value, "fn"):
                    yield node
                elif isinstance(value, types.ModuleType) and value.__name__ != "triton.language":
                    yield node


def _position(node: Any) -> tuple[int | None, ...]:
    names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    return tuple(getattr(node, name, None) for name in names)


def _authored(function: Any) -> Iterator[types.FunctionType]:
    """The Python functions of ``function`` and its callees, but those of this package."""
    fn = function.fn
    if fn.__module__.split(".")[0] not in ("ampopt_kernels", "triton"):
        yield fn
        for value in _scope(fn).values():
            if hasattr(value, "fn") and value is not function:
                yield from _authored(value)


def _scope(fn: types.FunctionType) -> dict[str, Any]:
    """The globals and closure values that a function reads, by name."""
    names = fn.__code__.co_names
    around = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    read = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    return read | {name: cell.cell_contents for name, cell in around}


def _plain(said: str) -> str:
    """The first sentence of Triton's message, which may be the ``repr`` of an exception."""
    inner = re.fullmatch(r"\w+\((['\"])(.*)\1\)", said, re.DOTALL)
    text = (inner[2] if inner else said).replace("\\n", " ").replace("\\'", "'")
    return " ".join(text.split()).split(". ")[0].rstrip(".")
