"""Sums over the rows, or the columns, of matrices, for rules that average over them.

A *line* is a row or a column. One launch sums one term over all matrices of one kind, of any
shapes. Each program sums a tile: some neighbouring lines, and of each line some elements. Where
several programs share a line, their sums are added afterwards in a fixed order, so a sum has the
same bits in every run.
"""

import math
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.language import kernel, tl
from ampopt_kernels.state import shape_of_lines
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.triton.chunks import numbers_of, streams_of
from ampopt_kernels.triton.codecs import scales_at
from ampopt_kernels.triton.launch import Variant, variant_of
from ampopt_kernels.triton.low_bits import with_master
from ampopt_kernels.triton.row_layout import layout_of
from ampopt_kernels.triton.table import EVEN, Table

__all__ = ["Tiles", "line_kernel"]

SHORT = 4
"""Elements of a block along the dimension that is strided in memory.

The other side of the block is contiguous, so that its loads are wide.
"""
BLOCKS = 1 << 4
"""The least number of blocks that a program sums along its lines."""


@dataclass(frozen=True)
class Tiles:
    """All sums over lines of one step, and the tiles that they are summed in.

    Attributes:
        parts: for each stack of the work and each term, where the sums of its tiles are: a slice,
            and the shape (matrices, programs that share a line, *shape of the lines).
        launches: for each launch of ``line_kernel``, the variant, the number of programs, and the
            tiles.
        size: the number of sums.
    """

    parts: list[list[tuple[slice, tuple[int, ...]]]]
    launches: list[tuple[Variant, int, Tensor]]
    size: int

    @classmethod
    def of(cls, work: Work) -> "Tiles":
        """The tiles of ``work``, made once for each table."""
        table = Table.of(work)
        if table.tiles is None:
            table.tiles = _divided(work, table)
        return table.tiles

    def add_up(self, sums: Tensor, work: Work) -> None:
        """Write the sums of whole lines to the ``sums`` of the line stacks of ``work``.

        Args:
            sums: float64, shape (size,): what ``line_kernel`` wrote.
            work: the work that the tiles are of.
        """
        for stack, parts in zip(work.line_stacks, self.parts, strict=True):
            for into, (at, shape) in zip(stack.sums, parts, strict=True):
                torch.sum(sums[at].view(shape), 1, out=into)


