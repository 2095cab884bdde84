"""Turn a compilation error of Triton into the line of the rule and what to write instead."""

import re
import types
from typing import Any

from ampopt_kernels.check_rule.advice import advice
from ampopt_kernels.check_rule.source import FunctionSource, authored

__all__ = ["explained"]


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
    sources = {source.text: source for source in map(FunctionSource, authored(function))}
    places = [
        (source, call)
        for source in sources.values()
        for call, called in source.calls()
        if isinstance(called, types.FunctionType) and not hasattr(called, "fn")
    ]
    if not (places and "Unsupported function" in said):  # Triton names only the caller for these
        # The innermost function that is the author's own.
        places = [(sources[e.src], e.node) for e in reversed(errors) if e.src in sources]
    where = places[0][0].place(places[0][1]) if places else FunctionSource(function.fn).place(None)
    instead = advice(said, where.partition("`")[2].rstrip("`"))
    parts = [f"{where}: {_plain(said)}", instead, "See ampopt_kernels.Rule for all that it may use"]
    return ". ".join(filter(None, parts))


def _plain(said: str) -> str:
    """The first sentence of Triton's message, which may be the ``repr`` of an exception."""
    inner = re.fullmatch(r"\w+\((['\"])(.*)\1\)", said, re.DOTALL)
    text = (inner[2] if inner else said).replace("\\n", " ").replace("\\'", "'")
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return " ".join(text.split()).split(". ")[0].rstrip(".")
