"""Update: one read, one rule, one write for every parameter and its states, or nothing."""

from ampopt_kernels.language import jit, tl

__all__ = ["update_kernel"]


@jit
def update_kernel(
    table,
    blocks,
    factors,
    h_table,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    N_H: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply ``RULE`` to one chunk of one parameter; return at once if the step is skipped.

    Args:
        table: int64, one row of ``COLUMNS`` a parameter; see ``multi_tensor``.
        blocks: int32, (row, chunk) for each program.
        factors: float64, (3,): skip, reciprocal of the scale, clip coefficient.
        h_table: float64, (rows, N_H), of control.
        RULE: the ``update`` of the rule.
        FLAGS: tuple of booleans for the rule.
        DTYPES: of gradient, parameter and each state.
        COMPUTE: the arithmetic dtype.
        ALIGN: a power of two that divides every address.
        N_H: scalars that the rule takes.
        COLUMNS: width of the table.
        CHUNK: elements for each program.
        BLOCK: elements at a time; divides ``CHUNK``.
    """
    if tl.load(factors) > 0:
        return
    program = tl.program_id(0)
    index = tl.load(blocks + 2 * program).to(tl.int64)
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * CHUNK
    row = table + index * COLUMNS
    numel = tl.load(row + COLUMNS - 1)
    inverse = tl.load(factors + 1).to(COMPUTE)
    clip = tl.load(factors + 2).to(COMPUTE)
    h = ()
    for i in tl.static_range(N_H):
        h = h + (tl.load(h_table + index * N_H + i).to(COMPUTE),)

    end = tl.minimum(start + CHUNK, numel)
    whole = start + (end - start) // BLOCK * BLOCK
    # Whole blocks need no mask, and only an unmasked access to an aligned address is a wide one.
    for offset in range(start, whole, BLOCK):
        _update_block(
            row, offset, end, inverse, clip, h, RULE, FLAGS, DTYPES, COMPUTE, ALIGN, False, BLOCK
        )
    if whole < end:
        _update_block(
            row, whole, end, inverse, clip, h, RULE, FLAGS, DTYPES, COMPUTE, ALIGN, True, BLOCK
        )


@jit
def _update_block(
    row,
    offset,
    end,
    inverse,
    clip,
    h,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = offset + tl.arange(0, BLOCK)
    live = at < end
    values = ()
    for i in tl.static_range(len(DTYPES)):
        address = tl.multiple_of(tl.load(row + i).to(tl.pointer_type(DTYPES[i])), ALIGN)
        if MASKED:
            x = tl.load(address + at, mask=live, other=0)
        else:
            x = tl.load(address + at)
        values = values + (x.to(COMPUTE),)
    # Two products, so that clipping rounds as it does on gradients that were unscaled before.
    grad = values[0] * inverse * clip
    param, state = RULE(values[1], grad, values[2:], h, FLAGS)
    new = (param,) + state
    for i in tl.static_range(len(new)):
        address = tl.multiple_of(tl.load(row + i + 1).to(tl.pointer_type(DTYPES[i + 1])), ALIGN)
        if MASKED:
            tl.store(address + at, new[i].to(DTYPES[i + 1]), mask=live)
        else:
            tl.store(address + at, new[i].to(DTYPES[i + 1]))
