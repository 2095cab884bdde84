"""Sums over flat CPU tensors, to the bit the same from torch's operations and from C++.

Either may be used in a run, and the clock may decide which. So both add half to half, of some
thousand elements at a time, until one number is left of each part, and then part after part.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu import numbers
from ampopt_kernels.eager import CHUNK
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic, flat

__all__ = ["PART", "halved", "in_order", "sum_of_squares", "sum_terms"]

PART = 1 << 11
"""Elements of a part: of a few terms in float64, what fits a core's first cache."""


def sum_terms(
    rule: Rule, flags: tuple[bool, ...], tensors: Sequence[Tensor], h: tuple[Any, ...]
) -> Tensor:
    """The terms of a rule, each summed over flat gradient, parameter and states.

    ``h`` begins with the reciprocal of the scale and the clip coefficient.

    Returns:
        float64, shape (terms,).
    """
    dtype = arithmetic(*(t.dtype for t in tensors[:2]))
    inverse, clip, *rest = h
    n = tensors[0].numel()
    width = min(PART, 1 << max(n - 1, 0).bit_length())
    parts = []
    for start in range(0, max(n, 1), CHUNK):
        grad, param, *state = (t[start : start + CHUNK].to(dtype) for t in tensors)
        g = grad * inverse * clip
        terms = rule.torch_reduce_in(dtype)(param, g, tuple(state), tuple(rest), flags)
        parts.append(torch.stack([halved(term, width) for term in terms]))
    return torch.tensor([in_order(term) for term in torch.cat(parts, 1)], dtype=torch.float64)


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


def halved(values: Tensor, width: int) -> Tensor:
    """The sum of each ``width`` of some values, a power of two, in float64."""
    n = values.numel()
    padded = torch.zeros(-(-n // width) * width, dtype=torch.float64, device="cpu")
    padded[:n] = values
    parts = padded.view(-1, width)
    while width > 1:
        width //= 2
        parts[:, :width] += parts[:, width : 2 * width]
    return parts[:, 0]
