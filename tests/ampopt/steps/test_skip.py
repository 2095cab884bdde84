"""A skipped step changes no bit, wherever and whenever the overflow is."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.fresh_states import is_fresh
from support.gpus import ON_A_GPU
from support.optimizers import ORDINARY
from support.strategies import (
    Case,
    History,
    Scale,
    cases,
    fewer,
    gradients,
    histories,
    loss_scales,
    non_finite_steps,
    parameters,
    set_gradients,
    spoiled,
)
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything, state_of

every_way = pytest.mark.parametrize(
    "backend", ["eager", "eager on a device", "triton", ON_A_GPU], indirect=True
)
pytestmark = [every_way, pytest.mark.usefixtures("backend")]


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)
UNSCALABLE = (torch.float16,)
INF = float("inf")


def any_case() -> st.SearchStrategy[Case]:
    return cases() | st.sampled_from([Case(cls) for cls in ORDINARY])


def unfit(case: Case, dtypes: set[torch.dtype]) -> bool:
    """Whether the case needs unscaled float16 gradients, which hand-written steps cannot get."""
    return case.cls in ORDINARY and not dtypes.isdisjoint(UNSCALABLE)


@fewer(0.8)
@given(any_case(), non_finite_steps(dtypes=DTYPES), loss_scales(off=False), st.data())
def test_nothing_changes_when_any_gradient_has_a_non_finite_element(case, drawn, scale, data):
    params, bad = drawn
    assume(not unfit(case, {p.dtype for p in params}))
    made = [p.parameter() for p in params]
    optimizer = case.make(made)
    for _ in range(data.draw(st.integers(0, 2), label="finite steps before")):
        set_gradients(made, data.draw(gradients(params)))
        optimizer.step()
    before = everything(optimizer)
    set_gradients(made, bad)

    result = optimizer.unscale_and_step(grads_scaled_by=scale.make())

    assert result.found_inf > 0
    assert result.skipped
    after = everything(optimizer)
    assert after["parameters"] == before["parameters"]
    assert after["groups"] == before["groups"]
    assert after["random"] == before["random"]
    for old, new in zip(before["state"], after["state"], strict=True):
        if old:
            assert new == old
        elif new:  # what a skipped step has to create, it creates as if fresh
            assert_fresh(new)


def assert_fresh(state: dict[str, Any]) -> None:
    for name, value in state.items():
        assert is_fresh(name, value), (name, value.shown)


@fewer(0.4)
@given(any_case(), histories(dtypes=DTYPES[:3]), loss_scales(off=False), st.booleans())
def test_training_goes_on_as_if_the_skipped_steps_had_never_been(case, history, scale, split):
    """In first and later steps, with momentum and dampening. Torch's fused SGD fails this test."""
    params, optimizer = train(case, history, scale, split, with_overflows=True)
    clean_params, clean = train(case, history, scale, split, with_overflows=False)
    assert bits(params) == bits(clean_params)
    assert without_fresh(optimizer) == without_fresh(clean)


def train(
    case: Case, history: History, scale: Scale, split: bool, with_overflows: bool
) -> tuple[list[Parameter], ampopt.Optimizer]:
    torch.manual_seed(0)  # the optimizers draw random numbers, and a skip must not
    params = history.build()
    optimizer = case.make(params)
    for step, overflows in zip(history.steps, history.overflows, strict=True):
        if with_overflows or not overflows:
            set_gradients(params, step, scale.number)
            attempt(optimizer, scale.make(), split)
    return params, optimizer


def attempt(optimizer: ampopt.Optimizer, scale: Any, split: bool) -> None:
    if split:
        optimizer.unscale(grads_scaled_by=scale)
        optimizer.step_after_unscale()
    else:
        optimizer.unscale_and_step(grads_scaled_by=scale)


def without_fresh(optimizer: ampopt.Optimizer) -> list[Any]:
    """The states of each parameter; ``None`` if only skipped steps have made them."""
    return [
        state if state and not all(is_fresh(*entry) for entry in state.items()) else None
        for state in state_of(optimizer)
    ]


