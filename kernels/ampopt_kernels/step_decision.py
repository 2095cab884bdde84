"""Decide: whether a step is skipped and why, what clips its gradients, and what the next scale is.

:func:`decide` is written once, in the language of rules: Triton's control kernel calls it on the
device, and :meth:`Backend.control <ampopt_kernels.step.Backend.control>` calls it on 0-d tensors
or, on the CPU, on Python numbers, bound by ``torch_language``.
"""

import math
from typing import NamedTuple

from torch import Tensor

from ampopt_kernels.language import jit, tl, total
from ampopt_kernels.next_scale import next_scale

__all__ = ["LONGEST_WINDOW", "RUNNING", "SETTINGS", "Check", "Window", "decide"]

RUNNING = 3
"""The numbers of running statistics: count, mean and sum of squared deviations. A window has more:
the count of values, that of consecutive outliers, and the last values, in a ring."""

LONGEST_WINDOW = 1 << 7
"""The largest number of values in a window."""


class Window(NamedTuple):
    """How the mean and the standard deviation of a window of the last values are computed.

    Attributes:
        length: the number of values in the window, a power of two, at most
            :data:`LONGEST_WINDOW`.
        latest: 1 if the window includes the tested value, else 0.
        correction: what is subtracted from the number of values in the variance.
        leaves_out: how many consecutive outliers are not added to the window.
    """

    length: float
    latest: float
    correction: float
    leaves_out: float


class Check(NamedTuple):
    """One check of the gradient norm or the loss of a step: a large value skips the step.

    Attributes:
        cause: the reason of a step that the check skips, counted as in
            :data:`ampopt_kernels.watch_statistics.CAUSES`.
        of_norm: 1 to check the norm of the gradients, 0 to check the loss.
        limit: a larger value skips the step; negative for no limit.
        deviations: a value that is this many standard deviations above the mean skips the step.
        warmup: how many values must be known before deviations are checked; infinity for never.
        both_sides: 1 if a value that far below the mean skips the step too, else 0.
        window: the window of the mean and the deviation; ``None`` for all applied steps.
        statistics: ``widest``, 1-d, the statistics of earlier values, updated in place; see
            :data:`RUNNING`. ``None`` if the check has a limit alone.
    """

    cause: float
    of_norm: float
    limit: float = -1.0
    deviations: float = 0.0
    warmup: float = math.inf
    both_sides: float = 0.0
    window: Window | None = None
    statistics: Tensor | None = None

    @property
    def settings(self) -> tuple[float, ...]:
        """All numbers of the check, as :func:`decide` takes them."""
        return (*self[:6], *(self.window or Window(1.0, 0.0, 0.0, 0.0)))


SETTINGS = 10
"""The length of :attr:`Check.settings`."""


@jit
def decide(
    flag,
    external,
    scale,
    growth,
    budget,
    schedule,
    scheduled_by,
    norm,
    max_norm,
    loss,
    checks,
    CHECK: tl.constexpr,
    DROP: tl.constexpr,
):
    """The decision of one step.

    Arguments are float64 scalars, or Python numbers; ``None`` for what the step does not have::

        found_inf = flag or external or the scale is not usable or a check fails
        skip      = found_inf, if DROP
        clip      = min(1, max_norm / norm)
        scale     = next_scale(scale) after an overflow or an applied step

    Args:
        flag: more than 0 if an unscaled gradient is not finite.
        external: an overflow flag of the caller, more than 0 for overflow.
        scale: the loss scale.
        growth: a counter of the schedule; see :func:`next_scale`.
        budget: a counter of the schedule.
        schedule: the constants of the schedule, a tuple.
        scheduled_by: the overflow flag that the schedule follows, where it is not that of this
            step: after ``accumulate``, a micro-batch may overflow and the step be applied.
        norm: the global norm of the unscaled gradients.
        max_norm: the norm to clip to; infinity clips nothing.
        loss: the loss of the step.
        checks: for each :class:`Check` a tuple: its ``settings``, a tuple, and its ``statistics``,
            a tuple: empty; or ``(count, mean, squares)``; or, of a window, ``(count, in_a_row,
            ring, places)`` with two blocks: the values, and the numbers 0, 1, 2, and so on.
        CHECK: whether a scale that is not positive and finite is an overflow.
        DROP: whether an overflow skips the step.

    Returns:
        ``(found_inf, skip, clip, cause, (scale, growth, budget), statistics)``. ``cause`` is that
        of the first check that fails, unless the step overflows; else 0. The scale and its counters
        are an empty tuple without a schedule. ``statistics`` has one tuple for each check, like
        those in ``checks``.
    """
    overflow = flag
    if external is not None:
        overflow = tl.where(external > 0, external, overflow)
    if CHECK:
        if scale is not None:
            # g / inf is 0, which is finite: a scale that is not usable counts as an overflow.
            overflow = tl.where((scale > 0) & (scale < float("inf")), overflow, 1.0)
    found_inf = overflow

    clip = 1.0
    if norm is not None:
        clip = max_norm / (norm + 1e-6)
        # A NaN stays NaN, as in torch. An infinite limit computes the norm and clips nothing.
        clip = tl.where((clip > 1.0) | (max_norm == float("inf")), 1.0, clip)

    cause = 0.0
    statistics = ()
    if len(checks) > 0:
        for i in tl.static_range(len(checks)):
            settings, known = checks[i]
            unusual = _is_unusual(_checked(settings, norm, loss), settings, known)
            cause = tl.where(unusual & (cause == 0.0) & (overflow <= 0), settings[0], cause)
        found_inf = tl.where(cause > 0, 1.0, overflow)
        for i in tl.static_range(len(checks)):
            settings, known = checks[i]
            value = _checked(settings, norm, loss)
            statistics += (_with_value(value, settings, known, overflow, found_inf),)

    next_values = ()
    if schedule is not None:
        if scheduled_by is None:
            overflowed = overflow
        else:
            overflowed = scheduled_by
        next_values = next_scale(scale, growth, budget, overflowed, schedule)
        if len(checks) > 0:  # a skip for another cause neither grows nor lowers the scale
            stays = (cause > 0) & (overflowed <= 0)
            next_values = (
                tl.where(stays, scale, next_values[0]),
                tl.where(stays, growth, next_values[1]),
                tl.where(stays, budget, next_values[2]),
            )
    skip = found_inf
    if not DROP:
        skip = 0.0
    return found_inf, skip, clip, cause, next_values, statistics


