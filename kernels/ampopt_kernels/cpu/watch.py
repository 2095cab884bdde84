"""Statistics for ``Watch`` on the CPU: C++ measures gradients, and records steps."""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ampopt_kernels.cpu import numbers
from ampopt_kernels.cpu.dtypes import DTYPES
from ampopt_kernels.cpu.sums import sum_of_squares
from ampopt_kernels.gradient_reports import FLUSHED, GradientReport, measured
from ampopt_kernels.watch_statistics import NOT_GIVEN, ChunkRange, RecordedStep, WatchStatistics
from ampopt_kernels.work import Work

__all__ = ["found_in", "note"]


def note(
    loops: ctypes.CDLL,
    statistics: WatchStatistics,
    attempt: RecordedStep,
    report: GradientReport | None,
    parts: Sequence[ChunkRange],
    *,
    notes_step: bool,
) -> None:
    """Record a step as :func:`ampopt_kernels.watch_statistics.note` does, for CPU tensors.

    Args:
        loops: the loops of ``numbers``.
        statistics: the statistics, changed in place.
        attempt: the step, applied or skipped.
        report: the flags and measures of its gradients; ``None`` if they were not tested.
        parts: which entries of ``report`` belong to which parameter of the statistics.
        notes_step: whether to record the step itself too, not only its gradients.
    """
    measures = flags = None
    if report is None or report.measures is None:
        parts = ()
    else:
        measures = report.measures
        flags = None if report.surely_finite else report.flags_on(torch.device("cpu"))
    cause = 0.0
    if attempt.skip is not None and attempt.skip.item() > 0:
        cause = max(_number(attempt.cause, 0.0), 1.0)
    numbers = (_number(x, NOT_GIVEN) for x in (attempt.scale, attempt.norm, attempt.loss))
    where = array("q", chain.from_iterable(parts))
    entry = array("d", (attempt.number, cause, *numbers))
    loops.note(
        None if measures is None else measures.data_ptr(),
        None if flags is None else flags.data_ptr(),
        where.buffer_info()[0],
        len(parts),
        entry.buffer_info()[0],
        statistics.numbers.data_ptr(),
        statistics.numbers.numel(),
        statistics.places,
        notes_step,
    )


def _number(tensor: Tensor | None, otherwise: float) -> float:
    """The number in ``tensor``, or ``otherwise`` if there is none."""
    return otherwise if tensor is None else tensor.item()


def found_in(work: Work, inverse: float) -> tuple[GradientReport, dict[int, float]]:
    """Measure the gradients of ``work``.

    Args:
        work: the rows and their gradients, which are only read.
        inverse: the reciprocal of the scale.

    Returns:
        The flags and measures of the unscaled gradients; and for each row with elements, by its
        index, the sum of squares of the gradient before unscaling.
    """
    rows = [index for index, _, grad in work.present_rows() if grad.numel()]
    if not rows:
        return GradientReport([], [], work.owners), {}
    grads, dtypes = [work.grads[row] for row in rows], [work.compute_dtypes[row] for row in rows]
    if numbers.loaded is not None:
        kinds = zip((grad.dtype for grad in grads), dtypes, strict=True)
        bounds = [_bounds(*kind, inverse) for kind in kinds]
        flags, measures = numbers.measures(grads, bounds, inverse)
    else:
        unscaled = [g.to(dtype) * inverse for g, dtype in zip(grads, dtypes, strict=True)]
        flags = [not bool(u.isfinite().all()) for u in unscaled]
        measures = torch.stack([measured(u, in_norm=False) for u in unscaled])
        sums = list(map(sum_of_squares, grads))
        measures[:, 3] = torch.tensor(sums, dtype=torch.float64, device="cpu")
    squares = measures[:, 3]
    before = dict(zip(rows, squares.tolist(), strict=True))
    squares.mul_(inverse * inverse)
    in_norm = [work.rows[row].in_norm for row in rows]
    if not all(in_norm):
        squares.mul_(torch.tensor(in_norm, device="cpu"))
    return GradientReport(flags, rows, work.owners, measures), before


@functools.lru_cache(maxsize=64)  # a scale is used for many steps
def _bounds(dtype: torch.dtype, compute_dtype: torch.dtype, inverse: float) -> tuple[int, ...]:
    """Return the bounds that :func:`numbers.measures` takes for a gradient.

    They are found by bisection over the bits of magnitudes: the smallest magnitudes that, once
    unscaled, are not 0, above :data:`FLUSHED`, and not finite.

    Args:
        dtype: the dtype of the gradient.
        compute_dtype: the arithmetic dtype, in which it is unscaled.
        inverse: the reciprocal of the scale.

    Returns:
        The bits of the three magnitudes, and whether ``compute_dtype`` is float64.
    """
    # The lower ends of the three intervals. Only an invalid scale makes 0 times ``inverse`` NaN.
    low = torch.tensor([1, 1, 0], dtype=torch.int64, device="cpu")
    high = torch.full_like(low, DTYPES[dtype].infinity)  # the upper ends
    flushed = torch.tensor(
        [0.0, FLUSHED, torch.finfo(compute_dtype).max], dtype=compute_dtype, device="cpu"
    )
    while (low < high).any():
        middle = low + (high - low) // 2  # low + high may overflow int64
        unscaled = (middle.to(DTYPES[dtype].integer).view(dtype).to(compute_dtype) * inverse).abs()
        below = unscaled <= flushed
        low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
    return *low.tolist(), compute_dtype == torch.float64
