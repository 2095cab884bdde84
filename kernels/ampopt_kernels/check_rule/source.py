"""The source of an author's functions: lines and code for messages about a rule."""

import ast
import inspect
import linecache
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["FunctionSource", "authored", "defined_at", "raised_at", "written_at"]

_NOT_AUTHORED = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
"""Folders of this package and of torch."""


class FunctionSource:
    """The source of a function from its ``def`` on, as Triton cuts it.

    Attributes:
        text: the source; different for each function.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        """Read the source of ``fn``.

        Raises:
            OSError: Python has no source for ``fn``, such as one typed at the ``>>>`` prompt.
        """
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
        code = ast.unparse(self._original(node)).splitlines()[0]
        return f"{file}:{self._line + node.lineno - 1}, in {name}: `{code}`"

    def _original(self, node: Any) -> Any:
        """The author's node at the position of ``node``; ``jit`` rewrites divisions and roots."""
        where = _position(node)
        nodes = (n for n in ast.walk(ast.parse(self.text)) if _position(n) == where)
        return next(nodes, node)

    def nodes(self) -> Iterator[ast.AST]:
        """All nodes of the function's syntax tree."""
        return ast.walk(ast.parse(self.text))

    def calls(self) -> Iterator[tuple[ast.Call, Any]]:
        """Each call, and the global or closure value that the called expression begins with.

        The value is ``torch`` for ``torch.sign(g)``, and ``None`` for ``g.abs()`` and for built-in
        functions, as neither begins with such a value.
        """
        scope = _scope(self._fn)
        for node in self.nodes():
            if isinstance(node, ast.Call):
                root: Any = node.func
                while isinstance(root, ast.Attribute):
                    root = root.value
                yield node, scope.get(root.id) if isinstance(root, ast.Name) else None


def authored(function: Any) -> Iterator[types.FunctionType]:
    """The Python functions of ``function`` and its callees, except those of this package.

    Args:
        function: a function of a rule, marked with ``jit``.
    """
    fn = function.fn
    if fn.__module__.split(".")[0] not in ("ampopt_kernels", "triton"):
        yield fn
        for value in _scope(fn).values():
            if hasattr(value, "fn") and value is not function:
                yield from authored(value)


def defined_at(fn: types.FunctionType) -> str:
    """File, line and name of a Python function."""
    try:
        return FunctionSource(fn).place(None)
    except (OSError, ValueError):  # no source, or that of a lambda
        return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}, {fn.__name__}"


def raised_at(error: BaseException) -> tuple[str, str]:
    """The innermost line of ``error``'s traceback that an author wrote.

    Args:
        error: an exception that a function of a rule raised when it ran as Python.

    Returns:
        File, line, function and code, with a colon after them; and the code alone. Both are empty
        if there is no such line.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_AUTHORED):
            code = frame.line or ""
            return f"{frame.filename}:{frame.lineno}, in {frame.name}: `{code}`: ", code
    return "", ""


def written_at(call: Callable[[], Any], tensors: Sequence[Tensor]) -> tuple[str, str]:
    """The line of an author that writes to one of ``tensors`` while ``call`` runs.

    Returns:
        As :func:`raised_at`.
    """
    before = [tensor.clone() for tensor in tensors]
    last, found = ("", ""), []

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal last
        code = frame.f_code
        if code.co_filename.startswith(_NOT_AUTHORED):
            return None
        if not found and not all(map(torch.equal, tensors, before)):
            found.append(last)
        if event == "line":
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            last = f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}: `{line}` ", line
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    return found[0] if found else last


def _position(node: Any) -> tuple[int | None, ...]:
    """The positions in the source at which a node begins and ends."""
    names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    return tuple(getattr(node, name, None) for name in names)


def _scope(fn: types.FunctionType) -> dict[str, Any]:
    """The globals and closure values that a function reads, by name."""
    names = fn.__code__.co_names
    around = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    global_values = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    return global_values | {name: cell.cell_contents for name, cell in around}
