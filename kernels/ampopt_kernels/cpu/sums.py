"""Sums over flat CPU tensors, to the bit the same from torch's operations and from C++.

Either may be used in a run, and the clock may decide which. So both add in the same order. Of some
thousand elements at a time, half is added to half until one number is left of each part, and then
part after part; of the terms of a rule, each part is first made one block, to which its blocks are
added one after another, as they come from memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu import numbers
from ampopt_kernels.eager import CHUNK
from ampopt_kernels.marginals import Marginals
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic, flat, times

__all__ = ["BLOCK", "PART", "halved", "in_order", "sum_of_squares", "sum_terms"]

PART = 1 << 11
"""Elements of a part, which is one thread's."""
BLOCK = 1 << 6
"""Elements of a block: of a few terms in float64, what fits a core's first cache."""


def sum_terms(
    rule: Rule,
    flags: tuple[bool, ...],
    tensors: Sequence[Tensor],
    h: tuple[Any, ...],
    marginals: Marginals | None = None,
) -> Tensor:
    """The terms of a rule, each summed over flat gradient, parameter and states.

    ``h`` begins with the reciprocal of the scale and the clip coefficient. ``marginals`` are those
    of the parameter.

    Returns:
        float64, shape (terms,).
    """
    dtype = arithmetic(*(t.dtype for t in tensors[:2]))
    inverse, clip, *rest = h
    n = tensors[0].numel()
    size = min(PART, -(-max(n, 1) // BLOCK) * BLOCK)
    parts = []
    for start in range(0, max(n, 1), CHUNK):
        grad, param, *state = (t[start : start + CHUNK].to(dtype) for t in tensors)
        g = times(grad, inverse, clip)
        if marginals is not None:
            state += marginals.at(start, start + g.numel())
        terms = rule.torch_reduce_in(dtype)(param, g, tuple(state), tuple(rest), flags)
        parts.append(torch.stack([_in_blocks(term, size) for term in terms]))
    sums = [in_order(term) for term in torch.cat(parts, 1)]
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def sum_of_squares(tensor: Tensor) -> float:
    """In float64, of a tensor that is not empty, as :func:`numbers.sums_of_squares` has it."""
    total = 0.0
    for chunk in flat(tensor).split(CHUNK):
        squares = chunk.double()
        width = min(numbers.PART, 1 << (chunk.numel() - 1).bit_length())
        total = in_order(halved(squares * squares, width), total)
    return total


def in_order(parts: Tensor, total: float = 0.0) -> float:
    """``total`` and then each of ``parts`` added up, one after another."""
    for part in parts.tolist():
        total += part
    return total


def _in_blocks(values: Tensor, size: int) -> Tensor:
    """The sum of each ``size`` of some values, a number of blocks, in float64."""
    first, *others = _padded(values, size).view(-1, size // BLOCK, BLOCK).unbind(1)
    for block in others:
        first += block
    return halved(first.reshape(-1), BLOCK)


def halved(values: Tensor, width: int) -> Tensor:
    """The sum of each ``width`` of some values, a power of two, in float64."""
    parts = _padded(values, width).view(-1, width)
    while width > 1:
        width //= 2
        parts[:, :width] += parts[:, width : 2 * width]
    return parts[:, 0]


def _padded(values: Tensor, width: int) -> Tensor:
    """In float64, with zeros until it is a multiple of ``width``."""
    n = values.numel()
    padded = torch.zeros(-(-n // width) * width, dtype=torch.float64, device="cpu")
    padded[:n] = values
    return padded
