"""Eleven traps, T1 to T11: errors of torch's scaler and of other systems that ampopt avoids.

Each test's docstring describes its trap, most of them with ``torch.amp.GradScaler`` in an unchanged
loop. Tests of ``ampopt.GradScaler`` have the same numbers in their names, such as T7 and T9, which
are about scalers alone. T4 takes two processes, and is in ranks/test_skip.py.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fixtures import either_host
from support.optimizers import BY_RULE, CLOSURE_FREE, OWN, HostCounted
from support.strategies import fewer
from support.training_loops import INF, give, iterate, made, scaler_at, steps
from torch.utils import _pytree as pytree

import ampopt
from ampopt import DynamicLossScale, StaticLossScale
from ampopt.loss_scale.presets import PRESETS
from ampopt.testing.bits import bits, everything

backend = either_host
on_each_backend = pytest.mark.usefixtures("backend")
each_of_all = pytest.mark.parametrize("cls", [*CLOSURE_FREE, *OWN])
both_ways = pytest.mark.parametrize("unscale_first", [False, True])


@pytest.mark.parametrize("cls", [*CLOSURE_FREE, *OWN, ampopt.LBFGS])
def test_t1_a_closure_by_position_is_refused_with_the_way_to_do_it(cls):
    """Trap: torch calls the closure after its test of the gradients, and applies new ones untested.

    Parameters may become NaN. ``ampopt.GradScaler`` calls the closure again after an overflow: see
    grad_scaler/test_closures.py. Accelerate passes closures by position: see tests/frameworks.
    """
    # torch.optim.LBFGS takes one group of any shape, and the others matrices.
    optimizer, _ = made(cls)
    give(optimizer, 1.0)
    before = everything(optimizer)
    scaler = scaler_at(4.0)
    ran = []
    with pytest.raises(RuntimeError, match=r"ampopt\.GradScaler.*unscale_and_step\(closure"):
        scaler.step(optimizer, lambda: ran.append(1))
    assert not ran
    assert everything(optimizer) == before
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    if cls is not ampopt.LBFGS:  # the scaler goes on, and takes no closure where it is said so
        scaler.step(optimizer, None)
        assert everything(optimizer) != before


@on_each_backend
@each_of_all
def test_t2_a_flag_of_2_skips(cls):
    """Trap: torch's fused kernels skip only if the flag is 1; flags of several devices add up."""
    optimizer, params = made(cls)
    give(optimizer, 1.0)
    before = everything(optimizer)["parameters"]
    scaler = scaler_at(4.0)
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    found["one device"], found["another"] = torch.ones(()), torch.ones(())
    scaler.step(optimizer)
    assert everything(optimizer)["parameters"] == before
    assert not any(state["step"].any() for state in optimizer.state.values() if "step" in state)


@on_each_backend
@each_of_all
def test_t3_a_flag_of_one_dimension_as_sharded_scalers_make_skips(cls):
    """Trap: torch's fused AdamW fails, as it expects a flag without dimensions."""
    optimizer, _ = made(cls)
    give(optimizer, 1.0)
    before = everything(optimizer)["parameters"]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([2.0]), torch.ones(1)
    optimizer.step()
    assert everything(optimizer)["parameters"] == before
    optimizer.found_inf = torch.zeros(1)
    optimizer.step()
    assert everything(optimizer)["parameters"] != before


@each_of_all
@pytest.mark.parametrize("bad", [False, True])
def test_t3_a_sharded_scaler_steps_after_unscale(cls, bad, process_group):
    """Only ``unscale_`` of this scaler shares the flag with other ranks, so call it first."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    optimizer, _ = made(cls)
    give(optimizer, INF if bad else 1.0, 4.0)
    before = everything(optimizer)["parameters"]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    if not issubclass(cls, torch.optim.SparseAdam):  # whose gradients that scaler cannot unscale
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert (everything(optimizer)["parameters"] == before) is bad
    if not bad:
        reference, _ = made(cls)
        give(reference, 1.0)
        if cls is not HostCounted:  # which draws random numbers
            reference.step()
            assert everything(reference)["parameters"] == everything(optimizer)["parameters"]


@on_each_backend
@each_of_all
@pytest.mark.parametrize(
    "scaler_class, unscale_first",
    [(torch.amp.GradScaler, False), (ampopt.GradScaler, False), (ampopt.GradScaler, True)],
)
def test_t5_an_overflow_by_unscaling_is_not_applied(cls, scaler_class, unscale_first):
    """Trap: torch tests scaled gradients, and dividing by a scale below 1 makes them larger.

    After torch's own ``unscale_``, its test decides: an overflow that it missed cannot be told from
    an edit of the gradients by the user.
    """
    optimizer, _ = made(cls)
    before = everything(optimizer)["parameters"]
    give(optimizer, 1e37)
    scaler = scaler_at(2.0**-10, scaler_class)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert everything(optimizer)["parameters"] == before


@each_of_all
def test_t5_a_scale_that_ran_down_to_0_applies_nothing(cls):
    """Trap: 0 times infinity is NaN, which torch applies; and the scale stays 0."""
    optimizer, _ = made(cls)
    before = everything(optimizer)["parameters"]
    scaler = scaler_at(2.0**-149)
    for _ in range(3):
        give(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.0
    give(optimizer, 0.0)  # as a loss times 0 has
    scaler.step(optimizer)
    assert everything(optimizer)["parameters"] == before


@pytest.mark.parametrize("cls", BY_RULE)
def test_t6_a_parameter_of_two_optimizers_is_unscaled_once(cls):
    """Trap: torch unscales a shared gradient in place, once for each optimizer.

    A rule unscales the values that it reads. After the step of a scaler, ``p.grad`` is unscaled all
    the same. With torch's scaler, a second optimizer of any class would unscale again;
    ``ampopt.GradScaler`` raises.
    """
    runs = []
    for scale in (1.0, 2.0**10):
        first, params = made(cls)
        second = cls(params[:1])
        give(first, 0.5, scale)
        first.unscale_and_step(grads_scaled_by=scale)
        second.unscale_and_step(grads_scaled_by=scale)
        runs.append(bits(params))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.0},
        {"init_scale": float("nan")},
        {"init_scale": 1e39},
        {"backoff_factor": 0.0},
        {"backoff_factor": -1.0},
        {"backoff_factor": 1.0},
        {"growth_factor": 1.0},
        {"growth_interval": 0},
    ],
    ids=str,
)
def test_t7_a_schedule_that_cannot_work_is_refused(options):
    """Trap: torch accepts most of these. The scale then never grows, or is NaN at once."""
    (name,) = options
    for make in (
        lambda: DynamicLossScale(**options),
        lambda: DynamicLossScale.like("torch", **options),
        lambda: ampopt.GradScaler("cpu", **options),
    ):
        with pytest.raises(ValueError, match=name):
            make()


@each_of_all
@both_ways
def test_t8_step_hooks_run_on_every_attempt(cls, unscale_first):
    """Trap: torch's hooks run after a skipped fused step, and not after another skipped step."""
    optimizer, _ = made(cls)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scaler = scaler_at(4.0)
    for step in (INF, 1.0, INF):
        calls.clear()
        iterate(scaler, optimizer, step, unscale_first)
        assert calls == ["before", "after"]


