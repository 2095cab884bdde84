"""The passes over all elements: detect, accumulate, reduce and update, which are one kernel.

A pass reads the tensors of a row once, chunk by chunk. Of each element it computes terms, which it
sums over the chunk, or new values, which it stores, or both:

==========  ========================  ==================================
pass        terms                     new values
==========  ========================  ==================================
detect      ``found_in``              the unscaled gradient, if asked for
accumulate  ``overflows_when_added``  ``added``
reduce      ``Rule.reduce``           none
update      none                      ``Rule.update``
==========  ========================  ==================================

Terms are summed in a fixed order, squares in float64, so a sum has the same bits in every run. The
CPU backends sum in another order: their norm may differ by an ulp of float64, and so may clipped
steps of float64 parameters; sums of ``Rule.reduce`` differ by a few ulp. The difference shows in
scalar states kept in float64, such as NovoGrad's ``exp_avg_sq``, and in float64 parameters; seldom
in float32. The norm is that of unscaled gradients, rounded to the arithmetic dtype. The eager
backend divides the norm of the scaled ones by the scale: if the scale is not a power of two, the
two norms of float32 gradients may differ by 2 ** -23 of themselves, and the results of a clipped
step by an ulp.

New float32 values have the bits that the eager backend computes from the same scalars: products and
sums are not fused (``launch.options``), and quotients and square roots are correctly rounded. In
float64, torch's square root on a CPU, and so that of the eager backend, may be an ulp off
(``torch_language.sqrt``). The scalars of a rule may differ by a few ulp where it computes them by
``language.power``, or from sums.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ampopt_kernels.gradient_terms import MEASURES, added, found_in, overflows_when_added
from ampopt_kernels.language import jit, kernel, rounded, tl
from ampopt_kernels.low_bits import split
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.stochastic import rounded_stochastically
from ampopt_kernels.triton.chunks import (
    chunk_of,
    elements_of,
    end_of,
    numbers_before,
    numbers_of,
    pointers_to,
    streams_of,
    values_of,
)
from ampopt_kernels.triton.codecs import scales_at, store_codes, uniform_of
from ampopt_kernels.triton.element_indices import indices_of, jumps_of
from ampopt_kernels.triton.launch import THREADS, Variant, sources_of, variant_of
from ampopt_kernels.triton.low_bits import with_master
from ampopt_kernels.triton.row_column_factors import factors_of, load_factors
from ampopt_kernels.triton.row_layout import layout_of
from ampopt_kernels.triton.table import Launch, Table

__all__ = ["ACCUMULATE", "Pass", "detect", "pass_kernel", "pass_launches", "reduce", "update"]

FOUND = "any", "squares", "largest", "count", "count"
"""How the terms of ``found_in`` are summed over elements."""

AHEAD = 1 << 6
"""Bytes of gradients that each thread of detect loads before it uses the first.

