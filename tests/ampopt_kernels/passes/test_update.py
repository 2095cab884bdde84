"""The pass update, on every backend, and whole steps."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
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
    edge_numbers,
    fingerprint,
    spots,
    works,
)

from ampopt.testing.bits import bits
from ampopt_kernels import rules
from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.tensors import arithmetic

ADAM = (0.5, 0.9, 0.999, 0.125, 0.25)
SGD = (0.5, 0.9, 0.5, 0.25)


def scalar_after(rule: Rule | None, before: float) -> float:
    """The scalar state after a step: Adam counts steps, and SGD notes the first one."""
    return float(before + 1 if rule is rules.adam else max(before, 1))


def reference(row: RowPlan, plan: WorkPlan, factor: float) -> dict[str, torch.Tensor]:
    """Parameter, states and scalar after torch's own float64 step, gradients times factor."""
    rule, hyper = plan.rule, plan.hyper[row.variant]
    assert rule is not None
    on = dict(zip(rule.flags, row.flags, strict=True))
    p = torch.nn.Parameter(row.tensor(row.param).to(row.stored).double())
    p.grad = row.tensor(row.grad).to(row.dtype).double() * factor
    names = [part.name for part in rule.state_for(row.flags)]
    state: dict[str, Any] = {
        name: row.tensor(pattern).to(row.stored).double()
        for name, pattern in zip(names, row.state, strict=True)
    }
    options: dict[str, Any] = {"maximize": on["maximize"], "foreach": False}
    if rule is rules.adam:
        lr, beta1, beta2, eps, decay = hyper
        optimizer: torch.optim.Optimizer = torch.optim.Adam(
            [p],
            lr,
            (beta1, beta2),
            eps,
            decay * on["weight_decay"],
            on["amsgrad"],
            decoupled_weight_decay=on["decoupled_weight_decay"],
            **options,
        )
        optimizer.state[p].update(state, step=torch.tensor(float(row.step)))
    else:
        lr, momentum, dampening, decay = hyper
        options["weight_decay"] = decay * on["weight_decay"]
        optimizer = torch.optim.SGD([p], lr, **options)
        # Set behind the constructor, which takes no Nesterov momentum with dampening. The first
        # step is not dampened.
        optimizer.param_groups[0].update(
            momentum=momentum * on["momentum"],
            dampening=dampening * on["dampening"] * bool(row.step),
            nesterov=on["nesterov"],
        )
        optimizer.state[p].update(state)
    optimizer.step()
    after = {"param": p.detach(), "scalar": torch.tensor(scalar_after(rule, row.step))}
    return {**after, **{name: optimizer.state[p][name] for name in names}}


def assert_matches(
    row: Any, plan: RowPlan, work: WorkPlan, factor: float, clipped: bool = False
) -> None:
    expected = reference(plan, work, factor)
    rule = work.rule
    assert rule is not None
    states = zip(rule.state_for(plan.flags), row.state, strict=True)
    actual = {"param": row.param, **{part.name: tensor for part, tensor in states}}
    for name, tensor in actual.items():
        # All numbers are of the order of 1; a float32 step takes a dozen roundings, and storing
        # takes one, which Triton's interpreter does to bfloat16 by cutting off. In float64 the
        # bias correction, 1 - 0.999, loses three digits, and the norm to clip by has the precision
        # of the float32 gradients in it.
        rounding = 1e-11 if row.compute_dtype == torch.float64 and not clipped else 1e-5
        eps = max(rounding, torch.finfo(tensor.dtype).eps)
        size = 1.0 + row_size(expected[name])
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=eps * size)
    if row.copy is not None:
        eps = torch.finfo(row.copy.dtype).eps
        torch.testing.assert_close(row.copy.float(), row.param, rtol=eps, atol=1e-6)
    for scalar in row.scalars:
        if scalar is not None:
            assert bits(scalar) == bits(expected["scalar"])


