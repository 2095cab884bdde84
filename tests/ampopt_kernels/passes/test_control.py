"""The pass control, on every backend, compared with its definition in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_rows import CPU, ENGINES, each_engine

from ampopt.testing.bits import bits
from ampopt_kernels import torch_language
from ampopt_kernels.next_scale import PolicyConstants, next_scale
from ampopt_kernels.step_data import Decision, Partials, Request
from ampopt_kernels.step_tensors import Work

POLICY = PolicyConstants(2.0, 0.5, 3.0, 2.0, 2.0, 1.0, 0.0, 2.0**-3, 2.0**5)
MANY = 1025
"""One flag more than control reduces at a time."""


def decide(engine, request, partials) -> Decision:
    return ENGINES[engine]().control(Work(CPU, []), request, partials)


def parts(flags=(), squares=None):
    return Partials(
        torch.tensor(flags, dtype=torch.float32),
        None if squares is None else torch.tensor(squares, dtype=torch.float64),
    )


@st.composite
def some_parts(draw, values):
    """A few flags, or many equal ones with one exception at any place."""
    if draw(st.booleans()):
        return draw(st.lists(values, max_size=5))
    many = [draw(values)] * MANY
    many[draw(st.sampled_from([0, MANY - 2, MANY - 1]) | st.integers(0, MANY - 1))] = draw(values)
    return many


@each_engine
@given(
    flags=some_parts(st.sampled_from([0.0, 1.0])),
    external=st.sampled_from([None, 0.0, -1.0, 1.0, 2.0, math.inf, math.nan]),
    scale=st.sampled_from([None, 1.0, 2.0**-10, 3.0, 0.0, -0.0, -2.0, math.inf, math.nan]),
    check=st.booleans(),
    drop=st.booleans(),
    shape=st.sampled_from([(), (1,), (1, 1)]),
)
def test_decides(engine, flags, external, scale, check, drop, shape):
    request = Request(
        scale=None if scale is None else torch.full(shape, scale),
        check=check,
        found_inf=None if external is None else torch.full(shape, external),
        drop=drop,
    )
    usable = scale is None or 0 < scale < math.inf
    overflow = (external or 0.0) > 0 or (check and (1.0 in flags or not usable))
    decision = decide(engine, request, parts(flags))
    assert (decision.found_inf.dtype, decision.found_inf.shape) == (torch.float32, ())
    assert (decision.found_inf > 0).item() == overflow
    skip, inverse, clip = decision.coefficients_on_host
    assert (skip > 0) == (overflow and drop)
    if usable:
        assert inverse == 1.0 / (1.0 if scale is None else scale)  # in float64
    assert clip == 1.0
    for tensor, number in ((decision.skip, skip), (decision.clip, clip)):
        assert tensor.shape == ()
        assert tensor.item() == pytest.approx(number, nan_ok=True, abs=0, rel=0)
    assert decision.norm is None
    assert decision.scale is None
    assert decision.counters is None


@each_engine
@given(
    squares=some_parts(st.sampled_from([0.0, 1.0, 1e-30, 0.3, 1e60])),
    max_norm=st.sampled_from([0.0, 0.1, 1.0, 1e3, math.inf]),
)
def test_clips_as_torch_does(engine, squares, max_norm):
    decision = decide(
        engine,
        Request(check=False, max_norm=max_norm),
        parts([0.0] * len(squares), squares),
    )
    norm = math.sqrt(math.fsum(squares))
    assert decision.norm is not None
    assert decision.norm.shape == ()
    assert decision.norm.dtype == torch.float32  # there are no rows of float64
    assert decision.norm.item() == pytest.approx(norm, rel=1e-6)
    # torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1
    expected = min(1.0, max_norm / (norm + 1e-6))
    assert decision.clip.item() == pytest.approx(expected, rel=1e-12)


@each_engine
@given(norm=st.sampled_from([math.inf, math.nan]), max_norm=st.sampled_from([0.0, 1.0, math.inf]))
def test_a_norm_that_is_not_finite_clips_as_torch_does(engine, norm, max_norm):
    request = Request(check=False, max_norm=max_norm)
    decision = decide(engine, request, parts([1.0], [norm]))
    assert decision.norm is not None
    assert not decision.norm.isfinite()
    # As torch multiplies by; infinity only measures.
    expected = 1.0 if max_norm == math.inf else 0.0 if norm == math.inf else math.nan
    assert decision.clip.item() == pytest.approx(expected, nan_ok=True)


@each_engine
@given(
    value=st.sampled_from([2.0**-3, 1.0, 2.0**5]),
    growth=st.integers(0, 2),
    budget=st.integers(0, 2),
    flags=st.lists(st.sampled_from([0.0, 1.0]), max_size=3),
    shape=st.sampled_from([(), (1,)]),
    drop=st.booleans(),
)
def test_the_next_scale_follows_the_schedule(engine, value, growth, budget, flags, shape, drop):
    """Scale and counters are new tensors with the values of the policy; the old ones stay."""
    scale, counters = torch.full(shape, value), torch.tensor([growth, budget], dtype=torch.int32)
    before = bits((scale, counters))
    request = Request(scale, POLICY, counters, drop=drop)
    decision = decide(engine, request, parts(flags))
    expected = torch_language.bind(next_scale)(
        value, growth, budget, max([0.0, *flags]), tuple(POLICY)
    )
    assert decision.scale is not None
    assert decision.counters is not None
    assert (decision.scale.shape, decision.scale.dtype) == (scale.shape, scale.dtype)
    assert decision.counters.dtype == torch.int32
    assert [decision.scale.item(), *decision.counters.tolist()] == list(expected)
    assert bits((scale, counters)) == before
    assert decision.scale.data_ptr() != scale.data_ptr()


@each_engine
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unusable_scale_is_an_overflow(engine, scale, dtype):
    """Gradients divided by infinity are finite zeros, so the scale is tested, too."""
    request = Request(torch.tensor(scale, dtype=dtype))
    decision = decide(engine, request, parts([0.0]))
    assert decision.found_inf > 0
    assert decision.skip > 0


@each_engine
def test_an_unusable_scale_backs_off(engine):
    """For the schedule, too, an unusable scale is an overflow."""
    scale, counters = torch.tensor(math.inf), torch.tensor([1, 1], dtype=torch.int32)
    decision = decide(engine, Request(scale, POLICY, counters), parts([0.0]))
    assert decision.found_inf > 0
    assert decision.counters is not None
    assert decision.counters[0] == 0
