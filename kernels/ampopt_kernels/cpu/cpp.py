"""A rule as C++: its own body, run once on expressions in place of tensors and numbers.

The third engine of the language that rules are written in, beside Triton and ``torch_language``,
whose results the C++ has to the bit: the same operations in the same order and precision, each
rounded as IEEE 754 says. Functions that IEEE 754 does not round, such as the exponential, are
another library's here than torch's, and sums over rows and columns are added up in another order,
so a source says whether there are any.

Numbers of the host (``h``) are computed in float64, once for each call, as Python does it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ampopt_kernels import random_numbers, stochastic, torch_language
from ampopt_kernels.cpu.loops import AVERAGES, PREAMBLE, SPREAD, SUMS, UPDATE
from ampopt_kernels.cpu.sums import BLOCK, PART
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic

__all__ = ["Source", "source_of"]

_C = {torch.float32: "float", torch.float64: "double", torch.bool: "bool"}
_STORED = {**_C, torch.float16: "uint16_t", torch.bfloat16: "uint16_t"}
_LOADED = {torch.float16: "from_float16", torch.bfloat16: "from_bfloat16"}
_ROUNDED = {torch.float16: "to_float16", torch.bfloat16: "to_bfloat16"}


@dataclass(frozen=True)
class Source:
    """C++ with the function ``update``, in place, ``sums`` or ``averages``; see ``loops``.

    Attributes:
        text: the C++.
        exact: whether its results are those of the eager backend to the bit.
    """

    text: str
    exact: bool


def source_of(
    rule: Rule,
    flags: tuple[bool, ...],
    dtypes: tuple[torch.dtype, ...],
    width: int,
    role: str = "update",
    by_chance: bool = False,
) -> Source:
    """``rule`` as C++.

    Args:
        rule: whose function it is.
        flags: of the rule.
        dtypes: of gradient, parameter, elementwise states and copy, if there is one.
        width: of ``h``: the reciprocal of the scale, the clip coefficient, then what the function
            takes as ``h``.
        role: which function: ``"update"``, ``"reduce"`` or ``"averages"``; only the first takes a
            copy.
        by_chance: round the parameter, bfloat16, stochastically.

    Behind the tensors are the ``addresses`` of ``Marginals``, if the rule has any, of which
    ``averages`` has the sizes alone.
    ``h`` has the position of the first element besides if the rule draws random numbers or
    ``by_chance``, and then the key.

    Raises:
        Exception: of whatever kind, where the rule does what the language has not.
    """
    compute = arithmetic(*dtypes[:2])
    program = _Program(compute)
    for i, dtype in enumerate(dtypes):
        pointer = f"{_STORED[dtype]}*"
        program.before.append(f"{pointer} __restrict t{i} = static_cast<{pointer}>(tensors[{i}]);")
    inverse, clip, *rest = (program.new(torch.float64, f"h[{i}]", False) for i in range(width))
    grad, *stored = (
        program.new(compute, f"{_LOADED[dtype]}(t{i}[i])" if dtype in _LOADED else f"t{i}[i]", True)
        for i, dtype in enumerate(dtypes)
    )
    n_state = len(rule.state_for(flags))
    function = torch_language.bind(getattr(rule, role), _LANGUAGE)
    marginals, state = rule.marginals_for(flags), stored[1 : 1 + n_state]
    filled = []
    for i, part in enumerate(marginals if role != "averages" else (), len(dtypes)):
        m, n = (f"(int64_t)tensors[{len(dtypes) + len(marginals) + k}]" for k in range(2))
        c, rows = _C[compute], str(part.shape == "rows").lower()
        program.before.append(f"{c} t{i}[BLOCK];")
        program.before.append(f"Spread<{c}> spread{i}(tensors[{i}], {rows}, {m}, {n}, start);")
        filled.append(f"spread{i}.next(lesser(BLOCK, end - block), t{i});")
        state.append(program.new(compute, f"t{i}[i - block]", True))
    given = (stored[0], grad * inverse * clip, tuple(state), tuple(rest), flags)
    preamble = f"#define BLOCK {BLOCK}\n{PREAMBLE}{SPREAD * bool(filled)}"
    if role != "update":
        loop, adds = (SUMS, "+=") if role == "reduce" else (AVERAGES, "=")
        terms = function(*given)
        for k, term in enumerate(terms):
            program.each.append(f"terms[{k}][j] {adds} {_cast(term, torch.float64)};")
        read = [i for i, x in enumerate((grad, *stored)) if x.used]
        of_rows = ", ".join(str(int(part.shape == "rows")) for part in marginals)
        sizes = {"part": PART, "n_terms": len(terms), "n_tensors": len(dtypes), "width": width}
        text = loop.format(**sizes, of_rows=of_rows, **program.body(read, filled))
        return Source(preamble + text, program.exact and role == "reduce")
    if rule.draws or by_chance:
        preamble += random_numbers.CPP
        program.before.append(f"const uint64_t position = (int64_t)h[{width}];")
        given += (program,) * rule.draws
    param, state = function(*given)
    new = (param, *state, *[param] * (len(stored) - 1 - n_state))
    if by_chance:
        preamble += stochastic.CPP
        program.before.append(f"const uint64_t key = h[{width + 1}];")
        value = _cast(param, torch.float32)
        program.each.append(f"t1[i] = to_bfloat16_by_chance({value}, position + i, key);")
        dtypes, new = (dtypes[0], *dtypes[2:]), new[1:]
    for i, (dtype, value) in enumerate(zip(dtypes[1:], new, strict=True), 2 if by_chance else 1):
        rounded = _ROUNDED.get(dtype)
        to = f"{rounded}({_cast(value, torch.float32)})" if rounded else _cast(value, dtype)
        program.each.append(f"t{i}[i] = {to};")
    width += (rule.draws or by_chance) + by_chance
    body = program.body(range(1 + len(stored)), filled)
    return Source(preamble + UPDATE.format(width=width, **body), program.exact)


@dataclass
class _Program:
    """Statements, in the order in which they were asked for.

    Attributes:
        compute: the dtype of values.
        before: what is computed once.
        each: what is computed for each element.
        exact: see :class:`Source`.
    """

    compute: torch.dtype
    before: list[str] = field(default_factory=list)
    each: list[str] = field(default_factory=list)
    exact: bool = True

    def body(self, tensors: Iterable[int], filled: Iterable[str] = ()) -> dict[str, str]:
        """Both, as they are put into a function that fetches ``tensors``.

        ``filled`` are statements for each block.
        """
        return {
            "before": "\n    ".join(self.before),
            "fetched": "\n        ".join((*(f"fetch(t{i} + block);" for i in tensors), *filled)),
            "each": "\n            ".join(self.each),
        }

    def new(self, dtype: torch.dtype, code: str, varies: bool) -> "_Expression":
        """A variable that is ``code``."""
        to = self.each if varies else self.before
        name = f"x{len(self.before) + len(self.each)}"
        to.append(f"const {_C[dtype]} {name} = {code};")
        return _Expression(self, name, dtype, varies)


def _cast(x: Any, dtype: torch.dtype) -> str:
    """``x``, an expression or a Python number, as C++ of that dtype."""
    if not isinstance(x, _Expression):
        return f"({_C[dtype]}){_literal(float(x))}"
    x.used = True
    return x.name if x.dtype == dtype else f"({_C[dtype]}){x.name}"


def _literal(x: float) -> str:
    if math.isfinite(x):
        return f"({x.hex()})"
    return "NAN" if math.isnan(x) else f"({'-' if x < 0 else ''}INFINITY)"


def _made(
    template: str, *operands: Any, dtype: torch.dtype | None = None, exact: bool = True
) -> Any:
    """A new variable: ``template`` of operands in their common dtype, ``T`` in the template.

    Numbers take on the dtype of values, as in torch, and are float64 among themselves.
    """
    expressions = [x for x in operands if isinstance(x, _Expression)]
    values = [x.dtype for x in expressions if x.varies]
    if any(x.dtype == torch.bool for x in expressions):
        raise TypeError("a rule computes with a truth value; say tl.where(condition, a, b)")
    common = arithmetic(*values) if values else torch.float64
    code = template.format(*(_cast(x, common) for x in operands), T=_C[common])
    program = expressions[0].program
    program.exact &= exact
    return program.new(dtype or common, code, bool(values))


def _logical(template: str, *operands: Any) -> Any:
    """A new truth value made of others."""
    expressions = [x for x in operands if isinstance(x, _Expression)]
    if len(expressions) < len(operands) or any(x.dtype != torch.bool for x in expressions):
        raise TypeError("a rule takes & or | or ~ of what is no comparison")
    code = template.format(*(x.name for x in expressions))
    return expressions[0].program.new(torch.bool, code, any(x.varies for x in expressions))


def _operator(template: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The methods of an operator, and of the same with operands exchanged."""
    return (
        lambda self, other: _made(template, self, other, dtype=dtype),
        lambda self, other: _made(template, other, self, dtype=dtype),
    )


