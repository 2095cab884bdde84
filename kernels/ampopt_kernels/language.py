"""The language that rules and kernels are written in.

``tl`` and ``jit`` are Triton's where Triton is installed. Elsewhere ``tl`` is the torch
stand-in of :mod:`ampopt_kernels.stand_in`, which has the elementwise part of the language, and
``jit`` only marks a function, so that a rule is written once and imports everywhere.
"""

import importlib.util
from typing import Any

from ampopt_kernels import stand_in

__all__ = ["HAS_TRITON", "INTERPRETED", "jit", "power", "tl"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton can be imported."""

INTERPRETED = False
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` at import), so on the CPU."""

jit: Any
tl: Any

if HAS_TRITON:
    import triton
    import triton.language
    from triton import knobs

    jit = triton.jit
    tl = triton.language
    INTERPRETED = bool(knobs.runtime.interpret)
else:
    jit = stand_in.jit
    tl = stand_in


@jit
def power(base, exponent):
    """``base ** exponent`` for ``base >= 0`` and ``exponent > 0``; Triton has no operator for it."""
    positive = base > 0
    return tl.where(positive, tl.exp2(exponent * tl.log2(tl.where(positive, base, 1.0))), 0.0)
