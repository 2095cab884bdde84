"""The language that rules and kernels are written in.

If Triton is installed, ``tl`` is ``triton.language``, and ``jit`` is ``triton.jit``, except that
``/``, ``tl.sqrt`` and ``tl.rsqrt`` are correctly rounded in float32: see
:mod:`ampopt_kernels.triton.correctly_rounded`. Without Triton, ``tl`` is
:mod:`ampopt_kernels.torch_language`, which has the elementwise functions of the language, and
``jit`` only marks a function. So a rule is written once, and can be imported everywhere.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ampopt_kernels import torch_language

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "after_steps",
    "as_float32",
    "chance",
    "div_rn",
    "exp2_linear",
    "float_bits",
    "float_of",
    "int_bits",
    "jit",
    "kernel",
    "log2_linear",
    "maximum",
    "minimum",
    "power",
    "rounded",
    "sign",
    "sqrt_rn",
    "steps_above",
    "tl",
    "total",
    "up_or_down",
]


def _patch_interpreter() -> None:
    """Let Triton's interpreter run two things that Triton compiles.

    A comparison of two numbers becomes a block of the dtype of the numbers, of which ``&`` and
    ``|`` with a comparison of blocks fail.

    ``range`` in a kernel may end at an argument of the kernel. Triton 3.6 passes it as an array of
    one element, and leaves it to NumPy to convert the array to an integer, which NumPy 2.4 refuses.
    Triton 3.9 has the same fix.
    """
    from triton.runtime import interpreter

    create_splat = interpreter.InterpreterBuilder.create_splat

    def splat(self, ret_ty, arg):
        block = create_splat(self, ret_ty, arg)
        if arg.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    interpreter.InterpreterBuilder.create_splat = splat
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


HAS_TRITON = True
"""Whether Triton can be imported."""
try:
    import triton.language
except ImportError:  # not installed, or installed and broken
    HAS_TRITON = False

INTERPRETED = False
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` at import), so on the CPU."""

if TYPE_CHECKING:

    def jit(fn: Any) -> Any:
        """Declared for type checkers, which treat kernels as untyped."""

    class _Anything(type):
        """A metaclass of which type checkers assume every attribute."""

        def __getattr__(cls, name: str) -> Any:
            """Declared for type checkers: any name."""

    class tl(metaclass=_Anything):
        """Declared for type checkers, which treat the language as untyped."""

        constexpr: TypeAlias = Any

elif HAS_TRITON:
    from triton import knobs

    tl = triton.language
    INTERPRETED = bool(knobs.runtime.interpret)
    if INTERPRETED:
        jit = triton.jit
        _patch_interpreter()
    else:
        from ampopt_kernels.triton.correctly_rounded import CorrectlyRounded as jit
else:
    jit = torch_language.jit
    tl = torch_language


def kernel(fn: Callable[..., Any], name: Callable[[Any], str] | None = None) -> Any:
    """``jit`` for kernels that are launched: one binary for all values and addresses of arguments.

    By default, Triton compiles another binary the first time that a size is 1 or a multiple of 16,
    or an address is not aligned, which would pause a training midway. Kernels get alignment as a
    compile-time argument instead.

    Args:
        fn: the function.
        name: ``name(specialization)`` is the name of a compiled kernel, as profilers show it, if it
            is not that of the function; see ``repr`` of ``triton.jit``.
    """
    if not HAS_TRITON:
        return jit(fn)
    parameters = inspect.signature(fn).parameters.values()
    runtime = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    triton_jit: Any = jit
    return triton_jit(fn, do_not_specialize=runtime, repr=name)


@jit
def sqrt_rn(x):
    """The square root, correctly rounded, as ``tl.sqrt`` is in functions marked with ``jit``."""
    return tl.sqrt(x)


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

    ``tl.maximum`` by itself drops NaN on accelerators, so a rule's average would lose it.
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
    """The bits of ``x`` as float32: ``tl.uint32``."""
    return x.to(tl.float32).to(tl.uint32, bitcast=True)


@jit
def int_bits(x):
    """The bits of ``x`` as float32: ``tl.int32``, so that sums wrap and ``>>`` keeps the sign."""
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@jit
def float_of(bits):
    """The float32 number that has the ``bits``, a block of int32: undoes :func:`int_bits`."""
    return bits.to(tl.float32, bitcast=True)