def _divided(work: Work, table: Table) -> Tiles:
    """Divide the matrices of ``work`` into tiles."""
    rule = work.rule
    assert rule is not None
    of_all = {
        "RULE": rule.averages,
        "N_H": rule.widths(len(work.hyper[0])).reduce,
        "SCALES": table.first_scale,
        "COLUMNS": table.columns,
    }
    stacks: list[list[tuple[slice, tuple[int, ...]]]] = []
    tiles: dict[Variant, array] = {}
    size = 0
    for members in (stack.members for stack in work.line_stacks):
        row = work.rows[members[0]]
        own: Any = row.row_column_means
        m, n = own.shape[-2:]
        layouts = {}
        for aligned in {table.aligned[index] for index in members}:
            align, even = (16, EVEN) if aligned and n % EVEN == 0 else (1, 1)
            layouts[aligned] = layout_of(row, (align,) * len(row.dtypes), even, row.compute_dtype)
        stacks.append([])
        for term, over in enumerate(own.over):
            of_rows, shape = over == "rows", shape_of_lines(own.shape, over)
            length, lines = n if of_rows else m, math.prod(shape)
            wide = of_rows and SHORT * SHORT * n >= table.block
            block = (SHORT, table.block // SHORT) if wide else (table.block // SHORT, SHORT)
            span = max(table.chunk // block[0], BLOCKS * block[1])
            of_tiles = {"TERM": term, "SPAN": span, "LINES": block[0], "ALONG": block[1]}
            parts, first = max(1, -(-length // span)), size
            variants = {
                aligned: variant_of(line_kernel, {**of_all, "ROW": layout, **of_tiles})
                for aligned, layout in layouts.items()
            }
            for index in members:
                variant = variants[table.aligned[index]]
                for start in range(0, parts * span, span):
                    for line in range(0, lines if length else 0, block[0]):
                        tile = index, line, start, size + line
                        tiles.setdefault(variant, array("q")).extend(tile)
                    size += lines
            stacks[-1].append((slice(first, size), (len(members), parts, *shape)))
    launches = []
    for variant, own in tiles.items():
        name = f"tiles of lines, launch {len(launches)}"
        on_device = work.uploads.get(name, own, torch.int64, work.device)
        launches.append((variant, len(own) // 4, on_device))
    return Tiles(stacks, launches, size)


@kernel
def line_kernel(
    table,
    tiles,
    coefficients,
    h_table,
    sums,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    N_H: tl.constexpr,
    TERM: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    LINES: tl.constexpr,
    ALONG: tl.constexpr,
):
    """Sum one term of ``RULE`` along the lines of one tile; return at once if the step is skipped.

    ``sums[line] = sum(RULE(param, grad * inverse_scale * clip, state, h, ROW.flags)[TERM])`` over
    elements of the line, in float64. Writes ``sums`` only. One program for each tile.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter; see ``table.py``.
        tiles: int64, shape (programs, 4): row, first line, first element along the line, and index
            of the first sum.
        coefficients: float64, shape (3,): skip (more than 0 to return at once), the reciprocal of
            the loss scale, and the clip coefficient.
        h_table: float64, shape (rows, N_H): the scalars of each row, which ``control_kernel``
            wrote.
        sums: float64, shape (sums of all tiles,), written.
        RULE: the rule's ``averages``.
        ROW: the :class:`RowLayout` of the rows.
        N_H: the number of scalars that ``RULE`` takes as ``h``.
        TERM: the index of the term among those that ``RULE`` returns.
        SCALES: the column of ``table`` with the address of the first state's scales.
        COLUMNS: the width of ``table``.
        SPAN: elements of a line for each program, a multiple of ``ALONG``.
        LINES: lines that a program sums.
        ALONG: elements of each line that it reads at a time.
    """
    if tl.load(coefficients) > 0:
        return
    tile = tiles + 4 * tl.program_id(0).to(tl.int64)
    index = tl.load(tile)
    row = table + index * COLUMNS
    inverse, clip, h = numbers_of(coefficients, h_table, index, N_H, ROW.compute)
    FLAGS: tl.constexpr = ROW.flags
    BY: tl.constexpr = ROW.even
    sizes = row + len(ROW.dtypes) + len(ROW.over)
    m = tl.load(sizes)
    n = tl.multiple_of(tl.load(sizes + 1), BY)
    line = tl.multiple_of(tl.load(tile + 1), LINES) + tl.arange(0, LINES)
    begin = tl.multiple_of(tl.load(tile + 2), ALONG)
    numel = tl.load(row + COLUMNS - 1)
    if ROW.over[TERM] == "rows":
        length = n
        step = 1
        lines = numel // n
        start = line * n
    else:
        length = m
        step = n
        lines = tl.multiple_of(numel // m, BY)
        start = line + line // n * (m - 1) * n
        start = tl.max_contiguous(tl.multiple_of(start, BY), BY)
    streams = streams_of(row, None, ROW)
    scales = scales_at(row + SCALES, 0, ROW)
    # Without a gradient, nothing is read, and the sums are 0.
    end = tl.where(tl.load(row) != 0, tl.minimum(begin + SPAN, length), begin)
    there = line < lines
    total = tl.zeros((LINES, ALONG), tl.float64)
    for offset in range(begin, end, ALONG):
        along = offset + tl.arange(0, ALONG)
        at = start[:, None] + along[None, :] * step
        live = there[:, None] & (along < end)[None, :]
        values = ()
        for i in tl.static_range(len(ROW.dtypes) - ROW.has_copy):
            # A stream that no term uses costs nothing: the compiler removes the unused load.
            x = tl.load(streams[i] + at, mask=live, other=0)
            if ROW.codecs[i] is not None:
                x = ROW.codecs[i].decode(x.to(tl.float32))
                if ROW.codecs[i].block > 1:
                    x *= tl.load(scales[i] + at // ROW.codecs[i].block, mask=live, other=0.0)
            values = values + (x.to(ROW.compute),)
        grad = values[0] * inverse * clip  # pyright: ignore
        param, state = with_master(values, ROW)
        term = RULE(param, grad, state, h, FLAGS)[TERM]  # pyright: ignore
        total += tl.where(live, term.to(tl.float64), 0.0)
    where = sums + tl.load(tile + 3) + tl.arange(0, LINES)
    tl.store(where, tl.sum(total, 1), mask=there)
