"""Formulas that several rules share."""

from ampopt_kernels.language import jit, tl

__all__ = ["lerp"]


@jit
def lerp(start, end, weight):
    """``start + weight * (end - start)``, as ``torch.lerp`` computes it.

    Computed from the nearer of the two, so that a weight of 1 gives exactly ``end``, without a
    rounding error of a much larger ``start``.
    """
    near = weight < 0.5
    return tl.where(near, start, end) + tl.where(near, weight, weight - 1) * (end - start)
