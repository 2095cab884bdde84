"""Sums over whole parameters, of what the pass ``reduce`` has written for each chunk."""

from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.language import kernel, tl
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.triton.launch import PARTS, Variant, variant_of
from ampopt_kernels.triton.table import Table

__all__ = ["sum_kernel", "sum_launch"]


def sum_launch(work: Work, parts: Tensor, sums: Tensor) -> tuple[Variant, int, dict[str, Any]]:
    """The variant, number of programs and arguments of the launch of ``sum_kernel``."""
    table = Table.of(work)
    spans = work.uploads.get("parts of rows", table.spans, torch.int32, work.device)
    arguments = {"parts": parts, "n_parts": table.n_chunks, "spans": spans, "sums": sums}
    variant = variant_of(sum_kernel, {"N_TERMS": len(parts), "PARTS": PARTS})
    return variant, len(work.rows), arguments


@kernel
def sum_kernel(parts, n_parts, spans, sums, N_TERMS: tl.constexpr, PARTS: tl.constexpr):
    """Sum the terms of one row over its chunks.

    ``sums[row, i] = sum(parts[i, begin:end])``. Writes ``sums`` only. One program for each row.

    Args:
        parts: float64, shape (N_TERMS, n_parts): what ``pass_kernel`` wrote.
        n_parts: the number of programs of that pass.
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
            total += tl.load(parts + i * n_parts + at, mask=at < end, other=0.0)
        tl.store(sums + row.to(tl.int64) * N_TERMS + i, tl.sum(total, 0))
