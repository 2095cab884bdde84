"""A function of a rule, and the errors that name a line of it and what to write there instead."""

import re
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple

import torch

from ampopt_kernels.check_rule.advice import advice
from ampopt_kernels.codecs import BFLOAT16, NON_NEGATIVE, SIGNED, WIDE, Codec
from ampopt_kernels.cpu.expressions import Expression
from ampopt_kernels.rule import Rule

__all__ = [
    "Function",
    "OwnCodec",
    "authored",
    "described",
    "functions_of",
    "outer_names",
    "own_codecs",
]

_NOT_AUTHORED = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
"""Folders of this package and of torch."""

_OTHERWISE = (
    'Call functions of tl and of ampopt_kernels, and your own marked with jit. The guide "The '
    'language of rules" lists all that a rule may use'
)


@dataclass(frozen=True)
class Function:
    """A function of a rule.

    Attributes:
        name: which function, for messages: ``"update"``, ``"encode of state 'momentum'"``, ...
        owner: name of the optimizer class.
        jitted: the function, marked with ``jit``; ``factors`` are not marked.
    """

    name: str
    owner: str
    jitted: Any

    @property
    def _definition(self) -> FrameSummary:
        """The line at which the function begins."""
        code = getattr(self.jitted, "fn", self.jitted).__code__
        return FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)

    @property
    def authored(self) -> Iterator[types.FunctionType]:
        """This function and its callees as Python functions, without those of this package."""
        return authored(self.jitted)

    def refused(
        self, message: str, line: FrameSummary | None, instead: str | None = None
    ) -> ValueError:
        """An error about a line of the author, with what to write instead.

        Args:
            message: what is wrong with the line.
            line: the line; ``None`` for the one at which the function begins.
            instead: a sentence in place of the advice for ``message``.
        """
        line = line or self._definition
        code = (line.line or "").partition("#")[0].strip()
        where = f"{line.filename}:{line.lineno}, in {line.name}: `{code}`"
        if instead is None:
            instead = advice(message, code)
        if instead is None:
            instead = _OTHERWISE
        else:
            message = message.partition(". All backends have")[0]
        parts = [f"{self.name} of {self.owner}'s rule: {where}: {message}", instead]
        return ValueError(". ".join(filter(None, parts)))

    def failed(self, error: Exception, declared: str) -> ValueError:
        """An error about the line of the author that raised ``error``.

        Args:
            error: what the function raised when it ran as Python.
            declared: what the rule declares of the arguments.
        """
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = next((f for f in frames if not f.filename.startswith(_NOT_AUTHORED)), None)
        message = re.sub(r"\b(_Argument|_Flag|Expression|Program)\b", "value", str(error)).rstrip(
            "."
        )
        message = message.replace("'_Given'", "'tuple'")
        instead = declared if "to unpack" in message else None
        if isinstance(error, NameError) and repr(error.name) in declared:
            instead = f"Unpack h, state or flags first, as lr, beta = h. {declared}"
        return self.refused(message, line, instead)

    def returned(self, what: str) -> ValueError:
        """An error that says ``what`` the function returned, and what to return."""
        line = self._definition
        where = f"{line.filename}:{line.lineno}, {line.name}"
        return ValueError(f"{self.name} of {self.owner}'s rule ({where}) returned {what}")

    def pair(self, result: Any, what: str) -> tuple[Any, Any]:
        """``result``, if it is a pair; ``what`` says in the message what it should be."""
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise self.returned(f"{described(result)}: return {what}")
        first, second = result
        return first, second


def described(value: Any) -> str:
    """``value``, which a function of a rule returned, in words."""
    if isinstance(value, Expression):
        return "a block" if value.varies else "a number"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def functions_of(rule: Rule, owner: str) -> dict[str, Function]:
    """The functions of a rule by name, but ``factors`` and those of codecs.

    Args:
        rule: the rule.
        owner: name of the optimizer class, for messages.
    """
    roles = ["update", "scalars", "before_reduce"]
    roles += ["reduce"] * rule.reduces + ["averages"] * (rule.averages is not None)
    return {role: Function(role, owner, getattr(rule, role)) for role in roles}


class OwnCodec(NamedTuple):
    """A codec of a rule that is not one of this package.

    Attributes:
        codec: the codec.
        positive: whether no number of the state is below 0.
        encode: the function ``encode`` of the codec.
        decode: its function ``decode``.
    """

    codec: Codec
    positive: bool
    encode: Function
    decode: Function


def own_codecs(rule: Rule, owner: str) -> list[OwnCodec]:
    """The codecs of a rule's states that are not of this package; see :func:`functions_of`."""
    return [
        OwnCodec(
            part.codec,
            part.positive,
            Function(f"encode of state {part.name!r}", owner, part.codec.encode),
            Function(f"decode of state {part.name!r}", owner, part.codec.decode),
        )
        for part in rule.state
        if part.codec not in (None, BFLOAT16, NON_NEGATIVE, SIGNED, WIDE)
    ]


def outer_names(fn: types.FunctionType) -> dict[str, Any]:
    """The globals and closure values that a function reads, by name."""
    code, cells = fn.__code__, fn.__closure__ or ()
    around = zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    names = set(code.co_names) - set(code.co_varnames)  # names of attributes are among co_names
    return {name: fn.__globals__[name] for name in names & fn.__globals__.keys()} | dict(around)


def authored(jitted: Any) -> Iterator[types.FunctionType]:
    """The Python functions of ``jitted`` and of its callees, except those of this package."""
    found, seen = [jitted], set()
    while found:
        fn = found.pop(0).fn
        if fn not in seen and fn.__module__.split(".")[0] not in ("ampopt_kernels", "triton"):
            seen.add(fn)
            yield fn
            found += [value for value in outer_names(fn).values() if hasattr(value, "fn")]