@each_engine
@given(plan=works(), scale=st.sampled_from([1.0, 4.0, 3.0]), skips=st.booleans())
def test_a_step_that_writes_leaves_unscaled_gradients(engine, plan, scale, skips):
    """Also if it is skipped; and takes the step that it takes without."""
    plan = replace(
        plan,
        rows=tuple(
            row for row in plan.rows if row.dtype == arithmetic(row.dtype, row.stored)
        ),  # others would round the gradients before the step
    )
    assume(plan.rows)
    stepped, left = plan.build(), plan.build()
    inverse = torch.tensor(1.0 / scale, dtype=torch.float64)
    expected = [grad * inverse.to(grad.dtype) for grad in left.grads]
    request = Request(torch.tensor(scale), found_inf=torch.tensor(float(skips)))
    run(lambda _: ENGINES[engine](), [stepped.work], request)
    run(lambda _: ENGINES[engine](), [left.work], replace(request, write=True))
    assert list(map(fingerprint, left.grads)) == list(map(fingerprint, expected))
    for one, other in zip(stepped.rows, left.rows, strict=True):
        assert list(map(fingerprint, one.outputs)) == list(map(fingerprint, other.outputs))
    left.assert_guards()


def row_size(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@each_engine
@given(
    plan=works(),
    scale=st.sampled_from([None, 1.0, 4.0, 3.0]),
    max_norm=st.sampled_from([None, 0.5, 1e9]),
    check=st.booleans(),
)
def test_steps_as_torch_does_in_float64(engine, plan, scale, max_norm, check):
    built = plan.build()
    gradients = [fingerprint(grad) for grad in built.grads]
    request = Request(
        scale=None if scale is None else torch.tensor(scale), check=check, max_norm=max_norm
    )
    decision = run(lambda _: ENGINES[engine](), [built.work], request)
    factor = 1.0 / (scale or 1.0)
    if max_norm is not None:
        wide = [row.tensor(row.grad).to(row.dtype).double() * factor for row in plan.rows]
        norm = math.sqrt(sum(float((x * x).sum()) for x in wide))
        assert decision.norm is not None
        assert float(decision.norm) == pytest.approx(norm, rel=1e-6)
        factor *= min(1.0, max_norm / (norm + 1e-6))
    assert not decision.found_inf > 0
    for row, row_plan in zip(built.rows, plan.rows, strict=True):
        assert_matches(row, row_plan, plan, factor, clipped=max_norm is not None)
    assert [fingerprint(grad) for grad in built.grads] == gradients
    built.assert_guards()


def spoil(draw, plan):
    """A copy of the plan with one non-finite gradient element."""
    index = draw(st.sampled_from([i for i, row in enumerate(plan.rows) if 0 not in row.shape]))
    row = plan.rows[index]
    bad = draw(spots(torch.Size(row.shape).numel(), st.sampled_from(NOT_FINITE)))
    changed = RowPlan(**{**row.__dict__, "spots": (bad,)})
    return WorkPlan((*plan.rows[:index], changed, *plan.rows[index + 1 :]), plan.rule, plan.hyper)


@each_engine
@given(data=st.data(), plan=works(), reason=st.sampled_from(["gradient", "flag", "scale"]))
def test_a_skipped_step_changes_no_bit(engine, data, plan, reason):
    scale, flag = torch.tensor(2.0), None
    if reason == "gradient":
        assume(any(0 not in row.shape for row in plan.rows))
        plan = spoil(data.draw, plan)
    elif reason == "flag":
        flag = torch.tensor(data.draw(st.sampled_from([1.0, 2.0, 1e-3, math.inf])))
    else:
        scale = torch.tensor(data.draw(st.sampled_from([0.0, -0.0, -1.0, *NOT_FINITE])))
    built = plan.build()
    before = built.fingerprints()
    decision = run(lambda _: ENGINES[engine](), [built.work], Request(scale=scale, found_inf=flag))
    assert decision.found_inf > 0
    assert built.fingerprints() == before
    built.assert_guards()


@each_engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, BLOCK + 1, CHUNK + 1])
def test_an_overflow_in_the_last_element_skips_all(engine, n, dtype):
    off = (False,) * 4
    rows = [
        RowPlan((3,), torch.float32, 0, (1.0,), param=(1.0,), state=((0.0,), (1.0,)), flags=off),
        RowPlan((n,), dtype, 0, (1.0,), ((n - 1, math.inf),), (1.0,), ((0.0,), (1.0,)), flags=off),
    ]
    built = WorkPlan(tuple(rows), rules.adam, (ADAM,)).build()
    before = built.fingerprints()
    decision = run(lambda _: ENGINES[engine](), [built.work], Request())
    assert decision.found_inf > 0
    assert built.fingerprints() == before


