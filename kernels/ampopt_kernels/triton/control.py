"""Control: one program that decides the step and advances the scalar states."""

from typing import Any, NamedTuple

import torch

from ampopt_kernels import step_decision as decide_module
from ampopt_kernels.language import jit, kernel, tl
from ampopt_kernels.step_data import Decision, Partials, Request
from ampopt_kernels.step_decision import decide
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.triton.launch import (
    PARTS,
    ROWS,
    TRITON_DTYPES,
    Variant,
    sources_of,
    variant_of,
)
from ampopt_kernels.triton.table import Table, hyper_table

__all__ = ["control_kernel", "control_launch"]

RUNNING = tl.constexpr(decide_module.RUNNING)  # pyright: ignore[reportCallIssue]
SETTINGS = tl.constexpr(decide_module.SETTINGS)  # pyright: ignore[reportCallIssue]
WINDOW = tl.constexpr(decide_module.LONGEST_WINDOW)  # pyright: ignore[reportCallIssue]


class Advance(NamedTuple):
    """How the scalar states of rows advance: a compile-time argument of ``control_kernel``.

    Attributes:
        before: the rule's ``before_reduce``; called before ``scalars`` if that takes sums.
        scalars: the rule's ``scalars``, or its ``before_reduce`` while there are no sums.
        arguments: how many of ``(s, h, flags, sums, totals)`` ``scalars`` takes.
        stores: whether to store the scalar states; if not, they stay as they are.
        n_hyper: the number of hyperparameters.
        n_terms: the number of sums that ``scalars`` takes of a row.
        dtypes: the dtype of each scalar state.
        flag_sets: the rule's flags, by the number that the table has for them.
    """

    before: Any
    scalars: Any
    arguments: int
    stores: bool
    n_hyper: int
    n_terms: int
    dtypes: tuple[Any, ...]
    flag_sets: tuple[tuple[bool, ...], ...]


def control_launch(
    work: Work,
    decision: Decision,
    request: Request | None = None,
    partials: Partials | None = None,
) -> tuple[Variant, int, dict[str, Any]]:
    """The variant, number of programs and arguments of a launch of ``control_kernel``.

    Args:
        work: the rows.
        decision: the decision, whose tensors are written.
        request: the request for the step; ``None`` if it is decided already, and only scalar states
            advance.
        partials: what detect wrote; ``None`` without a check.
    """
    decides, request = request is not None, request or Request()
    h, sums = decision.h, decision.sums
    table = None if h is None else Table.of(work)
    # Each optimizer uploads its own constants. A tensor shared by all of them would be read on
    # streams that do not wait for the stream that it was copied on.
    constants = max_norm = settings = statistics = None
    if request.policy is not None:
        constants = work.uploads.get("policy", request.policy, torch.float64, work.device)
    if decision.norm is not None:
        assert request.max_norm is not None
        max_norm = work.uploads.get(
            "max_norm", [float(request.max_norm)], torch.float64, work.device
        )
    checks = request.checks(work.device)
    if checks:
        numbers = [number for check in checks for number in check.settings]
        settings = work.uploads.get("checks", numbers, torch.float64, work.device)
        known = [check.statistics for check in checks]
        at = [0 if numbers is None else numbers.data_ptr() for numbers in known]
        statistics = work.uploads.get("statistics of checks", at, torch.int64, work.device)
    flags = None if partials is None else partials.flags_on(work.device)
    arguments = {
        "flags": flags if request.check else None,
        "squares": None if decision.norm is None or partials is None else partials.squares,
        "n_parts": 0 if flags is None else flags.numel(),
        "external": request.found_inf,
        "scale": request.scale,
        "constants": constants,
        "scheduled_by": request.scheduled_by,
        "counters": request.counters,
        "max_norm": max_norm,
        "loss": request.loss,
        "settings": settings,
        "statistics": statistics,
        "found_out": decision.found_inf if decides else None,
        "coefficients": decision.coefficients_on_device,
        "norm_out": decision.norm,
        "scale_out": decision.scale,
        "counters_out": decision.counters,
        "cause_out": decision.cause,
        "table": None if table is None else table.addresses,
        "hyper": None if table is None else hyper_table(work),
        "sums": None if sums is None else sums.each,
        "totals": None if sums is None else sums.totals,
        "h_out": h,
        "n_rows": 0 if h is None else h.shape[0],
    }
    sizes = tuple([0 if x.statistics is None else x.statistics.numel() for x in checks])
    unscaled = request.write or request.unscaled
    kind = "control", unscaled, sizes, request.drop, sums is None
    variant = None if table is None else table.variants.get(kind)
    if variant is None:
        advance = None if table is None else _advance_of(work, table, has_sums=sums is not None)
        variant = variant_of(
            control_kernel,
            {
                "UNSCALED": unscaled,
                "STATISTICS": sizes,
                "DROP": request.drop,
                "ADVANCE": advance,
                "SOURCES": "" if advance is None else sources_of(advance.before, advance.scalars),
                "COLUMNS": 0 if table is None else table.columns,
                "FIRST": 0 if table is None else table.first_scalar,
                "PARTS": PARTS,
                "ROWS": ROWS,
            },
        )
        if table is not None:
            table.variants[kind] = variant
    return variant, 1, arguments


