"""Stochastic rounding to bfloat16: up or down at random, so that updates below half a ulp count.

A number ``x`` between the bfloat16 neighbours ``a < b`` becomes ``b`` with probability
``(x - a) / (b - a)``, so that its expected value is ``x``. The random bits are a function of a key
and the place of the element, so that all backends, and all numbers of ranks, round the same way.

Each parameter has a key, which counts its steps from a start of its own. A skipped step does not
advance it.
"""

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.language import float_bits, jit, tl
from ampopt_kernels.random_numbers import random_bits

__all__ = ["CPP", "KEY_STRIDE", "rounded_stochastically", "stochastically", "take_keys"]

KEY_STRIDE = 1 << 32
"""Distance between the first keys of two parameters: more than the number of steps."""


@jit
def rounded_stochastically(x, position, key):
    """``x`` stochastically rounded to bfloat16.

    Args:
        x: a block of float32 or float64.
        position: place of each element, int64; see ``places``.
        key: key of the parameter at this step, an int64 scalar.
    """
    bits = float_bits(x)
    steps, stream = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    chance = random_bits(position, steps, stream) >> 16
    nearest = (
        bits + 0x7FFF + ((bits >> 16) & 1)
    )  # infinities must not become NaN by an addition to their bits
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = tl.where(finite, bits + chance, nearest)
    rounded = tl.where(x == x, rounded, bits)
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def stochastically(x: Tensor, position: Tensor, key: int | Tensor) -> Tensor:
    """:func:`rounded_stochastically` in torch.

    Args:
        x: float32 or float64, 1-d.
        position: place of each element, int64, with the shape of ``x``.
        key: key of the parameter at this step, a number or 0-d int64.
    """
    x = x.to(torch.float32)
    keys = torch.as_tensor(key, device=x.device)
    chance = _random_bits(position, keys & 0xFFFFFFFF, keys >> 32) >> 16
    bits = _float_bits(x) + chance
    up_or_down = (bits & 0xFFFF0000).to(torch.int32)  # the sum of bits wraps, as in uint32
    return torch.where(x.isfinite(), up_or_down.view(torch.float32), x).to(torch.bfloat16)


def take_keys(keys: list[Tensor], skip: Tensor) -> None:
    """Advance the key of each parameter in place, unless the step is skipped. Does not synchronize.

    Args:
        keys: the key of each parameter, int64, 0-d.
        skip: more than 0 if the step is skipped, 0-d.
    """
    if not keys:
        return
    one = (skip <= 0).to(torch.int64)
    torch._foreach_add_(keys, [one] * len(keys))  # pyright: ignore[reportPrivateImportUsage]


CPP = """
static inline uint16_t to_bfloat16_by_chance(float x, uint64_t position, uint64_t key) {
    const uint32_t chance = random_bits(position, key, key >> 32) >> 16;
    const uint32_t b = bits(x);
    return (b & 0x7F800000u) == 0x7F800000u ? to_bfloat16(x) : (b + chance) >> 16;
}
"""
"""The same in C++. Needs ``random_numbers.CPP`` before it."""

_float_bits, _random_bits = map(torch_language.bind, (float_bits, random_bits))
