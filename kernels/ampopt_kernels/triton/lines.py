"""Sums over the rows, or the columns, of matrices, for rules that keep averages over them.

A *line* is a row or a column. One launch sums one term over all matrices of one kind, of any
shapes. Each program sums a tile: some neighbouring lines, and of each line some elements. Where
several programs share a line, their sums are added afterwards in a fixed order, so a sum has the
same bits in every run.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.language import kernel, tl
from ampopt_kernels.row_column_states import EVEN, LineSums, RowColumnStates, advance_stack
from ampopt_kernels.triton.chunks import numbers_of, streams_of
from ampopt_kernels.triton.launch import TRITON_DTYPES
from ampopt_kernels.triton.low_bits import with_master
from ampopt_kernels.triton.table import Table
from ampopt_kernels.work import ParamRow, Work

__all__ = [
    "LineLaunch",
    "Lines",
    "Stack",
    "SumsLayout",
    "advance_row_column_states",
    "line_kernel",
    "line_launches",
]

SHORT = 4
"""Elements of a block along the dimension that is strided in memory.

The other side of the block is contiguous, so that its loads are wide.
"""
BLOCKS = 1 << 4
"""The least number of blocks that a program sums along its lines."""


class SumsLayout(NamedTuple):
    """Where the sums of one term over a stack are: a view of shape ``(matrices, parts, lines)``.

    Attributes:
        start: the first element.
        parts: the number of programs that share a line.
        lines: the number of lines of a matrix.
    """

    start: int
    parts: int
    lines: int


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape and kind, whose averages are updated together.

    A sharded parameter is a stack of one matrix.

    Attributes:
        rows: the indices of the matrices among the rows of the work.
        members: the row and column statistics of each matrix.
        flags: the rule's flags.
        sums: where the sums of each term are.
    """

    rows: list[int]
    members: list[RowColumnStates]
    flags: tuple[bool, ...]
    sums: list[SumsLayout]


@dataclass(frozen=True)
class LineLaunch:
    """One launch: programs ``start`` to ``stop`` of the tiles.

    Attributes:
        start: its first program.
        stop: the program after its last.
        like: one of its rows; all have the same dtypes and flags.
        term: the index of the term that is summed.
        aligned: whether 16 bytes divide every address, and ``EVEN`` every row length.
        block: the lines, and the elements of each, that a program reads at a time.
        span: elements of a line that a program sums.
    """

    start: int
    stop: int
    like: ParamRow
    term: int
    aligned: bool
    block: tuple[int, int]
    span: int


