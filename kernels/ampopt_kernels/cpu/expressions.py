"""The language that rules are written in, on expressions: objects that stand for C++ variables.

Each operation of a rule on expressions appends a C++ statement to a program; see ``cpp``.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ampopt_kernels import torch_language
from ampopt_kernels.cpu.dtypes import DTYPES
from ampopt_kernels.tensors import arithmetic

__all__ = ["C_TYPES", "LANGUAGE", "Expression", "Program", "cast", "whole"]

C_TYPES = {torch.bool: "bool", torch.int32: "int32_t"} | {
    dtype: DTYPES[dtype].c_type for dtype in (torch.float32, torch.float64)
}
"""The C++ types of variables."""


@dataclass
class Program:
    """C++ statements, in the order of the operations of a rule.

    Attributes:
        compute: the arithmetic dtype, that of all elements.
        before: statements that run once, before the loop.
        each: statements that run for each element.
        after: statements that run after the elements of each block.
        index: a C++ expression for the index of an element in the whole parameter, which random
            numbers follow from.
    """

    compute: torch.dtype
    before: list[str] = field(default_factory=list)
    each: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    index: str = ""

    def body(
        self, tensors: Iterable[int], statements: Iterable[str] = (), *, fetches: bool = False
    ) -> dict[str, str]:
        """Return the statements for the placeholders of the templates in ``loops``.

        Args:
            tensors: the indices of the tensors to prefetch.
            statements: further statements that run for each block of elements.
            fetches: whether to prefetch on every processor; see ``preamble.h``.
        """
        always = ", true" * fetches
        fetched = (f"fetch<BLOCK>(t{i} + block{always});" for i in tensors)
        return {
            "before": "\n    ".join(self.before),
            "fetched": "\n        ".join((*fetched, *statements)),
            "each": "\n            ".join(self.each),
            "after": "\n        ".join(self.after),
        }

    def new(self, dtype: torch.dtype, code: str, varies: bool) -> "Expression":
        """Append a variable with the value of ``code``.

        Args:
            dtype: its dtype: float32, float64, int32 or bool.
            code: a C++ expression.
            varies: whether each element has its own value.
        """
        to = self.each if varies else self.before
        name = f"x{len(self.before) + len(self.each)}"
        to.append(f"const {C_TYPES[dtype]} {name} = {code};")
        return Expression(self, name, dtype, varies)


def cast(x: Any, dtype: torch.dtype) -> str:
    """Return C++ code for ``x``, an expression or a Python number, converted to ``dtype``."""
    if not isinstance(x, Expression):
        return f"({C_TYPES[dtype]}){_literal(float(x))}"
    x.used = True
    if x.dtype == torch.bool:  # compilers make vectors of this, not of a conversion
        return f"({x.name} ? ({C_TYPES[dtype]})1 : ({C_TYPES[dtype]})0)"
    return x.name if x.dtype == dtype else f"({C_TYPES[dtype]}){x.name}"


def whole(x: Any) -> str:
    """Return C++ for the number ``x``, ``int32_t``; empty if none is known."""
    if isinstance(x, Expression):
        return x.name if x.dtype == torch.int32 else x.whole
    return str(int(x)) if float(x).is_integer() and abs(x) < 1 << 31 else ""


def _literal(x: float) -> str:
    """``x`` as C++ source, exactly."""
    if math.isfinite(x):
        return f"({x.hex()})"
    return '__builtin_nanf("")' if math.isnan(x) else f"({'-' if x < 0 else ''}__builtin_inff())"


def _operation(template: str, *operands: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a new variable: ``template`` filled with ``operands`` in their common dtype.

    Numbers take the dtype of the elements that they are combined with, as in torch. Arithmetic of
    numbers alone is float64.

    Args:
        template: C++ with ``{0}``, ``{1}`` for operands and ``{T}`` for their type.
        operands: expressions and Python numbers, at least one expression.
        dtype: the dtype of the result; default the common dtype.
    """
    expressions = [x for x in operands if isinstance(x, Expression)]
    values = [x.dtype for x in expressions if x.varies]
    if any(x.dtype == torch.bool for x in expressions):
        raise TypeError("a rule computes with a truth value")
    if dtype is None and _integers(*operands):
        raise TypeError("a rule divides or negates int32; convert it by x.to(tl.float32)")
    common = arithmetic(*values) if values else torch.float64
    integers = [*map(whole, operands)] if dtype == torch.bool else [""]
    names = integers if all(integers) else [cast(x, common) for x in operands]
    code = template.format(*names, T=C_TYPES[common])
    program = expressions[0].program
    return program.new(dtype or common, code, bool(values))


