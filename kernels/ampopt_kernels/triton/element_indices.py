"""The indices of elements in the whole parameter, from which kernels compute random numbers."""

from ampopt_kernels.language import jit, tl

__all__ = ["indices_of", "jumps_of"]


@jit
def jumps_of(end, start, JUMPS: tl.constexpr, CHUNK: tl.constexpr):
    """The gaps in the indices of one chunk; see ``ampopt_kernels.element_indices``.

    Args:
        end: pointer into the table of addresses, to the column after the row's last jump.
        start: the first element of the chunk.
        JUMPS: the number of jumps of the row.
        CHUNK: elements of a chunk.

    Returns:
        For each jump a tuple: the indices skipped before the chunk, the indices that each gap
        skips, and the phase and the period within the chunk, as int32, where division is fast.
    """
    jumps = ()
    for i in tl.static_range(JUMPS):
        period = tl.load(end - 3 * (JUMPS - i))
        at = start + tl.load(end - 3 * (JUMPS - i) + 1)
        size = tl.load(end - 3 * (JUMPS - i) + 2)
        # A period that is longer than a chunk ends within it at most once.
        short = tl.minimum(period, CHUNK)
        phase = short - tl.minimum(period - at % period, short)
        jumps = jumps + ((at // period * size, size, phase.to(tl.int32), short.to(tl.int32)),)
    return jumps


@jit
def indices_of(position, jumps, at):
    """The indices of some elements of a chunk in the whole parameter, int64.

    Args:
        position: the index of the chunk's first element, if there were no gaps.
        jumps: see :func:`jumps_of`.
        at: int32 block, the elements, counted from the beginning of the chunk.
    """
    indices = position + at
    for i in tl.static_range(len(jumps)):
        before, size, phase, period = jumps[i]
        indices += before + ((at + phase) // period).to(tl.int64) * size
    return indices