@fewer(0.4)
@given(cases(stateful=True), non_finite_steps(), st.integers(1, 3), st.data())
def test_a_checkpoint_after_skips_alone_loads_as_an_untouched_optimizer(case, drawn, skips, data):
    params, bad = drawn
    made = [p.parameter() for p in params]
    optimizer = case.make(made)
    for _ in range(skips):
        set_gradients(made, bad)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    saved = copy.deepcopy(optimizer.state_dict())

    loaded_params, fresh_params = ([p.parameter() for p in params] for _ in range(2))
    loaded, fresh = case.make(loaded_params), case.make(fresh_params)
    loaded.load_state_dict(saved)
    good = data.draw(gradients(params))
    for opt, of in ((optimizer, made), (loaded, loaded_params), (fresh, fresh_params)):
        set_gradients(of, good)
        opt.unscale_and_step(grads_scaled_by=1.0)
    assert bits(loaded_params) == bits(fresh_params)
    assert bits(made) == bits(fresh_params)
    assert without_fresh(loaded) == without_fresh(fresh)


@fewer(0.4)
@given(
    cases(classes=(ampopt.SGD, ampopt.Adam, ampopt.AdamW), stateful=True),
    non_finite_steps(),
    st.data(),
)
def test_torch_takes_a_checkpoint_after_skips_alone_for_a_fresh_start(case, drawn, data):
    params, bad = drawn
    made = [p.parameter() for p in params]
    optimizer = case.make(made)
    set_gradients(made, bad)
    optimizer.unscale_and_step(grads_scaled_by=1.0)

    loaded_params, fresh_params = ([p.parameter() for p in params] for _ in range(2))
    loaded, fresh = case.torch(loaded_params), case.torch(fresh_params)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    good = data.draw(gradients(params))
    for opt, of in ((loaded, loaded_params), (fresh, fresh_params)):
        set_gradients(of, good)
        opt.step()
    assert bits(loaded_params) == bits(fresh_params)


@pytest.mark.parametrize("cls", ORDINARY)
def test_an_ordinary_step_is_not_run_at_all_when_it_is_skipped(cls):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    param.grad = torch.tensor([1.0, INF, 1.0])
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param not in optimizer.state
    assert "step" not in optimizer.param_groups[0]


def test_the_memory_of_a_state_made_by_a_skip_is_not_left_uninitialised():
    """Tests fill ``torch.empty`` with NaN. Torch's fused SGD would use it in the next step."""
    param = Parameter(torch.ones(3))
    optimizer = ampopt.SGD([param], lr=0.5, momentum=0.5, dampening=0.5)
    param.grad = torch.full((3,), INF)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.zeros(3))
    assert optimizer.state_dict()["state"] == {}

    param.grad = torch.ones(3)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    # The first step that happens sets the buffer undampened.
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones(3))
    assert torch.equal(param.detach(), torch.full((3,), 0.5))


@pytest.mark.parametrize("where", range(3))
def test_one_bad_gradient_skips_every_group_and_dtype(where):
    params = [Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, torch.float64)]
    params.append(Parameter(torch.ones(2, dtype=torch.bfloat16)))
    optimizer = ampopt.AdamW([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(params)])
    for p in params:
        p.grad = torch.ones_like(p)
    grad = params[where].grad
    assert grad is not None
    grad[1] = INF
    before = bits(params)
    assert optimizer.unscale_and_step(grads_scaled_by=2.0).skipped
    assert bits(params) == before
    assert all(float(optimizer.state[p]["step"]) == 0 for p in params)


@pytest.mark.parametrize("number", [0.0, -4.0, INF, float("nan")])
@pytest.mark.parametrize("split", [False, True])
def test_a_scale_on_the_device_that_is_no_scale_skips(number, split):
    """A gradient divided by inf is a finite 0, so the scale itself is tested."""
    param = Parameter(torch.ones(2))
    optimizer = ampopt.AdamW([param])
    param.grad = torch.ones(2)
    before = bits(param)
    attempt(optimizer, torch.tensor(number), split)
    assert bits(param) == before
    assert float(optimizer.state[param]["step"]) == 0


@pytest.mark.parametrize("split", [False, True])
def test_an_overflow_by_unscaling_alone_is_an_overflow(split):
    """``GradScaler`` tests scaled gradients only, and applies the infinity (trap T5)."""
    param = Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=1.0)
    param.grad = torch.tensor([1e37, 1.0])
    before = bits(param)
    attempt(optimizer, 2.0**-10, split)
    assert bits(param) == before


def test_gradients_are_tested_in_float64_for_float64_parameters():
    param = Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = ampopt.SGD([param], lr=1e-300)
    param.grad = torch.full((2,), 1e300, dtype=torch.float64)
    assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    assert torch.equal(param.detach(), torch.zeros(2, dtype=torch.float64))


def test_float16_gradients_are_unscaled_in_float32():
    """In float16, unscaling would round small gradients to 0."""
    param = Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = ampopt.SGD([param], lr=2.0**20)
    param.grad = torch.full((1,), 2.0**-10, dtype=torch.float16)
    optimizer.unscale_and_step(grads_scaled_by=2.0**16)
    assert param.item() == -(2.0**-6)


