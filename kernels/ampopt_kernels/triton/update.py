"""Update: apply the rule to every parameter and its states, in one pass, or change nothing.

Float32 results have the bits that the eager backend computes from the same scalars: products and
sums are not fused (``launch.options``), and quotients and square roots are correctly rounded. In
float64 so are those of this kernel, while torch's square root on a CPU, and so the eager backend,
may be an ulp off (``torch_language.sqrt``). The scalars of a rule may differ by a few ulp where it
computes them by ``language.power``, or from sums (``reduce.py``).
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampopt_kernels.language import jit, kernel, rounded, tl
from ampopt_kernels.low_bits import split
from ampopt_kernels.stochastic import rounded_stochastically
from ampopt_kernels.triton.chunks import (
    chunk_of,
    end_of,
    numbers_of,
    store_if_live,
    streams_of,
    values_of,
)
from ampopt_kernels.triton.codecs import (
    arguments_of,
    scales_at,
    store_codes,
    uniform_of,
)
from ampopt_kernels.triton.launch import TRITON_DTYPES
from ampopt_kernels.triton.low_bits import with_master
from ampopt_kernels.triton.row_column_factors import factors_of, load_factors
from ampopt_kernels.triton.table import Table, state_columns
from ampopt_kernels.work import Work

__all__ = ["update_kernel", "update_launches"]


def update_launches(
    work: Work, coefficients: Tensor, h: Tensor
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of programs and the arguments of each launch of ``update_kernel``."""
    rule, table = work.rule, Table.of(work)
    assert rule is not None
    for group in table.launches:
        row = group.like
        yield (
            group.programs,
            {
                **table.arguments_of(group),
                "CHUNK": table.chunk,
                "coefficients": coefficients,
                "h_table": h,
                "RULE": rule.update,
                "FLAGS": row.flags,
                "DTYPES": tuple(TRITON_DTYPES[dtype] for dtype in group.dtypes),
                "HAS_COPY": row.copy is not None,
                "LOW": row.low is not None,
                "STOCHASTIC": row.rounds,
                "KEYED": row.keys is not None,
                "DRAWS": rule.draws,
                "JUMPS": len(row.places.jumps),
                "ALIGNS": group.aligns,
                "N_H": h.shape[1],
                "OF_ROWS": () if row.row_column_means is None else row.row_column_means.of_rows,
                "EVEN": group.even,
                **arguments_of(row.codecs, len(group.dtypes)),
                "SCALES": 2 + state_columns(rule),
                # Half as many elements, or Adam would need 160 registers.
                "BLOCK": table.block // 2 if row.is_coded else table.block,
            },
        )


