"""What a pass over gradients computes of each element, written once in the language of rules.

Detect is a ``reduce`` with :func:`found_in`, and accumulate an ``update`` with :func:`added`, under
the test :func:`overflows_when_added`. They take the arguments of a rule's functions: ``p`` is the
sum to which a gradient is added, and ``g`` the gradient, unscaled.
"""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule

__all__ = [
    "ACCUMULATION",
    "FLUSHED",
    "MEASURES",
    "added",
    "found_in",
    "overflow_of",
    "overflows_when_added",
]

FLUSHED = 2.0**-25
"""The largest magnitude that float16 rounds to zero."""
MEASURES = 4
"""The number of terms of :func:`found_in` after the first."""


@jit
def found_in(p, g, state, h, flags):
    """The terms of detect.

    Returns:
        Whether an element is not finite, to be joined by "or"; the element itself, whose square is
        to be summed; its magnitude, 0 if it is not finite, to be joined by "max"; whether that is
        not 0; and whether it is not 0 and at most ``FLUSHED``, to be counted.
    """
    magnitude = tl.abs(g)
    is_finite = magnitude < float("inf")
    finite = tl.where(is_finite, magnitude, 0.0)
    is_nonzero = finite > 0
    return ~is_finite, g, finite, is_nonzero, is_nonzero & (finite <= 2.0**-25)


@jit
def added(p, g, state, h, flags):
    """The sum ``p + g``; ``g`` if the sum is still empty; the old sum if the gradient is rejected.

    Args:
        p: the sum.
        g: the unscaled gradient.
        state: no tensors.
        h: a number that is more than 0 to reject the gradient; or empty.
        flags: whether the sum is empty: uninitialized memory, which counts as 0.
    """
    EMPTY: tl.constexpr = flags[0]
    if EMPTY:
        new = g
    else:
        new = p + g
    if len(h) > 0:
        if EMPTY:
            new = tl.where(h[0] > 0, 0.0, new)
        else:
            new = tl.where(h[0] > 0, p, new)
    return new, ()


@jit
def overflows_when_added(p, g, state, h, flags):
    """The term of accumulate: :func:`overflow_of` what :func:`added` returns."""
    new, _ = added(p, g, state, h, flags)
    return (overflow_of(p, g, new, flags),)


@jit
def overflow_of(p, g, new, flags):
    """Whether an element of the gradient ``g`` is not finite, or makes a finite sum so.

    Args:
        p: the sum before, which does not count if it was not finite then.
        g: the unscaled gradient.
        new: the sum after.
        flags: see :func:`added`.
    """
    EMPTY: tl.constexpr = flags[0]
    is_fine = tl.abs(g) < float("inf")
    if not EMPTY:
        was_finite = tl.abs(p) < float("inf")
        is_fine = is_fine & ((tl.abs(new) < float("inf")) | ~was_finite)
    return ~is_fine


@jit
def _keep(s, h, flags, sums):
    """There are no scalar states and no hyperparameters."""
    return s, h


ACCUMULATION = Rule(
    update=added, reduce=overflows_when_added, scalars=_keep, hyper=(), flags=("empty",)
)
"""Accumulate as a rule, whose parameters are the sums."""
