"""The elementwise part of Triton's language on torch tensors and Python numbers.

The eager backend runs a rule's own body with ``tl`` bound to this module, so the mathematics of
an optimizer is never written a second time. Functions take tensors, or Python numbers for the
few places (the loss-scale schedule on the CPU) where a tensor would only cost time.
"""

import ctypes
import functools
import math
import types
from array import array
from collections.abc import Callable
from typing import Any

import torch

from ampopt_kernels.tensors import widest

__all__ = ["bind", "copied", "dividing", "jit"]

float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
int32, int64 = torch.int32, torch.int64
uint32 = int64  # torch has no shifts and products of uint32
static_range = range


def constexpr(value: Any) -> Any:
    """``value``, known when a kernel is compiled: nothing else here."""
    return value


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``fn`` as written in this language, as ``triton.jit`` does, and leave it callable."""
    fn.fn = fn  # type: ignore[attr-defined]  # where triton.jit keeps the Python function
    return fn


def _unary(on_tensor: Callable[..., Any], on_number: Callable[..., Any]) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return on_tensor(x)
        try:
            return on_number(x)
        except (ValueError, ArithmeticError):  # where tensors have an infinity or NaN
            return on_tensor(torch.tensor(x, dtype=float64, device="cpu")).item()

    function.on_number = on_number  # type: ignore[attr-defined]
    return function


_ROOTS_BY_FLOAT64 = frozenset({"cpu"})
"""Types of devices where torch's square root of float32, Intel's, misses once in 150 times."""


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """The nearest number; in float64 what torch has, which on a CPU may be the next to it."""
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
floor = _unary(torch.floor, math.floor)
ceil = _unary(torch.ceil, math.ceil)
sigmoid = _unary(torch.sigmoid, lambda x: 1 / (1 + math.exp(-x)))


def where(condition: Any, a: Any, b: Any, number: torch.dtype = float32) -> Any:
    """``a`` where ``condition`` holds, else ``b``; no value of the other one reaches the result.

    Two numbers are of the dtype ``number``, as which a rule's blocks are computed in.
    """
    if isinstance(condition, torch.Tensor):
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            # Which torch would give its default dtype.
            a = torch.full((), a, dtype=number, device=condition.device)
            b = torch.full((), b, dtype=number, device=condition.device)
        return torch.where(condition, a, b)
    chosen, other = (a, b) if condition else (b, a)
    return _scalar(chosen, other) if isinstance(other, torch.Tensor) else chosen


def _scalar(x: Any, like: torch.Tensor) -> torch.Tensor:
    """A number as a tensor of the dtype of ``like``; a tensor as it is."""
    if isinstance(x, torch.Tensor):
        return x
    return torch.full((), x, dtype=like.dtype, device=like.device)


def _div_rn(x: Any, y: Any) -> Any:
    if isinstance(y, torch.Tensor) and not isinstance(x, torch.Tensor):
        x = _scalar(x, y)  # torch multiplies a number by the reciprocal, and so rounds twice
    return x / y


def _as_float32(x: Any) -> Any:
    return x.to(float32).to(x.dtype) if isinstance(x, torch.Tensor) else ctypes.c_float(x).value


def _float_bits(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(float32).view(int32).to(int64) & 0xFFFFFFFF
    return ctypes.c_uint32.from_buffer(ctypes.c_float(x)).value


def _maximum(a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.clamp_min(b) if not isinstance(b, torch.Tensor) else torch.maximum(a, b)
    if isinstance(b, torch.Tensor):
        return _maximum(b, a)
    return a if a >= b or a != a else b


def _minimum(a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.clamp_max(b) if not isinstance(b, torch.Tensor) else torch.minimum(a, b)
    if isinstance(b, torch.Tensor):
        return _minimum(b, a)
    return a if a <= b or a != a else b


HELPERS = {
    "as_float32": _as_float32,
    "div_rn": _div_rn,
    "float_bits": _float_bits,
    "maximum": _maximum,
    "minimum": _minimum,
    "sqrt_rn": sqrt,
}
"""What helpers of ``ampopt_kernels.language`` are here; the others run as they stand there."""


def __getattr__(name: str) -> Any:
    if name in (*HELPERS, "rand", "randn"):
        raise AttributeError(
            f"the rule uses tl.{name}, which is not the same on every device (another treatment of "
            "NaN, float32 alone, other random numbers): "
            f"from ampopt_kernels import {name}, and write {name}(...)"
        )
    offered = sorted(n for n in globals() if n[0] != "_" and n not in _NOT_LANGUAGE)
    raise AttributeError(
        f"the rule uses tl.{name}, which the eager backend does not have. "
        f"It has: {', '.join(offered)}. Write the rule with these, and with maximum, minimum, "
        "power, sign and others of ampopt_kernels; sums over a parameter are those of Rule(reduce=)"
    )


class _InFloat64:
    """The language for blocks and scalars of float64."""

    where = staticmethod(functools.partial(where, number=float64))

    def __getattr__(self, name: str) -> Any:
        return getattr(_this_module, name)


in_float64 = _InFloat64()


class _OfScalars:
    """The language for scalars, as wide as their device has it."""

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        number = widest(condition.device) if isinstance(condition, torch.Tensor) else float64
        return where(condition, a, b, number)

    def __getattr__(self, name: str) -> Any:
        return getattr(_this_module, name)


class _OfScalarsOnHost(_OfScalars):
    """The language for scalars that the host may read: the same bits in a tensor as as numbers.

    torch's functions have others than Python's, even for the square root of 2, and some have others
    in a vector than alone. Scalars are few, and so go through Python's one by one.
    """

    def __init__(self) -> None:
        each = {n: _of_each(f) for n, f in globals().items() if hasattr(f, "on_number")}
        vars(self).update(each)
        self.HELPERS = {**HELPERS, "sqrt_rn": each["sqrt"]}


def _of_each(function: Any) -> Callable[[Any], Any]:
    def on_scalars(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return function(x)
        values = x.reshape(-1).tolist()
        try:
            results = array("d", map(function.on_number, values))
        except (ValueError, ArithmeticError):  # some of them have none, which takes longer
            results = array("d", map(function, values))
        return torch.frombuffer(results, dtype=float64).reshape(x.shape)

    return on_scalars


class _OnNumbers:
    """The language for Python numbers alone, whose functions raise where they have no value."""

    def __init__(self) -> None:
        vars(self).update({n: getattr(f, "on_number", f) for n, f in globals().items()})
        self.HELPERS = {n: getattr(f, "on_number", f) for n, f in HELPERS.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(_this_module, name)


_NOT_LANGUAGE = {
    "HELPERS",
    "bind",
    "constexpr",
    "copied",
    "ctypes",
    "dividing",
    "functools",
    "in_float64",
    "jit",
    "of_scalars",
    "of_scalars_on_host",
    "on_numbers",
    "math",
    "types",
    "torch",
    "Any",
    "Callable",
    "array",
    "widest",
    "offered",
    "sys",
    "name",
}


def bind(function: Any, language: Any = None) -> Callable[..., Any]:
    """``function``, a ``jit`` function, as an ordinary one on torch tensors.

    Its globals are copied with Triton's language replaced by this module (or by ``language``) and
    every ``jit`` function it calls bound likewise; its code is not touched. The language's own
    ``HELPERS`` take the place of functions of ``ampopt_kernels.language`` and ``random_numbers``.
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
    return copied(fn, replaced)


