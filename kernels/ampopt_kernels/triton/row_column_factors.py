"""Load the factors of a matrix's rows and columns, in the kernels that run a rule."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.triton.chunks import load_if_live

__all__ = ["factors_of", "load_factors"]


@jit
def factors_of(
    row, start, OVER: tl.constexpr, COLUMN: tl.constexpr, COMPUTE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Pointers to the factors of one chunk, and the position of the chunk in its matrix.

    Args:
        row: pointer to the parameter's row of the table of addresses.
        start: the first element of the chunk.
        OVER: ``"rows"`` or ``"columns"`` for each factor: what it has one value for. Empty for a
            rule without factors.
        COLUMN: the column of the table with the address of the first factor. The last factor's
            column is followed by m and n, the rows and columns of a matrix.
        COMPUTE: the dtype of the factors.
        EVEN: a number that divides n.

    Returns:
        Two tuples: for each factor a pointer to its value for the row (or its first value for the
        matrix) in which the chunk begins; and, as int32, which suffices within a chunk, the chunk's
        row within its matrix, its column, m and n. Both are empty without factors.
    """
    pointers = ()
    place = ()
    if len(OVER) > 0:
        m = tl.load(row + COLUMN + len(OVER))
        n = tl.multiple_of(tl.load(row + COLUMN + len(OVER) + 1), EVEN)
        first = start // n
        matrix = first // m
        for i in tl.static_range(len(OVER)):
            pointer = tl.load(row + COLUMN + i).to(tl.pointer_type(COMPUTE))
            if OVER[i] == "rows":
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
def load_factors(pointers, place, at, live, OVER: tl.constexpr, EVEN: tl.constexpr):
    """The factors of some elements of a chunk: a tuple of blocks, one for each factor.

    Args:
        pointers: see :func:`factors_of`.
        place: the chunk's position in its matrix; see :func:`factors_of`.
        at: int32 block, the elements, counted from the beginning of the chunk.
        live: bool block, which elements exist; ``None`` if all do.
        OVER: see :func:`factors_of`.
        EVEN: see :func:`factors_of`.
    """
    blocks = ()
    if len(OVER) > 0:
        row0, column0, m, n = place
        rows = (column0 + at) // n
        columns = (row0 + rows) // m * n + (column0 + at) - rows * n
        # EVEN neighbours are in one row: EVEN divides n and the first element of the chunk.
        rows = tl.max_constancy(rows, EVEN)
        columns = tl.max_contiguous(tl.multiple_of(columns, EVEN), EVEN)
        for i in tl.static_range(len(OVER)):
            if OVER[i] == "rows":
                where = pointers[i] + rows
            else:
                where = pointers[i] + columns
            blocks = blocks + (load_if_live(where, live),)
    return blocks
