"""Advice for authors: what to write in a rule in place of code that some backend cannot run."""

import ast
import re

from ampopt_kernels import torch_language

__all__ = ["advice"]

_OTHER_NAMES = {
    "absolute": "abs",
    "clip": "clamp",
    "expit": "sigmoid",
    "fabs": "abs",
    "fmax": "maximum",
    "fmin": "minimum",
    "max": "maximum",
    "min": "minimum",
    "pow": "power",
}
"""Functions of Python, math, numpy and torch, and the name of the same function here."""

_OF_PACKAGE = {
    "maximum": "maximum(x, y)",
    "minimum": "minimum(x, y)",
    "power": "power(x, y), for x >= 0 and y > 0",
    "rand": "rand(seed, step, at)",
    "randn": "randn(seed, step, at)",
    "sign": "sign(x)",
}
"""Functions of this package that torch or numpy has too, and a call of each."""

_FORMULAS = {
    "addcdiv": "x + value * a / b",
    "addcmul": "x + value * a * b",
    "clamp": "minimum(maximum(x, low), high), with minimum and maximum of ampopt_kernels",
    "copysign": "tl.where(y < 0, -tl.abs(x), tl.abs(x))",
    "enumerate": "for i in tl.static_range(len(state)), with state[i]",
    "expm1": "tl.exp(x) - 1",
    "float": "x itself: blocks and the numbers of h are floating-point",
    "int": "tl.floor(x)",
    "isfinite": "x - x == 0",
    "isnan": "x != x",
    "lerp": "x + weight * (y - x)",
    "log10": "tl.log2(x) * 0.3010299956639812",
    "log1p": "tl.log(1 + x)",
    "nan_to_num": "tl.where(x == x, x, 0.0)",
    "ones_like": "x * 0 + 1",
    "reciprocal": "1 / x",
    "round": "tl.floor(x + 0.5)",
    "square": "x * x",
    "tanh": "2 * tl.sigmoid(2 * x) - 1",
    "where": "tl.where(condition, a, b)",
    "zeros_like": "x * 0",
    "zip": "for i in tl.static_range(len(state)), with state[i]",
}
"""For functions that rules lack, an expression with the same result."""

_SUMS = (
    "all", "any", "argmax", "dot", "mean", "norm", "numel", "shape", "size", "std", "sum", "var",
)  # fmt: skip

_ELEMENTWISE = (
    "A rule is elementwise: for sums over a parameter, return the terms from Rule(reduce=), whose "
    "sums are passed to scalars"
)

_BY_PATTERN = {
    r"call itself": "Write a loop: for i in tl.static_range(n)",
    r"be a lambda": "Write a function with def",
    r"for \*\*": "Write x * x, tl.sqrt(x) or, for x >= 0 and y > 0, power(x, y) of ampopt_kernels",
    r"for //": "Write tl.floor(x / y)",
    r"for %": "Write x - y * tl.floor(x / y)",
    r"branches on a value": (
        "There are many values at once, of elements or of parameters. Write tl.where(x > 0, a, b) "
        "in place of `if x > 0`; &, | and ~ in place of `and`, `or` and `not`; and maximum and "
        "minimum of ampopt_kernels in place of `max` and `min`"
    ),
    r"computes with a truth": "Write tl.where(x > 0, 1.0, 0.0) for a number in place of x > 0",
    r"attribute 'new'": "Draw in update, as rand(seed, step, at), where at is its sixth argument",
    r"inverts a flag": "Write `not flag` in place of `~flag`",
    r"not iterable|not subscriptable|has no len": _ELEMENTWISE,
    r"but reads": "Add it to the declaration, or read what is declared",
    r"tuple indices must": (
        "Read h, state and flags by position, as h[0], in the order of Rule(hyper=, state=, flags=)"
    ),
    r"'value' object does not support item assignment": (
        "Compute a new value; to change some elements only, by tl.where(condition, a, b)"
    ),
    r"does not support item assignment": (
        "Compute a new value, as average = state[0] + g, and return it in a new tuple"
    ),
    r"attribute '\w*[a-z]_'": "Compute a new value, as p - lr * g, and return it",
    r"'tuple'|to tuple|multiply sequence": (
        "h, state and flags are tuples: unpack them, as (m,) = state, or read state[0]"
    ),
    r"unexpected keyword argument": "Pass arguments by position",
    r"Cannot access global variable": (
        "Write the number in the function, as NAME: tl.constexpr = NUMBER; one that may change "
        "is a hyperparameter"
    ),
    # Triton 3.6 says no more than AssertionError() of a starred target.
    r"[Ss]tarred|AssertionError\(\)": (
        "Write h[0], h[1] for each, and a + (b,) to make a longer tuple"
    ),
    r"unhashable type: 'list'": (  # of Triton 3.6
        "Unpack one tuple in a statement: a, b = h, then (c,) = state"
    ),
    r"'Name' object has no attribute 'func'": (
        "Write for i in tl.static_range(len(state)), with state[i]"
    ),
    r"Loop-carried variable": "Before the loop, give it that type, as in total = p * 0 + total",
    r"attribute 'to'": "The seed and the step of rand are numbers of h, such as hyperparameters",
    r"cannot assert": ("Check settings in __init__ of the optimizer, or in check_step"),
    r"cannot call print": "Read the optimizer's state after a step, or see ampopt.Watch",
}
"""Advice by a pattern in the message."""

_NAMES = (
    r"(\w+)'? is not defined",
    r"uses tl\.(\w+), which not every",
    r"has no attribute '(\w+)'",
    r"cannot call (?:.*\.)?(\w+)$",
    r"^_?(\w+)\(\) (?:argument|missing|takes)",
    r"define __(\w+)__ method",
)
"""Patterns of messages about a function; the group is its name."""


def advice(message: str, code: str) -> str | None:
    """What to write in place of code that a rule must not have.

    Args:
        message: the message of the error that the code caused.
        code: the line at fault.

    Returns:
        A sentence without its full stop, or ``None``.
    """
    if "in place" in message:
        return _instead_of_write(code)
    for pattern, sentence in _BY_PATTERN.items():
        if re.search(pattern, message):
            return sentence
    names = [match[1] for pattern in _NAMES if (match := re.search(pattern, message))]
    return _instead_of(names[0]) if names else None


def _instead_of_write(code: str) -> str:
    """What to write in place of ``code``, a statement that changes a value."""
    try:
        (statement,) = ast.parse(code).body
    except (SyntaxError, ValueError):  # a part of a statement
        statement = None
    if not isinstance(statement, ast.AugAssign):
        return "Compute a new value, as p - lr * g, and return it"
    value = ast.BinOp(statement.target, statement.op, statement.value)
    written = ast.fix_missing_locations(ast.Assign([ast.Name("x")], value))
    target = ast.unparse(statement.target)
    name = target if target.isidentifier() else "new"
    return f"Write `{name} = {ast.unparse(written).removeprefix('x = ')}`"


def _instead_of(name: str) -> str | None:
    """What to write in place of a call of ``name``; ``None`` if nothing does the same."""
    name = _OTHER_NAMES.get(name, name)
    if name in _OF_PACKAGE:
        return f"Write {_OF_PACKAGE[name]}, with {name} of ampopt_kernels"
    if name in _FORMULAS:
        return f"Write {_FORMULAS[name]}"
    if name in _SUMS:
        return _ELEMENTWISE
    if hasattr(getattr(torch_language, name, None), "on_number"):
        return f"Write tl.{name}(x)"
    return None
