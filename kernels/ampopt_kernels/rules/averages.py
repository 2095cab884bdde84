"""Formulas that several rules share."""

from ampopt_kernels.language import jit, tl

__all__ = ["lerp"]


@jit
def lerp(start, end, weight):
    """``start + weight * (end - start)``, as ``torch.lerp`` computes it.

    Reckoned from whichever of the two is nearer, so that a weight of 1 gives ``end`` and no
    rounding of a much larger ``start`` is left in it.
    """
    near = weight < 0.5
    return tl.where(near, start, end) + tl.where(near, weight, weight - 1) * (end - start)
