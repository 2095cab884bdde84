"""Refuse what one run may pass over, or never ends: ``assert``, ``math.sqrt(2)``, recursion."""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from traceback import FrameSummary
from typing import Any, cast

from ampopt_kernels.check_rule.function import Function, authored, outer_names

__all__ = ["check"]

_LANGUAGES = ("triton.language", "ampopt_kernels.torch_language")


def check(function: Function) -> None:
    """Refuse lambdas, ``assert``, ``raise``, ``try``, ``print``, recursion, ``tl.math.sqrt``.

    Does nothing where Python has no source of the function.

    Raises:
        ValueError: the function, or one that it calls, has such code.
    """
    for fn in function.authored:
        if fn.__name__ == "<lambda>":  # whose source Triton cannot read
            line = FrameSummary(fn.__code__.co_filename, fn.__code__.co_firstlineno, fn.__name__)
            raise function.refused("a rule cannot be a lambda, nor call one", line)
        try:
            lines, first = inspect.getsourcelines(fn)
        except OSError:
            continue
        tree = ast.parse(textwrap.dedent("".join(lines)))
        outer, nodes = outer_names(fn), cast("Iterator[Any]", ast.walk(tree))
        for node in nodes:
            if (why := _refused(node, fn, outer)) is not None:
                line = FrameSummary(fn.__code__.co_filename, first + node.lineno - 1, fn.__name__)
                raise function.refused(f"a rule cannot {why}", line)


def _refused(node: Any, fn: types.FunctionType, outer: dict[str, Any]) -> str | None:
    """What a rule cannot do, if ``node`` does that.

    Args:
        node: a node of the syntax tree of ``fn``.
        fn: a function of the rule.
        outer: the names around the function, with their values.
    """
    if isinstance(node, (ast.Assert, ast.Raise, ast.Try)):
        return "assert, raise or catch"
    if not isinstance(node, ast.Call):
        return None
    root, depth = node.func, 0
    while isinstance(root, ast.Attribute):
        root, depth = root.value, depth + 1
    if not isinstance(root, ast.Name):
        return None
    value = outer.get(root.id)
    if hasattr(value, "fn") and fn in authored(value):
        return "call itself"
    of_language = isinstance(value, types.ModuleType) and value.__name__ in _LANGUAGES
    in_language = of_language and depth < 2  # tl.math.sqrt is not the sqrt of every backend
    known = value is None or in_language or hasattr(value, "fn") or isinstance(value, type)
    if known and root.id != "print":
        return None
    return f"call {ast.unparse(node.func)}"