def _advance_of(work: Work, table: Table, *, has_sums: bool) -> Advance:
    """How the scalar states of ``work`` advance; ``has_sums`` if those of ``reduce`` are known."""
    rule, n_hyper = work.rule, len(work.hyper[0])
    assert rule is not None
    is_first = rule.reduces and not has_sums
    return Advance(
        before=rule.before_reduce,
        scalars=rule.before_reduce if is_first else rule.scalars,
        arguments=3 if is_first else rule.scalars_arguments,
        stores=not is_first,
        n_hyper=n_hyper,
        n_terms=rule.widths(n_hyper).terms if has_sums else 0,
        dtypes=tuple(TRITON_DTYPES[dtype] for dtype in work.scalar_dtypes),
        flag_sets=table.flag_sets,
    )


@kernel
def control_kernel(
    flags,
    squares,
    n_parts,
    external,
    scale,
    constants,
    scheduled_by,
    counters,
    max_norm,
    loss,
    settings,
    statistics,
    found_out,
    coefficients,
    norm_out,
    scale_out,
    counters_out,
    cause_out,
    table,
    hyper,
    sums,
    totals,
    h_out,
    n_rows,
    UNSCALED: tl.constexpr,
    STATISTICS: tl.constexpr,
    DROP: tl.constexpr,
    ADVANCE: tl.constexpr,
    SOURCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Reduce the flags of detect to one decision, then advance the scalar states of every row.

    ``found_inf = max(flags)``, ``norm = sqrt(sum(squares))``, ``clip = min(1, max_norm / (norm +
    1e-6))``, ``scale, counters = next_scale(scale, counters, found_inf)``, and for each row
    ``s, h = ADVANCE.scalars(s, hyper)``. All arithmetic is float64. Scalar states are stored only
    if the step is not skipped.

    One launch of one program. ``None`` stands for what a step does not have, or does not ask for;
    another combination of these is another binary.

    Args:
        flags: float32, shape (n_parts,): the overflow flags of the chunks; ``None`` if nothing is
            checked. Otherwise a scale that is not finite or not positive is an overflow, too.
        squares: float64, shape (n_parts,): the sums of squares of the chunks; or ``None``.
        n_parts: the number of chunks.
        external: one element, an overflow flag of the caller, more than 0 for overflow; or
            ``None``.
        scale: one element, the loss scale; ``None`` without one.
        constants: float64, shape (10,): the ``PolicyConstants`` of ``next_scale``; ``None`` if the
            scale has no schedule.
        scheduled_by: one element, the overflow flag that the schedule follows; or ``None``.
        counters: int32, shape (2,): counters of the schedule; or ``None``.
        max_norm: float64, one element, the norm to clip to; or ``None``.
        loss: one element, the loss of the step; or ``None``.
        settings: float64, shape (n_checks, 10): ``decide.Check.settings`` of each check.
        statistics: int64, shape (n_checks,): the address of the statistics of each check, float64,
            updated in place; any number for a check without.
        found_out: float32, one element: more than 0 for overflow. ``None`` if ``coefficients``
            holds an earlier decision, which may be that of another device.
        coefficients: float64, shape (3,): skip, the reciprocal of the scale that the gradients are
            still multiplied by, and the clip coefficient.
        norm_out: one element, float32 or float64; or ``None``.
        scale_out: one element of the dtype of ``scale``; ``None`` without a schedule.
        counters_out: int32, shape (2,); ``None`` without a schedule.
        cause_out: float64, one element, written if there are checks: the cause of the skip; 0 if
            the step is applied, or overflows.
        table: int64, shape (n_rows, COLUMNS); see ``table.py``. The scalar states are at addresses
            in it, and are updated in place if ``ADVANCE.stores``.
        hyper: float64, shape (variants, hyperparameters): the hyperparameters of each variant.
        sums: float64, shape (n_rows, terms): what ``sum_kernel`` wrote; ``None`` without terms.
        totals: float64, shape (terms,): the sums over all parameters; or ``None``.
        h_out: float64, shape (n_rows, width of h); ``None`` if the scalar states of the rows do
            not advance.
        n_rows: the number of rows.
        UNSCALED: whether the gradients are unscaled by now.
        STATISTICS: for each check how many statistics it has, 0 for none.
        DROP: whether an overflow skips the step.
        ADVANCE: the :class:`Advance` of the rows; ``None`` if their scalar states do not advance.
        SOURCES: a text that changes with the source of a function in ``ADVANCE``.
        COLUMNS: the width of ``table``.
        FIRST: the column of ``table`` with the address of the first scalar state.
        PARTS: chunks that are read at a time.
        ROWS: rows that are advanced at a time.
    """
    if found_out is not None:
        worst = tl.zeros((PARTS,), tl.float32)
        total = tl.zeros((PARTS,), tl.float64)
        for start in range(0, n_parts, PARTS):
            at = start + tl.arange(0, PARTS)
            if flags is not None:
                worst = tl.maximum(worst, tl.load(flags + at, mask=at < n_parts, other=0.0))
            if squares is not None:
                total += tl.load(squares + at, mask=at < n_parts, other=0.0)
        norm = None
        limit = None
        if norm_out is not None:
            norm = tl.sqrt(tl.sum(total, 0))
            limit = tl.load(max_norm)
            tl.store(norm_out, norm.to(norm_out.dtype.element_ty))
        growth = None
        budget = None
        schedule = None
        if constants is not None:
            growth = tl.load(counters).to(tl.float64)
            budget = tl.load(counters + 1).to(tl.float64)
            schedule = _numbers_at(constants, 10)
        checks = ()
        for i in tl.static_range(len(STATISTICS)):
            where = tl.load(statistics + i).to(tl.pointer_type(tl.float64))
            known = _statistics_at(where, tl.constexpr(STATISTICS[i]))  # pyright: ignore
            checks = checks + ((_numbers_at(settings + SETTINGS * i, SETTINGS), known),)
        # Not by a function that returns None, which Triton 3.6 does not compile.
        value = None
        inverse = tl.full((), 1.0, tl.float64)
        if scale is not None:
            value = tl.load(scale).to(tl.float64)
            if not UNSCALED:
                inverse = 1.0 / value
        other_flag = None
        if external is not None:
            other_flag = tl.load(external).to(tl.float64)
        followed = None
        if scheduled_by is not None:
            followed = tl.load(scheduled_by).to(tl.float64)
        loss_value = None
        if loss is not None:
            loss_value = tl.load(loss).to(tl.float64)
        found_inf, skip, clip, cause, scheduled, known = decide(
            tl.max(worst, 0).to(tl.float64),
            other_flag,
            value,
            growth,
            budget,
            schedule,
            followed,
            norm,
            limit,
            loss_value,
            checks,
            flags is not None,
            DROP,
        )
        if constants is not None:
            tl.store(scale_out, scheduled[0].to(scale_out.dtype.element_ty))
            tl.store(counters_out, scheduled[1].to(tl.int32))
            tl.store(counters_out + 1, scheduled[2].to(tl.int32))
        for i in tl.static_range(len(STATISTICS)):
            where = tl.load(statistics + i).to(tl.pointer_type(tl.float64))
            _store_statistics(where, known[i], tl.constexpr(STATISTICS[i]))  # pyright: ignore
        if len(STATISTICS) > 0:
            tl.store(cause_out, cause)
        tl.store(found_out, found_inf.to(tl.float32))
        skip = skip + tl.full((), 0.0, tl.float64)
        tl.store(coefficients, skip)
        tl.store(coefficients + 1, inverse)
        tl.store(coefficients + 2, clip)
    else:
        skip = tl.load(coefficients)
    if ADVANCE is not None:
        for start in range(0, n_rows, ROWS):
            for of_flags in tl.static_range(len(ADVANCE.flag_sets)):
                _advance(
                    skip, start, table, hyper, sums, totals, h_out, n_rows, of_flags, ADVANCE,
                    COLUMNS, FIRST, ROWS,
                )  # fmt: skip


@jit
def _numbers_at(numbers, N: tl.constexpr):
    """The first ``N`` elements at ``numbers``, as a tuple."""
    result = ()
    for i in tl.static_range(N):
        result = result + (tl.load(numbers + i),)
    return result


@jit
def _statistics_at(numbers, N: tl.constexpr):
    """The ``N`` statistics of a check at ``numbers``, as ``decide`` takes them."""
    if N <= RUNNING:
        return _numbers_at(numbers, N)
    else:
        lane = tl.arange(0, WINDOW)
        ring = tl.load(numbers + 2 + lane, mask=lane < N - 2, other=0.0)
        return tl.load(numbers), tl.load(numbers + 1), ring, lane.to(tl.float64)


@jit
def _store_statistics(numbers, known, N: tl.constexpr):
    """Replace the ``N`` statistics of a check at ``numbers``."""
    if N <= RUNNING:
        for i in tl.static_range(N):
            tl.store(numbers + i, known[i])
    else:
        lane = tl.arange(0, WINDOW)
        tl.store(numbers, known[0])
        tl.store(numbers + 1, known[1])
        tl.store(numbers + 2 + lane, known[2], mask=lane < N - 2)


@jit
def _advance(
    skip, start, table, hyper, sums, totals, h_out, n_rows, FLAG_SET: tl.constexpr,
    ADVANCE: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Advance the scalar states of ``ROWS`` rows whose flags are ``FLAG_SET``; see the kernel."""
    FLAGS: tl.constexpr = ADVANCE.flag_sets[FLAG_SET]
    N_HYPER: tl.constexpr = ADVANCE.n_hyper
    N_TERMS: tl.constexpr = ADVANCE.n_terms
    at = start + tl.arange(0, ROWS)
    live = at < n_rows
    row = table + at.to(tl.int64) * COLUMNS
    present = tl.load(row, mask=live, other=0) != 0  # whether there is a gradient
    if len(ADVANCE.flag_sets) > 1:
        live = live & (tl.load(row + COLUMNS - 4, mask=live, other=-1) == FLAG_SET)
    variant = tl.load(row + COLUMNS - 2, mask=live, other=0)
    # Lanes without a row compute on ordinary numbers, so that none divides by zero.
    h = ()
    for i in tl.static_range(N_HYPER):
        h = h + (tl.load(hyper + variant * N_HYPER + i, mask=live, other=0.5),)
    s = ()
    for i in tl.static_range(len(ADVANCE.dtypes)):
        address = tl.load(row + FIRST + i, mask=live, other=0)
        exists = live & (address != 0)
        old = tl.load(address.to(tl.pointer_type(ADVANCE.dtypes[i])), mask=exists, other=0.0)
        s = s + (tl.where(live, old.to(tl.float64), 1.0),)
    each = ()
    over_all = ()
    for i in tl.static_range(N_TERMS):
        each = each + (tl.load(sums + at.to(tl.int64) * N_TERMS + i, mask=live, other=1.0),)
        over_all = over_all + (tl.load(totals + i),)
    if ADVANCE.arguments > 3:
        s, h = ADVANCE.before(s, h, FLAGS)
    new_s, new_h = ADVANCE.scalars(*(s, h, FLAGS, each, over_all)[: ADVANCE.arguments])
    if ADVANCE.stores:
        for i in tl.static_range(len(ADVANCE.dtypes)):
            address = tl.load(row + FIRST + i, mask=live, other=0)
            exists = live & present & (address != 0) & (skip <= 0)
            new = tl.cast(new_s[i], ADVANCE.dtypes[i])
            tl.store(address.to(tl.pointer_type(ADVANCE.dtypes[i])), new, mask=exists)
    for i in tl.static_range(len(new_h)):
        tl.store(h_out + at.to(tl.int64) * len(new_h) + i, new_h[i], mask=live)
