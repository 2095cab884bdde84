"""Accumulate: unscale gradients, test them for inf and NaN, and add them to sums, in one pass."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampopt_kernels.decision import Request
from ampopt_kernels.language import jit, kernel, tl
from ampopt_kernels.triton.chunks import (
    chunk_of,
    inverse_of,
    load_if_live,
    not_finite,
    store_if_live,
    streams_of,
)
from ampopt_kernels.triton.launch import TRITON_DTYPES
from ampopt_kernels.triton.table import Table

__all__ = ["accumulate_kernel", "accumulate_launches"]


def accumulate_launches(
    table: Table, request: Request, flags: Tensor
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of programs and the arguments of each launch of ``accumulate_kernel``."""
    for group in table.launches:
        yield (
            group.programs,
            {
                **table.arguments_of(group),
                "chunk": table.chunk,
                "scale": flags if request.scale is None else request.scale,
                "reject": flags if request.found_inf is None else request.found_inf,
                "flags": flags,
                "DTYPES": tuple(TRITON_DTYPES[dtype] for dtype in group.dtypes),
                "ALIGNS": group.aligns,
                "FRESH": group.like.flags[0],
                "HAS_SCALE": request.scale is not None,
                "HAS_REJECT": request.found_inf is not None,
            },
        )


@kernel
def accumulate_kernel(
    table,
    blocks,
    first,
    chunk,
    scale,
    reject,
    flags,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_REJECT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one chunk of one unscaled gradient to its sum, and test it for inf and NaN.

    ``sum += grad / scale``, in the arithmetic dtype, or ``sum = grad / scale`` if ``FRESH``. Writes
    the sums, at the addresses in ``table``, and ``flags``.

    One program for each chunk. A launch has the rows of one kind: the same dtypes, ``FRESH`` and
    alignment.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter, with the address of the
            sum in the parameter's column; see ``table.py``.
        blocks: int32, shape (programs of all launches, 2): row and chunk of each program.
        first: the number of this launch's first program in ``blocks``.
        chunk: elements for each program, a multiple of ``BLOCK``.
        scale: one element, the loss scale of the gradients; read if ``HAS_SCALE``.
        reject: one element, more than 0 to leave the sums as they are (0 if ``FRESH``); read if
            ``HAS_REJECT``.
        flags: float32, shape (programs of all launches,), written: 1 if the unscaled gradient is
            not finite, or makes the sum so; else 0.
        DTYPES: dtypes of the gradient and of the sum.
        COMPUTE: the arithmetic dtype, float32 or float64.
        ALIGNS: for each of ``DTYPES``, a power of two in bytes that divides the addresses.
        FRESH: whether the sums are uninitialized; they are written and not read.
        HAS_SCALE: whether the gradients are multiplied by a loss scale.
        HAS_REJECT: whether ``reject`` is passed.
        COLUMNS: the width of ``table``.
        BLOCK: elements that a program reads at a time.
    """
    program = first + tl.program_id(0)
    _, row, start, end = chunk_of(table, blocks, program, chunk, COLUMNS)
    grad, total = streams_of(row, start, DTYPES, ALIGNS)
    inverse = inverse_of(scale, HAS_SCALE, COMPUTE)
    rejected = False
    if HAS_REJECT:
        rejected = tl.load(reject) > 0

    whole = end // BLOCK * BLOCK
    bad = tl.zeros((BLOCK,), tl.int32)
    for offset in range(0, whole, BLOCK):
        bad = bad | _add_block(
            grad, total, offset, end, inverse, rejected, COMPUTE, FRESH, HAS_REJECT, False, BLOCK
        )
    if whole < end:
        bad = bad | _add_block(
            grad, total, whole, end, inverse, rejected, COMPUTE, FRESH, HAS_REJECT, True, BLOCK
        )
    tl.store(flags + program, tl.max(bad, 0).to(tl.float32))


@jit
def _add_block(
    grad,
    total,
    offset,
    end,
    inverse,
    rejected,
    COMPUTE: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_REJECT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add ``BLOCK`` unscaled elements to their sums; 1 for each that makes its sum non-finite."""
    at = offset + tl.arange(0, BLOCK)
    live = at < end
    x = load_if_live(grad + at, live, MASKED).to(COMPUTE) * inverse
    if FRESH:
        old = tl.zeros((BLOCK,), COMPUTE)
        new = x
    else:
        old = load_if_live(total + at, live, MASKED)
        new = old + x
    if HAS_REJECT:
        new = tl.where(rejected, old, new)
    store_if_live(total + at, new, live, MASKED)
    # A sum that was not finite before this gradient is not counted as its overflow.
    bad = not_finite(x) | (not_finite(new) & (1 - not_finite(old)))
    return tl.where(live, bad, 0)
