"""Lines: sums over the rows, or columns, of matrices, which averages of a rule are made of.

A launch sums one term over all matrices of one kind, of whatever shapes. Its programs are tiles: so
many lines beside each other, and of each of them so many elements. The sums of a line that several
programs share are added up afterwards, so that no order of anything is left to chance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.language import kernel, tl
from ampopt_kernels.marginals import EVEN, LineSums, Marginals, advance_stack
from ampopt_kernels.triton.launch import TRITON_DTYPES
from ampopt_kernels.triton.table import Table
from ampopt_kernels.work import Row, Work

__all__ = [
    "LineLaunch",
    "Lines",
    "Stack",
    "Sums",
    "advance_marginals",
    "line_kernel",
    "line_launches",
]

SHORT = 4
"""Elements of the shorter side of a block: those of a line that are far from each other in memory.

The longer side has the others, which are next to each other and are read at once.
"""
BLOCKS = 1 << 4
"""Blocks along its lines that a program sums up at least."""


class Sums(NamedTuple):
    """Where the sums of one term over the matrices of a stack are: ``(matrices, parts, lines)``."""

    start: int
    parts: int
    lines: int


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape and kind, which are averaged together.

    A parameter that is spread over ranks is a stack by itself.

    Attributes:
        rows: their places in the work.
        members: their marginals.
        flags: of the rule.
        sums: of each term.
    """

    rows: list[int]
    members: list[Marginals]
    flags: tuple[bool, ...]
    sums: list[Sums]


@dataclass(frozen=True)
class LineLaunch:
    """Programs ``start`` to ``stop`` of the tiles.

    Attributes:
        like: a row of their kind.
        term: which term is summed up.
        aligned: whether 16 bytes divide every address, and ``EVEN`` the length of every row.
        block: lines, and elements of each, that are read at a time.
        span: elements of a line that a program sums up.
    """

    start: int
    stop: int
    like: Row
    term: int
    aligned: bool
    block: tuple[int, int]
    span: int


