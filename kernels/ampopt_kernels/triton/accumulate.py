"""Accumulate: every gradient is unscaled, judged and added to its sum, in one pass."""

from ampopt_kernels.language import jit, kernel, tl

__all__ = ["accumulate_kernel"]


@kernel
def accumulate_kernel(
    table,
    blocks,
    first,
    chunk,
    scale,
    reject,
    flags,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_REJECT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one chunk of one gradient, divided by the scale, to its sum, in the arithmetic dtype.

    Args:
        table: int64, one row of ``COLUMNS`` a parameter, the sum in the parameter's place; see
            ``table``.
        blocks: int32, (row, chunk) for each program of every launch.
        first: the first program that is this launch's.
        chunk: elements for each program, a multiple of ``BLOCK``.
        scale: one element, the factor the gradients carry; read if ``HAS_SCALE``.
        reject: one element, more than 0 to leave the sums alone; read if ``HAS_REJECT``.
        flags: float32, one for each of ``blocks``: 1 if a value is not finite, of the unscaled
            gradient or, because of it, of the sum; else 0.
        DTYPES: of gradient and sum.
        COMPUTE: the arithmetic dtype.
        ALIGNS: powers of two, bytes, that divide the addresses of both.
        FRESH: whether nothing is in the sums yet, which then are written only.
        HAS_SCALE: whether the gradients are scaled.
        HAS_REJECT: whether gradients may be left out.
        COLUMNS: width of the table.
        BLOCK: elements at a time.
    """
    program = first + tl.program_id(0)
    row = table + tl.load(blocks + 2 * program).to(tl.int64) * COLUMNS
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * chunk
    numel = tl.load(row + COLUMNS - 1)
    grad = tl.load(row).to(tl.pointer_type(DTYPES[0])) + start
    grad = tl.multiple_of(grad, tl.constexpr(ALIGNS[0]))  # pyright: ignore
    total = tl.load(row + 1).to(tl.pointer_type(DTYPES[1])) + start
    total = tl.multiple_of(total, tl.constexpr(ALIGNS[1]))  # pyright: ignore
    inverse = tl.full((), 1.0, COMPUTE)
    if HAS_SCALE:
        # In float64, so that float32 gets the correctly rounded reciprocal.
        inverse = (1.0 / tl.load(scale).to(tl.float64)).to(COMPUTE)
    rejected = False
    if HAS_REJECT:
        rejected = tl.load(reject) > 0

    # From here on 32 bits count: offsets are within the chunk.
    end = tl.minimum(numel - start, chunk).to(tl.int32)
    whole = end // BLOCK * BLOCK
    bad = tl.zeros((BLOCK,), tl.int32)
    # Whole blocks need no mask, and only an unmasked access to an aligned address is a wide one.
    for offset in range(0, whole, BLOCK):
        bad = bad | _add_block(
            grad, total, offset, end, inverse, rejected, COMPUTE, FRESH, HAS_REJECT, False, BLOCK
        )
    if whole < end:
        bad = bad | _add_block(
            grad, total, whole, end, inverse, rejected, COMPUTE, FRESH, HAS_REJECT, True, BLOCK
        )
    tl.store(flags + program, tl.max(bad, 0).to(tl.float32))


@jit
def _add_block(
    grad,
    total,
    offset,
    end,
    inverse,
    rejected,
    COMPUTE: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_REJECT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = offset + tl.arange(0, BLOCK)
    live = at < end
    if MASKED:
        x = tl.load(grad + at, mask=live, other=0).to(COMPUTE) * inverse
    else:
        x = tl.load(grad + at).to(COMPUTE) * inverse
    if FRESH:
        old = tl.zeros((BLOCK,), COMPUTE)
        new = x
    else:
        old = tl.load(total + at, mask=live, other=0) if MASKED else tl.load(total + at)
        new = old + x
    if HAS_REJECT:
        new = tl.where(rejected, old, new)
    if MASKED:
        tl.store(total + at, new, mask=live)
    else:
        tl.store(total + at, new)
    # What was not finite before says nothing of this gradient.
    bad = _not_finite(x) | (_not_finite(new) & (1 - _not_finite(old)))
    return tl.where(live, bad, 0)


@jit
def _not_finite(x):
    return ((tl.abs(x) < float("inf")) == 0).to(tl.int32)