@dataclass(frozen=True)
class Lines:
    """All sums over lines of one step.

    Attributes:
        stacks: the matrices.
        launches: the launches that sum them.
        tiles: for each program its row, first line, first element along the line, and the index of
            its first sum.
        size: the number of sums.
    """

    stacks: list[Stack]
    launches: list[LineLaunch]
    tiles: list[int]
    size: int

    @staticmethod
    def of(rows: Sequence[ParamRow], aligned: Sequence[bool], chunk: int, block: int) -> "Lines":
        """Divide the matrices of ``rows`` into stacks and tiles.

        Args:
            rows: the rows of a work; those without row and column statistics are skipped.
            aligned: for each row, whether its addresses are multiples of 16 bytes.
            chunk: the number of elements of a program, at least.
            block: the number of elements that a program reads at a time.
        """
        of_kind: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            if (row_column_states := row.row_column_states) is not None:
                alone = None if row_column_states.shard is None else index
                layout = (row_column_states.parts, row_column_states.shape, row_column_states.size)
                key = (row.kind, aligned[index], *layout, alone)
                of_kind.setdefault(key, []).append(index)
        stacks: list[Stack] = []
        tiles: dict[Any, list[int]] = {}
        likes: dict[Any, ParamRow] = {}
        size = 0
        for (kind, is_aligned, *_), members in of_kind.items():
            first = rows[members[0]]
            row_column_states = first.row_column_states
            assert row_column_states is not None
            *_, m, n = row_column_states.shape
            sums = []
            for term, of_rows in enumerate(row_column_states.of_rows):
                length, lines = n if of_rows else m, row_column_states.lines(term)
                wide = of_rows and SHORT * SHORT * n >= block
                shape = (SHORT, block // SHORT) if wide else (block // SHORT, SHORT)
                span = max(chunk // shape[0], BLOCKS * shape[1])
                parts = max(1, -(-length // span))
                launch = (kind, is_aligned and row_column_states.is_even, term, shape, span)
                likes.setdefault(launch, first)
                tiles_of_launch = tiles.setdefault(launch, [])
                for i, index in enumerate(members if row_column_states.numel else ()):
                    for part in range(parts):
                        place = size + (i * parts + part) * lines
                        for line in range(0, lines, shape[0]):
                            tiles_of_launch += (index, line, part * span, place + line)
                sums.append(SumsLayout(size, parts, lines))
                size += len(members) * parts * lines
            of_members = [
                row.row_column_states for row in (rows[i] for i in members) if row.row_column_states
            ]
            stacks.append(Stack(members, of_members, first.flags, sums))
        launches: list[LineLaunch] = []
        flat: list[int] = []
        for launch, some in tiles.items():
            start = len(flat) // 4
            flat += some
            if some:
                _, is_even, *rest = launch
                stop = len(flat) // 4
                launches.append(LineLaunch(start, stop, likes[launch], rest[0], is_even, *rest[1:]))
        return Lines(stacks, launches, flat, size)

    def by_row(self, sums: Tensor) -> LineSums:
        """Add up the parts of each line.

        Args:
            sums: float64, shape (size,): what ``line_kernel`` wrote.
        """
        sums_by_row: LineSums = {}
        for stack in self.stacks:
            first, n = stack.members[0], len(stack.members)
            of_terms = sums_by_row[stack.rows[0]] = []
            for part, (start, parts, size) in zip(first.parts, stack.sums, strict=True):
                term = sums[start : start + n * parts * size].view(n, parts, size)
                of_terms.append(term.sum(1).view(n, *part.beside(first.shape)))
        return sums_by_row


def line_launches(
    work: Work, lines: Lines, coefficients: Tensor, h: Tensor, sums: Tensor
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of programs and the arguments of each launch of ``line_kernel``."""
    rule, table = work.rule, Table.of(work)
    assert rule is not None
    tiles = work.uploads.get("tiles of lines", lines.tiles, torch.int64, work.device)
    for group in lines.launches:
        row = group.like
        assert row.row_column_states is not None
        n = 2 + len(row.state) + (row.low is not None)
        yield (
            group.stop - group.start,
            {
                "table": table.rows,
                "tiles": tiles,
                "first": group.start,
                "coefficients": coefficients,
                "h_table": h,
                "sums": sums,
                "RULE": rule.averages,
                "FLAGS": row.flags,
                "DTYPES": tuple(TRITON_DTYPES[dtype] for dtype in row.dtypes[:n]),
                "COMPUTE": TRITON_DTYPES[row.compute_dtype],
                "ALIGNS": (16 if group.aligned else 1,) * n,
                "LOW": row.low is not None,
                "N_H": h.shape[1],
                "TERM": group.term,
                "OF_ROWS": row.row_column_states.of_rows[group.term],
                "SIZES": len(row.dtypes) + len(row.row_column_states.parts),
                "EVEN": EVEN if group.aligned else 1,
                "COLUMNS": table.columns,
                "SPAN": group.span,
                "LINES": group.block[0],
                "ALONG": group.block[1],
            },
        )


def advance_row_column_states(
    work: Work, lines: Lines, coefficients: Tensor, h: Tensor, sums: LineSums
) -> None:
    """Update the averages of rows and columns, and the factors made of them, unless it is skipped.

    Args:
        work: the rows of one device.
        lines: the lines of ``work``.
        coefficients: float64, shape (3,); see ``line_kernel``.
        h: float64, shape (rows, width): what ``before_reduce`` returned for each row.
        sums: the sums over lines, of whole parameters.
    """
    assert work.rule is not None
    skip = coefficients[0] > 0
    get = functools.partial(work.uploads.get, dtype=torch.int64, device=work.device)
    for number, stack in enumerate(lines.stacks):
        # Only matrices with a gradient: a mean over a larger stack may be rounded differently.
        present = [i for i, row in enumerate(stack.rows) if work.is_present(row)]
        if not present:
            continue
        rows, members = [stack.rows[i] for i in present], [stack.members[i] for i in present]
        numbers, of_stack = h, sums[stack.rows[0]]
        if len(rows) < len(work.rows):
            numbers = h[get(f"stack {number}", rows)]
        if len(rows) < len(stack.rows):
            places = get(f"present in stack {number}", present)
            of_stack = [sum_.index_select(0, places) for sum_ in of_stack]
        advance_stack(work.rule, members, stack.flags, of_stack, numbers, skip)


@kernel
def line_kernel(
    table,
    tiles,
    first,
    coefficients,
    h_table,
    sums,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    LOW: tl.constexpr,
    N_H: tl.constexpr,
    TERM: tl.constexpr,
    OF_ROWS: tl.constexpr,
    SIZES: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    LINES: tl.constexpr,
    ALONG: tl.constexpr,
):
    """Sum one term of ``RULE`` along the lines of one tile; return at once if the step is skipped.

    ``sums[line] = sum(RULE(param, grad * inverse_scale * clip, state, h, FLAGS)[TERM])`` over
    elements of the line, in float64. Writes ``sums`` only. One program for each tile.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter; see ``table.py``.
        tiles: int64, shape (programs of all launches, 4): row, first line, first element along the
            line, and index of the first sum.
        first: the number of this launch's first program in ``tiles``.
        coefficients: float64, shape (3,): skip (more than 0 to return at once), the reciprocal of
            the loss scale, and the clip coefficient.
        h_table: float64, shape (rows, N_H): the scalars of each row, which ``control_kernel``
            wrote.
        sums: float64, shape (sums of all tiles,), written.
        RULE: the rule's ``averages``.
        FLAGS: tuple of bool, the rule's flags.
        DTYPES: dtypes of the gradient, the parameter, each elementwise state, and the low bits if
            there are any.
        COMPUTE: the arithmetic dtype, float32 or float64.
        ALIGNS: for each of ``DTYPES``, a power of two in bytes that divides the addresses.
        LOW: whether the last of ``DTYPES`` are the low bits of a 24-bit master.
        N_H: the number of scalars that ``RULE`` takes as ``h``.
        TERM: the index of the term among those that ``RULE`` returns.
        OF_ROWS: whether lines are rows; otherwise they are columns.
        SIZES: the column of ``table`` with m, the rows of a matrix; the next has n, its columns.
        EVEN: a number that divides n.
        COLUMNS: the width of ``table``.
        SPAN: elements of a line for each program, a multiple of ``ALONG``.
        LINES: lines that a program sums.
        ALONG: elements of each line that it reads at a time.
    """
    if tl.load(coefficients) > 0:
        return
    tile = tiles + 4 * (first + tl.program_id(0)).to(tl.int64)
    index = tl.load(tile)
    row = table + index * COLUMNS
    inverse, clip, h = numbers_of(coefficients, h_table, index, N_H, COMPUTE)
    m = tl.load(row + SIZES)
    n = tl.multiple_of(tl.load(row + SIZES + 1), EVEN)
    line = tl.multiple_of(tl.load(tile + 1), LINES) + tl.arange(0, LINES)
    begin = tl.multiple_of(tl.load(tile + 2), ALONG)
    numel = tl.load(row + COLUMNS - 1)
    if OF_ROWS:
        length = n
        step = 1
        lines = numel // n
        start = line * n
    else:
        length = m
        step = n
        lines = tl.multiple_of(numel // m, EVEN)
        start = line + line // n * (m - 1) * n
        start = tl.max_contiguous(tl.multiple_of(start, EVEN), EVEN)
    streams = streams_of(row, 0, DTYPES, ALIGNS)
    # Without a gradient, nothing is read, and the sums are 0.
    end = tl.where(tl.load(row) != 0, tl.minimum(begin + SPAN, length), begin)
    there = line < lines
    total = tl.zeros((LINES, ALONG), tl.float64)
    for offset in range(begin, end, ALONG):
        along = offset + tl.arange(0, ALONG)
        at = start[:, None] + along[None, :] * step
        live = there[:, None] & (along < end)[None, :]
        values = ()
        for i in tl.static_range(len(DTYPES)):
            # A stream that no term uses costs nothing: the compiler removes the unused load.
            values = values + (tl.load(streams[i] + at, mask=live, other=0).to(COMPUTE),)
        grad = values[0] * inverse * clip  # pyright: ignore
        param, state = with_master(values, LOW, DTYPES)
        term = RULE(param, grad, state, h, FLAGS)[TERM]  # pyright: ignore
        total += tl.where(live, term.to(tl.float64), 0.0)
    where = sums + tl.load(tile + 3) + tl.arange(0, LINES)
    tl.store(where, tl.sum(total, 1), mask=there)
