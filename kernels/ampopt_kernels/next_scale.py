"""The loss-scale schedule: how a scale follows from the one before it and the overflow flag.

The function is written once: the Triton control kernel calls it, and the other backends and
``LossScale.next`` call it on torch tensors or Python numbers, bound by ``torch_language``.
"""

from typing import NamedTuple

from ampopt_kernels.language import jit, tl

__all__ = ["PolicyConstants", "next_scale"]


class PolicyConstants(NamedTuple):
    """The constants of a schedule, in the order in which :func:`next_scale` reads them.

    All are numbers, so that one float64 vector on a device holds them.
    """

    growth_factor: float
    backoff_factor: float
    first_growth: float
    """The finite step, counted from the start or the last overflow, at which the scale grows."""
    growth_period: float
    """Finite steps from one growth to the next."""
    hysteresis: float
    """Number of overflows that lower the scale."""
    refill_on_finite: float
    """1 if any finite step resets the hysteresis budget, else 0."""
    refill_on_backoff: float
    """1 if lowering the scale resets the hysteresis budget, else 0."""
    min_scale: float
    max_scale: float
    kept_scale: float = -1.0
    """A scale that overflows do not lower; negative if there is no such scale."""


@jit
def next_scale(value, growth, budget, found_inf, constants):
    """The scale and counters after one step.

    Arguments are float64 scalars, or Python numbers::

        if found_inf > 0:
            growth, budget = 0, budget - 1
            if budget <= 0:
                if value != kept_scale: value = max(value * backoff_factor, min_scale)
                budget = hysteresis if refill_on_backoff else 0
        else:
            growth += 1
            if refill_on_finite: budget = hysteresis
            if growth >= first_growth:
                value = min(value * growth_factor, max_scale), unless float32 cannot hold it
                growth, budget = first_growth - growth_period, hysteresis

    Args:
        value: the scale.
        growth: finite steps counted towards the next growth.
        budget: overflows left before the scale is lowered.
        found_inf: more than 0 if the step overflowed.
        constants: :class:`PolicyConstants`, as a tuple.

    Returns:
        ``(value, growth, budget)``.
    """
    (
        growth_factor,
        backoff_factor,
        first_growth,
        growth_period,
        hysteresis,
        refill_on_finite,
        refill_on_backoff,
        min_scale,
        max_scale,
        kept_scale,
    ) = constants
    bad = found_inf > 0

    new_budget = budget - 1
    lowers = new_budget <= 0
    lowered = value * backoff_factor
    lowered = tl.where(lowered > min_scale, lowered, min_scale)
    bad_value = tl.where(lowers & (value != kept_scale), lowered, value)
    bad_budget = tl.where(lowers, hysteresis * refill_on_backoff, new_budget)

    count = growth + 1
    grows = count >= first_growth
    larger_value = value * growth_factor
    larger_value = tl.where(larger_value < max_scale, larger_value, max_scale)
    # Values from 2**128 - 2**103 on round to infinity in float32: the scale does not grow there.
    larger_value = tl.where(larger_value < 3.4028235677973366e38, larger_value, value)
    good_value = tl.where(grows, larger_value, value)
    good_growth = tl.where(grows, first_growth - growth_period, count)
    refills = grows | (refill_on_finite > 0)
    good_budget = tl.where(refills, hysteresis, budget)

    return (
        tl.where(bad, bad_value, good_value),
        tl.where(bad, growth * 0, good_growth),
        tl.where(bad, bad_budget, good_budget),
    )
