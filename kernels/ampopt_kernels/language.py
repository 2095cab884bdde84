"""The language that rules and kernels are written in.

``tl`` and ``jit`` are Triton's where Triton is installed, but that ``jit`` has ``/``, ``tl.sqrt``
and ``tl.rsqrt`` correctly rounded in float32: see :mod:`ampopt_kernels.triton.correctly_rounded`.
Elsewhere ``tl`` is :mod:`ampopt_kernels.torch_language`, which has the elementwise part of the
language, and ``jit`` only marks a function, so that a rule is written once and imports everywhere.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ampopt_kernels import torch_language
from ampopt_kernels.triton import interpreter

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "as_float32",
    "div_rn",
    "float_bits",
    "jit",
    "kernel",
    "maximum",
    "minimum",
    "power",
    "rounded",
    "sign",
    "sqrt_rn",
    "tl",
]


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:  # not installed, or installed and broken
        return False
    return True


HAS_TRITON = _can_import("triton.language")
"""Whether Triton can be imported."""

INTERPRETED = False
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` at import), so on the CPU."""

if TYPE_CHECKING:

    def jit(fn: Any) -> Any:
        """What type checkers see: a function of which they know no types."""

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):
        """What type checkers see: a language of which they know no types."""

        constexpr: TypeAlias = Any

elif HAS_TRITON:
    import triton
    import triton.language
    from triton import knobs

    tl = triton.language
    INTERPRETED = bool(knobs.runtime.interpret)
    if INTERPRETED:
        jit = triton.jit
        interpreter.patch()
    else:
        from ampopt_kernels.triton.correctly_rounded import CorrectlyRounded as jit
else:
    jit = torch_language.jit
    tl = torch_language


def kernel(fn: Callable[..., Any]) -> Any:
    """``jit`` for what is launched: one binary, whatever the values and addresses of arguments.

    Triton would compile a second one the first time that a size is 1 or a multiple of 16, or an
    address is not, which is mid-training. Kernels say themselves what they know of alignment.
    """
    if not HAS_TRITON:
        return jit(fn)
    parameters = inspect.signature(fn).parameters.values()
    runtime = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    triton_jit: Any = jit
    return triton_jit(fn, do_not_specialize=runtime)


@jit
def sqrt_rn(x):
    """The square root, correctly rounded, as ``tl.sqrt`` is in functions marked with ``jit``."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@jit
def div_rn(x, y):
    """The quotient, correctly rounded.

    ``x / y`` is the same in functions marked with ``jit``, unless ``x`` is a number and ``y`` is a
    block: torch, and so every backend, then multiplies ``x`` by the reciprocal of ``y``.
    """
    if (x * y).dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@jit
def maximum(a, b):
    """The larger of ``a`` and ``b``, and NaN if either is, as in torch.

    ``tl.maximum`` by itself drops NaN on accelerators, so a rule's average would forget one.
    """
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def minimum(a, b):
    """The smaller of ``a`` and ``b``, and NaN if either is; see :func:`maximum`."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def sign(x):
    """1 where ``x`` is above 0, -1 where it is below, and 0 elsewhere, at NaN too, as in torch."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@jit
def float_bits(x):
    """Those of ``x`` as float32, ``tl.uint32``."""
    return x.to(tl.float32).to(tl.uint32, bitcast=True)


@jit
def as_float32(x):
    """``x`` rounded to float32, as which scalar states are kept, in its own dtype."""
    return x.to(tl.float32).to(x.dtype)


_ROUNDS_BY_HAND = tl.constexpr(INTERPRETED) if HAS_TRITON else False  # pyright: ignore[reportCallIssue]


@jit
def rounded(x, DTYPE: tl.constexpr):
    """``x`` in ``DTYPE``, to the nearest, ties to even: what a kernel stores."""
    if _ROUNDS_BY_HAND and DTYPE == tl.bfloat16:
        # Triton's interpreter cuts float32 off where every device rounds it.
        bits = float_bits(x)  # by way of float32 everywhere
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@jit
def power(base, exponent):
    """``base ** exponent`` for ``base >= 0`` and ``exponent > 0``, which Triton has not.

    Backends may differ by units in the last place, as their ``tl.log2`` and ``tl.exp2`` do: in
    float64 that shows in what a rule keeps in float64, such as ScheduleFreeAdamW's ``weight_sum``.

    Near 1 it is all but correctly rounded: rules take ``1 - power(beta, step)``, and in the first
    steps that is little more than the rounding of the power. ``tl.exp2`` by itself may be a unit in
    the last place off, on some processors and accelerators.
    """
    positive = base > 0
    exponent2 = exponent * tl.log2(tl.where(positive, base, 1.0))
    x = exponent2 * 0.6931471805599453
    near = (x > -0.5) & (x < 0.5)
    # exp(x) - 1 by its Taylor series, of which 14 terms are enough for float64 at 0.5. By
    # reciprocals, which are constants: nothing of a step goes on while control divides.
    x = tl.where(near, x, 0.0)
    above_1 = x * 0.0
    for i in tl.static_range(14):
        above_1 = (1.0 + above_1) * (x * (1.0 / (14 - i)))
    return tl.where(positive, tl.where(near, 1.0 + above_1, tl.exp2(exponent2)), 0.0)