@each_engine
@given(data=st.data(), plan=works(max_rows=1))
def test_without_drop_an_overflow_is_applied(engine, data, plan):
    assume(any(0 not in row.shape for row in plan.rows))
    plan = spoil(data.draw, plan)
    dropped, unchecked = plan.build(), plan.build()
    decision = run(lambda _: ENGINES[engine](), [dropped.work], Request(drop=False))
    run(lambda _: ENGINES[engine](), [unchecked.work], Request(check=False))
    assert decision.found_inf > 0
    assert dropped.fingerprints() == unchecked.fingerprints()
    for row, row_plan in zip(dropped.rows, plan.rows, strict=True):
        for scalar in row.scalars:
            assert scalar is None or float(scalar) == scalar_after(plan.rule, row_plan.step)


@each_engine
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:3]))
def test_edge_values_are_stepped_exactly(engine, data, dtype):
    """``p - g`` is rounded once: -0, subnormal numbers and overflows are those of torch."""
    grad, param = data.draw(edge_numbers(dtype)), data.draw(edge_numbers(dtype))
    row = RowPlan((7,), dtype, 0, grad, param=param, flags=(False,) * 5)
    built = WorkPlan((row,), rules.sgd, ((1.0, 0.0, 0.0, 0.0),)).build()
    g, p = row.tensor(grad), row.tensor(param)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (p.to(dtype).to(wide) - g.to(dtype).to(wide)).to(dtype)
    run(lambda _: ENGINES[engine](), [built.work], Request(check=False))
    assert built.rows[0].param is not None
    assert bits(built.rows[0].param) == bits(expected)
    built.assert_guards()


@each_engine
@pytest.mark.parametrize("bad", [0, 1])
def test_devices_skip_together(engine, bad):
    """An overflow on one device skips the rows of all devices."""
    built = []
    for i in range(2):
        spots = ((0, math.inf),) if i == bad else ()
        state = ((0.0,), (1.0,))
        row = RowPlan((3,), torch.float32, 0, (1.0,), spots, (1.0,), state, 1, (False,) * 4)
        built.append(WorkPlan((row,), rules.adam, (ADAM,)).build())
    before = [b.fingerprints() for b in built]
    decision = run(lambda _: ENGINES[engine](), [b.work for b in built], Request(max_norm=1.0))
    assert decision.found_inf > 0
    assert [b.fingerprints() for b in built] == before


@each_engine
@given(plan=works(max_rows=2), other=works(max_rows=2), scale=st.sampled_from([1.0, 4.0]))
def test_devices_step_and_clip_together(engine, plan, other, scale):
    plans, built = (plan, other), (plan.build(), other.build())
    request = Request(scale=torch.tensor(scale), max_norm=0.5)
    run(lambda _: ENGINES[engine](), [b.work for b in built], request)
    total = 0.0
    for row in (*plan.rows, *other.rows):
        g = row.tensor(row.grad).to(row.dtype).double() / scale
        total += float((g * g).sum())
    factor = min(1.0, 0.5 / (math.sqrt(total) + 1e-6)) / scale
    for each_plan, each in zip(plans, built, strict=True):
        for row, row_plan in zip(each.rows, each_plan.rows, strict=True):
            assert_matches(row, row_plan, each_plan, factor, clipped=True)
        each.assert_guards()


@each_engine
def test_many_rows_each_with_its_own_count(engine):
    """With more rows than control advances at a time, and two groups, one without momentum."""
    rows = tuple(
        RowPlan(
            shape=(1,),
            dtype=torch.float32,
            shift=0,
            grad=(1.0,),
            param=(float(i),),
            state=((2.0,),) if i % 3 else (),
            step=i % 5,
            flags=(bool(i % 3), False, bool(i % 2), False, bool(i % 7)),
            variant=i % 2,
        )
        for i in range(131)
    )
    plan = WorkPlan(rows, rules.sgd, (SGD, (0.125, 0.5, 0.0, 0.5)))
    built = plan.build()
    run(lambda _: ENGINES[engine](), [built.work], Request())
    for row, row_plan in zip(built.rows, rows, strict=True):
        assert_matches(row, row_plan, plan, 1.0)