def _logical(template: str, *operands: Any) -> Any:
    """Return a new boolean variable: ``template`` filled with boolean expressions.

    Or an int32 variable, if the operands are of int32.
    """
    expressions = [x for x in operands if isinstance(x, Expression)]
    if _integers(*operands):
        return _of_integers(template, *operands)
    if len(expressions) < len(operands) or any(x.dtype != torch.bool for x in expressions):
        raise TypeError("a rule applies &, | or ~ to a number; write a comparison, such as x != 0")
    code = template.format(*(x.name for x in expressions))
    return expressions[0].program.new(torch.bool, code, any(x.varies for x in expressions))


def _integers(*operands: Any) -> bool:
    """Whether ``operands`` are expressions of int32, one at least, and Python integers."""
    dtypes = {x.dtype if isinstance(x, Expression) else type(x) for x in operands}
    return torch.int32 in dtypes and dtypes <= {torch.int32, int}


def _of_integers(template: str, *operands: Any) -> Any:
    """Return a new int32 variable: ``template`` filled with ``operands``; see :func:`_integers`."""
    first, *_ = expressions = [x for x in operands if isinstance(x, Expression)]
    code = template.format(*map(whole, operands))
    return first.program.new(torch.int32, code, any(x.varies for x in expressions))


def _shifted(template: str, x: "Expression", places: int) -> Any:
    """Return a new int32 variable: the bits of ``x``, int32, shifted."""
    if not _integers(x, places):
        raise TypeError("a rule shifts a number that is not whole; convert it by x.to(tl.int32)")
    return _of_integers(template, x, places)


