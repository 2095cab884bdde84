"""Reduce: sum the terms of a rule over each chunk, and then over each parameter.

The order of summation is fixed, so a sum has the same bits in every run. The CPU backends sum in
another order, and their sums differ by a few ulp of float64. The difference shows in scalar states
kept in float64, such as NovoGrad's ``exp_avg_sq``, and in float64 parameters; seldom in float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.language import jit, kernel, tl
from ampopt_kernels.triton.chunks import chunk_of, end_of, numbers_of, streams_of, values_of
from ampopt_kernels.triton.codecs import decoding_arguments, scales_at
from ampopt_kernels.triton.launch import PARTS, TRITON_DTYPES
from ampopt_kernels.triton.low_bits import with_master
from ampopt_kernels.triton.row_column_factors import factors_of, load_factors
from ampopt_kernels.triton.table import Table, state_columns
from ampopt_kernels.work import Work

__all__ = ["count_terms", "reduce_kernel", "reduce_launches", "sum_arguments", "sum_kernel"]


def count_terms(work: Work) -> int:
    """How many terms the rule sums over each row."""
    assert work.rule is not None
    return work.rule.widths(len(work.hyper[0])).terms


def reduce_launches(
    work: Work, coefficients: Tensor, h: Tensor, sums: Tensor
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of programs and the arguments of each launch of ``reduce_kernel``."""
    rule, table = work.rule, Table.of(work)
    assert rule is not None
    for group in table.launches:
        row = group.like
        n = 2 + len(row.state) + (row.low is not None)
        yield (
            group.programs,
            {
                **table.arguments_of(group),
                "coefficients": coefficients,
                "h_table": h,
                "sums": sums,
                "RULE": rule.reduce,
                "FLAGS": row.flags,
                "DTYPES": tuple(TRITON_DTYPES[dtype] for dtype in group.dtypes[:n]),
                "ALIGNS": group.aligns[:n],
                "N_H": h.shape[1],
                "N_TERMS": count_terms(work),
                "OF_ROWS": () if row.row_column_means is None else row.row_column_means.of_rows,
                "EVEN": group.even,
                "FACTORS": len(row.dtypes),
                **decoding_arguments(row.codecs, n),
                "LOW": row.low is not None,
                "SCALES": 2 + state_columns(rule),
                "CHUNK": table.chunk,
            },
        )


def sum_arguments(work: Work, parts: Tensor, sums: Tensor) -> dict[str, Any]:
    """The arguments of ``sum_kernel``, which sums what ``reduce_kernel`` wrote over each row."""
    spans = work.uploads.get("parts of rows", Table.of(work).spans, torch.int32, work.device)
    terms = {"N_TERMS": count_terms(work), "PARTS": PARTS}
    return {"parts": parts, "spans": spans, "sums": sums, **terms}


