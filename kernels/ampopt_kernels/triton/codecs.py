"""Decode and encode the states of a parameter, in the kernels that run a rule."""

from ampopt_kernels.codecs import scale_of
from ampopt_kernels.language import jit, rounded, tl
from ampopt_kernels.random_numbers import element_bits, key_of_pair, uniform_part

__all__ = ["decoded", "scales_at", "store_codes", "uniform_of"]


@jit
def scales_at(columns, start, ROW: tl.constexpr):
    """Pointers to the scales of a chunk's first block, one for each stream.

    Args:
        columns: pointer into the table of addresses, to the column of the first state's scales.
        start: the first element of the chunk.
        ROW: the :class:`RowLayout`.
    """
    pointers = ()
    for i in tl.static_range(len(ROW.codecs)):
        if ROW.codecs[i] is not None:
            pointer = tl.load(columns + i - 2).to(tl.pointer_type(tl.float32))
            pointers = pointers + (pointer + start // ROW.codecs[i].block,)
        else:
            pointers = pointers + (0,)
    return pointers


@jit
def decoded(x, scales, offset, end, INDEX: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Values of stream ``INDEX``, which has a codec: float32.

    Args:
        x: what is stored of ``BLOCK`` elements.
        scales: see :func:`scales_at`.
        offset: the first element, counted from the beginning of the chunk.
        end: the number of elements of the chunk; ``None`` if all ``BLOCK`` elements exist.
        INDEX: the index of the stream.
        ROW: the :class:`RowLayout`.
        BLOCK: the number of elements.
    """
    value = ROW.codecs[INDEX].decode(x.to(tl.float32))
    SIZE: tl.constexpr = ROW.codecs[INDEX].block
    if SIZE > 1:
        # A thread has at least four neighbours of one block, and loads one scale for them.
        first = offset + 4 * tl.arange(0, BLOCK // 4)
        where = scales[INDEX] + first // SIZE
        if end is None:
            scale = tl.load(where)
        else:
            scale = tl.load(where, mask=first < end, other=0.0)
        value = value * _spread(scale, BLOCK // 4, 4)
    return value


@jit
def uniform_of(indices, key, INDEX: tl.constexpr):
    """A uniform random number in (0, 1) for each element of stream ``INDEX``.

    The stream is a state, or 1: the low bits of a 24-bit master. See ``codecs.pair_and_part``.
    """
    if INDEX == 1:
        return uniform_part(element_bits(indices, key_of_pair(key, 0)), 2)
    else:
        bits = element_bits(indices, key_of_pair(key, (INDEX - 2) // 2))
        return uniform_part(bits, INDEX % 2)


@jit
def store_codes(
    stream, value, u, scales, offset, end, INDEX: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Encode and store ``BLOCK`` elements of stream ``INDEX``, and the scales of their blocks.

    Args:
        stream: pointer to the codes of the chunk.
        value: the values, of shape (BLOCK,).
        u: a random number for each.
        scales: see :func:`scales_at`.
        offset: the first element, counted from the beginning of the chunk.
        end: the number of elements of the chunk; ``None`` if all ``BLOCK`` elements exist.
        INDEX: the index of the stream.
        ROW: the :class:`RowLayout`.
        BLOCK: the number of elements.
    """
    at = offset + tl.arange(0, BLOCK)
    live = None
    if end is not None:
        live = at < end
    x = value.to(tl.float32)
    SIZE: tl.constexpr = ROW.codecs[INDEX].block
    if SIZE > 1:
        N: tl.constexpr = BLOCK // SIZE
        # As integers, the magnitudes are in the same order, with NaN above all.
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if live is not None:
            bits = tl.where(live, bits, 0)
        scale, reciprocal = scale_of(tl.max(tl.reshape(bits, (N, SIZE)), 1))
        x = x * _spread(reciprocal, N, SIZE)
        # The thread that has the first element of a block stores its scale. A store of N scales
        # would exchange them between threads, through shared memory and barriers.
        bits = _spread(scale, N, SIZE).to(tl.int32, bitcast=True)
        own = tl.max(tl.reshape(bits, (BLOCK // 4, 4)), 1).to(tl.float32, bitcast=True)
        first = offset + 4 * tl.arange(0, BLOCK // 4)
        is_first = first % SIZE == 0
        if end is not None:
            is_first = is_first & (first < end)
        tl.store(scales[INDEX] + first // SIZE, own, mask=is_first)
    code = ROW.codecs[INDEX].encode(x, u)
    LIMITS: tl.constexpr = ROW.codecs[INDEX].limits
    if LIMITS is not None:
        code = tl.where(code > LIMITS[0], code, LIMITS[0])
        code = tl.where(code < LIMITS[1], code, LIMITS[1])
        number = code.to(tl.int32).to(ROW.dtypes[INDEX])
    else:
        number = rounded(code, ROW.dtypes[INDEX])
    tl.store(stream + at, number, mask=live)


@jit
def _spread(numbers, N: tl.constexpr, SIZE: tl.constexpr):
    """Each of ``N`` numbers ``SIZE`` times."""
    spread = tl.broadcast_to(tl.expand_dims(numbers, 1), (N, SIZE))
    return tl.reshape(spread, (N * SIZE,))
