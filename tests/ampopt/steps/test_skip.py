"""Skipped steps in special cases; of every optimizer, see ``ampopt/testing/test_built_ins.py``."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.gpus import ON_A_GPU
from support.optimizers import ORDINARY
from support.strategies import (
    Case,
    cases,
    fewer,
    gradients,
    non_finite_steps,
    parameters,
    set_gradients,
    spoiled,
)
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything

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
INF = float("inf")


def any_case() -> st.SearchStrategy[Case]:
    return cases() | st.sampled_from([Case(cls) for cls in ORDINARY])


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
