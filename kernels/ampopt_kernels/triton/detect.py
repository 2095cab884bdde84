"""Detect: read every gradient once, for non-finite values, the squared norm, and sums over calls.

The norm is summed in float64 and in a fixed order. The CPU backends sum in another order: their
norm may differ by an ulp of float64, and so may clipped steps of float64 parameters. Summed are
unscaled gradients, rounded to the arithmetic dtype. The eager backend divides the norm of the
scaled ones by the scale: if the scale is not a power of two, the two norms of float32 gradients may
differ by 2 ** -23 of themselves, and the results of a clipped step by an ulp.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampopt_kernels.decision import Request
from ampopt_kernels.language import jit, kernel, rounded, tl
from ampopt_kernels.triton.chunks import (
    chunk_of,
    end_of,
    inverse_of,
    load_if_live,
    not_finite,
    store_if_live,
    streams_of,
)
from ampopt_kernels.triton.launch import THREADS, TRITON_DTYPES
from ampopt_kernels.triton.table import Table

__all__ = ["detect_kernel", "detect_launches"]

AHEAD = 1 << 6
"""Bytes of gradients that each thread of detect loads before it uses the first.

By Little's law, bandwidth times latency must be in flight: for 5 TB/s and 0.8 microseconds, on 132
multiprocessors of about 1500 threads each, at least 20 bytes for each thread.
"""


def detect_launches(
    table: Table, request: Request, flags: Tensor, squares: Tensor, measures: Tensor
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of programs and the arguments of each launch of ``detect_kernel``."""
    for group in table.launches:
        row, n = group.like, 1 + request.accumulate
        ahead = AHEAD * THREADS // (row.grad_dtype.itemsize * table.block)
        yield (
            group.programs,
            {
                **table.arguments_of(group),
                "chunk": table.chunk,
                "scale": flags if request.scale is None else request.scale,
                "reject": flags if request.found_inf is None else request.found_inf,
                "flags": flags,
                "squares": squares,
                "measures": measures,
                "DTYPES": tuple(TRITON_DTYPES[dtype] for dtype in row.dtypes[:n]),
                "ALIGNS": group.aligns if request.accumulate else (group.align,),
                "HAS_SCALE": request.scale is not None,
                "WRITE": request.write,
                "NORM": request.max_norm is not None,
                "MEASURE": request.measure,
                "ADD": request.accumulate,
                "FRESH": request.accumulate and row.flags[0],
                "HAS_REJECT": request.accumulate and request.found_inf is not None,
                "AHEAD": 1 if request.accumulate else ahead,
            },
        )


