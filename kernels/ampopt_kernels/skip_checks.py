"""Checks of the gradient norm and the loss, which skip a step as an overflow does.

The functions marked with ``jit`` are the formulas: the Triton kernel runs them on the device, and
:func:`find_cause` runs the same bodies on torch tensors, for all checks at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.language import jit, tl

__all__ = [
    "CheckSettings",
    "FoundCause",
    "SkipChecks",
    "find_cause",
    "is_finite",
    "statistics_with",
    "within_deviations",
    "within_limit",
]


class CheckSettings(NamedTuple):
    """One check: numbers that fit one row of a table on the device.

    Attributes:
        cause: the reason of a step that the check skips, counted as in
            :data:`ampopt_kernels.watch_statistics.CAUSES`.
        limit: a larger value skips the step; negative for no limit.
        deviations: a value that is this many standard deviations above the mean skips the step.
        warmup: how many steps must be applied before deviations are checked; infinity for never.
        of_norm: 1 if the value is the norm of the gradients, else 0.
    """

    cause: float
    limit: float
    deviations: float
    warmup: float
    of_norm: float


class SkipChecks(NamedTuple):
    """All checks of a step, in order: the first one that fails names the cause.

    Attributes:
        settings: ``widest``, shape (checks, 5): a row of :class:`CheckSettings` each.
        values: ``widest``, shape (checks,): the values to check; any number for a check of the
            norm. ``None`` if all checks are of the norm.
        statistics: ``widest``, shape (checks, 3): count, mean and sum of squared deviations of the
            values of all applied steps, updated in place; ``None`` if no check reads them.
    """

    settings: Tensor
    values: Tensor | None
    statistics: Tensor | None


class FoundCause(NamedTuple):
    """Whether to skip a step, and why, as new tensors on the device.

    Attributes:
        flag: float32, shape (1,): 1 to skip the step for any reason, else 0.
        cause: ``widest``, 0-d: the cause if it is not overflow, as in :class:`CheckSettings`;
            else 0.
        squares: ``widest``, shape (1,): the sum of squares of all gradients; ``None`` if the caller
            passed no squares.
    """

    flag: Tensor
    cause: Tensor
    squares: Tensor | None


@jit
def within_limit(value, limit):
    """Whether ``value`` is not above ``limit``, or there is no limit. NaN is above every limit."""
    return (value <= limit) | (limit < 0)


@jit
def within_deviations(value, deviations, warmup, count, mean, squares):
    """Whether ``value`` is less than ``deviations`` standard deviations above the mean.

    False for NaN. True for every value during the warmup.
    """
    degrees = count - 1.0
    deviation = tl.sqrt(squares / tl.where(degrees > 1.0, degrees, 1.0))
    return (value - mean <= deviations * deviation) | (count < warmup)


@jit
def statistics_with(value, count, mean, squares):
    """Count, mean and sum of squared differences with one more ``value``, by Welford's method."""
    delta = value - mean
    new_mean = mean + delta / (count + 1.0)
    return count + 1.0, new_mean, squares + delta * (value - new_mean)


@jit
def is_finite(value):
    """Whether ``value`` is neither infinite nor NaN."""
    return value - value == 0.0


def find_cause(
    flags: Tensor, squares: Tensor | None, found_inf: Tensor | None, checks: SkipChecks
) -> FoundCause:
    """Decide whether to skip a step, and update the statistics if it is applied.

    By torch operations; does not synchronize.

    Args:
        flags: float32, shape (parts,): more than 0 where a part overflows.
        squares: ``widest``, shape (parts,): sums of squares of the gradients; ``None`` if no check
            is of the norm.
        found_inf: one element, more than 0 for an overflow found elsewhere; ``None`` for none.
        checks: the checks, in addition to overflow.
    """
    settings, values, statistics = checks
    causes, limits, deviations, warmups, of_norm = settings.unbind(1)
    overflow = flags.amax() > 0 if flags.numel() else flags.new_zeros(()) > 0
    if found_inf is not None:
        overflow = overflow | (found_inf.reshape(()) > 0)
    if squares is not None:
        squares = squares.sum(0, keepdim=True)
        norm = squares.sqrt()
        values = norm if values is None else torch.where(of_norm > 0, norm, values)
    assert values is not None
    usual = _within_limit(values, limits)
    before = () if statistics is None else statistics.unbind(1)
    if before:
        usual = usual & _within_deviations(values, deviations, warmups, *before)
    cause, *others = torch.where(usual | overflow, 0.0, causes).unbind()
    for other in others:
        cause = torch.where(cause > 0, cause, other)
    skips = overflow | (cause > 0)
    if statistics is not None:
        new = torch.stack(_statistics_with(values, *before), 1)
        keeps = (skips | ~_is_finite(values)).unsqueeze(1)
        statistics.copy_(torch.where(keeps, statistics, new))
    return FoundCause(skips.to(torch.float32).reshape(1), cause, squares)


_within_limit, _within_deviations, _statistics_with, _is_finite = map(
    torch_language.bind, (within_limit, within_deviations, statistics_with, is_finite)
)
