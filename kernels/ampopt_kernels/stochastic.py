"""Stochastic rounding to bfloat16: up or down by chance, so that small steps are not lost.

A number is rounded up with a probability that is its distance from the lower neighbour, in units of
the distance between the two: unbiased. The chances follow from a key and the position of the
element alone, so that every backend, and every number of ranks, takes the same ones.

A key counts the steps of a parameter, from a start of its own: a skipped step consumes none.
"""

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.language import float_bits, jit, tl
from ampopt_kernels.random_numbers import random_bits

__all__ = ["CPP", "KEY_STRIDE", "rounded_stochastically", "stochastically", "take_keys"]

KEY_STRIDE = 1 << 32
"""The distance from the first key of one parameter to that of the next: room for its steps."""


@jit
def rounded_stochastically(x, position, key):
    """``x`` in bfloat16.

    Args:
        x: a block of float32 or float64.
        position: of each element in its parameter, int64.
        key: of the step, an int64 scalar.
    """
    bits = float_bits(x)
    steps, stream = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    chance = random_bits(position, steps, stream) >> 16
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # what infinities are
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = tl.where(finite, bits + chance, nearest)
    rounded = tl.where(x == x, rounded, bits)
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def stochastically(x: Tensor, position: Tensor, key: int | Tensor) -> Tensor:
    """:func:`rounded_stochastically` in torch.

    Args:
        x: flat, float32 or float64.
        position: of each element in its parameter, int64, of the shape of ``x``.
        key: of the step, a number or 0-d int64.
    """
    x = x.to(torch.float32)
    keys = torch.as_tensor(key, device=x.device)
    chance = _random_bits(position, keys & 0xFFFFFFFF, keys >> 32) >> 16
    bits = _float_bits(x) + chance
    up_or_down = (bits & 0xFFFF0000).to(torch.int32)  # as bits, so that it wraps
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
static inline uint16_t to_bfloat16_by_chance(float x, uint64_t position, uint64_t key) {
    const uint32_t chance = random_bits(position, key, key >> 32) >> 16;
    const uint32_t b = bits(x);
    return (b & 0x7F800000u) == 0x7F800000u ? to_bfloat16(x) : (b + chance) >> 16;
}
"""
"""The same in C++, after that of ``random_numbers``."""

_float_bits, _random_bits = map(torch_language.bind, (float_bits, random_bits))
