"""Detect: one read of every gradient, for non-finite values and the squared norm.

The norm is summed in float64 and in a fixed order, which is not that of backends on the CPU: theirs
may differ in the last place of float64, and so may clipped steps of float64 parameters.
"""

from ampopt_kernels.language import jit, kernel, rounded, tl

__all__ = ["detect_kernel"]


@kernel
def detect_kernel(
    table,
    blocks,
    first,
    chunk,
    scale,
    flags,
    squares,
    measures,
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WRITE: tl.constexpr,
    NORM: tl.constexpr,
    MEASURE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Judge one chunk of one gradient after unscaling, in the arithmetic dtype.

    Reads each element once; writes it back unscaled if ``WRITE``.

    Args:
        table: int64, one row of ``COLUMNS`` a parameter; see ``multi_tensor``.
        blocks: int32, (row, chunk) for each program of every launch.
        first: the first program that is this launch's.
        chunk: elements for each program, a multiple of ``AHEAD * BLOCK``.
        scale: one element, the factor the gradients carry; read if ``HAS_SCALE``.
        flags: float32, one for each of ``blocks``: 1 if it has a non-finite value, else 0.
        squares: float64, one for each of ``blocks``: sum of squares, 0 of a row that does not
            count; written if ``NORM``.
        measures: float64, four for each of ``blocks``; see ``found``. Written if ``MEASURE``.
        DTYPE: of the gradients.
        COMPUTE: the arithmetic dtype.
        ALIGN: a power of two that divides every address.
        HAS_SCALE: whether the gradients are scaled.
        WRITE: whether to store the unscaled gradients.
        NORM: whether to sum squares.
        MEASURE: whether to measure the gradients.
        COLUMNS: width of the table.
        BLOCK: elements at a time.
        AHEAD: blocks that are on their way from memory at once.
    """
    program = first + tl.program_id(0)
    row = table + tl.load(blocks + 2 * program).to(tl.int64) * COLUMNS
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * chunk
    numel = tl.load(row + COLUMNS - 1)
    grad = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)) + start, ALIGN)
    inverse = tl.full((), 1.0, COMPUTE)
    if HAS_SCALE:
        # In float64, so that float32 gets the correctly rounded reciprocal.
        inverse = (1.0 / tl.load(scale).to(tl.float64)).to(COMPUTE)

    # From here on 32 bits count: offsets are within the chunk.
    end = tl.minimum(numel - start, chunk).to(tl.int32)
    whole = end // (AHEAD * BLOCK) * (AHEAD * BLOCK)
    bad = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK // 4,), COMPUTE)
    used = tl.zeros((BLOCK // 4,), tl.int32)
    flushed = tl.zeros((BLOCK // 4,), tl.int32)
    # Whole blocks need no mask, and only an unmasked access to an aligned address is a wide one.
    lanes = tl.arange(0, BLOCK)
    for offset in range(0, whole, AHEAD * BLOCK):
        blocks_read = ()
        for i in tl.static_range(AHEAD):
            blocks_read = blocks_read + (tl.load(grad + offset + i * BLOCK + lanes),)
        for i in tl.static_range(AHEAD):
            x = blocks_read[i].to(COMPUTE) * inverse  # pyright: ignore
            bad = bad | _not_finite(x)
            if NORM or MEASURE:
                total = _plus_square(total, x)
            if MEASURE:
                largest, used, flushed = _measured(largest, used, flushed, x, BLOCK)
            if WRITE:
                tl.store(grad + offset + i * BLOCK + lanes, rounded(x, DTYPE))
    for offset in range(whole, end, BLOCK):
        at = offset + lanes
        live = at < end
        x = tl.load(grad + at, mask=live, other=0).to(COMPUTE) * inverse
        # A masked lane is 0; NaN if the reciprocal overflowed, but so then are others.
        bad = bad | _not_finite(x)
        if NORM or MEASURE:
            total = _plus_square(total, x)
        if MEASURE:
            largest, used, flushed = _measured(largest, used, flushed, x, BLOCK)
        if WRITE:
            tl.store(grad + at, rounded(x, DTYPE), mask=live)
    tl.store(flags + program, tl.max(bad, 0).to(tl.float32))
    if NORM or MEASURE:
        in_norm = tl.load(row + COLUMNS - 3)
        square = tl.where(in_norm != 0, tl.sum(total, 0), 0.0)
        if NORM:
            tl.store(squares + program, square)
        if MEASURE:
            tl.store(measures + 4 * program, tl.max(largest, 0).to(tl.float64))
            tl.store(measures + 4 * program + 1, tl.sum(used, 0).to(tl.float64))
            tl.store(measures + 4 * program + 2, tl.sum(flushed, 0).to(tl.float64))
            tl.store(measures + 4 * program + 3, square)


@jit
def _not_finite(x):
    return ((tl.abs(x) < float("inf")) == 0).to(tl.int32)


@jit
def _plus_square(total, x):
    # In one operation: float64 is what some accelerators have little of. The square of a float32 is
    # exact in it either way.
    wide = x.to(tl.float64)
    return tl.fma(wide, wide, total)


@jit
def _measured(largest, used, flushed, x, BLOCK: tl.constexpr):
    # A thread reads four neighbours at least. Joined at once, they take one place of each total.
    magnitude = tl.abs(tl.reshape(x, (BLOCK // 4, 4)))
    finite = tl.where(magnitude < float("inf"), magnitude, 0.0)
    largest = tl.maximum(largest, tl.max(finite, 1))
    used = used + tl.sum((finite > 0).to(tl.int32), 1)
    flushed = flushed + tl.sum(((finite > 0) & (finite <= 2.0**-25)).to(tl.int32), 1)
    return largest, used, flushed
