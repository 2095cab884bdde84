"""The pass detect, on every backend: flags, squared norms and unscaled gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_rows import (
    BLOCK,
    CHUNK,
    CPU,
    DTYPES,
    ENGINES,
    NOT_FINITE,
    RowPlan,
    WorkPlan,
    each_engine,
    fingerprint,
    gradient_works,
    works,
)

from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work

SCALES = st.sampled_from([None, 1.0, 2.0**-10, 2.0**16, 3.0])


def request(scale, **kwargs):
    return Request(scale=None if scale is None else torch.tensor(scale), **kwargs)


def unscaled(built, scale):
    """The unscaled gradients by definition, in the dtype in which a rule computes."""
    inverse = torch.tensor(1.0 / (scale or 1.0), dtype=torch.float64)
    dtypes = [row.compute_dtype for row in built.rows]
    return [g.to(d) * inverse.to(d) for g, d in zip(built.grads, dtypes, strict=True)]


def overflows(built, scale):
    return not all(gradient.isfinite().all() for gradient in unscaled(built, scale))


def has_overflow(partials):
    return bool((partials.flags_on(torch.device("cpu")) > 0).any())


@each_engine
@given(plan=gradient_works(), scale=SCALES)
def test_flags_exactly_the_non_finite(engine, plan, scale):
    built = plan.build()
    before = built.fingerprints()
    partials = ENGINES[engine]().detect(built.work, request(scale))
    flags = partials.flags_on(torch.device("cpu"))
    assert flags.dtype == torch.float32
    assert set(flags.tolist()) <= {0.0, 1.0}
    assert partials.squares is None
    assert has_overflow(partials) == overflows(built, scale)
    assert built.fingerprints() == before
    built.assert_guards()


@each_engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1])
def test_one_bad_element_anywhere_is_found(engine, n, dtype):
    places = {0, n - 1, n // 2, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK} & set(range(n))
    for place, bad in zip(sorted(places), NOT_FINITE * 3, strict=False):
        for spots in ((), ((place, bad),)):
            # An odd shift: the same elements at addresses that allow no wide access.
            rows = [
                RowPlan((n,), dtype, shift, (1.0,), spots) for shift in ((0, 1) if n < 9 else (0,))
            ]
            partials = ENGINES[engine]().detect(WorkPlan(tuple(rows)).build().work, request(None))
            assert has_overflow(partials) == bool(spots), (place, bad)


@each_engine
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("n", "place"), [(5, 4), (CHUNK, 0), (CHUNK + 1, CHUNK)])
def test_gradients_are_tested_after_unscaling(engine, n, place, sign):
    """In float32 the unscaled value overflows, and in float64 it does not."""
    for dtype, expected in ((torch.float32, True), (torch.float64, False)):
        plan = WorkPlan((RowPlan((n,), dtype, 0, (1.0,), ((place, sign * 1e37),)),))
        partials = ENGINES[engine]().detect(plan.build().work, request(2.0**-10))
        assert has_overflow(partials) == expected, dtype


@each_engine
@given(plan=gradient_works(bad=False), scale=SCALES)
def test_write_stores_the_unscaled_gradients(engine, plan, scale):
    built = plan.build()
    # Triton's interpreter cuts bfloat16 off where devices round, and miswrites its subnormals.
    exact = [row.dtype != torch.bfloat16 or engine != "triton" for row in plan.rows]
    wide = unscaled(built, scale)
    expected = [w.to(row.grad_dtype) for w, row in zip(wide, built.rows, strict=True)]
    partials = ENGINES[engine]().detect(built.work, request(scale, write=True))
    for grad, value, whole in zip(built.grads, expected, exact, strict=True):
        if whole:
            assert fingerprint(grad) == fingerprint(value)
        elif value.isfinite().all():
            eps, tiny = torch.finfo(value.dtype).eps, torch.finfo(value.dtype).tiny
            torch.testing.assert_close(grad, value, rtol=eps, atol=2 * tiny)
    assert has_overflow(partials) == overflows(plan.build(), scale)
    built.assert_guards()


@each_engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_write_names_the_row_that_overflows_and_unscales_the_others(engine, bad, dtype):
    spots = ((), ((CHUNK, bad),), ())
    rows = tuple(RowPlan((CHUNK + 1,), dtype, 0, (1.0,), of_row) for of_row in spots)
    built = WorkPlan(rows).build()
    partials = ENGINES[engine]().detect(built.work, request(2.0, write=True))
    (report,) = partials.reports
    assert isinstance(report, GradientReport)
    flags = partials.flags_on(CPU).tolist()
    assert {row for row, flag in zip(report.rows, flags, strict=True) if flag > 0} == {1}
    for grad in (built.grads[0], built.grads[2]):
        assert (grad == 0.5).all()
    assert (built.grads[1][:CHUNK] == 0.5).all()


@each_engine
@given(plan=gradient_works(bad=False), scale=st.sampled_from([None, 1.0, 2.0**4, 3.0]))
@pytest.mark.parametrize("write", [False, True])
def test_squares_add_up_to_the_norm(engine, write, plan, scale):
    built = plan.build()
    wide = [grad.double() / (scale or 1.0) for grad in built.grads]
    expected = math.sqrt(sum(float((x * x).sum()) for x in wide))
    partials = ENGINES[engine]().detect(
        built.work, request(scale, write=write, check=False, max_norm=1.0)
    )
    assert partials.squares is not None
    assert partials.squares.dtype == torch.float64
    norm = math.sqrt(float(partials.squares.sum()))
    # Elements are rounded once, where they are unscaled.
    assert norm == pytest.approx(expected, rel=1e-6, abs=1e-37)


@each_engine
def test_gradients_that_are_unscaled_already_are_not_divided(engine):
    work = Work(CPU, [ParamRow(torch.float32)], [torch.full((3,), 2.0)])
    of_sums = request(4.0, max_norm=1.0, unscaled=True)
    partials = ENGINES[engine]().detect(work, of_sums)
    assert partials.squares is not None
    assert partials.squares.tolist() == pytest.approx([12.0])
    decision = ENGINES[engine]().control(work, of_sums, partials)
    assert decision.coefficients_on_host.inverse == 1.0


@each_engine
@given(plan=st.one_of(gradient_works(), works()), data=st.data())
@pytest.mark.parametrize("write", [False, True])
def test_a_row_that_does_not_count_adds_nothing_to_the_norm(engine, write, plan, data):
    """Non-finite elements of such a row still set the flag."""
    built, counting = plan.build(), plan.build()
    counted = [data.draw(st.booleans()) for _ in built.rows]
    for row, counts in zip(built.rows, counted, strict=True):
        row.in_norm = counts
    for entries in (counting.rows, counting.grads):
        entries[:] = [x for x, counts in zip(entries, counted, strict=True) if counts]
    norm = request(4.0, write=write, max_norm=1.0)
    found_all, found_counted = (ENGINES[engine]().detect(b.work, norm) for b in (built, counting))
    assert found_all.squares is not None and found_counted.squares is not None
    totals = [float(squares.sum()) for squares in (found_all.squares, found_counted.squares)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12, nan_ok=True)
    assert has_overflow(found_all) == overflows(plan.build(), 4.0)


@each_engine
def test_nothing_to_read(engine):
    for rows in ((), (RowPlan((0,), torch.float32, 0, (1.0,)),)):
        partials = ENGINES[engine]().detect(
            WorkPlan(rows).build().work, request(2.0, check=False, max_norm=1.0)
        )
        assert not has_overflow(partials)
        assert partials.squares is not None
        assert float(partials.squares.sum()) == 0.0
