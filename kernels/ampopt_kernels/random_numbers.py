"""Random numbers of rules: functions of a seed, the step and the place of an element, alone.

So nothing is consumed: a skipped step, a replay, a checkpoint and the number of ranks change none,
and every backend makes the same ones to the bit.
"""

from ampopt_kernels.language import float_bits, jit, tl

__all__ = ["CPP", "PLACE_STRIDE", "rand", "randn", "random_bits"]

PLACE_STRIDE = 1 << 36
"""The distance from the first place of one parameter to that of the next: room for its elements."""


@jit
def rand(seed, step, at):
    """Random numbers from 0 up to 1, multiples of 2**-24, another for each element.

    Args:
        seed: a number of ``h``, which tells runs, or several calls in one ``update``, apart.
        step: likewise, not twice the same. Both count as float32, whole numbers to 2**24.
        at: what ``update`` has got.
    """
    position, like = at
    bits = random_bits(position, float_bits(step), float_bits(seed))
    return (bits >> 8).to(like.dtype) * 5.9604644775390625e-08


@jit
def randn(seed, step, at):
    """Random numbers with the normal distribution, of mean 0 and variance 1; see :func:`rand`.

    They are made of :func:`rand` at ``step`` and ``-step`` (Box and Muller), by functions that
    backends round differently.
    """
    radius = tl.sqrt(-2.0 * tl.log(1.0 - rand(seed, step, at)))
    return radius * tl.cos(6.283185307179586 * rand(seed, -step, at))


@jit
def random_bits(position, low, high):
    """32 random bits, ``tl.uint32``, for each element.

    Args:
        position: of the element, int64.
        low: half of a key, ``tl.uint32``.
        high: the other.
    """
    near, far = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    return _mixed(_mixed(near ^ _mixed(_mixed(low) ^ high)) ^ far)


@jit
def _mixed(x):
    # Chris Wellons' "lowbias32": every bit of the input changes half of those of the output.
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF  # for torch, whose integers have 64 bits
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


CPP = """
static inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static inline uint32_t random_bits(uint64_t position, uint32_t low, uint32_t high) {
    const uint32_t of_key = mixed(mixed(low) ^ high);
    return mixed(mixed(uint32_t(position) ^ of_key) ^ uint32_t(position >> 32));
}

static inline float uniform(float seed, float step, uint64_t position) {
    return int32_t(random_bits(position, bits(step), bits(seed)) >> 8) * 0x1p-24f;
}
"""
"""The same in C++."""
