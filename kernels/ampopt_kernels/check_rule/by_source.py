"""Refuse a rule by its source: statements that some backends would run and others would not."""

import ast
import types
from collections.abc import Iterator

from ampopt_kernels.check_rule.advice import advice
from ampopt_kernels.check_rule.codecs import functions_of
from ampopt_kernels.check_rule.source import FunctionSource, authored
from ampopt_kernels.rule import Rule

__all__ = ["check"]

_LANGUAGES = ("triton.language", "ampopt_kernels.torch_language")
_RAISES = (
    "a rule cannot assert or raise. Check settings in __init__ of the optimizer, or in check_step"
)
_PRINT = "a rule cannot print. Read the optimizer's state after a step, or see ampopt.Watch"


def check(rule: Rule, owner: str) -> None:
    """Refuse ``assert``, ``raise``, ``print``, and calls such as ``g.abs()`` and ``torch.abs(g)``.

    Does nothing for a function whose source Python does not have.

    Args:
        rule: the rule.
        owner: name of the optimizer class, for the message.

    Raises:
        ValueError: a function of the rule, or one that it calls, has such a statement. The message
            has the line, and what to write instead.
    """
    roles = ["update", "scalars", "before_reduce"]
    roles += ["reduce"] * rule.reduces + ["averages"] * (rule.averages is not None)
    functions = [(role, getattr(rule, role)) for role in roles]
    functions += [(name, function) for name, function, _ in functions_of(rule)]
    for role, function in functions:
        for fn in authored(function):
            try:
                source = FunctionSource(fn)
            except OSError:
                continue
            for node, why in _refused(source):
                raise ValueError(f"{role} of {owner}'s rule: {source.place(node)}: {why}")


def _refused(source: FunctionSource) -> Iterator[tuple[ast.AST, str]]:
    """Each node of ``source`` that a rule must not have, and why."""
    for node in source.nodes():
        if isinstance(node, (ast.Assert, ast.Raise)):
            yield node, _RAISES
    for call, root in source.calls():
        code = ast.unparse(call)
        if isinstance(root, types.ModuleType) and root.__name__ not in _LANGUAGES:
            yield call, f"a rule cannot call functions of {root.__name__}. {advice('', code)}"
        elif isinstance(call.func, ast.Name) and call.func.id == "print":
            yield call, _PRINT
        elif isinstance(call.func, ast.Attribute) and root is None and call.func.attr != "to":
            yield call, f"a rule cannot call methods of values. {advice('', code)}"
