"""Watch: one launch that adds a step to the statistics of an ``ampopt.Watch``."""

from ampopt_kernels.language import jit, kernel, tl

__all__ = ["watch_kernel"]


@jit
def _or_not_given(number, HAS: tl.constexpr):
    """The element at ``number``, or ``NOT_GIVEN`` for a step that has no such number."""
    result = tl.full((), -float("inf"), tl.float64)
    if HAS:
        result = tl.load(number).to(tl.float64)
    return result


@kernel
def watch_kernel(
    flags,
    measures,
    parts,
    n_parts,
    numbers,
    places,
    number,
    at,
    skip,
    cause,
    scale,
    norm,
    loss,
    HAS_SKIP: tl.constexpr,
    HAS_CAUSE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_LOSS: tl.constexpr,
    STEP: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the measures of one parameter to the statistics or, in the last program, the step itself.

    One launch of ``n_parts + 1`` programs: program ``i < n_parts`` reduces the flags and measures
    of one parameter over its blocks, and adds them to the row of that parameter. Writes ``numbers``
    only.

    Args:
        flags: float32, shape (blocks,): the overflow flags that ``detect_kernel`` wrote.
        measures: float64, shape (blocks, 4): see ``GradientReport.measures``.
        parts: int64, shape (n_parts, 3): for each parameter its first block, its number of blocks,
            and its row in the statistics.
        n_parts: the number of parameters.
        numbers: float64, the statistics, updated in place; see ``ampopt_kernels.watch_statistics``.
        places: the number of parameters that the statistics have rows for.
        number: the number of the step, counted from 1.
        at: the row of the step in the ring of steps.
        skip: one element, more than 0 if the step was skipped; read if ``HAS_SKIP``.
        cause: one element, the reason of a skip other than overflow; read if ``HAS_CAUSE``.
        scale: one element, the loss scale; read if ``HAS_SCALE``.
        norm: one element, the gradient norm; read if ``HAS_NORM``.
        loss: one element, the loss; read if ``HAS_LOSS``.
        HAS_SKIP: whether the step may have been skipped.
        HAS_CAUSE: whether a step may be skipped for reasons other than overflow.
        HAS_SCALE: whether the gradients were multiplied by a loss scale.
        HAS_NORM: whether the norm was computed.
        HAS_LOSS: whether the loss is known.
        STEP: whether these statistics record the step itself, besides parameters.
        COUNTS: numbers of a parameter before the ring of its latest overflows.
        WIDTH: all numbers of a parameter.
        RING: numbers of a step in the ring of steps.
        BLOCK: blocks that a program reads at a time.
    """
    program = tl.program_id(0)
    skipped = tl.full((), 0.0, tl.float64)
    if HAS_SKIP:
        skipped = tl.where(tl.load(skip) > 0, 1.0, 0.0).to(tl.float64)
    lanes = tl.arange(0, BLOCK)
    if program < n_parts:
        first = tl.load(parts + 3 * program)
        count = tl.load(parts + 3 * program + 1)
        row = numbers + WIDTH * tl.load(parts + 3 * program + 2)
        flag = tl.zeros((BLOCK,), tl.float32)
        largest = tl.zeros((BLOCK,), tl.float64)
        nonzeros = tl.zeros((BLOCK,), tl.float64)
        flushed = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, count, BLOCK):
            live = start + lanes < count
            block = first + start + lanes
            flag = tl.maximum(flag, tl.load(flags + block, mask=live, other=0.0))
            largest = tl.maximum(largest, tl.load(measures + 4 * block, mask=live, other=0.0))
            nonzeros += tl.load(measures + 4 * block + 1, mask=live, other=0.0)
            flushed += tl.load(measures + 4 * block + 2, mask=live, other=0.0)
        overflowed = tl.max(flag, 0) > 0
        tl.store(row, tl.maximum(tl.load(row), tl.max(largest, 0)))
        overflows = tl.load(row + 1)
        oldest = row + COUNTS + overflows.to(tl.int64) % (WIDTH - COUNTS)
        tl.store(oldest, tl.where(overflowed, number.to(tl.float64), tl.load(oldest)))
        tl.store(row + 1, overflows + tl.where(overflowed, 1.0, 0.0))
        tl.store(row + 2, tl.load(row + 2) + tl.sum(nonzeros, 0) * (1.0 - skipped))
        tl.store(row + 3, tl.load(row + 3) + tl.sum(flushed, 0) * (1.0 - skipped))
    elif STEP:
        squares = tl.zeros((BLOCK,), tl.float64)
        flag = tl.zeros((BLOCK,), tl.float32)
        for part in range(0, n_parts):
            first = tl.load(parts + 3 * part)
            count = tl.load(parts + 3 * part + 1)
            for start in range(0, count, BLOCK):
                live = start + lanes < count
                block = first + start + lanes
                flag = tl.maximum(flag, tl.load(flags + block, mask=live, other=0.0))
                squares += tl.load(measures + 4 * block + 3, mask=live, other=0.0)
        square = tl.where(tl.max(flag, 0) > 0, float("inf"), tl.sum(squares, 0))
        square = tl.where(n_parts > 0, square, -float("inf"))
        other = tl.full((), 0.0, tl.float64)
        if HAS_CAUSE:
            other = tl.load(cause).to(tl.float64)
        why = skipped * tl.where(other > 0, other, 1.0)
        totals = numbers + WIDTH * places
        tl.store(totals, (tl.load(totals) + 1.0) * skipped)
        for i in tl.static_range(1, 4):
            tl.store(totals + i, tl.load(totals + i) + tl.where(why == i, 1.0, 0.0))
        entry = totals + 4 + RING * at
        tl.store(entry, why)
        tl.store(entry + 1, _or_not_given(scale, HAS_SCALE))
        tl.store(entry + 2, _or_not_given(norm, HAS_NORM))
        tl.store(entry + 3, square)
        tl.store(entry + 4, _or_not_given(loss, HAS_LOSS))