@kernel
def update_kernel(
    table,
    blocks,
    first,
    coefficients,
    h_table,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    HAS_COPY: tl.constexpr,
    LOW: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DRAWS: tl.constexpr,
    JUMPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGNS: tl.constexpr,
    N_H: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    CODECS: tl.constexpr,
    DECODES: tl.constexpr,
    ENCODES: tl.constexpr,
    SOURCES: tl.constexpr,
    KEYED: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply ``RULE`` to one chunk of one parameter; return at once if the step is skipped.

    ``param, state = RULE(param, grad * inverse_scale * clip, state, h, FLAGS)``, elementwise.
    Writes the parameter, its elementwise states and its low-precision copy, at the addresses in
    ``table``.

    One program for each chunk. A launch has the rows of one kind: the same dtypes, flags and
    alignment.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter; see ``table.py``.
        blocks: int32, shape (programs of all launches, 2): row and chunk of each program.
        first: the number of this launch's first program in ``blocks``.
        coefficients: float64, shape (3,): skip (more than 0 to return at once), the reciprocal of
            the loss scale, and the clip coefficient.
        h_table: float64, shape (rows, N_H): the scalars of each row, which ``control_kernel``
            wrote.
        RULE: the rule's ``update``.
        FLAGS: tuple of bool, the rule's flags.
        DTYPES: dtypes of the gradient, the parameter, each elementwise state, and the copy or the
            low bits if there are any: the first columns of ``table``, in this order.
        HAS_COPY: whether the last of ``DTYPES`` is a low-precision copy of the parameter, which is
            only written.
        LOW: whether the last of ``DTYPES`` are the low bits of a 24-bit master; see
            ``ampopt_kernels.low_bits``.
        STOCHASTIC: whether the parameter, in bfloat16, is rounded stochastically.
        DRAWS: whether the rule draws random numbers, and so takes positions of elements.
        JUMPS: the number of gaps in the positions of a row's elements; see
            ``ampopt_kernels.places``.
        COMPUTE: the arithmetic dtype, float32 or float64.
        ALIGNS: for each of ``DTYPES``, a power of two in bytes that divides the addresses.
        N_H: the number of scalars that ``RULE`` takes as ``h``.
        OF_ROWS: tuple of bool, one for each factor of a matrix: true if it has one value for each
            row of the matrix, false if one for each column; see ``row_column_factors.py``.
        EVEN: a number that divides the row length of every matrix with such factors.
        CODECS: for each of ``DTYPES`` what is known of its codec when compiling; see ``codecs.py``.
        DECODES: for each of ``DTYPES`` the function ``decode`` of its codec, or ``None``.
        ENCODES: for each of ``DTYPES`` the function ``encode`` of its codec, or ``None``.
        SOURCES: a text that changes with the source of a codec.
        KEYED: whether the row has a random key.
        SCALES: the column of ``table`` with the address of the first state's scales.
        COLUMNS: the width of ``table``.
        CHUNK: elements for each program, a multiple of ``BLOCK``. A compile-time constant, as
            float64 rules would spill registers if it were not.
        BLOCK: elements that a program reads at a time.
    """
    if tl.load(coefficients) > 0:
        return
    program = first + tl.program_id(0)
    index, row, start, numel = chunk_of(table, blocks, program, CHUNK, COLUMNS)
    inverse, clip, h = numbers_of(coefficients, h_table, index, N_H, COMPUTE)
    streams = streams_of(row, start, DTYPES, ALIGNS)

    key = tl.full((), 0, tl.int64)
    position = tl.load(row + COLUMNS - 5) + start
    jumps = _jumps_of(row + COLUMNS - 6, start, JUMPS, CHUNK)
    factors_at, place = factors_of(row, start, OF_ROWS, len(DTYPES), COMPUTE, EVEN)
    scales = scales_at(row + SCALES, start, CODECS)
    if KEYED:
        key = tl.load(tl.load(row + COLUMNS - 6).to(tl.pointer_type(tl.int64)))

    end = end_of(row, start, numel, CHUNK)
    whole = end // BLOCK * BLOCK
    for offset in range(0, whole, BLOCK):
        _update_block(
            streams,
            offset,
            end,
            inverse,
            clip,
            h,
            key,
            position,
            jumps,
            factors_at,
            place,
            scales,
            RULE,
            FLAGS,
            DTYPES,
            HAS_COPY,
            LOW,
            STOCHASTIC,
            DRAWS,
            COMPUTE,
            OF_ROWS,
            EVEN,
            CODECS,
            DECODES,
            ENCODES,
            False,
            BLOCK,
        )
    if whole < end:
        _update_block(
            streams, whole, end, inverse, clip, h, key, position, jumps, factors_at, place,
            scales, RULE, FLAGS, DTYPES, HAS_COPY, LOW, STOCHASTIC, DRAWS, COMPUTE, OF_ROWS, EVEN,
            CODECS, DECODES, ENCODES, True, BLOCK,
        )  # fmt: skip


@jit
def _update_block(
    streams,
    offset,
    end,
    inverse,
    clip,
    h,
    key,
    position,
    jumps,
    factors,
    place,
    scales,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    DTYPES: tl.constexpr,
    HAS_COPY: tl.constexpr,
    LOW: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DRAWS: tl.constexpr,
    COMPUTE: tl.constexpr,
    OF_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    CODECS: tl.constexpr,
    DECODES: tl.constexpr,
    ENCODES: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply the rule to ``BLOCK`` elements, and store them; see the kernel."""
    at = offset + tl.arange(0, BLOCK)
    live = at < end
    values = values_of(
        streams, at, live, scales, offset, end, COMPUTE, len(DTYPES) - HAS_COPY, CODECS, DECODES,
        MASKED, BLOCK,
    )  # fmt: skip
    # Two products, so that clipping rounds as it does for gradients that `unscale` has divided.
    grad = values[0] * inverse * clip  # pyright: ignore[reportGeneralTypeIssues]
    old, state = with_master(values, LOW, DTYPES)
    state = state + load_factors(factors, place, at, live, OF_ROWS, EVEN, MASKED)
    places = _places_of(position, jumps, at)
    if DRAWS:
        param, state = RULE(old, grad, state, h, FLAGS, (places, old))  # pyright: ignore
    else:
        param, state = RULE(old, grad, state, h, FLAGS)  # pyright: ignore
    new = (param,) + state
    if HAS_COPY:
        new = new + (param,)
    if LOW:
        top, steps = split(param, uniform_of(places, key, 1), DTYPES[1] == tl.float16)  # pyright: ignore
        new = (top,) + state + (steps,)
    for i in tl.static_range(len(new)):
        if len(CODECS[i + 1]) > 0:
            store_codes(
                streams[i + 1], new[i], uniform_of(places, key, i + 1), scales, offset, end, i + 1,
                CODECS, ENCODES, DTYPES[i + 1], MASKED, BLOCK,
            )  # fmt: skip
        else:
            value = _rounded(new[i], places, key, DTYPES[i + 1], STOCHASTIC and i == 0)
            store_if_live(streams[i + 1] + at, value, live, MASKED)


@jit
def _rounded(x, position, key, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """``x`` rounded to ``DTYPE``, to nearest or stochastically."""
    if STOCHASTIC:
        x = rounded_stochastically(x, position, key)
    return rounded(x, DTYPE)


@jit
def _jumps_of(end, start, JUMPS: tl.constexpr, CHUNK: tl.constexpr):
    """The gaps in the positions of one chunk; see ``ampopt_kernels.places``.

    Args:
        end: pointer into the table of addresses, to the column after the row's last jump.
        start: the first element of the chunk.
        JUMPS: the number of jumps of the row.
        CHUNK: elements of a chunk.

    Returns:
        For each jump a tuple: the positions skipped before the chunk, the positions that each gap
        skips, and the phase and the period within the chunk, as int32, where division is fast.
    """
    jumps = ()
    for i in tl.static_range(JUMPS):
        period = tl.load(end - 3 * (JUMPS - i))
        at = start + tl.load(end - 3 * (JUMPS - i) + 1)
        size = tl.load(end - 3 * (JUMPS - i) + 2)
        # A period that is longer than a chunk ends within it at most once.
        short = tl.minimum(period, CHUNK)
        phase = short - tl.minimum(period - at % period, short)
        jumps = jumps + ((at // period * size, size, phase.to(tl.int32), short.to(tl.int32)),)
    return jumps


@jit
def _places_of(position, jumps, at):
    """The positions of some elements of a chunk in the whole parameter, int64.

    Args:
        position: the position of the chunk's first element, if there were no gaps.
        jumps: see :func:`_jumps_of`.
        at: int32 block, the elements, counted from the beginning of the chunk.
    """
    places = position + at
    for i in tl.static_range(len(jumps)):
        before, size, phase, period = jumps[i]
        places += before + ((at + phase) // period).to(tl.int64) * size
    return places
