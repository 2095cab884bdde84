"""Reduce: one read of what the terms of a rule are made of, summed up chunk by chunk, then by row.

The order is fixed, so that the sums are the same bits each time. Backends on the CPU have another
order: sums differ from theirs by a few units in the last place of float64. That shows in a scalar
state that is kept in float64, such as NovoGrad's ``exp_avg_sq``, and in float64 parameters; rounded
to float32 it seldom does.
"""

from ampopt_kernels.language import jit, kernel, tl
from ampopt_kernels.triton.marginals import factors_of, load_factors

__all__ = ["reduce_kernel", "sum_kernel"]


@kernel
def reduce_kernel(
    table,
    blocks,
    first,
    factors,
    h_table,
    sums,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    N_H: tl.constexpr,
    N_TERMS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    FACTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the terms of ``RULE`` over one chunk of one parameter; nothing if the step is skipped.

    Args:
        table: int64, one row of ``COLUMNS`` a parameter; see ``table``.
        blocks: int32, (row, chunk) for each program of every launch.
        first: the first program that is this launch's.
        factors: float64, (3,): skip, reciprocal of the scale, clip coefficient.
        h_table: float64, (rows, N_H), of control.
        sums: float64, (programs of every launch, N_TERMS), written.
        RULE: the ``reduce`` of the rule.
        FLAGS: tuple of booleans for the rule.
        DTYPES: of gradient, parameter and each state.
        COMPUTE: the arithmetic dtype.
        ALIGNS: powers of two, bytes, that divide the addresses of each.
        N_H: scalars that ``RULE`` takes.
        N_TERMS: terms that it returns.
        OF_ROWS: of each factor of rows or columns, whether it is of rows; see ``marginals``.
        EVEN: a number that divides the length of every row, of matrices that have factors.
        FACTORS: the first column of the table with one.
        COLUMNS: width of the table.
        CHUNK: elements for each program, a multiple of ``BLOCK``.
        BLOCK: elements at a time.
    """
    if tl.load(factors) > 0:
        return
    program = first + tl.program_id(0)
    index = tl.load(blocks + 2 * program).to(tl.int64)
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * CHUNK
    row = table + index * COLUMNS
    inverse = tl.load(factors + 1).to(COMPUTE)
    clip = tl.load(factors + 2).to(COMPUTE)
    h = ()
    for i in tl.static_range(N_H):
        h = h + (tl.load(h_table + index * N_H + i).to(COMPUTE),)
    streams = ()
    for i in tl.static_range(len(DTYPES)):
        stream = tl.load(row + i).to(tl.pointer_type(DTYPES[i])) + start
        streams = streams + (tl.multiple_of(stream, tl.constexpr(ALIGNS[i])),)  # pyright: ignore

    end = tl.minimum(tl.load(row + COLUMNS - 1) - start, CHUNK).to(tl.int32)
    whole = end // BLOCK * BLOCK
    factors_at, place = factors_of(row, start, OF_ROWS, FACTORS, COMPUTE, EVEN)
    totals = ()
    for _ in tl.static_range(N_TERMS):
        totals = totals + (tl.zeros((BLOCK // 4,), tl.float64),)
    # Whole blocks need no mask, and only an unmasked access to an aligned address is a wide one.
    for offset in range(0, whole, BLOCK):
        totals = _with_block(
            totals, streams, offset, end, inverse, clip, h, factors_at, place,
            RULE, FLAGS, DTYPES, COMPUTE, N_TERMS, OF_ROWS, EVEN, False, BLOCK,
        )  # fmt: skip
    if whole < end:
        totals = _with_block(
            totals, streams, whole, end, inverse, clip, h, factors_at, place,
            RULE, FLAGS, DTYPES, COMPUTE, N_TERMS, OF_ROWS, EVEN, True, BLOCK,
        )  # fmt: skip
    for i in tl.static_range(N_TERMS):
        tl.store(sums + program.to(tl.int64) * N_TERMS + i, tl.sum(totals[i], 0))


@jit
def _with_block(
    totals,
    streams,
    offset,
    end,
    inverse,
    clip,
    h,
    factors,
    place,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    N_TERMS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = offset + tl.arange(0, BLOCK)
    live = at < end
    values = ()
    for i in tl.static_range(len(DTYPES)):
        # What no term is made of is not read: the compiler drops a load that nobody uses.
        if MASKED:
            x = tl.load(streams[i] + at, mask=live, other=0)
        else:
            x = tl.load(streams[i] + at)
        values = values + (x.to(COMPUTE),)
    grad = values[0] * inverse * clip  # pyright: ignore[reportGeneralTypeIssues]
    state = values[2:] + load_factors(factors, place, at, live, OF_ROWS, EVEN, MASKED)
    terms = RULE(values[1], grad, state, h, FLAGS)  # pyright: ignore
    new = ()
    for i in tl.static_range(N_TERMS):
        wide = terms[i].to(tl.float64)
        if MASKED:
            wide = tl.where(live, wide, 0.0)
        # A thread reads four neighbours at least. Added up at once, they take one place of theirs.
        new = new + (totals[i] + tl.sum(tl.reshape(wide, (BLOCK // 4, 4)), 1),)
    return new


@kernel
def sum_kernel(parts, spans, sums, N_TERMS: tl.constexpr, PARTS: tl.constexpr):
    """Sum up the parts of one row.

    Args:
        parts: float64, (programs, N_TERMS), of reduce.
        spans: int32, (first part, one behind the last) for each row.
        sums: float64, (rows, N_TERMS), written.
        N_TERMS: terms of the rule.
        PARTS: parts at a time.
    """
    row = tl.program_id(0)
    begin, end = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    for i in tl.static_range(N_TERMS):
        total = tl.zeros((PARTS,), tl.float64)
        for start in range(begin, end, PARTS):
            at = start + tl.arange(0, PARTS)
            total += tl.load(parts + at.to(tl.int64) * N_TERMS + i, mask=at < end, other=0.0)
        tl.store(sums + row.to(tl.int64) * N_TERMS + i, tl.sum(total, 0))
