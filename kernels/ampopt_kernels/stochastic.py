"""Stochastic rounding to bfloat16: up or down by chance, so that small steps are not lost.

A number is rounded up with a probability that is its distance from the lower neighbour, in units of
the distance between the two: unbiased. The chances follow from a key and the position of the
element alone, so that every backend, and every number of ranks, takes the same ones.

A key counts the steps of a parameter, from a start of its own: a skipped step consumes none.
"""

import torch
from torch import Tensor

from ampopt_kernels.language import jit, tl

__all__ = ["CPP", "STREAM", "rounded_stochastically", "stochastically", "take_keys"]

STREAM = 1 << 32
"""From the keys of one parameter to those of the next: each has so many steps."""


@jit
def _mixed(x):
    # Chris Wellons' "lowbias32": every bit of the input changes half of those of the output.
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def rounded_stochastically(x, position, key):
    """``x`` in bfloat16.

    Args:
        x: a block of float32 or float64.
        position: of each element in its parameter, int64.
        key: of the step, an int64 scalar.
    """
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    steps = (key & 0xFFFFFFFF).to(tl.uint32)
    stream = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    chance = _mixed(_mixed(low ^ _mixed(_mixed(steps) ^ stream)) ^ high) >> 16
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # what infinities are
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = tl.where(finite, bits + chance, nearest)
    rounded = tl.where(x == x, rounded, bits)
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def stochastically(x: Tensor, start: int, key: int | Tensor) -> Tensor:
    """:func:`rounded_stochastically` of elements from the position ``start`` on, in memory order.

    Args:
        x: flat, float32 or float64.
        start: the position of the first.
        key: of the step, a number or 0-d int64.
    """
    mask = 0xFFFFFFFF

    def mixed(n: Tensor) -> Tensor:
        n = n ^ (n >> 16)
        n = (n * 0x7FEB352D) & mask
        n = n ^ (n >> 15)
        n = (n * 0x846CA68B) & mask
        return n ^ (n >> 16)

    x = x.to(torch.float32)
    bits = x.view(torch.int32).to(torch.int64) & mask
    position = torch.arange(start, start + x.numel(), device=x.device).view(x.shape)
    keys = torch.as_tensor(key, device=x.device)
    of_step = mixed(mixed(keys & mask) ^ (keys >> 32))
    chance = mixed(mixed((position & mask) ^ of_step) ^ (position >> 32)) >> 16
    up_or_down = ((bits + chance) & 0xFFFF0000).to(torch.int32)  # as bits, so that it wraps
    return torch.where(x.isfinite(), up_or_down.view(torch.float32), x).to(torch.bfloat16)


def take_keys(keys: list[Tensor], skip: Tensor) -> None:
    """Go on to the next key of each parameter, unless the step is skipped. Does not synchronize.

    Args:
        keys: of each parameter, 0-d int64, in place.
        skip: 0-d, more than 0 to skip.
    """
    one = (skip <= 0).to(torch.int64)
    torch._foreach_add_(keys, [one] * len(keys))  # pyright: ignore[reportPrivateImportUsage]


CPP = """
static inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static inline uint16_t to_bfloat16_by_chance(float x, uint64_t position, uint64_t key) {
    const uint32_t of_step = mixed(mixed(uint32_t(key)) ^ uint32_t(key >> 32));
    const uint32_t chance =
        mixed(mixed(uint32_t(position) ^ of_step) ^ uint32_t(position >> 32)) >> 16;
    const uint32_t b = bits(x);
    return (b & 0x7F800000u) == 0x7F800000u ? to_bfloat16(x) : (b + chance) >> 16;
}
"""
"""The same in C++."""
