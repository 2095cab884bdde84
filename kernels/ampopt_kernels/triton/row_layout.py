"""How the rows of one launch are stored: what is compiled into a kernel that reads them."""

from typing import Any, NamedTuple

import torch

from ampopt_kernels.codecs import Codec
from ampopt_kernels.step_tensors import ParamRow
from ampopt_kernels.triton.launch import TRITON_DTYPES, sources_of

__all__ = ["RowLayout", "layout_of"]


class RowLayout(NamedTuple):
    """The layout of the rows of one launch: a compile-time argument of kernels.

    A *stream* is a tensor whose elements a kernel reads or writes one after another: the gradient,
    the parameter, each elementwise state, and the copy or the low bits of a master weight, if there
    are any. Their addresses are in the first columns of the table, in this order.

    Attributes:
        flags: the flags of the rows.
        dtypes: Triton's dtype of each stream.
        aligns: for each stream, a power of two in bytes that divides the addresses.
        codecs: for each stream its codec, or ``None``.
        sources: a text that changes with the source of a codec.
        compute: the arithmetic dtype, float32 or float64.
        has_copy: whether the last stream is a low-precision copy of the parameter, which is only
            written.
        has_low_bits: whether the last stream are the low bits of a 24-bit master.
        rounds: whether the parameter, in bfloat16, is rounded stochastically.
        has_key: whether the rows have random keys.
        jumps: the number of gaps in the indices of a row's elements; see ``element_indices``.
        over: ``"rows"`` or ``"columns"`` for each factor of a matrix: what it has one value for.
        even: a number that divides the row length of every matrix with such factors.
    """

    flags: tuple[bool, ...]
    dtypes: tuple[Any, ...]
    aligns: tuple[int, ...]
    codecs: tuple[Codec | None, ...]
    sources: str
    compute: Any
    has_copy: bool
    has_low_bits: bool
    rounds: bool
    has_key: bool
    jumps: int
    over: tuple[str, ...]
    even: int


def layout_of(
    row: ParamRow, aligns: tuple[int, ...], even: int, compute_dtype: torch.dtype
) -> RowLayout:
    """The layout of ``row``, of the whole row or of its gradient alone.

    Args:
        row: one of the rows of the launch.
        aligns: see :class:`RowLayout`.
        even: see :class:`RowLayout`.
        compute_dtype: the arithmetic dtype.
    """
    means, after = row.row_column_means, len(row.dtypes) - 2 - len(row.codecs)
    return RowLayout(
        flags=row.flags,
        dtypes=tuple(TRITON_DTYPES[dtype] for dtype in row.dtypes),
        aligns=aligns,
        codecs=(None, None, *row.codecs, *(None,) * after),
        sources=sources_of(*(f for c in row.codecs if c is not None for f in (c.decode, c.encode))),
        compute=TRITON_DTYPES[compute_dtype],
        has_copy=row.copy is not None,
        has_low_bits=row.low is not None,
        rounds=row.rounds,
        has_key=row.random_key is not None,
        jumps=len(row.indices.jumps),
        over=() if means is None else means.over,
        even=1 if means is None else even,
    )
