"""What elements read of their rows and columns, in the kernels that run a rule."""

from ampopt_kernels.language import jit, tl

__all__ = ["factors_of", "load_factors"]


@jit
def factors_of(
    row, start, OF_ROWS: tl.constexpr, COLUMN: tl.constexpr, COMPUTE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Where the factors for a chunk are, and where in its matrix the chunk begins.

    Args:
        row: of the table of addresses.
        start: the first element of the chunk.
        OF_ROWS: of each factor, whether it is of rows; empty for a rule without any.
        COLUMN: of the table, the first with an address of one. Behind them are m and n.
        COMPUTE: the dtype of factors.
        EVEN: a number that divides n.

    Returns:
        Pointers to those of the row, or matrix, in which the chunk begins; and, in 32 bits, which
        suffice within a chunk, the row in its matrix, the column, m and n.
    """
    pointers = ()
    place = ()
    if len(OF_ROWS) > 0:
        m = tl.load(row + COLUMN + len(OF_ROWS))
        n = tl.multiple_of(tl.load(row + COLUMN + len(OF_ROWS) + 1), EVEN)
        first = start // n
        matrix = first // m
        for i in tl.static_range(len(OF_ROWS)):
            pointer = tl.load(row + COLUMN + i).to(tl.pointer_type(COMPUTE))
            if OF_ROWS[i]:
                pointers = pointers + (pointer + first,)
            else:
                pointers = pointers + (tl.multiple_of(pointer + matrix * n, EVEN),)
        place = (
            (first - matrix * m).to(tl.int32),
            (start - first * n).to(tl.int32),
            m.to(tl.int32),
            n.to(tl.int32),
        )
    return pointers, place


@jit
def load_factors(
    pointers, place, at, live, OF_ROWS: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr
):
    """A tuple of blocks, of the elements ``at`` these places in the chunk, as far as ``live``."""
    blocks = ()
    if len(OF_ROWS) > 0:
        row0, column0, m, n = place
        rows = (column0 + at) // n
        columns = (row0 + rows) // m * n + (column0 + at) - rows * n
        # So many neighbours are in one row, since a chunk begins with a multiple of it.
        rows = tl.max_constancy(rows, EVEN)
        columns = tl.max_contiguous(tl.multiple_of(columns, EVEN), EVEN)
        for i in tl.static_range(len(OF_ROWS)):
            if OF_ROWS[i]:
                where = pointers[i] + rows
            else:
                where = pointers[i] + columns
            if MASKED:
                blocks = blocks + (tl.load(where, mask=live, other=0.0),)
            else:
                blocks = blocks + (tl.load(where),)
    return blocks
