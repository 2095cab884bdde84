"""The places of elements in their whole parameter, in the kernels that run a rule."""

from ampopt_kernels.language import jit, tl

__all__ = ["jumps_of", "places_of"]


@jit
def jumps_of(end, start, JUMPS: tl.constexpr, CHUNK: tl.constexpr):
    """What a chunk needs to know of the jumps of its row; see ``ampopt_kernels.places``.

    Args:
        end: of the table of addresses, one column behind the last jump of the row.
        start: the first element of the chunk.
        JUMPS: how many jumps the row has.
        CHUNK: elements of a chunk.

    Returns:
        For each jump: how many places it has left out before the chunk, how many it leaves out at
        a time, and its phase and period within the chunk, in 32 bits, where a division is quick.
    """
    jumps = ()
    for i in tl.static_range(JUMPS):
        period = tl.load(end - 3 * (JUMPS - i))
        at = start + tl.load(end - 3 * (JUMPS - i) + 1)
        size = tl.load(end - 3 * (JUMPS - i) + 2)
        # A period that is longer than a chunk ends in it once, if at all.
        short = tl.minimum(period, CHUNK)
        phase = short - tl.minimum(period - at % period, short)
        jumps = jumps + ((at // period * size, size, phase.to(tl.int32), short.to(tl.int32)),)
    return jumps


@jit
def places_of(position, jumps, at):
    """The places of the elements ``at`` these positions of a chunk.

    Args:
        position: of the first element of the chunk, if there were no jumps.
        jumps: see :func:`jumps_of`.
        at: int32.
    """
    places = position + at
    for i in tl.static_range(len(jumps)):
        before, size, phase, period = jumps[i]
        places += before + ((at + phase) // period).to(tl.int64) * size
    return places