def _operator(template: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Return the method of a binary operator and its reflected method."""

    def operation(x: Any, y: Any) -> Any:
        if dtype is None and _integers(x, y):  # in C++, sums of uint32_t wrap, and of int32_t not
            return _of_integers(template.replace("{0}", "uint32_t({0})"), x, y)
        return _operation(template, x, y, dtype=dtype)

    return operation, lambda self, other: operation(other, self)


@dataclass(eq=False)
class Expression:
    """A C++ variable.

    Attributes:
        program: the program that declares it.
        name: its name in C++.
        dtype: float32, float64, int32 or bool.
        varies: whether each element has its own value; else it is a Python number for the rule.
        used: whether another statement reads it.
        chance: a format of C++ for a random number times a power of two, 16 or more, ``uint32_t``,
            where it takes fewer operations than the number itself.
        whole: C++ for the same number, ``int32_t``, if it is known to be whole.
    """

    program: Program
    name: str
    dtype: torch.dtype
    varies: bool
    used: bool = False
    chance: str = ""
    whole: str = ""

    __add__, __radd__ = _operator("{0} + {1}")
    __sub__, __rsub__ = _operator("{0} - {1}")
    __mul__, __rmul__ = _operator("{0} * {1}")
    __lt__, __gt__ = _operator("{0} < {1}", torch.bool)
    __le__, __ge__ = _operator("{0} <= {1}", torch.bool)

    def __eq__(self, other: Any) -> Any:
        """A boolean variable: whether both are equal."""
        return _operation("{0} == {1}", self, other, dtype=torch.bool)

    def __ne__(self, other: Any) -> Any:
        """A boolean variable: whether both differ."""
        return _operation("{0} != {1}", self, other, dtype=torch.bool)

    def __truediv__(self, other: Any) -> Any:
        """The quotient; see :func:`_divide`."""
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        """The quotient of a number by this; see :func:`_divide`."""
        return _divide(other, self)

    def __and__(self, other: Any) -> Any:
        """A boolean variable: whether both hold."""
        return _logical("{0} & {1}", self, other)

    def __or__(self, other: Any) -> Any:
        """A boolean variable: whether at least one holds."""
        return _logical("{0} | {1}", self, other)

    def __lshift__(self, places: int) -> Any:
        """The bits of this, int32, moved towards the highest."""
        return _shifted("uint32_t({0}) << {1}", self, places)

    def __rshift__(self, places: int) -> Any:
        """The bits of this, int32, moved towards the lowest."""
        return _shifted("{0} >> {1}", self, places)

    def __invert__(self) -> Any:
        """A boolean variable: whether this does not hold."""
        return _logical("!{0}", self)

    def __neg__(self) -> Any:
        """The negative value."""
        result = _operation("-{0}", self)
        result.whole = self.whole and f"-{self.whole}"
        return result

    def __pos__(self) -> Any:
        """The expression itself."""
        return self

    def __abs__(self) -> Any:
        """The absolute value."""
        return LANGUAGE.abs(self)

    def __bool__(self) -> bool:
        """Raise ``TypeError``: no value is known when a rule is traced."""
        raise TypeError("a rule branches on a value")

    def to(self, dtype: torch.dtype) -> Any:
        """Convert the values of elements to float32, float64 or int32, rounded towards 0."""
        if not self.varies or self.dtype == torch.bool or dtype not in C_TYPES:
            raise TypeError(
                f"a rule converts a number or a comparison, or to {dtype}; only values of elements "
                "can be converted, to float32, float64 or int32"
            )
        if dtype == self.dtype:
            return self
        if dtype == torch.int32 and self.whole:
            return self.program.new(dtype, self.whole, True)
        result = self.program.new(dtype, cast(self, dtype), True)
        result.whole = self.name if self.dtype == torch.int32 else ""
        return result


# --- the language --------------------------------------------------------------------------------


def _divide(x: Any, y: Any) -> Any:
    """``x / y`` with the rounding of torch."""
    if _varies(y) and not _varies(x):
        return _operation("(({T})1 / {1}) * {0}", x, y)  # torch divides a number by a tensor so
    return _operation("{0} / {1}", x, y)


def _varies(x: Any) -> bool:
    """Whether ``x`` differs between elements."""
    return isinstance(x, Expression) and x.varies


def _where(condition: Any, a: Any, b: Any) -> Any:
    """``tl.where``; takes a Python bool, too."""
    if not isinstance(condition, Expression):
        return torch_language.where(condition, a, b)
    if condition.dtype != torch.bool:
        raise TypeError("a rule selects by a number; write tl.where(x != 0, a, b)")
    program, values = condition.program, [x.dtype for x in (a, b) if _varies(x)]
    varies = condition.varies or bool(values)
    number = program.compute if varies else torch.float64
    dtype = arithmetic(*values) if values else number
    dtype = torch.int32 if _integers(a, b) else dtype
    result = program.new(dtype, f"{condition.name} ? {cast(a, dtype)} : {cast(b, dtype)}", varies)
    if (whole_a := whole(a)) and (whole_b := whole(b)):
        result.whole = f"({condition.name} ? {whole_a} : {whole_b})"
    return result


def _extreme(sign: str) -> Callable[[Any, Any], Any]:
    """``maximum`` or ``minimum``; the result is NaN if either argument is."""

    def function(a: Any, b: Any) -> Any:
        # Of 0.0 and -0.0, which are equal, torch takes that of the tensor, Python the first one.
        equal = "" if _varies(a) or _varies(b) else "="
        template = f"({{0}} {sign}{equal} {{1}} || {{0}} != {{0}}) ? {{0}} : {{1}}"
        return (
            _operation(template, b, a)
            if _varies(a) and not _varies(b)
            else _operation(template, a, b)
        )

    return function


def _function(template: str, of_number: str = "") -> Callable[[Any], Any]:
    """A function of one argument: C++ of ``template``.

    Args:
        template: see :func:`_operation`.
        of_number: the template for the bits that Python's function of a number has, where it is not
            ``template``.
    """
    return lambda x: _operation(template if x.varies else of_number or template, x)


def _div_rn(x: Any, y: Any) -> Any:
    """``x / y`` rounded to the nearest."""
    return _operation("{0} / {1}", x, y)


def _rand(seed: Any, step: Any, program: Any) -> Any:
    """A random number for each element."""
    seed, step = (cast(x, torch.float32) for x in (seed, step))
    return program.new(program.compute, f"uniform({seed}, {step}, {program.index})", True)


def _as_float32(x: "Expression") -> "Expression":
    """``x`` rounded to float32; ``x`` itself if it is, as torch returns the tensor itself."""
    return x if x.dtype == torch.float32 else _operation("(float){0}", x)


def _of_float32(name: str) -> Callable[["Expression"], "Expression"]:
    """A function of ``preamble.h`` that takes and returns float32."""
    return lambda x: x.program.new(x.dtype, f"{name}({cast(x, torch.float32)})", x.varies)


def _abs(x: "Expression") -> "Expression":
    """The magnitude of ``x``."""
    result = _operation("math::fabs({0})", x)
    if n := x.whole:
        result.whole = f"({n} < 0 ? -{n} : {n})"
    return result


def _int_bits(x: "Expression") -> "Expression":
    """The bits of ``x`` as float32: int32."""
    return x.program.new(torch.int32, f"bits({cast(x, torch.float32)})", x.varies)


def _float_of(bits: "Expression") -> "Expression":
    """The float32 number that has the ``bits``."""
    return bits.program.new(torch.float32, f"number({bits.name})", bits.varies)


def _chance(u: "Expression", places: int) -> "Expression":
    """2**places times the random number ``u``: int32."""
    if not u.chance:
        return (u * 2.0**places).to(torch.int32)
    code = u.chance.format(max(places, 16))
    return u.program.new(torch.int32, f"{code} >> {max(16 - places, 0)}", u.varies)


_FUNCTIONS = {
    "abs": _abs,
    "sqrt": _function("math::sqrt({0})"),
    "rsqrt": _function("({T})1 / math::sqrt({0})"),
    "floor": _function("math::floor({0})", "math::floor({0}) + 0.0"),  # of an integer: not -0.0
    "ceil": _function("math::ceil({0})", "math::ceil({0}) + 0.0"),
    "exp": _function("math::exp({0})", "libm::exp({0})"),
    "exp2": _function("math::exp2({0})", "libm::pow(2.0, {0})"),
    "log": _function("math::log({0})", "libm::log({0})"),
    "log2": _function("math::log2({0})", "libm::log2({0})"),
    "sin": _function("math::sin({0})", "libm::sin({0})"),
    "cos": _function("math::cos({0})", "libm::cos({0})"),
    "sigmoid": _function("({T})1 / (({T})1 + math::exp(-{0}))", "1 / (1 + libm::exp(-{0}))"),
}
"""Functions of ``tl`` on expressions."""

_HELPERS = {
    "as_float32": _as_float32,
    "div_rn": _div_rn,
    "exp2_linear": _of_float32("exp2_linear"),
    "float_of": _float_of,
    "int_bits": _int_bits,
    "log2_linear": _of_float32("log2_linear"),
    "maximum": _extreme(">"),
    "minimum": _extreme("<"),
}
"""Functions of ``torch_language.HELPERS`` on expressions."""


def _also_of_numbers(
    functions: Mapping[str, Callable[..., Any]], of_numbers: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """``functions`` of expressions, each of which takes numbers in the source alone, too."""

    def either(name: str, *arguments: Any) -> Any:
        of_expressions = any(isinstance(x, Expression) for x in arguments)
        return (functions if of_expressions else of_numbers)[name](*arguments)

    return {name: functools.partial(either, name) for name in functions}


LANGUAGE = torch_language.Language(
    **_also_of_numbers(_FUNCTIONS, vars(torch_language)),
    where=_where,
    HELPERS={
        **_also_of_numbers(_HELPERS, torch_language.HELPERS),
        "chance": _chance,
        "rand": _rand,
    },
)
"""The language that rules are translated to C++ in: its functions return expressions."""
