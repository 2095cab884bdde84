"""Load the factors of a matrix's rows and columns, in the kernels that run a rule."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.triton.chunks import load_if_live

__all__ = ["factors_of", "load_factors"]


@jit
def factors_of(row, start, ROW: tl.constexpr):
    """Pointers to the factors of one chunk, and the position of the chunk in its matrix.

    Args:
        row: pointer to the parameter's row of the table of addresses. The columns of the streams
            are followed by those of the factors, then m and n, the rows and columns of a matrix.
        start: the first element of the chunk.
        ROW: the :class:`RowLayout`.

    Returns:
        Two tuples: for each factor a pointer to its value for the row (or its first value for the
        matrix) in which the chunk begins; and, as int32, which suffices within a chunk, the chunk's
        row within its matrix, its column, m and n. Both are empty without factors.
    """
    pointers = ()
    place = ()
    if len(ROW.over) > 0:
        EVEN: tl.constexpr = ROW.even
        columns = row + len(ROW.dtypes)
        m = tl.load(columns + len(ROW.over))
        n = tl.multiple_of(tl.load(columns + len(ROW.over) + 1), EVEN)
        first = start // n
        matrix = first // m
        for i in tl.static_range(len(ROW.over)):
            pointer = tl.load(columns + i).to(tl.pointer_type(ROW.compute))
            if ROW.over[i] == "rows":
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
def load_factors(pointers, place, at, live, ROW: tl.constexpr):
    """The factors of some elements of a chunk: a tuple of blocks, one for each factor.

    Args:
        pointers: see :func:`factors_of`.
        place: the chunk's position in its matrix; see :func:`factors_of`.
        at: int32 block, the elements, counted from the beginning of the chunk.
        live: bool block, which elements exist; ``None`` if all do.
        ROW: the :class:`RowLayout`.
    """
    blocks = ()
    if len(ROW.over) > 0:
        EVEN: tl.constexpr = ROW.even
        row0, column0, m, n = place
        rows = (column0 + at) // n
        columns = (row0 + rows) // m * n + (column0 + at) - rows * n
        # EVEN neighbours are in one row: EVEN divides n and the first element of the chunk.
        rows = tl.max_constancy(rows, EVEN)
        columns = tl.max_contiguous(tl.multiple_of(columns, EVEN), EVEN)
        for i in tl.static_range(len(ROW.over)):
            if ROW.over[i] == "rows":
                where = pointers[i] + rows
            else:
                where = pointers[i] + columns
            blocks = blocks + (load_if_live(where, live),)
    return blocks
