"""Update rules, and the backends that run them: Triton kernels, compiled C++ loops, plain torch.

To write a rule, import :data:`tl` and :func:`jit` from here and declare a :class:`Rule`.
"""

from ampopt_kernels.codecs import Codec
from ampopt_kernels.language import (
    as_float32,
    div_rn,
    exp2_linear,
    jit,
    log2_linear,
    maximum,
    minimum,
    power,
    sign,
    sqrt_rn,
    tl,
)
from ampopt_kernels.random_numbers import rand, randn
from ampopt_kernels.rule import Rule, State

__all__ = [
    "Codec",
    "Rule",
    "State",
    "as_float32",
    "div_rn",
    "exp2_linear",
    "jit",
    "log2_linear",
    "maximum",
    "minimum",
    "power",
    "rand",
    "randn",
    "sign",
    "sqrt_rn",
    "tl",
]
