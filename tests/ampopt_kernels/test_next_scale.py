"""The schedule of the loss scale on every backend, compared with its pseudo-code."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_rows import CPU, ENGINES, each_engine

from ampopt_kernels import torch_language
from ampopt_kernels.next_scale import PolicyConstants, next_scale
from ampopt_kernels.step_data import Partials, Request
from ampopt_kernels.step_tensors import Work

FLOAT32_MAX = float(torch.finfo(torch.float32).max)

POLICIES = st.builds(
    PolicyConstants,
    growth_factor=st.sampled_from([2.0, 1.5, 2.0**64, 1.001]),
    backoff_factor=st.sampled_from([0.5, 0.25, 0.8, 2.0**-64]),
    first_growth=st.integers(1, 4).map(float),
    growth_period=st.integers(1, 3).map(float),
    hysteresis=st.integers(1, 3).map(float),
    refill_on_finite=st.sampled_from([0.0, 1.0]),
    refill_on_backoff=st.sampled_from([0.0, 1.0]),
    min_scale=st.sampled_from([2.0**-126, 1.0, 2.0**-149]),
    max_scale=st.sampled_from([float("inf"), FLOAT32_MAX, 2.0**4]),
    kept_scale=st.sampled_from([-1.0, 1.0]),
)
HISTORIES = st.lists(st.booleans(), max_size=12)
SHORT = st.lists(st.booleans(), max_size=4)
STARTS = st.sampled_from([1.0, 2.0**16, 2.0**127, 3.0, FLOAT32_MAX])


def by_definition(value, growth, budget, overflow, c):
    """The pseudo-code of the docstring of ``next_scale``, line by line."""
    if overflow:
        growth, budget = 0.0, budget - 1
        if budget <= 0:
            if value != c.kept_scale:
                value = max(value * c.backoff_factor, c.min_scale)
            budget = c.hysteresis if c.refill_on_backoff else 0.0
    else:
        growth += 1
        if c.refill_on_finite:
            budget = c.hysteresis
        if growth >= c.first_growth:
            raised = min(value * c.growth_factor, c.max_scale)
            if torch.tensor(raised, dtype=torch.float64).float().isfinite():
                value = raised
            growth, budget = c.first_growth - c.growth_period, c.hysteresis
    return value, growth, budget


def as_float32(value):
    return torch.tensor(value, dtype=torch.float32).item()


def expected_history(start, history, constants):
    state = (as_float32(start), 0.0, constants.hysteresis)
    for overflow in history:
        value, growth, budget = by_definition(*state, overflow, constants)
        state = (as_float32(value), growth, budget)
        yield state


@given(constants=POLICIES, history=HISTORIES, start=STARTS)
def test_on_numbers(constants, history, start):
    bound = torch_language.bind(next_scale)
    state = (as_float32(start), 0.0, constants.hysteresis)
    for overflow, expected in zip(
        history, expected_history(start, history, constants), strict=True
    ):
        value, growth, budget = bound(*state, float(overflow), tuple(constants))
        state = (as_float32(value), growth, budget)
        assert state == expected


@given(constants=POLICIES, history=HISTORIES, start=STARTS)
def test_on_tensors(constants, history, start):
    bound = torch_language.bind(next_scale)
    wide = torch.tensor(constants, dtype=torch.float64).unbind()
    state = torch.tensor([as_float32(start), 0.0, constants.hysteresis], dtype=torch.float64)
    for overflow, expected in zip(
        history, expected_history(start, history, constants), strict=True
    ):
        flag = torch.tensor(float(overflow))
        value, growth, budget = bound(*state.unbind(), flag, wide)
        state = torch.stack([value.float().double(), growth, budget])
        assert tuple(state.tolist()) == expected


@each_engine
@given(constants=POLICIES, history=SHORT, start=STARTS)
def test_in_control(engine, constants, history, start):
    """Bitwise the results of the definition, on every backend, over a whole history."""
    backend, work = ENGINES[engine](), Work(CPU, [])
    scale = torch.tensor(as_float32(start))
    counters = torch.tensor([0, int(constants.hysteresis)], dtype=torch.int32)
    for overflow, expected in zip(
        history, expected_history(start, history, constants), strict=True
    ):
        request = Request(scale, constants, counters)
        partials = Partials(torch.tensor([float(overflow)]), None)
        decision = backend.control(work, request, partials)
        assert decision.scale is not None
        assert decision.counters is not None
        scale, counters = decision.scale, decision.counters
        assert (scale.item(), *counters.tolist()) == expected
