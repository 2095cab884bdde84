"""Control: one program that decides the step and advances what it counts."""

from ampopt_kernels.language import jit, kernel, tl
from ampopt_kernels.policy import next_scale

__all__ = ["control_kernel", "with_sums"]


@kernel
def control_kernel(
    flags,
    squares,
    n_parts,
    external,
    scale,
    constants,
    counters,
    max_norm,
    found_out,
    factors,
    norm_out,
    scale_out,
    counters_out,
    table,
    hyper,
    sums,
    totals,
    h_out,
    n_rows,
    DECIDE: tl.constexpr,
    CHECK: tl.constexpr,
    HAS_EXTERNAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_POLICY: tl.constexpr,
    UNSCALED: tl.constexpr,
    NORM: tl.constexpr,
    DROP: tl.constexpr,
    ADVANCE: tl.constexpr,
    PREVIEW: tl.constexpr,
    BEFORE: tl.constexpr,
    SCALARS: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    N_HYPER: tl.constexpr,
    N_STATES: tl.constexpr,
    N_SCALARS: tl.constexpr,
    STORED: tl.constexpr,
    FLAG_SETS: tl.constexpr,
    N_TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decide from the parts that detect found, then advance every row's scalars.

    Args:
        flags: float32, (n_parts,), of detect; read if ``CHECK``.
        squares: float64, (n_parts,), of detect; read if ``NORM``.
        n_parts: how many parts.
        external: one element, more than 0 for overflow; read if ``HAS_EXTERNAL``.
        scale: one element; read if ``HAS_SCALE``.
        constants: float64, ``policy.PolicyConstants``; read if ``HAS_POLICY``.
        counters: int32, (2,); read if ``HAS_POLICY``.
        max_norm: float64, one element, the norm to clip to; read if ``NORM``.
        found_out: float32, one element, written.
        factors: float64, (3,): skip, reciprocal of the scale that the gradients still carry, clip
            coefficient; written if ``DECIDE``, else read.
        norm_out: one element, written if ``NORM``.
        scale_out: one element, written if ``HAS_POLICY``.
        counters_out: int32, (2,), written if ``HAS_POLICY``.
        table: int64, (n_rows, COLUMNS); see ``multi_tensor``.
        hyper: float64, (groups, N_HYPER).
        sums: float64, (n_rows, N_TERMS), of reduce; read if ``N_TERMS``.
        totals: float64, (N_TERMS,), likewise over all parameters.
        h_out: float64, (n_rows, width of h), written if ``ADVANCE``.
        n_rows: how many rows.
        DECIDE: decide; otherwise ``factors`` holds a decision made elsewhere.
        CHECK: judge ``flags`` and the scale.
        HAS_EXTERNAL: join ``external``.
        HAS_SCALE: the gradients are scaled.
        HAS_POLICY: the scale has a successor.
        UNSCALED: detect has unscaled the gradients.
        NORM: compute norm and clip coefficient.
        DROP: skip an overflowed step.
        ADVANCE: advance the rows.
        PREVIEW: write ``h_out`` alone, and leave the scalar states as they are.
        BEFORE: the ``before_reduce`` of the rule, which ``SCALARS`` goes on from if ``N_TERMS``.
        SCALARS: the ``scalars`` of the rule, or its ``before_reduce`` before there are sums.
        ARGUMENTS: how many ``SCALARS`` takes, of ``(s, h, flags, sums, totals)``.
        N_HYPER: hyperparameters in a group.
        N_STATES: state columns of the table.
        N_SCALARS: scalar-state columns of the table.
        STORED: dtype of each scalar state.
        FLAG_SETS: the flags that rows may have, by their number in the table, if ``SCALARS`` takes
            flags; else empty.
        N_TERMS: sums of a row that ``SCALARS`` takes.
        COLUMNS: width of the table.
        PARTS: parts at a time.
        ROWS: rows at a time.
    """
    if DECIDE:
        skip = _decide(
            flags, squares, n_parts, external, scale, constants, counters, max_norm,
            found_out, factors, norm_out, scale_out, counters_out,
            CHECK, HAS_EXTERNAL, HAS_SCALE, HAS_POLICY, UNSCALED, NORM, DROP, PARTS,
        )  # fmt: skip
    else:
        skip = tl.load(factors)
    if ADVANCE:
        for start in range(0, n_rows, ROWS):
            if ARGUMENTS == 2:
                _advance(
                    skip, start, table, hyper, sums, totals, h_out, n_rows, 0, PREVIEW, BEFORE,
                    SCALARS, ARGUMENTS, N_HYPER, N_STATES, N_SCALARS, STORED, FLAG_SETS, N_TERMS,
                    COLUMNS, ROWS,
                )  # fmt: skip
            for i in tl.static_range(len(FLAG_SETS)):
                _advance(
                    skip, start, table, hyper, sums, totals, h_out, n_rows, i, PREVIEW, BEFORE,
                    SCALARS, ARGUMENTS, N_HYPER, N_STATES, N_SCALARS, STORED, FLAG_SETS, N_TERMS,
                    COLUMNS, ROWS,
                )  # fmt: skip


@jit
def _decide(
    flags,
    squares,
    n_parts,
    external,
    scale,
    constants,
    counters,
    max_norm,
    found_out,
    factors,
    norm_out,
    scale_out,
    counters_out,
    CHECK: tl.constexpr,
    HAS_EXTERNAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_POLICY: tl.constexpr,
    UNSCALED: tl.constexpr,
    NORM: tl.constexpr,
    DROP: tl.constexpr,
    PARTS: tl.constexpr,
):
    worst = tl.zeros((PARTS,), tl.float32)
    total = tl.zeros((PARTS,), tl.float64)
    for start in range(0, n_parts, PARTS):
        at = start + tl.arange(0, PARTS)
        if CHECK:
            worst = tl.maximum(worst, tl.load(flags + at, mask=at < n_parts, other=0.0))
        if NORM:
            total += tl.load(squares + at, mask=at < n_parts, other=0.0)
    found = tl.max(worst, 0).to(tl.float64)
    if HAS_EXTERNAL:
        flag = tl.load(external).to(tl.float64)
        found = tl.where(flag > 0, flag, found)
    inverse = tl.full((), 1.0, tl.float64)
    if HAS_SCALE:
        value = tl.load(scale).to(tl.float64)
        inverse = 1.0 / value
        if CHECK:
            # g / inf is a finite 0: a scale that cannot be one is an overflow of its own.
            usable = (value > 0) & (value < float("inf"))
            found = tl.where(usable, found, 1.0)
    if UNSCALED:
        inverse = tl.full((), 1.0, tl.float64)
    coefficient = tl.full((), 1.0, tl.float64)
    if NORM:
        norm = tl.sqrt(tl.sum(total, 0))
        limit = tl.load(max_norm)
        coefficient = limit / (norm + 1e-6)
        # NaN stays, as in torch; an infinite limit only measures.
        coefficient = tl.where((coefficient > 1.0) | (limit == float("inf")), 1.0, coefficient)
        tl.store(norm_out, norm.to(norm_out.dtype.element_ty))
    if HAS_POLICY:
        constant = ()
        for i in tl.static_range(10):
            constant = constant + (tl.load(constants + i),)
        new_scale, growth, budget = next_scale(
            tl.load(scale).to(tl.float64),
            tl.load(counters).to(tl.float64),
            tl.load(counters + 1).to(tl.float64),
            found,
            constant,
        )
        tl.store(scale_out, new_scale.to(scale_out.dtype.element_ty))
        tl.store(counters_out, growth.to(tl.int32))
        tl.store(counters_out + 1, budget.to(tl.int32))
    skip = tl.full((), 0.0, tl.float64)
    if DROP:
        skip = found
    tl.store(found_out, found.to(tl.float32))
    tl.store(factors, skip)
    tl.store(factors + 1, inverse)
    tl.store(factors + 2, coefficient)
    return skip


@jit
def _advance(
    skip,
    start,
    table,
    hyper,
    sums,
    totals,
    h_out,
    n_rows,
    FLAG_SET: tl.constexpr,
    PREVIEW: tl.constexpr,
    BEFORE: tl.constexpr,
    SCALARS: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    N_HYPER: tl.constexpr,
    N_STATES: tl.constexpr,
    N_SCALARS: tl.constexpr,
    STORED: tl.constexpr,
    FLAG_SETS: tl.constexpr,
    N_TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    at = start + tl.arange(0, ROWS)
    live = at < n_rows
    row = table + at.to(tl.int64) * COLUMNS
    if len(FLAG_SETS) > 1:
        live = live & (tl.load(row + COLUMNS - 4, mask=live, other=-1) == FLAG_SET)
    group = tl.load(row + COLUMNS - 2, mask=live, other=0)
    # Idle lanes compute on ordinary numbers, so that they divide nothing by zero.
    h = ()
    for i in tl.static_range(N_HYPER):
        h = h + (tl.load(hyper + group * N_HYPER + i, mask=live, other=0.5),)
    s = ()
    for i in tl.static_range(N_SCALARS):
        address = tl.load(row + 2 + N_STATES + i, mask=live, other=0)
        stored = live & (address != 0)
        old = tl.load(address.to(tl.pointer_type(STORED[i])), mask=stored, other=0.0)
        s = s + (tl.where(live, old.to(tl.float64), 1.0),)
    each = ()
    over_all = ()
    for i in tl.static_range(N_TERMS):
        each = each + (tl.load(sums + at.to(tl.int64) * N_TERMS + i, mask=live, other=1.0),)
        over_all = over_all + (tl.load(totals + i),)
    # Triton 3.6 takes an element of a compile-time tuple for numbers of the kernel's.
    if ARGUMENTS == 2:
        new_s, new_h = SCALARS(s, h)
    elif ARGUMENTS == 3:
        new_s, new_h = SCALARS(s, h, tl.constexpr(FLAG_SETS[FLAG_SET]))  # pyright: ignore
    else:
        new_s, new_h = with_sums(
            s,
            h,
            tl.constexpr(FLAG_SETS[FLAG_SET]),  # pyright: ignore
            each,
            over_all,
            BEFORE,
            SCALARS,
            ARGUMENTS,
        )
    # Spread before it is compared: Triton's interpreter cannot spread a boolean.
    skips = skip + tl.zeros((ROWS,), tl.float64)
    for i in tl.static_range(0 if PREVIEW else N_SCALARS):
        address = tl.load(row + 2 + N_STATES + i, mask=live, other=0)
        stored = live & (address != 0) & (skips <= 0)
        tl.store(address.to(tl.pointer_type(STORED[i])), new_s[i].to(STORED[i]), mask=stored)
    for i in tl.static_range(len(new_h)):
        tl.store(h_out + at.to(tl.int64) * len(new_h) + i, new_h[i], mask=live)


@jit
def with_sums(
    s, h, FLAGS: tl.constexpr, sums, totals, BEFORE: tl.constexpr, SCALARS: tl.constexpr,
    ARGUMENTS: tl.constexpr,
):  # fmt: skip
    """What ``SCALARS`` of a rule makes of its sums, going on from ``BEFORE``."""
    s, h = BEFORE(s, h, FLAGS)
    if ARGUMENTS == 4:
        return SCALARS(s, h, FLAGS, sums)
    else:
        return SCALARS(s, h, FLAGS, sums, totals)