@dataclass(frozen=True)
class Lines:
    """What is to be summed up in one step.

    Attributes:
        stacks: what the sums are of.
        launches: that sum up.
        tiles: of each program the row, the first line, the first element of it, and where its sums
            begin.
        size: how many sums there are.
    """

    stacks: list[Stack]
    launches: list[LineLaunch]
    tiles: list[int]
    size: int

    @staticmethod
    def of(rows: Sequence[Row], aligned: Sequence[bool], chunk: int, block: int) -> "Lines":
        """Those of ``rows``.

        Args:
            rows: of a work.
            aligned: of each row, whether its addresses are multiples of 16 bytes.
            chunk: elements for each program, or more.
            block: elements at a time.
        """
        alike: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            if (own := row.marginals) is not None:
                alone = None if own.spread is None else index
                key = (row.kind, aligned[index], own.parts, own.shape, own.size, alone)
                alike.setdefault(key, []).append(index)
        stacks: list[Stack] = []
        tiles: dict[Any, list[int]] = {}
        likes: dict[Any, Row] = {}
        size = 0
        for (kind, is_aligned, *_), members in alike.items():
            first = rows[members[0]]
            own = first.marginals
            assert own is not None
            *_, m, n = own.shape
            sums = []
            for term, of_rows in enumerate(own.of_rows):
                length, lines = n if of_rows else m, own.lines(term)
                wide = of_rows and SHORT * SHORT * n >= block
                shape = (SHORT, block // SHORT) if wide else (block // SHORT, SHORT)
                span = max(chunk // shape[0], BLOCKS * shape[1])
                parts = max(1, -(-length // span))
                launch = (kind, is_aligned and own.is_even, term, shape, span)
                likes.setdefault(launch, first)
                mine = tiles.setdefault(launch, [])
                for i, index in enumerate(members if own.numel else ()):
                    for part in range(parts):
                        place = size + (i * parts + part) * lines
                        for line in range(0, lines, shape[0]):
                            mine += (index, line, part * span, place + line)
                sums.append(Sums(size, parts, lines))
                size += len(members) * parts * lines
            of_members = [row.marginals for row in (rows[i] for i in members) if row.marginals]
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
        """The sums over whole lines, from those that ``line_kernel`` has written.

        Args:
            sums: float64, (size,).
        """
        found: LineSums = {}
        for stack in self.stacks:
            first, n = stack.members[0], len(stack.members)
            of_terms = found[stack.rows[0]] = []
            for part, (start, parts, size) in zip(first.parts, stack.sums, strict=True):
                term = sums[start : start + n * parts * size].view(n, parts, size)
                of_terms.append(term.sum(1).view(n, *part.beside(first.shape)))
        return found


def line_launches(
    work: Work, lines: Lines, factors: Tensor, h: Tensor, sums: Tensor
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The programs and arguments of each launch of the line kernel."""
    rule, table = work.rule, Table.of(work)
    assert rule is not None
    tiles = work.uploads.get("tiles of lines", lines.tiles, torch.int64, work.device)
    for group in lines.launches:
        row = group.like
        assert row.marginals is not None
        n = 2 + len(row.state)
        yield (
            group.stop - group.start,
            {
                "table": table.rows,
                "tiles": tiles,
                "first": group.start,
                "factors": factors,
                "h_table": h,
                "sums": sums,
                "RULE": rule.averages,
                "FLAGS": row.flags,
                "DTYPES": tuple(TRITON_DTYPES[dtype] for dtype in row.dtypes[:n]),
                "COMPUTE": TRITON_DTYPES[row.compute_dtype],
                "ALIGNS": (16 if group.aligned else 1,) * n,
                "N_H": h.shape[1],
                "TERM": group.term,
                "OF_ROWS": row.marginals.of_rows[group.term],
                "SIZES": len(row.dtypes) + len(row.marginals.parts),
                "EVEN": EVEN if group.aligned else 1,
                "COLUMNS": table.columns,
                "SPAN": group.span,
                "LINES": group.block[0],
                "ALONG": group.block[1],
            },
        )


def advance_marginals(work: Work, lines: Lines, factors: Tensor, h: Tensor, sums: LineSums) -> None:
    """By what ``before_reduce`` gave for each row, and the sums over its lines."""
    assert work.rule is not None
    skip = factors[0] > 0
    for number, stack in enumerate(lines.stacks):
        numbers = h
        if len(stack.rows) < len(work.rows):
            places = work.uploads.get(f"stack {number}", stack.rows, torch.int64, work.device)
            numbers = h[places]
        of_stack = sums[stack.rows[0]]
        advance_stack(work.rule, stack.members, stack.flags, of_stack, numbers, skip)


@kernel
def line_kernel(
    table,
    tiles,
    first,
    factors,
    h_table,
    sums,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
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
    """Sum one term of ``RULE`` along some lines; nothing if the step is skipped.

    Args:
        table: int64, one row of ``COLUMNS`` a parameter; see ``table``.
        tiles: int64, (row, first line, first element of it, place of the sums) for each program.
        first: the first program that is this launch's.
        factors: float64, (3,): skip, reciprocal of the scale, clip coefficient.
        h_table: float64, (rows, N_H), of control.
        sums: float64, written at the place of the program.
        RULE: the ``averages`` of the rule.
        FLAGS: tuple of booleans for the rule.
        DTYPES: of gradient, parameter and each elementwise state.
        COMPUTE: the arithmetic dtype.
        ALIGNS: powers of two, bytes, that divide the addresses of each.
        N_H: scalars that ``RULE`` takes.
        TERM: which of its terms.
        OF_ROWS: whether lines are rows, or else columns.
        SIZES: the column of the table with m, and behind it n.
        EVEN: a number that divides n.
        COLUMNS: width of the table.
        SPAN: elements of a line for each program, a multiple of ``ALONG``.
        LINES: lines at a time.
        ALONG: elements of each at a time.
    """
    if tl.load(factors) > 0:
        return
    tile = tiles + 4 * (first + tl.program_id(0)).to(tl.int64)
    index = tl.load(tile)
    row = table + index * COLUMNS
    inverse = tl.load(factors + 1).to(COMPUTE)
    clip = tl.load(factors + 2).to(COMPUTE)
    h = ()
    for i in tl.static_range(N_H):
        h = h + (tl.load(h_table + index * N_H + i).to(COMPUTE),)
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
    streams = ()
    for i in tl.static_range(len(DTYPES)):
        stream = tl.load(row + i).to(tl.pointer_type(DTYPES[i]))
        streams = streams + (tl.multiple_of(stream, tl.constexpr(ALIGNS[i])),)  # pyright: ignore
    end = tl.minimum(begin + SPAN, length)
    there = line < lines
    total = tl.zeros((LINES, ALONG), tl.float64)
    for offset in range(begin, end, ALONG):
        along = offset + tl.arange(0, ALONG)
        at = start[:, None] + along[None, :] * step
        live = there[:, None] & (along < end)[None, :]
        values = ()
        for i in tl.static_range(len(DTYPES)):
            # What the term is not made of is not read: the compiler drops a load that nobody uses.
            values = values + (tl.load(streams[i] + at, mask=live, other=0).to(COMPUTE),)
        grad = values[0] * inverse * clip  # pyright: ignore
        term = RULE(values[1], grad, values[2:], h, FLAGS)[TERM]  # pyright: ignore
        total += tl.where(live, term.to(tl.float64), 0.0)
    where = sums + tl.load(tile + 3) + tl.arange(0, LINES)
    tl.store(where, tl.sum(total, 1), mask=there)
