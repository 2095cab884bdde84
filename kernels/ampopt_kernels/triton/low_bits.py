"""Read the 24-bit master of a parameter in the kernels that run a rule."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.low_bits import joined

__all__ = ["with_master"]


@jit
def with_master(values, ROW: tl.constexpr):
    """The parameter, or its 24-bit master; and a tuple of the states.

    Args:
        values: gradient, parameter, states and, if there are any, low bits, in the arithmetic
            dtype; or the gradient alone, which is then returned in place of the parameter.
        ROW: the :class:`RowLayout`.
    """
    if ROW.has_low_bits:
        low = values[len(values) - 1].to(tl.int32)
        master = joined(values[1].to(tl.float32), low, ROW.dtypes[1] == tl.float16)
        return master.to(values[0].dtype), values[2 : len(values) - 1]
    elif len(values) > 1:
        return values[1], values[2:]
    else:
        return values[0], ()
