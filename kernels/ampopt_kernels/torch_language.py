"""The elementwise functions of Triton's language, for torch tensors and Python numbers.

:func:`bind` makes a rule's functions run on tensors, with this module as ``tl``, so that a rule is
written once for all backends. Functions take tensors, or Python numbers where tensors would only
cost time, as in the loss-scale schedule on the CPU.
"""

import ctypes
import dis
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch

from ampopt_kernels.tensors import widest

__all__ = ["FUNCTIONS", "HELPERS", "Language", "bind", "copied", "dividing", "jit"]

float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
int32, int64 = torch.int32, torch.int64
uint32 = int64  # torch has no shifts and products of uint32; code masks with 0xFFFFFFFF
_DTYPES = "float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32"
static_range = range
_IN_PLACE = range(13, 26)
"""The operations ``+=`` and so on of Python's instruction ``BINARY_OP``; 0 to 12 are ``+`` etc."""


def constexpr(value: Any) -> Any:
    """``value`` itself: torch operations have no compile-time constants."""
    return value


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Set ``fn.fn = fn``, as functions marked with ``triton.jit`` have it, and return ``fn``."""
    fn.fn = fn  # type: ignore[attr-defined]  # where triton.jit keeps the Python function
    return fn


def _unary(on_tensor: Callable[..., Any], on_number: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors or numbers, with the second implementation as ``on_number``."""

    def function(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return on_tensor(x)
        try:
            return on_number(x)
        except (ValueError, ArithmeticError):  # tensors get inf or NaN
            return on_tensor(torch.tensor(x, dtype=float64, device="cpu")).item()

    function.on_number = on_number  # type: ignore[attr-defined]
    return function


_ROOTS_BY_FLOAT64 = frozenset({"cpu"})
"""Device types whose float32 ``torch.sqrt`` is not correctly rounded: Intel's is off in one of
150 values."""


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root, correctly rounded in float32; in float64 ``torch.sqrt``, within an ulp."""
    if x.dtype == float32 and x.device.type in _ROOTS_BY_FLOAT64:
        return x.double().sqrt_().float()
    return torch.sqrt(x)


abs = _unary(torch.abs, abs)  # the language's own name
sqrt = _unary(_sqrt, math.sqrt)
rsqrt = _unary(torch.rsqrt, lambda x: 1 / math.sqrt(x))
exp = _unary(torch.exp, math.exp)
exp2 = _unary(torch.exp2, functools.partial(pow, 2.0))
log = _unary(torch.log, math.log)
log2 = _unary(torch.log2, math.log2)
sin = _unary(torch.sin, math.sin)
cos = _unary(torch.cos, math.cos)
floor = _unary(torch.floor, lambda x: float(math.floor(x)))
ceil = _unary(torch.ceil, lambda x: float(math.ceil(x)))
sigmoid = _unary(torch.sigmoid, lambda x: 1 / (1 + math.exp(-x)))

FUNCTIONS = {name for name, value in [*vars().items()] if hasattr(value, "on_number")}
FUNCTIONS |= {"static_range", "where"}
"""The functions of ``tl`` that every backend has."""


def where(condition: Any, a: Any, b: Any, number: torch.dtype = float32) -> Any:
    """``a`` where ``condition`` holds, else ``b``; NaN in the one not selected has no effect.

    Args:
        condition: bool, or a bool tensor.
        a: a tensor or number.
        b: a tensor or number.
        number: dtype of the result if ``condition`` is a tensor, and ``a`` and ``b`` are numbers.
    """
    if isinstance(condition, torch.Tensor):
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            # torch.where would use the default dtype.
            a = torch.full((), a, dtype=number, device=condition.device)
            b = torch.full((), b, dtype=number, device=condition.device)
        return torch.where(condition, a, b)
    value, other = (a, b) if _holds(condition) else (b, a)
    return _scalar(value, other) if isinstance(other, torch.Tensor) else value


def _holds(condition: Any) -> Any:
    """Whether a Python condition holds, as a number that is not 0 does; ``~True`` is -2."""
    return condition not in (0, -2) if isinstance(condition, int) else condition


def _scalar(x: Any, like: torch.Tensor) -> torch.Tensor:
    """``x`` if it is a tensor; a number as a 0-d tensor with dtype and device of ``like``."""
    if isinstance(x, torch.Tensor):
        return x
    return torch.full((), x, dtype=like.dtype, device=like.device)


def _div_rn(x: Any, y: Any) -> Any:
    """The quotient, correctly rounded; see ``ampopt_kernels.div_rn``."""
    if isinstance(y, torch.Tensor) and not isinstance(x, torch.Tensor):
        x = _scalar(x, y)  # torch computes number / tensor as number * (1 / tensor): two roundings
    return x / y


def _as_float32(x: Any) -> Any:
    """``x`` rounded to float32, in the dtype of ``x``."""
    return x.to(float32).to(x.dtype) if isinstance(x, torch.Tensor) else ctypes.c_float(x).value


def _float_bits(x: Any) -> Any:
    """The bits of ``x`` as float32, as a whole number from 0."""
    if isinstance(x, torch.Tensor):
        return x.to(float32).view(int32).to(int64) & 0xFFFFFFFF
    return ctypes.c_uint32.from_buffer(ctypes.c_float(x)).value


def _log2_linear(x: Any) -> Any:
    """See ``ampopt_kernels.language.log2_linear``."""
    if not isinstance(x, torch.Tensor):
        return _log2_linear(torch.tensor(x, dtype=float32, device="cpu")).item()
    bits = x.to(float32).view(int32) - 0x3F800000
    return (bits.to(float32) * 2.0**-23).to(x.dtype)


def _exp2_linear(y: Any) -> Any:
    """See ``ampopt_kernels.language.exp2_linear``."""
    if not isinstance(y, torch.Tensor):
        return _exp2_linear(torch.tensor(y, dtype=float32, device="cpu")).item()
    bits = (y.to(float32) * 2.0**23).to(int32) + 0x3F800000
    return bits.view(float32).to(y.dtype)


def _int_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of ``x`` as float32: int32."""
    return x.to(float32).view(int32)


def _float_of(bits: torch.Tensor) -> torch.Tensor:
    """The float32 number that has the ``bits``, int32."""
    return bits.view(float32)


def _maximum(a: Any, b: Any) -> Any:
    """The larger of both, and NaN if one is."""
    if isinstance(a, torch.Tensor):
        return a.clamp_min(b) if not isinstance(b, torch.Tensor) else torch.maximum(a, b)
    if isinstance(b, torch.Tensor):
        return _maximum(b, a)
    return a if a >= b or a != a else b


def _minimum(a: Any, b: Any) -> Any:
    """The smaller of both, and NaN if one is."""
    if isinstance(a, torch.Tensor):
        return a.clamp_max(b) if not isinstance(b, torch.Tensor) else torch.minimum(a, b)
    if isinstance(b, torch.Tensor):
        return _minimum(b, a)
    return a if a <= b or a != a else b


HELPERS = {
    "as_float32": _as_float32,
    "div_rn": _div_rn,
    "exp2_linear": _exp2_linear,
    "float_bits": _float_bits,
    "float_of": _float_of,
    "int_bits": _int_bits,
    "log2_linear": _log2_linear,
    "maximum": _maximum,
    "minimum": _minimum,
    "total": torch.sum,
}
"""Replacements for functions of ``ampopt_kernels.language``. :func:`bind` binds the bodies of the
others."""


def __getattr__(name: str) -> Any:
    """Raise for a function that this language lacks: name those that it has."""
    if name in (*HELPERS, "rand", "randn", "sqrt_rn"):
        raise AttributeError(
            f"the rule uses tl.{name}, whose results are not the same on all devices: write "
            f"from ampopt_kernels import {name}, and call {name}(...)"
        )
    offered = sorted((*FUNCTIONS, *_DTYPES))
    raise AttributeError(
        f"the rule uses tl.{name}, which not every backend has. All backends have: "
        f"{', '.join(offered)}. Write the rule with these, and with maximum, minimum, power, sign "
        "and the other functions of ampopt_kernels. For sums over a parameter, use Rule(reduce=)"
    )


class Language:
    """This module as a language, with other functions under some names."""

    def __init__(self, **replaced: Any) -> None:
        """Take all names of this module, but ``replaced`` ones."""
        vars(self).update({**globals(), **replaced})

    def __getattr__(self, name: str) -> Any:
        """Raise for a function that no backend has, as this module does."""
        return getattr(_this_module, name)


def _where_in_widest(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` holds, else ``b``; two numbers give the widest dtype."""
    number = widest(condition.device) if isinstance(condition, torch.Tensor) else float64
    return where(condition, a, b, number)


def _on_numbers() -> Language:
    """The language for Python numbers only; functions raise where they are undefined."""
    replaced = {name: getattr(value, "on_number", value) for name, value in globals().items()}
    replaced["where"] = lambda c, a, b: a if c is True or (c is not False and _holds(c)) else b
    return Language(**replaced)


def bind(function: Any, language: Any = None) -> Callable[..., Any]:
    """A copy of a ``jit`` function that runs on torch tensors.

    The copy has the same code and other globals: ``tl`` is ``language``, ``jit`` functions are
    bound in turn, and functions of ``ampopt_kernels.language`` and ``random_numbers`` that are in
    ``language.HELPERS`` are replaced by those. In a language of tensors, ``x += y`` gives the name
    ``x`` to another tensor, as Triton does, where torch writes to the tensor ``x``.

    Args:
        function: a function marked with ``jit``.
        language: replaces ``triton.language``; ``None`` for this module.
    """
    language = _this_module if language is None else language

    def replaced(value: Any) -> Any:
        if getattr(value, "__name__", None) == "triton.language" or value is _this_module:
            return language
        if type(value).__name__ == "constexpr":
            return value.value
        return bind(value, language) if value is not function and hasattr(value, "fn") else value

    fn = function.fn
    helped = ("ampopt_kernels.language", "ampopt_kernels.random_numbers")
    if fn.__module__ in helped and fn.__name__ in language.HELPERS:
        return language.HELPERS[fn.__name__]
    bound = copied(fn, replaced)
    if language in (_this_module, in_widest):
        bound.__code__ = _without_writes(fn.__code__)
    return bound


def _without_writes(code: types.CodeType) -> types.CodeType:
    """``code`` with ``x = x + y`` in place of ``x += y``, and likewise for ``-=`` and so on."""
    instructions = bytearray(code.co_code)
    for at in range(0, len(instructions), 2):
        name = dis.opname[instructions[at]]
        if name == "BINARY_OP" and instructions[at + 1] in _IN_PLACE:
            instructions[at + 1] -= _IN_PLACE.start
        elif name.startswith("INPLACE_"):  # before Python 3.11
            instructions[at] = dis.opmap[name.replace("INPLACE", "BINARY")]
    return code.replace(co_code=bytes(instructions))


def copied(fn: Any, replaced: Callable[[Any], Any]) -> Any:
    """A copy of the function ``fn`` whose globals and closure values are ``replaced(value)``."""
    scope: dict[str, Any] = dict(fn.__globals__)
    scope.update((name, replaced(scope[name])) for name in fn.__code__.co_names if name in scope)
    closure = fn.__closure__ and tuple(
        types.CellType(replaced(cell.cell_contents)) for cell in fn.__closure__
    )
    copy = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, closure)
    copy.__annotations__, copy.__kwdefaults__ = fn.__annotations__, fn.__kwdefaults__
    return copy


def dividing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with a division of numbers by 0 that gives inf or NaN, as on devices.

    Python raises instead, often in the branch of a ``where`` that is not selected. Then the call is
    repeated with tensors in place of numbers; functions of this language have no side effects.
    """

    def divided(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ZeroDivisionError:
            flat = (x for a in arguments for x in (a if isinstance(a, tuple) else (a,)))
            tensors = (x for x in flat if isinstance(x, torch.Tensor))
            like = next(tensors, torch.empty((), dtype=float64, device="cpu"))
            return function(*_as_tensors(arguments, like))

    return divided


def _as_tensors(value: Any, like: torch.Tensor) -> Any:
    """``value``, or each element of a tuple, as a 0-d tensor if it is a number."""
    if isinstance(value, tuple):
        return tuple(_as_tensors(x, like) for x in value)
    return value if isinstance(value, (torch.Tensor, bool)) else like.new_full((), value)


import sys  # noqa: E402

_this_module = sys.modules[__name__]
in_widest = Language(where=_where_in_widest)
on_numbers = _on_numbers()