By Little's law, bandwidth times latency must be in flight: for 5 TB/s and 0.8 microseconds, on 132
multiprocessors of about 1500 threads each, at least 20 bytes for each thread.
"""


class Pass(NamedTuple):
    """What a pass computes.

    Attributes:
        name: ``"detect"``, ``"accumulate"``, ``"reduce"`` or ``"update"``.
        decided: whether the pass follows control, so that it does nothing if the step is skipped.
        terms: for each term how it is summed over elements: ``"sum"``, in float64; ``"squares"``,
            the sum of its squares; ``"largest"``; ``"count"`` of those that are true; or ``"any"``.
        reduce: computes the terms; a function with the arguments of ``Rule.reduce``.
        update: computes new values; a function with the arguments of ``Rule.update``.
        writes: whether to store the unscaled gradients.
        draws: whether ``update`` draws random numbers, and so takes positions of elements.
    """

    name: str
    decided: bool
    terms: tuple[str, ...] = ()
    reduce: Any = None
    update: Any = None
    writes: bool = False
    draws: bool = False


ACCUMULATE = Pass("accumulate", False, ("any",), overflows_when_added, added)


def detect(*, norm: bool, measure: bool, writes: bool) -> Pass:
    """Test unscaled gradients for inf and NaN.

    Args:
        norm: whether to sum squares.
        measure: whether to measure the gradients for a watch, which includes their squares.
        writes: whether to store the unscaled gradients.
    """
    n = 1 + (MEASURES if measure else norm)
    return Pass("detect", False, FOUND[:n], found_in, writes=writes)


def reduce(work: Work) -> Pass:
    """Sum the terms of the rule."""
    assert work.rule is not None
    n_terms = work.rule.widths(len(work.hyper[0])).terms
    return Pass("reduce", True, ("sum",) * n_terms, work.rule.reduce)


def update(work: Work) -> Pass:
    """Apply the rule to every parameter and its states, or change nothing."""
    assert work.rule is not None
    return Pass("update", True, update=work.rule.update, draws=work.rule.draws)


def pass_launches(
    work: Work,
    of: Pass,
    coefficients: Tensor | None,
    h: Tensor | None,
    flags: Tensor | None,
    parts: Tensor | None,
) -> Iterator[tuple[Variant, int, dict[str, Any]]]:
    """The variant, number of programs and arguments of each launch of ``pass_kernel``.

    Args:
        work: the rows.
        of: the pass.
        coefficients: see ``pass_kernel``; ``None`` before the decision if there is no scale.
        h: see ``pass_kernel``; ``None`` if there are no such numbers.
        flags: see ``pass_kernel``; ``None`` after the decision.
        parts: see ``pass_kernel``; ``None`` if the pass has no such terms.
    """
    table = Table.of(work)
    width = 0 if h is None else h.shape[1] if of.decided else 1
    kind = of.name, of.terms, of.writes, width
    variants = table.variants.get(kind)
    if variants is None:
        table.variants[kind] = variants = [
            variant_of(pass_kernel, _constants(work, of, group, width)) for group in table.launches
        ]
    of_all = {
        "table": table.addresses,
        "chunks": table.chunks,
        "chunk": table.chunk,
        "n_parts": table.n_chunks,
        "coefficients": coefficients,
        "h_table": h,
        "flags": flags,
        "parts": parts,
    }
    for group, variant in zip(table.launches, variants, strict=True):
        yield variant, group.programs, {**of_all, "first": group.start}


def _constants(work: Work, of: Pass, group: Launch, width: int) -> dict[str, Any]:
    """The compile-time arguments of a launch of ``pass_kernel``."""
    table, row, ahead = Table.of(work), group.like, 1
    if of.name == "detect":
        row, ahead = group.gradient, AHEAD * THREADS // (row.grad_dtype.itemsize * table.block)
    return {
        "PASS": of,
        "ROW": layout_of(row, group.aligns_of(row.dtypes), group.even, group.compute_dtype),
        "SOURCES": sources_of(of.reduce, of.update),
        "N_H": width,
        "SCALES": table.first_scale if row.is_coded else 0,
        "COLUMNS": table.columns,
        "CHUNK": None if of.name == "detect" else table.chunk,
        # Half as many elements, or Adam would need 160 registers.
        "BLOCK": table.block // 2 if of.update and row.is_coded else table.block,
        "AHEAD": ahead,
    }


@functools.partial(kernel, name=lambda compiled: f"{compiled.constants['PASS'].name}_kernel")
def pass_kernel(
    table,
    chunks,
    first,
    chunk,
    n_parts,
    coefficients,
    h_table,
    flags,
    parts,
    PASS: tl.constexpr,
    ROW: tl.constexpr,
    SOURCES: tl.constexpr,
    N_H: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Run a pass over one chunk of one parameter; return at once if the step is skipped.

    With ``g = grad * inverse_scale * clip``, in the arithmetic dtype, elementwise::

        parts[i, program] = sum(PASS.reduce(param, g, state, h, ROW.flags)[i])
        param, state = PASS.update(param, g, state, h, ROW.flags)

    One program for each chunk. A launch has the rows of one kind: the same dtypes, flags and
    alignment. Each tensor is read once, at the address in ``table``, and stored there.

    Args:
        table: int64, shape (rows, COLUMNS): one row for each parameter; see ``table.py``.
        chunks: int32, shape (programs of all launches, 2): row and chunk of each program.
        first: the number of this launch's first program in ``chunks``.
        chunk: elements for each program, a multiple of ``AHEAD * BLOCK``.
        n_parts: the number of programs of all launches.
        coefficients: float64, shape (3,): skip (more than 0 to return at once), the reciprocal of
            the loss scale, and the clip coefficient. Unless ``PASS.decided``, one element: the loss
            scale of the gradients; ``None`` without one.
        h_table: float64, shape (rows, N_H): the scalars of each row, which ``control_kernel``
            wrote. Unless ``PASS.decided``, one element, more than 0 to reject the gradients.
            ``None`` without such numbers.
        flags: float32, shape (n_parts,), written: 1 if the term "any" is true in the chunk, else 0.
            ``None`` without that term.
        parts: float64, shape (other terms, n_parts), written. Squares of a row that is not part of
            the norm are 0. ``None`` without other terms.
        PASS: the :class:`Pass`; as many of the terms that it computes are summed as ``terms`` has.
        ROW: the :class:`RowLayout` of the rows.
        SOURCES: a text that changes with the source of a function in ``PASS``.
        N_H: the number of scalars in ``h``.
        SCALES: the column of ``table`` with the address of the first state's scales.
        COLUMNS: the width of ``table``.
        CHUNK: ``chunk`` as a compile-time constant, without which float64 rules would spill
            registers; ``None`` for detect, which takes fewer registers without it.
        BLOCK: elements of one load.
        AHEAD: loads that are issued before the first is used.
    """
    if PASS.decided:
        if tl.load(coefficients) > 0:
            return
    program = first + tl.program_id(0)
    if CHUNK is not None:
        chunk = CHUNK
    index, row, start, numel = chunk_of(table, chunks, program, chunk, COLUMNS)
    if PASS.decided:
        numbers = numbers_of(coefficients, h_table, index, N_H, ROW.compute)
    else:
        numbers = numbers_before(coefficients, h_table, N_H, ROW.compute)
    streams = streams_of(row, start, ROW)
    key = tl.full((), 0, tl.int64)
    position = tl.load(row + COLUMNS - 5) + start
    jumps = jumps_of(row + COLUMNS - 6, start, ROW.jumps, CHUNK)
    factors_at, place = factors_of(row, start, ROW)
    scales = scales_at(row + SCALES, start, ROW)
    if ROW.has_key:
        key = tl.load(tl.load(row + COLUMNS - 6).to(tl.pointer_type(tl.int64)))
    tensors = streams, scales, factors_at, place, key, position, jumps

    end = end_of(row, start, numel, chunk)
    whole = end // (AHEAD * BLOCK) * (AHEAD * BLOCK)
    totals = _zeros(PASS, ROW, BLOCK)
    for offset in range(0, whole, AHEAD * BLOCK):
        totals = _with_blocks(totals, tensors, numbers, offset, None, PASS, ROW, BLOCK, AHEAD)
    if PASS.decided:  # at most one block is left, and a loop would take more registers
        if whole < end:
            totals = _with_blocks(totals, tensors, numbers, whole, end, PASS, ROW, BLOCK, 1)
    else:
        for offset in range(whole, end, BLOCK):
            totals = _with_blocks(totals, tensors, numbers, offset, end, PASS, ROW, BLOCK, 1)
    to = parts
    for i in tl.static_range(len(PASS.terms)):
        if PASS.terms[i] == "any":
            tl.store(flags + program, tl.max(totals[i], 0).to(tl.float32))
        else:
            if PASS.terms[i] == "largest":
                total = tl.max(totals[i], 0)
            else:
                total = tl.sum(totals[i], 0)
            if PASS.terms[i] == "squares":
                total = tl.where(tl.load(row + COLUMNS - 3) != 0, total, 0.0)
            tl.store(to + program, total.to(tl.float64))
            to += n_parts


