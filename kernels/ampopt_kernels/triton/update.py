"""Update: one read, one rule, one write for every parameter and its states, or nothing."""

from ampopt_kernels.language import jit, kernel, rounded, tl
from ampopt_kernels.stochastic import rounded_stochastically
from ampopt_kernels.triton.marginals import factors_of, load_factors
from ampopt_kernels.triton.places import jumps_of, places_of

__all__ = ["update_kernel"]


@kernel
def update_kernel(
    table,
    blocks,
    first,
    factors,
    h_table,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COPIED: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    DRAWS: tl.constexpr,
    JUMPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    N_H: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply ``RULE`` to one chunk of one parameter; return at once if the step is skipped.

    Args:
        table: int64, one row of ``COLUMNS`` a parameter; see ``multi_tensor``.
        blocks: int32, (row, chunk) for each program of every launch.
        first: the first program that is this launch's.
        factors: float64, (3,): skip, reciprocal of the scale, clip coefficient.
        h_table: float64, (rows, N_H), of control.
        RULE: the ``update`` of the rule.
        FLAGS: tuple of booleans for the rule.
        DTYPES: of gradient, parameter, each state, and the copy if there is one.
        COPIED: whether the last is a low-precision copy of the parameter, only written.
        BY_CHANCE: whether the parameter, bfloat16, is rounded stochastically.
        DRAWS: whether the rule takes ``at``, for random numbers.
        JUMPS: how many there are in the places of the elements; see ``places``.
        COMPUTE: the arithmetic dtype.
        ALIGNS: powers of two, bytes, that divide the addresses of each.
        N_H: scalars that the rule takes.
        OF_ROWS: of each factor of rows or columns, whether it is of rows; see ``marginals``.
        EVEN: a number that divides the length of every row, of matrices that have factors.
        COLUMNS: width of the table.
        CHUNK: elements for each program, a multiple of ``BLOCK``. Were it an argument, float64
            rules would spill registers.
        BLOCK: elements at a time.
    """
    if tl.load(factors) > 0:
        return
    program = first + tl.program_id(0)
    index = tl.load(blocks + 2 * program).to(tl.int64)
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * CHUNK
    row = table + index * COLUMNS
    numel = tl.load(row + COLUMNS - 1)
    inverse = tl.load(factors + 1).to(COMPUTE)
    clip = tl.load(factors + 2).to(COMPUTE)
    h = ()
    for i in tl.static_range(N_H):
        h = h + (tl.load(h_table + index * N_H + i).to(COMPUTE),)
    # Gradient, parameter and states. An address from a table carries no alignment of its own.
    streams = ()
    for i in tl.static_range(len(DTYPES)):
        stream = tl.load(row + i).to(tl.pointer_type(DTYPES[i])) + start
        # The call must be written in place: a name would hold a number of the kernel's.
        streams = streams + (tl.multiple_of(stream, tl.constexpr(ALIGNS[i])),)  # pyright: ignore

    key = tl.full((), 0, tl.int64)
    position = tl.load(row + COLUMNS - 5) + start
    jumps = jumps_of(row + COLUMNS - 6, start, JUMPS, CHUNK)
    factors_at, place = factors_of(row, start, OF_ROWS, len(DTYPES), COMPUTE, EVEN)
    if BY_CHANCE:
        key = tl.load(tl.load(row + COLUMNS - 6).to(tl.pointer_type(tl.int64)))

    # From here on 32 bits count, which spares registers: offsets are within the chunk.
    end = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = end // BLOCK * BLOCK
    # Whole blocks need no mask, and only an unmasked access to an aligned address is a wide one.
    for offset in range(0, whole, BLOCK):
        _update_block(
            streams,
            offset,
            end,
            inverse,
            clip,
            h,
            key,
            position,
            jumps,
            factors_at,
            place,
            RULE,
            FLAGS,
            DTYPES,
            COPIED,
            BY_CHANCE,
            DRAWS,
            COMPUTE,
            OF_ROWS,
            EVEN,
            False,
            BLOCK,
        )
    if whole < end:
        _update_block(
            streams, whole, end, inverse, clip, h, key, position, jumps, factors_at, place,
            RULE, FLAGS, DTYPES, COPIED, BY_CHANCE, DRAWS, COMPUTE, OF_ROWS, EVEN, True,
            BLOCK,
        )  # fmt: skip


@jit
def _update_block(
    streams,
    offset,
    end,
    inverse,
    clip,
    h,
    key,
    position,
    jumps,
    factors,
    place,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COPIED: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    DRAWS: tl.constexpr,
    COMPUTE: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = offset + tl.arange(0, BLOCK)
    live = at < end
    values = ()
    for i in tl.static_range(len(DTYPES) - COPIED):
        if MASKED:
            x = tl.load(streams[i] + at, mask=live, other=0)
        else:
            x = tl.load(streams[i] + at)
        values = values + (x.to(COMPUTE),)
    # Two products, so that clipping rounds as it does on gradients that were unscaled before.
    grad = values[0] * inverse * clip  # pyright: ignore[reportGeneralTypeIssues]
    state = values[2:] + load_factors(factors, place, at, live, OF_ROWS, EVEN, MASKED)
    places = places_of(position, jumps, at)
    if DRAWS:
        param, state = RULE(values[1], grad, state, h, FLAGS, (places, values[1]))  # pyright: ignore
    else:
        param, state = RULE(values[1], grad, state, h, FLAGS)  # pyright: ignore
    new = (param,) + state
    if COPIED:
        new = new + (param,)
    for i in tl.static_range(len(new)):
        value = _rounded(new[i], places, key, DTYPES[i + 1], BY_CHANCE and i == 0)
        if MASKED:
            tl.store(streams[i + 1] + at, value, mask=live)
        else:
            tl.store(streams[i + 1] + at, value)


@jit
def _rounded(x, position, key, DTYPE: tl.constexpr, BY_CHANCE: tl.constexpr):
    if BY_CHANCE:
        return rounded_stochastically(x, position, key)
    else:
        return rounded(x, DTYPE)
