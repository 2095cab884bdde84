"""Sums over flat CPU tensors by torch operations, bitwise equal to those by C++.

A run switches from torch to C++ when the compiler is done, so both add in the same order. A tensor
is divided into parts of a few thousand elements. The second half of a part is added to its first
half until one number is left; then the sums of the parts are added one after another. For the terms
of a rule, the blocks of a part are first added to its first block, in memory order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels import codecs
from ampopt_kernels.codecs import Codec
from ampopt_kernels.cpu import numbers
from ampopt_kernels.eager import CHUNK
from ampopt_kernels.row_column_states import RowColumnStates
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic, flat, times

__all__ = ["BLOCK", "PART", "halved", "in_order", "sum_of_squares", "sum_terms"]

PART = 1 << 11
"""Elements of a part, which one thread adds up."""
BLOCK = 1 << 6
"""Elements of a block: a few terms of it in float64 fit the first cache of a core."""


def sum_terms(
    rule: Rule,
    flags: tuple[bool, ...],
    tensors: Sequence[Tensor],
    h: Sequence[Any],
    row_column_states: RowColumnStates | None = None,
    of_states: Sequence[Codec | None] = (),
) -> Tensor:
    """Sum each term of ``rule.reduce`` over the elements of a parameter.

    Args:
        rule: the update rule.
        flags: its flags.
        tensors: flat gradient, parameter and states, then the scales of states that have some.
        h: the reciprocal of the scale, the clip coefficient, and the numbers of the rule.
        row_column_states: the row and column states of the parameter, if the rule has any.
        of_states: the codec of each state, or ``None``. Empty if no state has one.

    Returns:
        float64, shape (terms,).
    """
    dtype = arithmetic(*(t.dtype for t in tensors[:2]))
    inverse, clip, *rest = h
    n = tensors[0].numel()
    size = min(PART, -(-max(n, 1) // BLOCK) * BLOCK)
    parts = []
    *tensors, scales = codecs.with_scales(tensors, of_states)
    for start in range(0, max(n, 1), CHUNK):
        chunks = [t[start : start + CHUNK] for t in tensors]
        if of_states:
            own = codecs.scales_at(scales, of_states, start, start + chunks[0].numel())
            chunks[2:] = codecs.decoded_each(chunks[2:], of_states, own)
        grad, param, *state = (t.to(dtype) for t in chunks)
        g = times(grad, inverse, clip)
        if row_column_states is not None:
            state += row_column_states.at(start, start + g.numel())
        terms = rule.torch_reduce_in(dtype)(param, g, tuple(state), tuple(rest), flags)
        parts.append(torch.stack([_in_blocks(term, size) for term in terms]))
    sums = [in_order(term) for term in torch.cat(parts, 1)]
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def sum_of_squares(tensor: Tensor) -> float:
    """Return the same as :func:`numbers.sums_of_squares`, of one tensor that is not empty."""
    total = 0.0
    for chunk in flat(tensor).split(CHUNK):
        squares = chunk.double()
        width = min(numbers.PART, 1 << (chunk.numel() - 1).bit_length())
        total = in_order(halved(squares * squares, width), total)
    return total


def in_order(parts: Tensor, total: float = 0.0) -> float:
    """Add the elements of ``parts`` to ``total``, one after another."""
    for part in parts.tolist():
        total += part
    return total


def _in_blocks(values: Tensor, size: int) -> Tensor:
    """Return the sums of each ``size`` values, a multiple of :data:`BLOCK`, in float64."""
    first, *others = _padded(values, size).view(-1, size // BLOCK, BLOCK).unbind(1)
    for block in others:
        first += block
    return halved(first.reshape(-1), BLOCK)


def halved(values: Tensor, width: int) -> Tensor:
    """Return the sums of each ``width`` values, a power of two, in float64."""
    parts = _padded(values, width).view(-1, width)
    while width > 1:
        width //= 2
        parts[:, :width] += parts[:, width : 2 * width]
    return parts[:, 0]


def _padded(values: Tensor, width: int) -> Tensor:
    """Return ``values`` in float64, padded with zeros to a multiple of ``width``."""
    n = values.numel()
    padded = torch.zeros(-(-n // width) * width, dtype=torch.float64, device="cpu")
    padded[:n] = values
    return padded