@jit
def chance(u, PLACES: tl.constexpr):
    """``2**PLACES`` times the random number ``u``, in (0, 1), rounded down: int32."""
    return (u * (1 << PLACES)).to(tl.int32)


@jit
def log2_linear(x):
    """The base-2 logarithm of ``x``, a positive float32, linear between powers of two.

    At ``(1 + f) * 2**n`` with ``f`` in [0, 1) it is ``n + f``, rounded once. All backends compute
    the same bits, and in fewer operations than ``tl.log2``.
    """
    return ((int_bits(x) - 0x3F800000).to(tl.float32) * 1.1920928955078125e-07).to(x.dtype)


@jit
def exp2_linear(y):
    """The inverse of :func:`log2_linear`, for ``y`` from -126 to 127."""
    return float_of((y.to(tl.float32) * 8388608.0).to(tl.int32) + 0x3F800000).to(y.dtype)


@jit
def steps_above(x, u, LEAST: tl.constexpr, DROPPED: tl.constexpr):
    """How many steps ``x`` is above the least number, rounded stochastically: a whole float32.

    ``2**(23 - DROPPED)`` steps double a number. They are evenly spaced between powers of two, as a
    step is ``2**DROPPED`` in the bits of a float32. The few operations are on integers.

    Args:
        x: a block of float32, at least the least number.
        u: a uniform random number in (0, 1) for each element.
        LEAST: the bits of the least number, an integer: a multiple of ``2**DROPPED``.
        DROPPED: how many of the lower bits of ``x`` are rounded, from 16 to 22.
    """
    # The lower bits of LEAST are 0, so that one operation adds it to the random number.
    added = chance(u, DROPPED) | -LEAST
    return ((int_bits(x) + added) >> DROPPED).to(tl.float32)


@jit
def after_steps(n, LEAST: tl.constexpr, DROPPED: tl.constexpr):
    """The number that is ``n`` steps above the least: the inverse of :func:`steps_above`.

    Args:
        n: a block of whole numbers, float32.
        LEAST: as for :func:`steps_above`.
        DROPPED: as for :func:`steps_above`.
    """
    return float_of((n.to(tl.int32) << DROPPED) + LEAST)


@jit
def up_or_down(x, chance):
    """``x``, a float32, stochastically rounded to a number that bfloat16 holds.

    Rounded away from zero where ``chance``, a random int32 from 0 to 65535, is large enough that
    the result is ``x`` on average. Infinities and NaN stay.
    """
    bits = int_bits(x)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, float_of((bits + chance) & -65536), x)


@jit
def as_float32(x):
    """``x`` rounded to float32, the dtype of scalar states; the result has the dtype of ``x``."""
    return x.to(tl.float32).to(x.dtype)


_ROUNDS_BY_HAND = tl.constexpr(INTERPRETED) if HAS_TRITON else False  # pyright: ignore[reportCallIssue]


@jit
def rounded(x, DTYPE: tl.constexpr):
    """``x`` converted to ``DTYPE``, rounded to nearest, ties to even."""
    if _ROUNDS_BY_HAND and DTYPE == tl.bfloat16:
        # Triton's interpreter truncates to bfloat16, where devices round.
        bits = float_bits(x)  # float64 is rounded to float32 first, as on devices
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@jit
def power(base, exponent):
    """``base ** exponent`` for ``base >= 0`` and ``exponent > 0``; Triton has no such operator.

    Results of different backends may differ by a few ulp, as their ``tl.log2`` and ``tl.exp2`` do.

    Results near 1 are almost correctly rounded. Rules compute ``1 - power(beta, step)``, which in
    the first steps cancels nearly all digits of the power; ``tl.exp2`` alone may be an ulp off.
    """
    positive = base > 0
    exponent2 = exponent * tl.log2(tl.where(positive, base, 1.0))
    x = exponent2 * 0.6931471805599453
    near = (x > -0.5) & (x < 0.5)
    # exp(x) - 1 by its Taylor series; 14 terms are enough for float64 at 0.5. Multiplies by
    # reciprocals, as divisions are slow, and the whole step waits for control.
    x = tl.where(near, x, 0.0)
    above_1 = x * 0.0
    for i in tl.static_range(14):
        above_1 = (1.0 + above_1) * (x * (1.0 / (14 - i)))
    return tl.where(positive, tl.where(near, 1.0 + above_1, tl.exp2(exponent2)), 0.0)


@jit
def total(x):
    """The sum of a block, for functions of scalars that are not rules."""
    return tl.sum(x, 0)