@kernel
def reduce_kernel(
    table,
    blocks,
    first,
    coefficients,
    h_table,
    sums,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    N_H: tl.constexpr,
    N_TERMS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    FACTORS: tl.constexpr,
    CODECS: tl.constexpr,
    DECODES: tl.constexpr,
    LOW: tl.constexpr,
    SOURCES: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the terms of ``RULE`` over one chunk of one parameter; return at once if it is skipped.

    ``sums[program, i] = sum(RULE(param, grad * inverse_scale * clip, state, h, FLAGS)[i])``, in
    float64. Writes ``sums`` only. One program for each chunk, and launches as ``update_kernel``
    has.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter; see ``table.py``.
        blocks: int32, shape (programs of all launches, 2): row and chunk of each program.
        first: the number of this launch's first program in ``blocks``.
        coefficients: float64, shape (3,): skip (more than 0 to return at once), the reciprocal of
            the loss scale, and the clip coefficient.
        h_table: float64, shape (rows, N_H): the scalars of each row, which ``control_kernel``
            wrote.
        sums: float64, shape (programs of all launches, N_TERMS), written.
        RULE: the rule's ``reduce``.
        FLAGS: tuple of bool, the rule's flags.
        DTYPES: dtypes of the gradient, the parameter, each elementwise state, and the low bits if
            there are any.
        COMPUTE: the arithmetic dtype, float32 or float64.
        ALIGNS: for each of ``DTYPES``, a power of two in bytes that divides the addresses.
        N_H: the number of scalars that ``RULE`` takes as ``h``.
        N_TERMS: the number of terms that ``RULE`` returns.
        OF_ROWS: tuple of bool, one for each factor of a matrix: true if it has one value for each
            row of the matrix, false if one for each column; see ``row_column_factors.py``.
        EVEN: a number that divides the row length of every matrix with such factors.
        FACTORS: the column of ``table`` with the address of the first factor.
        CODECS: for each of ``DTYPES`` what is known of its codec when compiling; see ``codecs.py``.
        DECODES: for each of ``DTYPES`` the function ``decode`` of its codec, or ``None``.
        LOW: whether the last of ``DTYPES`` are the low bits of a 24-bit master.
        SOURCES: a text that changes with the source of a codec.
        SCALES: the column of ``table`` with the address of the first state's scales.
        COLUMNS: the width of ``table``.
        CHUNK: elements for each program, a multiple of ``BLOCK``.
        BLOCK: elements that a program reads at a time.
    """
    if tl.load(coefficients) > 0:
        return
    program = first + tl.program_id(0)
    index, row, start, numel = chunk_of(table, blocks, program, CHUNK, COLUMNS)
    inverse, clip, h = numbers_of(coefficients, h_table, index, N_H, COMPUTE)
    streams = streams_of(row, start, DTYPES, ALIGNS)
    end = end_of(row, start, numel, CHUNK)
    whole = end // BLOCK * BLOCK
    factors_at, place = factors_of(row, start, OF_ROWS, FACTORS, COMPUTE, EVEN)
    scales = scales_at(row + SCALES, start, CODECS)
    totals = ()
    for _ in tl.static_range(N_TERMS):
        totals = totals + (tl.zeros((BLOCK // 4,), tl.float64),)
    for offset in range(0, whole, BLOCK):
        totals = _with_block(
            totals, streams, offset, end, inverse, clip, h, factors_at, place,
            scales, RULE, FLAGS, DTYPES, COMPUTE, N_TERMS, OF_ROWS, EVEN, CODECS, DECODES, LOW,
            False, BLOCK,
        )  # fmt: skip
    if whole < end:
        totals = _with_block(
            totals, streams, whole, end, inverse, clip, h, factors_at, place,
            scales, RULE, FLAGS, DTYPES, COMPUTE, N_TERMS, OF_ROWS, EVEN, CODECS, DECODES, LOW,
            True, BLOCK,
        )  # fmt: skip
    for i in tl.static_range(N_TERMS):
        tl.store(sums + program.to(tl.int64) * N_TERMS + i, tl.sum(totals[i], 0))


@jit
def _with_block(
    totals,
    streams,
    offset,
    end,
    inverse,
    clip,
    h,
    factors,
    place,
    scales,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    N_TERMS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    CODECS: tl.constexpr,
    DECODES: tl.constexpr,
    LOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``totals`` with the terms of ``BLOCK`` more elements."""
    at = offset + tl.arange(0, BLOCK)
    live = at < end
    values = values_of(
        streams, at, live, scales, offset, end, COMPUTE, len(DTYPES), CODECS, DECODES, MASKED, BLOCK
    )
    grad = values[0] * inverse * clip  # pyright: ignore[reportGeneralTypeIssues]
    param, state = with_master(values, LOW, DTYPES)
    state = state + load_factors(factors, place, at, live, OF_ROWS, EVEN, MASKED)
    terms = RULE(param, grad, state, h, FLAGS)  # pyright: ignore
    new = ()
    for i in tl.static_range(N_TERMS):
        wide = terms[i].to(tl.float64)
        if MASKED:
            wide = tl.where(live, wide, 0.0)
        # A thread reads at least four neighbours. It adds them to one total, to save registers.
        new = new + (totals[i] + tl.sum(tl.reshape(wide, (BLOCK // 4, 4)), 1),)
    return new


@kernel
def sum_kernel(parts, spans, sums, N_TERMS: tl.constexpr, PARTS: tl.constexpr):
    """Sum the terms of one row over its chunks.

    ``sums[row, i] = sum(parts[begin:end, i])``. Writes ``sums`` only. One program for each row.

    Args:
        parts: float64, shape (programs, N_TERMS): what ``reduce_kernel`` wrote.
        spans: int32, shape (rows, 2): ``begin`` and ``end`` of each row in ``parts``.
        sums: float64, shape (rows, N_TERMS), written.
        N_TERMS: the number of terms of the rule.
        PARTS: entries of ``parts`` that are read at a time.
    """
    row = tl.program_id(0)
    begin, end = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    for i in tl.static_range(N_TERMS):
        total = tl.zeros((PARTS,), tl.float64)
        for start in range(begin, end, PARTS):
            at = start + tl.arange(0, PARTS)
            total += tl.load(parts + at.to(tl.int64) * N_TERMS + i, mask=at < end, other=0.0)
        tl.store(sums + row.to(tl.int64) * N_TERMS + i, tl.sum(total, 0))