@each_engine
@given(lr=st.sampled_from([0.5, 0.125]))
def test_hyperparameters_may_be_tensors(engine, lr):
    """A learning rate on the device changes between steps."""
    row = RowPlan((5,), torch.float32, 0, (1.0,), param=(1.0,), flags=(False,) * 5)
    built = WorkPlan((row,), rules.sgd).build()
    rate = torch.tensor(lr)
    backend = ENGINES[engine]()
    for _ in range(2):
        hyper = [[rate, 0.0, 0.0, 0.0]]
        work = Work(CPU, built.rows, built.grads, rules.sgd, hyper, built.work.uploads)
        run(lambda _: backend, [work], Request(check=False))
        rate = rate * 2
    assert built.rows[0].param is not None
    assert built.rows[0].param.tolist() == [1.0 - 3 * lr] * 5


@jit
def _turn(p, g, state, h, flags):
    return state[0], (state[1], p)


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rule_may_return_its_arguments(engine, dtype):
    """For instance to keep the previous parameter as a state."""
    states = State("first", dtype=dtype), State("second", dtype=dtype)
    rule = Rule(update=_turn, hyper=(), state=states)
    p, first, second = tensors = [torch.full((CHUNK + 3,), x, dtype=dtype) for x in (1, 2, 3)]
    work = Work(CPU, [ParamRow(dtype, p, state=(first, second))], [p + 1], rule, ((),))
    run(lambda _: ENGINES[engine](), [work], Request(check=False))
    assert [set(t.tolist()) for t in tensors] == [{2.0}, {3.0}, {1.0}]


@jit
def _on_two_conditions(p, g, state, h, flags):
    return tl.where((g > 0) & (h[0] > h[1]), p, g), ()


@each_engine
def test_comparisons_of_numbers_and_of_blocks_combine(engine):
    rule = Rule(update=_on_two_conditions, hyper=("a", "b"))
    for hyper, expected in (((2.0, 1.0), [3.0, -1.0]), ((1.0, 2.0), [1.0, -1.0])):
        p, g = torch.full((2,), 3.0), torch.tensor([1.0, -1.0])
        work = Work(CPU, [ParamRow(torch.float32, p)], [g], rule, [hyper])
        run(lambda _: ENGINES[engine](), [work], Request(check=False))
        assert p.tolist() == expected


@jit
def _doubled_in_place(p, g, state, h, flags):
    double = g * 1.0
    kept = double
    double += g
    rest = tl.where(h[0] > 1, h[0], 1.0)
    rest -= g
    return p + double * kept + rest, ()


@each_engine
def test_an_assignment_that_adds_leaves_other_names_of_the_block_alone(engine):
    rule = Rule(update=_doubled_in_place, hyper=("a",))
    p, g = torch.full((1,), 1.0), torch.full((1,), 3.0)
    work = Work(CPU, [ParamRow(torch.float32, p)], [g], rule, [(5.0,)])
    run(lambda _: ENGINES[engine](), [work], Request(check=False))
    assert p.item() == 1 + 6 * 3 + 5 - 3


@jit
def _restarted(s, h):
    return (0.0, s[0] + 1), (3, s[1])


@jit
def _plus_numbers(p, g, state, h, flags):
    return p + h[0] + h[1], ()


@each_engine
@pytest.mark.parametrize("drop", [True, False])
def test_scalars_may_return_numbers_that_are_written_in_it(engine, drop):
    rule = Rule(
        update=_plus_numbers, scalars=_restarted, hyper=(), scalar_state=(State("a"), State("b"))
    )
    p, a, b = torch.full((1,), 1.0), torch.tensor(5.0), torch.tensor(7.0)
    row = ParamRow(torch.float32, p, scalars=(a, b))
    work = Work(CPU, [row], [torch.ones(1)], rule, ((),))
    run(lambda _: ENGINES[engine](), [work], Request(drop=drop))
    assert (p.item(), a.item(), b.item()) == (1 + 3 + 7, 0.0, 6.0)


@jit
def _grown(s, h):
    return (s[0] * 1e30,), (s[0] * 1e30,)


@jit
def _smaller(p, g, state, h, flags):
    return tl.where(g < h[0], p, h[0]), ()


@each_engine
def test_a_number_that_float32_cannot_hold_is_infinite(engine):
    rule = Rule(update=_smaller, scalars=_grown, hyper=(), scalar_state=(State("a"),))
    p, a = torch.full((1,), 1.0), torch.tensor(1e30)
    work = Work(CPU, [ParamRow(torch.float32, p, scalars=(a,))], [torch.ones(1)], rule, ((),))
    run(lambda _: ENGINES[engine](), [work], Request())
    assert (p.item(), a.item()) == (1.0, math.inf)