@pytest.mark.parametrize("cls", BY_RULE)
@pytest.mark.parametrize("bad", [False, True])
def test_t8_gradients_are_left_unscaled_by_a_scaler_and_as_they_were_without(cls, bad):
    """Trap: torch leaves unscaled gradients after one kind of skip, scaled ones after the other."""
    optimizer, params = made(cls)
    give(optimizer, INF if bad else 1.0)
    unscaled = bits([p.grad for p in params])
    give(optimizer, INF if bad else 1.0, 4.0)
    scaled = bits([p.grad for p in params])
    optimizer.unscale_and_step(grads_scaled_by=4.0)
    assert bits([p.grad for p in params]) == scaled
    scaler_at(4.0).step(optimizer)
    assert bits([p.grad for p in params]) == unscaled


@pytest.mark.parametrize("shape", [(), (1,)])
def test_t9_a_half_precision_loss_does_not_overflow_by_being_scaled(shape):
    """Trap: 1.5 * 65536 overflows float16, and torch widens only losses without dimensions."""
    loss = torch.full(shape, 1.5, dtype=torch.float16)
    for scaled in (
        ampopt.scale_outputs(loss, 2.0**16),
        ampopt.scale_outputs(loss, DynamicLossScale()),
        ampopt.GradScaler("cpu").scale(loss),
    ):
        assert scaled.dtype == torch.float32
        assert scaled == 1.5 * 2**16


@on_each_backend
@pytest.mark.parametrize("cls", [ampopt.Adam, ampopt.NAdam, ampopt.ASGD])
@fewer(0.1)
@given(steps(), st.booleans())
def test_t10_every_group_counts_the_finite_steps_and_unscales_once(cls, steps, unscale_first):
    """Trap: apex and TransformerEngine advance counts of a group by the flag of the step before.

    They also unscale in every step, so gradients that were unscaled before are unscaled twice.
    """
    _, params = made(cls)
    optimizer = cls([{"params": [p]} for p in params], lr=0.25)
    _, clean_params = made(cls)
    clean = cls([{"params": [p]} for p in clean_params], lr=0.25)
    scale: Any = DynamicLossScale(init_scale=2.0**4)
    happened = 0
    for step in steps:
        give(optimizer, step, scale.item())
        if unscale_first:
            scale = optimizer.unscale(grads_scaled_by=scale).scale
            result = optimizer.step_after_unscale()
        else:
            result = optimizer.unscale_and_step(grads_scaled_by=scale)
            scale = result.scale
        if step.bad is None:
            happened += 1
            give(clean, step)
            clean.step()
        assert result.skipped is (step.bad is not None)
        counts = {float(state["step"]) for state in optimizer.state.values()}
        assert counts == {happened}
    assert bits(params) == bits(clean_params)


@pytest.mark.parametrize("name", sorted(PRESETS))
@fewer(0.3)
@given(st.lists(st.booleans(), max_size=8), st.lists(st.booleans(), max_size=8))
def test_t11_no_way_to_copy_a_scale_forgets_its_floor(name, before, after):
    """Trap: jmp's ``tree_flatten`` omits the floor, so any jit or tree_map resets it to 1."""

    def follow(scale: Any, flags: list[bool]) -> Any:
        for flag in flags:
            scale = scale.next(flag)
        return scale

    bounds = {"init_scale": 2.0**3, "min_scale": 2.0**2, "max_scale": 2.0**4}
    scale = follow(DynamicLossScale.like(name, **bounds, growth_interval=2), before)
    loaded = DynamicLossScale()
    loaded.load_state_dict(scale.state_dict())
    (mapped,) = pytree.tree_map(lambda leaf: leaf, [scale])
    expected = follow(scale, after).state_dict()
    for one in (
        copy.copy(scale),
        copy.deepcopy(scale),
        pickle.loads(pickle.dumps(scale)),
        loaded,
        mapped,
    ):
        assert follow(one, after).state_dict() == expected
    assert (expected["min_scale"], expected["max_scale"]) == (4.0, 16.0)
    static = StaticLossScale(8.0, drop_overflow_update=False)
    assert copy.deepcopy(static).state_dict() == static.state_dict()
