"""Skip checks: one program that checks the gradient norm and the loss of a step."""

from ampopt_kernels.language import kernel, tl
from ampopt_kernels.skip_checks import (
    is_finite,
    statistics_with,
    within_deviations,
    within_limit,
)

__all__ = ["skip_checks_kernel"]


@kernel
def skip_checks_kernel(
    flags,
    squares,
    n_parts,
    external,
    settings,
    values,
    statistics,
    n_checks,
    flag_out,
    cause_out,
    squares_out,
    HAS_EXTERNAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Find the reason to skip a step, and update the statistics if the step is not skipped.

    ``cause`` is that of the first check whose value is over its limit, or too many standard
    deviations from the mean; 0 if there is none, or if a gradient overflowed. All arithmetic is
    float64. One launch of one program. Pointers that a launch does not need may be any address.

    Args:
        flags: float32, shape (n_parts,): the overflow flags of the chunks.
        squares: float64, shape (n_parts,): the sums of squares of the chunks; read if ``HAS_NORM``.
        n_parts: the number of chunks.
        external: one element, an overflow flag of the caller, more than 0 for overflow; read if
            ``HAS_EXTERNAL``.
        settings: float64, shape (n_checks, 5); see ``skip_checks.CheckSettings``.
        values: float64, shape (n_checks,): the checked values other than the norm; read if
            ``HAS_VALUES``.
        statistics: float64, shape (n_checks, 3): count, mean and sum of squared deviations of each
            check, updated in place; read and written if ``HAS_STATISTICS``.
        n_checks: the number of checks.
        flag_out: float32, one element, written: 1 to skip the step, else 0.
        cause_out: float64, one element, written: the cause of the skip, or 0.
        squares_out: float64, one element, written if ``HAS_NORM``: the sum of ``squares``.
        HAS_EXTERNAL: whether ``external`` is passed.
        HAS_NORM: whether a check needs the gradient norm.
        HAS_VALUES: whether a check is of another value than the norm.
        HAS_STATISTICS: whether a check is by standard deviations.
        PARTS: chunks that are read at a time.
    """
    worst = tl.zeros((PARTS,), tl.float32)
    total = tl.zeros((PARTS,), tl.float64)
    for start in range(0, n_parts, PARTS):
        at = start + tl.arange(0, PARTS)
        worst = tl.maximum(worst, tl.load(flags + at, mask=at < n_parts, other=0.0))
        if HAS_NORM:
            total += tl.load(squares + at, mask=at < n_parts, other=0.0)
    overflow = tl.max(worst, 0) > 0
    if HAS_EXTERNAL:
        overflow = overflow | (tl.load(external) > 0)
    norm = tl.full((), 0.0, tl.float64)
    if HAS_NORM:
        sum_of_squares = tl.sum(total, 0)
        norm = tl.sqrt(sum_of_squares)
        tl.store(squares_out, sum_of_squares)
    cause = tl.full((), 0.0, tl.float64)
    for i in range(0, n_checks):
        row = settings + 5 * i
        value = norm
        if HAS_VALUES:
            value = tl.where(tl.load(row + 4) > 0, norm, tl.load(values + i))
        usual = within_limit(value, tl.load(row + 1))
        if HAS_STATISTICS:
            entry = statistics + 3 * i
            count, mean, squared = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            usual = usual & within_deviations(
                value, tl.load(row + 2), tl.load(row + 3), count, mean, squared
            )
        cause = tl.where(usual | (cause > 0), cause, tl.load(row))
    cause = tl.where(overflow, 0.0, cause)
    skips = overflow | (cause > 0)
    tl.store(flag_out, tl.where(skips, 1.0, 0.0))
    tl.store(cause_out, cause)
    if HAS_STATISTICS:
        for i in range(0, n_checks):
            value = norm
            if HAS_VALUES:
                value = tl.where(tl.load(settings + 5 * i + 4) > 0, norm, tl.load(values + i))
            entry = statistics + 3 * i
            count, mean, squared = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            new_count, new_mean, new_squared = statistics_with(value, count, mean, squared)
            keeps = skips | (is_finite(value) == 0)
            tl.store(entry, tl.where(keeps, count, new_count))
            tl.store(entry + 1, tl.where(keeps, mean, new_mean))
            tl.store(entry + 2, tl.where(keeps, squared, new_squared))
