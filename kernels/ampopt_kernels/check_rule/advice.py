"""Advice for authors: what to write in a rule in place of code that some backend cannot run."""

import ast
import re

from ampopt_kernels import torch_language

__all__ = ["advice", "instead_of_write"]

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
    "zeros_like": "x * 0",
    "zip": "for i in tl.static_range(len(state)), with state[i]",
}
"""For functions that rules lack, an expression with the same result."""

_SUMS = ("all", "any", "argmax", "dot", "mean", "norm", "numel", "size", "std", "sum", "var")

_BY_PATTERN = {
    r"\*\*|__pow__": (
        "Write x * x, tl.sqrt(x) or, for x >= 0 and y > 0, power(x, y) of ampopt_kernels"
    ),
    r"//|__floordiv__": "Write tl.floor(x / y)",
    r" % |%:|__mod__": "Write x - y * tl.floor(x / y)",
    r"branches on a value|truth value": (
        "There are many values at once, of elements or of parameters, so choose between them by "
        "tl.where(x > 0, a, b), not by `if x > 0`, nor by `and`, `or`, `not`, nor by `max` or "
        "`min`, but by maximum and minimum of ampopt_kernels"
    ),
    r"tuple indices must": (
        "Read h, state and flags by position, as h[0], in the order of Rule(hyper=, state=, flags=)"
    ),
    r"does not support item assignment": (
        "Compute a new value, as average = state[0] + g, and return it in a new tuple"
    ),
    r"\.\w*[a-z]_\(": "Compute a new value, as p - lr * g, and return it",
    r"two bool tensors": "Write tl.where(x > 0, 1.0, 0.0) for a number in place of x > 0",
    r"Cannot access global variable": (
        "Write the number in the function, as NAME: tl.constexpr = NUMBER; one that may change "
        "is a hyperparameter"
    ),
    r"[Ss]tarred|[` ]\*\w": "Write h[0], h[1] for each, and a + (b,) to make a longer tuple",
    r"unhashable type: 'list'": (  # of Triton 3.6
        "Unpack one tuple in a statement: a, b = h, then (c,) = state"
    ),
    r"^for |'Name' object has no attribute 'func'": (
        "Write for i in tl.static_range(len(state)), with state[i]"
    ),
    r"attribute 'to'": "The seed and the step of rand are numbers of h, such as hyperparameters",
}
"""Advice by a pattern in the message or in the code."""


def advice(message: str, code: str) -> str | None:
    """The advice for code that a rule must not have: what to write instead.

    Args:
        message: the message of the error that the code caused.
        code: the code at fault: an expression or a line.

    Returns:
        A sentence without its full stop, or ``None``.
    """
    for text in (message, code):
        for pattern, sentence in _BY_PATTERN.items():
            if re.search(pattern, text):
                return sentence
    names = re.findall(r"(\w+)'? is not defined", message)
    names += re.findall(r"uses tl\.(\w+), which not every", message)
    calls = re.findall(r"((?:\w+|[)\]])\.)?\b(\w+)\(", code)
    names += [f for of, f in calls if of != "tl." and (of or f not in _OF_PACKAGE)]
    for sentence in filter(None, map(_instead_of, names)):
        return sentence
    if re.search("Unsupported function referenced|real number|is not defined", message) or calls:
        return "Call functions of tl and of ampopt_kernels, and your own marked with jit"
    return None


def instead_of_write(code: str) -> str:
    """The advice for ``code``, a statement that writes to a value in place."""
    try:
        (statement,) = ast.parse(code).body
    except (SyntaxError, ValueError):
        statement = None
    if isinstance(statement, ast.AugAssign):
        value = ast.BinOp(statement.target, statement.op, statement.value)
        written = ast.fix_missing_locations(ast.Assign([ast.Name("x")], value))
        target = ast.unparse(statement.target)
        name = target if target.isidentifier() else "new"
        return f"Write `{name} = {ast.unparse(written).removeprefix('x = ')}`"
    return "Compute a new value; to change some elements only, by tl.where(condition, a, b)"


def _instead_of(name: str) -> str | None:
    """The advice for a call of ``name``; ``None`` if there is none."""
    name = _OTHER_NAMES.get(name, name)
    if name in _OF_PACKAGE:
        return f"Write {_OF_PACKAGE[name]}, with {name} of ampopt_kernels"
    if name in _FORMULAS:
        return f"Write {_FORMULAS[name]}"
    if name in _SUMS:
        return (
            "A rule is elementwise: for sums over a parameter, return the terms from "
            "Rule(reduce=), whose sums are passed to scalars"
        )
    if name[:1] != "_" and hasattr(getattr(torch_language, name, None), "on_number"):
        return f"Write tl.{name}(x)"
    return "Write tl.where(condition, a, b)" if name == "where" else None