@jit
def _with_blocks(
    totals, tensors, numbers, offset, end, PASS: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Process ``AHEAD`` blocks, and return ``totals`` with their terms; see the kernel.

    They are whole if ``end`` is ``None``; else some of their elements do not exist.
    """
    streams, scales, factors_at, place, key, position, jumps = tensors
    inverse, clip, h = numbers
    at = offset + tl.arange(0, BLOCK)
    live = None
    if end is not None:
        live = at < end
    N: tl.constexpr = len(ROW.dtypes) - ROW.has_copy
    FLAGS: tl.constexpr = ROW.flags
    loaded = ()
    for i in tl.static_range(AHEAD):
        loaded = loaded + (elements_of(streams, offset + i * BLOCK, live, N, BLOCK),)
    for i in tl.static_range(AHEAD):
        values = values_of(loaded[i], scales, offset, end, ROW, BLOCK)
        # Two products, so that clipping rounds as it does for gradients that `unscale` has divided.
        grad = values[0] * inverse * clip  # pyright: ignore
        param, state = with_master(values, ROW)
        state = state + load_factors(factors_at, place, at, live, ROW)
        if len(PASS.terms) > 0:
            terms = PASS.reduce(param, grad, state, h, FLAGS)
            totals = _with_terms(totals, terms, live, PASS, BLOCK)
        if PASS.writes:
            pointers = pointers_to(streams[0], offset + i * BLOCK, live is None, BLOCK)
            tl.store(pointers, rounded(grad, ROW.dtypes[0]), mask=live)
        if PASS.update is not None:
            indices = indices_of(position, jumps, at)
            if PASS.draws:
                new, states = PASS.update(param, grad, state, h, FLAGS, (indices, param))
            else:
                new, states = PASS.update(param, grad, state, h, FLAGS)
            outputs = (new,) + states
            if ROW.has_copy:
                outputs = outputs + (new,)
            if ROW.has_low_bits:
                u = uniform_of(indices, key, 1)
                top, steps = split(new, u, ROW.dtypes[1] == tl.float16)  # pyright: ignore
                outputs = (top,) + states + (steps,)
            for k in tl.static_range(1, 1 + len(outputs)):
                if ROW.codecs[k] is not None:
                    u = uniform_of(indices, key, k)
                    store_codes(streams[k], outputs[k - 1], u, scales, offset, end, k, ROW, BLOCK)
                else:
                    value = outputs[k - 1]
                    if ROW.rounds and k == 1:
                        value = rounded_stochastically(value, indices, key)
                    tl.store(streams[k] + at, rounded(value, ROW.dtypes[k]), mask=live)
    return totals


@jit
def _zeros(PASS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """The totals of no elements: a tuple of blocks."""
    totals = ()
    for i in tl.static_range(len(PASS.terms)):
        if PASS.terms[i] == "squares":
            zeros = tl.zeros((BLOCK,), tl.float64)
        elif PASS.terms[i] == "sum":
            zeros = tl.zeros((BLOCK // 4,), tl.float64)
        elif PASS.terms[i] == "largest":
            zeros = tl.zeros((BLOCK // 4,), ROW.compute)
        elif PASS.terms[i] == "any":
            zeros = tl.zeros((BLOCK,), tl.int32)
        else:
            zeros = tl.zeros((BLOCK // 4,), tl.int32)
        totals = totals + (zeros,)
    return totals


@jit
def _with_terms(totals, terms, live, PASS: tl.constexpr, BLOCK: tl.constexpr):
    """``totals`` with the terms of ``BLOCK`` more elements."""
    new = ()
    for i in tl.static_range(len(PASS.terms)):
        if PASS.terms[i] == "any":
            total = totals[i] | terms[i].to(tl.int32)
        elif PASS.terms[i] == "squares":
            # One fused operation, since some accelerators have few float64 units. The square of a
            # float32 is exact in float64, so fusing does not change the rounding.
            wide = terms[i].to(tl.float64)
            total = tl.fma(wide, wide, totals[i])
        else:
            # A thread reads at least four neighbours. It adds them to one total, to save registers.
            if PASS.terms[i] == "largest":
                total = tl.maximum(totals[i], tl.max(tl.reshape(terms[i], (BLOCK // 4, 4)), 1))
            else:
                term = terms[i].to(tl.float64 if PASS.terms[i] == "sum" else tl.int32)
                if live is not None and PASS.terms[i] == "sum":
                    term = tl.where(live, term, 0.0)
                total = totals[i] + tl.sum(tl.reshape(term, (BLOCK // 4, 4)), 1)
        new = new + (total,)
    return new