@fewer(0.4)
@given(
    parameters(dtypes=DTYPES).filter(lambda ps: any(p.numbers for p in ps)), st.data(), any_case()
)
def test_the_flag_from_unscale_skips_and_edited_gradients_are_not_tested_again(params, data, case):
    assume(not any(p.dtype == torch.float16 for p in params))
    made = [p.parameter() for p in params]
    optimizer = case.make(made)
    step = data.draw(gradients(params, absent=False))
    set_gradients(made, data.draw(spoiled(step)))
    before = everything(optimizer)
    found_inf, _ = optimizer.unscale(grads_scaled_by=2.0)
    assert found_inf > 0
    set_gradients(made, step)
    assert optimizer.step_after_unscale().skipped
    after = everything(optimizer)
    assert (after["parameters"], after["random"]) == (before["parameters"], before["random"])


def test_drop_overflow_update_false_applies_the_update_and_says_so():
    for split in (False, True):
        param = Parameter(torch.ones(2))
        optimizer = ampopt.SGD([param], lr=1.0)
        param.grad = torch.tensor([2.0, INF])
        scale = ampopt.StaticLossScale(2.0, drop_overflow_update=False)
        if split:
            optimizer.unscale(grads_scaled_by=scale)
            result = optimizer.step_after_unscale()
        else:
            result = optimizer.unscale_and_step(grads_scaled_by=scale)
        assert result.found_inf > 0
        assert not result.skipped
        assert result.scale is scale
        assert param.tolist() == [0.0, -INF]


SHARED = {
    "the same": (lambda g: g[:40], lambda g: g[:40]),
    "in part": (lambda g: g[:60], lambda g: g[50:90]),
    "in part, the later one first": (lambda g: g[50:110], lambda g: g[:70]),
    "in a chain": (lambda g: g[:40], lambda g: g[30:60], lambda g: g[50:80]),
    "within": (lambda g: g[:100], lambda g: g[20:30], lambda g: g[40:50]),
    "alternating": (lambda g: g[:100:2], lambda g: g[1:100:2]),
    "expanded": (lambda g: g[:1].expand(9), lambda g: g[:9]),
}
"""Gradients as views of one tensor."""


@pytest.mark.parametrize(
    ("cls", "by_scaler"),
    [(ampopt.SGD, False), (ampopt.SGD, True), (ampopt.extend(torch.optim.SGD), False)],
)
@pytest.mark.parametrize("how", SHARED)
def test_gradients_that_share_memory_are_divided_once(how, cls, by_scaler):
    values = torch.arange(1.0, 121.0)
    shapes = [view(values).shape for view in SHARED[how]]
    params: list[Any] = [Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = cls(params, lr=1.0)
    for _ in range(2):  # with a new plan, and with one that is kept
        for p in params:
            p.data.zero_()
        shared = values.clone()
        for p, view in zip(params, SHARED[how], strict=True):
            p.grad = view(shared)
        if by_scaler:  # the step unscales
            if how == "expanded":
                return  # torch's scaler refuses it
            scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        else:
            optimizer.unscale(grads_scaled_by=4.0)
        for p, view in zip(params, SHARED[how], strict=True):
            assert torch.equal(p.grad, view(values) / 4)
        if not by_scaler:
            optimizer.step_after_unscale()
        for p, view in zip(params, SHARED[how], strict=True):
            assert torch.equal(p, -view(values) / 4)
        if how == "alternating":
            assert [p.grad.data_ptr() for p in params] == [
                view(shared).data_ptr() for view in SHARED[how]
            ]


@pytest.mark.parametrize(
    ("cls", "grads_scaled_by"), [(ampopt.SGD, None), (ampopt.extend(torch.optim.SGD), 4.0)]
)
@pytest.mark.parametrize("how", SHARED)
def test_gradients_that_share_memory_are_clipped_once(how, cls, grads_scaled_by):
    def stepped(views: list[torch.Tensor]) -> list[torch.Tensor]:
        params: list[Any] = [Parameter(torch.zeros_like(view)) for view in views]
        for p, view in zip(params, views, strict=True):
            p.grad = view
        cls(params, lr=1.0).unscale_and_step(grads_scaled_by=grads_scaled_by, max_norm=1.0)
        return params

    values = torch.arange(1.0, 121.0)
    alone = stepped([view(values).clone() for view in SHARED[how]])
    torch.testing.assert_close(stepped([view(values) for view in SHARED[how]]), alone)