@kernel
def detect_kernel(
    table,
    blocks,
    first,
    chunk,
    scale,
    reject,
    flags,
    squares,
    measures,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WRITE: tl.constexpr,
    NORM: tl.constexpr,
    MEASURE: tl.constexpr,
    ADD: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_REJECT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Test one chunk of one unscaled gradient for inf and NaN, and sum its squares or add it.

    ``x = grad / scale``, in the arithmetic dtype; ``flags[program] = any(not isfinite(x))``;
    ``squares[program] = sum(x * x)``, in float64. If ``ADD``, ``sum += x``, or ``sum = x`` if
    ``FRESH``. Reads each element once. Writes ``flags``, ``squares`` and ``measures``, and the
    gradients if ``WRITE``, and the sums if ``ADD``.

    One program for each chunk. A launch has the rows of one kind: the same dtypes, flags and
    alignment.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter; see ``table.py``.
        blocks: int32, shape (programs of all launches, 2): row and chunk of each program.
        first: the number of this launch's first program in ``blocks``.
        chunk: elements for each program, a multiple of ``AHEAD * BLOCK``.
        scale: one element, the loss scale of the gradients; read if ``HAS_SCALE``.
        reject: one element, more than 0 to leave the sums as they are (0 if ``FRESH``); read if
            ``HAS_REJECT``.
        flags: float32, shape (programs of all launches,), written: 1 if the chunk has a non-finite
            value after unscaling, or one that makes a finite sum non-finite; else 0.
        squares: float64, shape (programs of all launches,), written if ``NORM``: the sum of
            squares; 0 for a row that is not part of the norm.
        measures: float64, shape (programs of all launches, 4), written if ``MEASURE``; see
            ``GradientReport.measures``.
        DTYPES: the dtype of the gradients; if ``ADD``, that of the sums, too.
        COMPUTE: the arithmetic dtype, float32 or float64.
        ALIGNS: for each of ``DTYPES``, a power of two in bytes that divides the addresses.
        HAS_SCALE: whether the gradients are multiplied by a loss scale.
        WRITE: whether to store the unscaled gradients in place of the scaled ones.
        NORM: whether to sum squares.
        MEASURE: whether to measure the gradients.
        ADD: whether to add the gradients to sums, whose addresses are in the parameter's column.
        FRESH: whether the sums are uninitialized; they are written and not read.
        HAS_REJECT: whether ``reject`` is passed.
        COLUMNS: the width of ``table``.
        BLOCK: elements of one load.
        AHEAD: loads that are issued before the first is used.
    """
    program = first + tl.program_id(0)
    _, row, start, numel = chunk_of(table, blocks, program, chunk, COLUMNS)
    streams = streams_of(row, start, DTYPES, ALIGNS)
    grad, sums = streams[0], streams[len(DTYPES) - 1]
    rejected = False
    if HAS_REJECT:
        rejected = tl.load(reject) > 0
    inverse = inverse_of(scale, HAS_SCALE, COMPUTE)
    end = end_of(row, start, numel, chunk)
    whole = end // (AHEAD * BLOCK) * (AHEAD * BLOCK)
    bad = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK // 4,), COMPUTE)
    nonzeros = tl.zeros((BLOCK // 4,), tl.int32)
    flushed = tl.zeros((BLOCK // 4,), tl.int32)
    lanes = tl.arange(0, BLOCK)
    for offset in range(0, whole, AHEAD * BLOCK):
        blocks_read = ()
        for i in tl.static_range(AHEAD):
            blocks_read = blocks_read + (tl.load(grad + offset + i * BLOCK + lanes),)
        for i in tl.static_range(AHEAD):
            x = blocks_read[i].to(COMPUTE) * inverse  # pyright: ignore
            bad = bad | not_finite(x)
            if NORM or MEASURE:
                total = _plus_square(total, x)
            if MEASURE:
                largest, nonzeros, flushed = _measured(largest, nonzeros, flushed, x, BLOCK)
            if WRITE:
                tl.store(grad + offset + i * BLOCK + lanes, rounded(x, DTYPES[0]))
            if ADD:
                at = offset + i * BLOCK + lanes
                bad = bad | _add(sums + at, x, rejected, at < end, FRESH, HAS_REJECT, False)
    for offset in range(whole, end, BLOCK):
        at = offset + lanes
        live = at < end
        x = tl.load(grad + at, mask=live, other=0).to(COMPUTE) * inverse
        # A masked lane is 0, or NaN if the reciprocal is inf; live lanes then overflow as well.
        bad = bad | not_finite(x)
        if NORM or MEASURE:
            total = _plus_square(total, x)
        if MEASURE:
            largest, nonzeros, flushed = _measured(largest, nonzeros, flushed, x, BLOCK)
        if WRITE:
            tl.store(grad + at, rounded(x, DTYPES[0]), mask=live)
        if ADD:
            bad = bad | _add(sums + at, x, rejected, live, FRESH, HAS_REJECT, True)
    tl.store(flags + program, tl.max(bad, 0).to(tl.float32))
    if NORM or MEASURE:
        in_norm = tl.load(row + COLUMNS - 3)
        square = tl.where(in_norm != 0, tl.sum(total, 0), 0.0)
        if NORM:
            tl.store(squares + program, square)
        if MEASURE:
            tl.store(measures + 4 * program, tl.max(largest, 0).to(tl.float64))
            tl.store(measures + 4 * program + 1, tl.sum(nonzeros, 0).to(tl.float64))
            tl.store(measures + 4 * program + 2, tl.sum(flushed, 0).to(tl.float64))
            tl.store(measures + 4 * program + 3, square)


@jit
def _add(
    sums, x, rejected, live, FRESH: tl.constexpr, HAS_REJECT: tl.constexpr, MASKED: tl.constexpr
):
    """Add the block ``x`` to the sums at these pointers; 1 for each that was finite, and is not."""
    if FRESH:
        old = tl.zeros_like(x)
        new = x
    else:
        old = load_if_live(sums, live, MASKED)
        new = old + x
    if HAS_REJECT:
        new = tl.where(rejected, old, new)
    store_if_live(sums, new, live, MASKED)
    # A sum that was not finite before this gradient is not counted as its overflow.
    return not_finite(new) & (1 - not_finite(old))


@jit
def _plus_square(total, x):
    """``total + x * x``, in float64."""
    # One fused operation, since some accelerators have few float64 units. The square of a float32
    # is exact in float64, so fusing does not change the rounding.
    wide = x.to(tl.float64)
    return tl.fma(wide, wide, total)


@jit
def _measured(largest, nonzeros, flushed, x, BLOCK: tl.constexpr):
    """Add a block to the measures: largest magnitude, nonzero elements, and underflows."""
    # A thread reads at least four neighbours. It adds them to one total, to save registers.
    magnitude = tl.abs(tl.reshape(x, (BLOCK // 4, 4)))
    finite = tl.where(magnitude < float("inf"), magnitude, 0.0)
    largest = tl.maximum(largest, tl.max(finite, 1))
    nonzeros = nonzeros + tl.sum((finite > 0).to(tl.int32), 1)
    flushed = flushed + tl.sum(((finite > 0) & (finite <= 2.0**-25)).to(tl.int32), 1)
    return largest, nonzeros, flushed
