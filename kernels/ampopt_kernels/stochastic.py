"""Stochastic rounding to bfloat16: up or down at random, so that updates below half a ulp count.

A number ``x`` between the bfloat16 neighbours ``a < b`` becomes ``b`` with probability
``(x - a) / (b - a)``, so that its expected value is ``x``. The random bits are a function of a key
and the index of the element, so that all backends, and all numbers of ranks, round the same way.

Each parameter has a key, which counts its steps from a start of its own. A skipped step does not
advance it.
"""

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.language import jit, tl, up_or_down
from ampopt_kernels.random_numbers import random_bits

__all__ = ["KEY_STRIDE", "advance_keys", "rounded_stochastically", "stochastically"]

KEY_STRIDE = 1 << 32
"""Distance between the first keys of two parameters: more than the number of steps."""


@jit
def rounded_stochastically(x, position, key):
    """``x`` stochastically rounded to a number that bfloat16 holds: float32.

    Args:
        x: a block of float32 or float64.
        position: index of each element, int64; see ``element_indices``.
        key: key of the parameter at this step, an int64 scalar.
    """
    steps, stream = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    chance = (random_bits(position, steps, stream) >> 16).to(tl.int32)
    return up_or_down(x.to(tl.float32), chance)


_rounded = torch_language.bind(rounded_stochastically)


def stochastically(x: Tensor, position: Tensor, key: int | Tensor) -> Tensor:
    """:func:`rounded_stochastically` on torch tensors: bfloat16.

    Args:
        x: float32 or float64, 1-d.
        position: index of each element, int64, with the shape of ``x``.
        key: key of the parameter at this step, a number or 0-d int64.
    """
    return _rounded(x, position, torch.as_tensor(key, device=x.device)).to(torch.bfloat16)


def advance_keys(keys: list[Tensor], skip: Tensor) -> None:
    """Advance the key of each parameter in place, unless the step is skipped. Does not synchronize.

    Args:
        keys: the key of each parameter, int64, 0-d.
        skip: more than 0 if the step is skipped, 0-d.
    """
    if not keys:
        return
    one = (skip <= 0).to(torch.int64)
    torch._foreach_add_(keys, [one] * len(keys))  # pyright: ignore[reportPrivateImportUsage]
