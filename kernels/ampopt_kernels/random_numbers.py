"""Random numbers for rules: pure functions of a seed, the step and the index of an element.

There is no generator state. A skipped step, a retried closure, a checkpoint or another number of
ranks does not change the numbers, and all backends compute the same bits.
"""

from ampopt_kernels.language import float_bits, jit, tl

__all__ = [
    "CPP",
    "PLACE_STRIDE",
    "element_bits",
    "key_of_pair",
    "rand",
    "randn",
    "random_bits",
    "uniform_part",
]

PLACE_STRIDE = 1 << 36
"""Distance between the first indices of two parameters: more than the number of elements."""


@jit
def rand(seed, step, at):
    """Uniform random numbers in [0, 1), multiples of 2**-24, one for each element.

    Args:
        seed: a number of ``h``; different for different runs, and for each call in one ``update``.
        step: a number of ``h`` that differs at every step, such as a step count. Seed and step are
            used as float32, which is exact for whole numbers up to 2**24.
        at: the sixth argument of ``update``.
    """
    position, like = at
    bits = random_bits(position, float_bits(step), float_bits(seed))
    return (bits >> 8).to(like.dtype) * 5.9604644775390625e-08


@jit
def randn(seed, step, at):
    """Normal random numbers of mean 0 and variance 1, one for each element.

    Computed from :func:`rand` at ``step`` and ``-step`` (Box and Muller). Backends may differ in
    the last bits, as their ``tl.log`` and ``tl.cos`` do.

    Args:
        seed: as for :func:`rand`.
        step: as for :func:`rand`.
        at: the sixth argument of ``update``.
    """
    radius = tl.sqrt(-2.0 * tl.log(1.0 - rand(seed, step, at)))
    return radius * tl.cos(6.283185307179586 * rand(seed, -step, at))


@jit
def random_bits(position, low, high):
    """32 random bits, ``tl.uint32``, for each element.

    Args:
        position: index of each element, int64.
        low: low half of a key, ``tl.uint32``.
        high: high half of the key, ``tl.uint32``.
    """
    near, far = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    return _mixed(_mixed(near ^ _mixed(_mixed(low) ^ high)) ^ far)


@jit
def key_of_pair(key, pair):
    """The key of :func:`element_bits` for two states of a parameter: ``tl.uint32``.

    Args:
        key: key of the parameter at this step, an int64 scalar; see ``stochastic``.
        pair: index of the two states among all pairs, a number known when compiling.
    """
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    return _mixed((_mixed(_mixed(low) ^ high) + (pair + 1) * 40503) & 0xFFFFFFFF)


@jit
def element_bits(position, key):
    """32 random bits, ``tl.uint32``, for each element; half as costly as :func:`random_bits`.

    Elements of one parameter get different bits at one key.

    Args:
        position: index of each element, int64.
        key: see :func:`key_of_pair`.
    """
    near, far = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    return _mixed(near ^ ((far * 40503 + key) & 0xFFFFFFFF))


@jit
def uniform_part(bits, PART: tl.constexpr):
    """A uniform random number in (0, 1) of some of 32 random bits.

    An odd multiple of 2**-16, so that ``floor(n + u)`` is ``n`` for whole ``n`` below 256. The
    parts 0 and 1, of the high and the low half, are independent. Part 2 is of the bits between:
    its correlation with either is 2**-8.
    """
    if PART == 0:
        part = bits >> 17
    elif PART == 1:
        part = (bits >> 1) & 0x7FFF
    else:
        part = (bits >> 9) & 0x7FFF
    return (part.to(tl.int32).to(tl.float32) + 0.5) * 3.0517578125e-05


@jit
def _mixed(x):
    """A hash of 32 bits, each of which depends on all bits of ``x``."""
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

static inline uint32_t key_of_pair(uint64_t key, uint32_t pair) {
    return mixed(mixed(mixed(uint32_t(key)) ^ uint32_t(key >> 32)) + (pair + 1) * 40503u);
}

static inline uint32_t key_at(uint64_t position, uint32_t key) {
    return uint32_t(position >> 32) * 40503u + key;
}

// 2**places times ``uniform_part``; 2**16 times it is a whole number.
static inline uint32_t chance_part(uint32_t bits, int32_t part, int32_t places) {
    const int32_t left = places - (part == 0 ? 32 : part == 1 ? 16 : 24), last = places - 16;
    return ((left < 0 ? bits >> -left : bits << left) & (0xFFFFu << last)) | (1u << last);
}

static inline float uniform_part(uint32_t bits, int32_t part) {
    return number(chance_part(bits, part, 23) | 0x3F800000u) - 1.0f;  // one in (1, 2), less 1
}

static inline float uniform(float seed, float step, uint64_t position) {
    return int32_t(random_bits(position, bits(step), bits(seed)) >> 8) * 0x1p-24f;
}
"""
"""These functions in C++; ``uniform`` is :func:`rand` for one element.

:func:`element_bits` is ``mixed(uint32_t(position) ^ key_at(position, key))``.
"""