@dataclass(eq=False)
class _Expression:
    """A C++ variable.

    Attributes:
        program: where it stands.
        name: its name there.
        dtype: float32, float64 or bool.
        varies: whether each element has its own; else it is a number of the host.
        used: whether anything is computed of it.
    """

    program: _Program
    name: str
    dtype: torch.dtype
    varies: bool
    used: bool = False

    __add__, __radd__ = _operator("{0} + {1}")
    __sub__, __rsub__ = _operator("{0} - {1}")
    __mul__, __rmul__ = _operator("{0} * {1}")
    __lt__, __gt__ = _operator("{0} < {1}", torch.bool)
    __le__, __ge__ = _operator("{0} <= {1}", torch.bool)

    def __eq__(self, other: Any) -> Any:
        return _made("{0} == {1}", self, other, dtype=torch.bool)

    def __ne__(self, other: Any) -> Any:
        return _made("{0} != {1}", self, other, dtype=torch.bool)

    def __truediv__(self, other: Any) -> Any:
        return _divided(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _divided(other, self)

    def __and__(self, other: Any) -> Any:
        return _logical("{0} & {1}", self, other)

    def __or__(self, other: Any) -> Any:
        return _logical("{0} | {1}", self, other)

    def __invert__(self) -> Any:
        return _logical("!{0}", self)

    def __neg__(self) -> Any:
        return _made("-{0}", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _made("std::fabs({0})", self)

    def __bool__(self) -> bool:
        raise TypeError("a rule branches on a value; say tl.where(condition, a, b)")

    def to(self, dtype: torch.dtype) -> Any:
        """In another dtype, float32 or float64, of a value."""
        if not self.varies or self.dtype == torch.bool or dtype not in _C:
            raise TypeError(f"a rule converts what is no value of an element, or to {dtype}")
        return self.program.new(dtype, _cast(self, dtype), True)


# --- the language --------------------------------------------------------------------------------


def _divided(x: Any, y: Any) -> Any:
    if _varies(y) and not _varies(x):
        return _made("(({T})1 / {1}) * {0}", x, y)  # as torch divides a number by a tensor
    # Python divides no number by 0; what then is done in its place is not quite the same.
    return _made("{0} / {1}", x, y, exact=_varies(x))


def _varies(x: Any) -> bool:
    return isinstance(x, _Expression) and x.varies


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, _Expression):
        return a if condition else b
    if condition.dtype != torch.bool:
        raise TypeError("a rule selects by what is no comparison; say tl.where(x != 0, a, b)")
    program, values = condition.program, [x.dtype for x in (a, b) if _varies(x)]
    varies = condition.varies or bool(values)
    number = program.compute if varies else torch.float64
    dtype = arithmetic(*values) if values else number
    return program.new(dtype, f"{condition.name} ? {_cast(a, dtype)} : {_cast(b, dtype)}", varies)


def _extreme(name: str, sign: str) -> Callable[[Any, Any], Any]:
    template = f"({{0}} {sign} {{1}} || {{0}} != {{0}}) ? {{0}} : {{1}}"

    def function(a: Any, b: Any) -> Any:
        if not isinstance(a, _Expression) and not isinstance(b, _Expression):
            return torch_language.HELPERS[name](a, b)
        # Where they are equal, a zero's sign tells whose it is: torch takes that of a tensor.
        return _made(template, b, a) if _varies(a) and not _varies(b) else _made(template, a, b)

    return function


def _function(name: str, template: str, exact: bool = True) -> Callable[[Any], Any]:
    of_number = getattr(torch_language, name)
    return lambda x: _made(template, x, exact=exact) if isinstance(x, _Expression) else of_number(x)


def _sqrt(x: Any) -> Any:
    # Of float64, torch's own on the CPU is not always the nearest; see ``torch_language.sqrt``.
    exact = not (_varies(x) and x.dtype == torch.float64)
    return _function("sqrt", "std::sqrt({0})", exact)(x)


def _div_rn(x: Any, y: Any) -> Any:
    if not isinstance(x, _Expression) and not isinstance(y, _Expression):
        return torch_language.HELPERS["div_rn"](x, y)
    return _made("{0} / {1}", x, y, exact=_varies(x) or _varies(y))


def _rand(seed: Any, step: Any, program: Any) -> Any:
    seed, step = (_cast(x, torch.float32) for x in (seed, step))
    return program.new(program.compute, f"uniform({seed}, {step}, position + i)", True)


def _as_float32(x: Any) -> Any:
    return (
        _made("(float){0}", x)
        if isinstance(x, _Expression)
        else torch_language.HELPERS["as_float32"](x)
    )


_EXACT = {
    "abs": "std::fabs({0})",
    "rsqrt": "({T})1 / std::sqrt({0})",
    "floor": "std::floor({0})",
    "ceil": "std::ceil({0})",
}
_INEXACT = {
    "exp": "std::exp({0})",
    "exp2": "std::exp2({0})",
    "log": "std::log({0})",
    "log2": "std::log2({0})",
    "sin": "std::sin({0})",
    "cos": "std::cos({0})",
    "sigmoid": "({T})1 / (({T})1 + std::exp(-{0}))",
}


class _Language:
    """What ``tl`` and its helpers are in a rule that becomes C++; the rest is the stand-in's."""

    def __init__(self) -> None:
        self.where, self.sqrt = _where, _sqrt
        for name, template in _EXACT.items():
            setattr(self, name, _function(name, template))
        for name, template in _INEXACT.items():
            setattr(self, name, _function(name, template, exact=False))
        self.HELPERS = {
            "as_float32": _as_float32,
            "div_rn": _div_rn,
            "maximum": _extreme("maximum", ">"),
            "minimum": _extreme("minimum", "<"),
            "rand": _rand,
            "sqrt_rn": _sqrt,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_language, name)


_LANGUAGE = _Language()
