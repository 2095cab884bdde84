"""The chunk of one parameter that a program works on: where it is, and how it is read and written.

Every access comes twice: whole blocks need no mask, and only unmasked accesses to aligned addresses
are 16 bytes wide. In whole blocks ``end``, the number of elements of the chunk, is ``None``, and so
is ``live``, the block of bool that says which elements exist.
"""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.triton.codecs import decoded

__all__ = [
    "chunk_of",
    "elements_of",
    "end_of",
    "load_if_live",
    "numbers_before",
    "numbers_of",
    "pointers_to",
    "streams_of",
    "values_of",
]


@jit
def chunk_of(table, chunks, program, chunk, COLUMNS: tl.constexpr):
    """The chunk of a program.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter; see ``table.py``.
        chunks: int32, shape (programs, 2): row and chunk of each program.
        program: the number of the program in ``chunks``.
        chunk: elements for each program.
        COLUMNS: the width of ``table``.

    Returns:
        The index of the row; the pointer to it; the chunk's first element; and the number of
        elements of the row.
    """
    index = tl.load(chunks + 2 * program).to(tl.int64)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * chunk
    row = table + index * COLUMNS
    return index, row, start, tl.load(row + COLUMNS - 1)


@jit
def end_of(row, start, numel, chunk):
    """The number of elements of the chunk from ``start``: 0 for a row without a gradient.

    It and offsets within the chunk are int32, which saves registers. Call this just before the
    loop: computed in :func:`chunk_of`, it costs up to 36 registers on gfx942.
    """
    return tl.where(tl.load(row) != 0, tl.minimum(numel - start, chunk), 0).to(tl.int32)


@jit
def streams_of(row, start, ROW: tl.constexpr):
    """Pointers to element ``start`` of each stream of a row.

    The compiler knows no alignment of an address that was loaded, so it is stated here.

    Args:
        row: pointer to the row.
        start: the element; ``None`` for the first.
        ROW: the :class:`RowLayout`.
    """
    streams = ()
    for i in tl.static_range(len(ROW.dtypes)):
        stream = tl.load(row + i).to(tl.pointer_type(ROW.dtypes[i]))
        if start is not None:  # what is stated of a pointer is lost if 0 is added to it
            stream += start
        # `tl.constexpr(...)` must be written inside the call: assigned to a name first, it would
        # become a run-time value.
        streams = streams + (tl.multiple_of(stream, tl.constexpr(ROW.aligns[i])),)  # pyright: ignore
    return streams


@jit
def numbers_of(coefficients, h_table, index, N_H: tl.constexpr, COMPUTE: tl.constexpr):
    """The reciprocal of the loss scale, the clip coefficient, and the scalars ``h`` of a row."""
    inverse = tl.load(coefficients + 1).to(COMPUTE)
    clip = tl.load(coefficients + 2).to(COMPUTE)
    h = ()
    for i in tl.static_range(N_H):
        h = h + (tl.load(h_table + index * N_H + i).to(COMPUTE),)
    return inverse, clip, h


@jit
def numbers_before(scale, reject, N_H: tl.constexpr, COMPUTE: tl.constexpr):
    """What :func:`numbers_of` returns, before control: clips nothing, and ``h`` is ``reject``."""
    inverse = tl.full((), 1.0, COMPUTE)
    if scale is not None:
        # In float64, so that the float32 reciprocal is correctly rounded.
        inverse = (1.0 / tl.load(scale).to(tl.float64)).to(COMPUTE)
    h = ()
    if N_H > 0:
        h = (tl.load(reject).to(COMPUTE),)
    return inverse, 1.0, h


@jit
def load_if_live(at, live):
    """The block at the pointers ``at``; 0 where not ``live``."""
    if live is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=live, other=0)


@jit
def pointers_to(stream, offset, ALONE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to ``BLOCK`` elements of a stream, from ``offset`` on.

    Streams that are read together share the sum of offset and lanes. A stream that is read
    ``ALONE``, in whole blocks, takes fewer registers if its pointer advances.
    """
    if ALONE:
        return stream + offset + tl.arange(0, BLOCK)
    else:
        return stream + (offset + tl.arange(0, BLOCK))


@jit
def elements_of(streams, offset, live, N: tl.constexpr, BLOCK: tl.constexpr):
    """What is stored in the first ``N`` streams from ``offset`` on: a tuple of blocks.

    A stream that is not used costs nothing: the compiler removes the load.
    """
    elements = ()
    for i in tl.static_range(N):
        pointers = pointers_to(streams[i], offset, N == 1 and live is None, BLOCK)
        elements = elements + (load_if_live(pointers, live),)
    return elements


@jit
def values_of(elements, scales, offset, end, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """The decoded values of :func:`elements_of` from ``offset`` on, in the arithmetic dtype."""
    values = ()
    for i in tl.static_range(len(elements)):
        x = elements[i]
        if ROW.codecs[i] is not None:
            x = decoded(x, scales, offset, end, i, ROW, BLOCK)
        values = values + (x.to(ROW.compute),)
    return values