def copied(fn: Any, replaced: Callable[[Any], Any]) -> Any:
    """The Python function ``fn`` with each value that it reads from without given as another."""
    read: dict[str, Any] = dict(fn.__globals__)
    read.update((name, replaced(read[name])) for name in fn.__code__.co_names if name in read)
    closure = fn.__closure__ and tuple(
        types.CellType(replaced(cell.cell_contents)) for cell in fn.__closure__
    )
    copy = types.FunctionType(fn.__code__, read, fn.__name__, fn.__defaults__, closure)
    copy.__annotations__, copy.__kwdefaults__ = fn.__annotations__, fn.__kwdefaults__
    return copy


def dividing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of this language, which divides numbers by 0 as devices do.

    That is an infinity or NaN, often in the branch of a ``where`` that nothing takes, where Python
    would raise. Then the numbers are made tensors and all is done again, since the language has no
    side effects.
    """

    def divided(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ZeroDivisionError:
            given = (x for a in arguments for x in (a if isinstance(a, tuple) else (a,)))
            tensors = (x for x in given if isinstance(x, torch.Tensor))
            like = next(tensors, torch.empty((), dtype=float64, device="cpu"))
            return function(*_as_tensors(arguments, like))

    return divided


def _as_tensors(value: Any, like: torch.Tensor) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_tensors(x, like) for x in value)
    return value if isinstance(value, (torch.Tensor, bool)) else like.new_full((), value)


import sys  # noqa: E402

_this_module = sys.modules[__name__]
of_scalars, of_scalars_on_host, on_numbers = _OfScalars(), _OfScalarsOnHost(), _OnNumbers()