@jit
def _checked(settings, norm, loss):
    """The value of a check: the norm or the loss."""
    if norm is None:
        return loss
    elif loss is None:
        return norm
    else:
        return tl.where(settings[1] > 0, norm, loss)


@jit
def _is_unusual(value, settings, statistics):
    """Whether a value skips the step. NaN is above every limit, but usual during a warmup."""
    cause, of_norm, limit, deviations, warmup, both_sides = settings[:6]
    usual = (value <= limit) | (limit < 0)
    if len(statistics) > 0:
        mean, deviation = _mean_and_deviation(value, settings, statistics)
        away = value - mean
        away = tl.where(both_sides > 0, tl.abs(away), away)
        usual = usual & ((away <= deviations * deviation) | (statistics[0] < warmup))
    return usual == 0


@jit
def _mean_and_deviation(value, settings, statistics):
    """Mean and standard deviation of the earlier values, and of ``value`` if it is included."""
    if len(statistics) == 3:
        count, mean, squares = statistics
        degrees = count - 1.0
        return mean, tl.sqrt(squares / tl.where(degrees > 1.0, degrees, 1.0))
    else:
        length, latest, correction, leaves_out = settings[6:]
        count, in_a_row, ring, places = statistics
        values = tl.where(places == tl.where(latest > 0, _next(count, length), -1.0), value, ring)
        n = tl.where(count + latest < length, count + latest, length)
        mean = total(tl.where(places < n, values, 0.0)) / n
        away = values - mean
        squares = total(tl.where(places < n, away * away, 0.0))
        return mean, tl.sqrt(squares / (n - correction))


@jit
def _with_value(value, settings, statistics, overflow, found_inf):
    """The statistics after the step.

    They have ``value`` too if it is finite, and no gradient overflowed, and the step is applied.
    A window has those of other skipped steps as well, but for the first few of several outliers in
    a row.
    """
    is_finite = value - value == 0.0
    if len(statistics) == 0:
        return ()
    elif len(statistics) == 3:  # by Welford's method
        count, mean, squares = statistics
        delta = value - mean
        new_mean = mean + delta / (count + 1.0)
        adds = is_finite & (found_inf <= 0)
        return (
            tl.where(adds, count + 1.0, count),
            tl.where(adds, new_mean, mean),
            tl.where(adds, squares + delta * (value - new_mean), squares),
        )
    else:
        length, latest, correction, leaves_out = settings[6:]
        count, in_a_row, ring, places = statistics
        outliers = tl.where(_is_unusual(value, settings, statistics), in_a_row + 1.0, 0.0)
        counts = is_finite & (overflow <= 0)
        adds = counts & ((outliers == 0.0) | (outliers > leaves_out))
        at = tl.where(adds, _next(count, length), -1.0)
        return (
            tl.where(adds, count + 1.0, count),
            tl.where(counts, outliers, in_a_row),
            tl.where(places == at, value, ring),
            places,
        )


@jit
def _next(count, length):
    """The place of the next value in a ring of ``length`` values, a power of two."""
    return count - tl.floor(count / length) * length
