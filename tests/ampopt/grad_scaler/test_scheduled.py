"""``ampopt.GradScaler`` follows any loss scale, and saves and loads it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import Plain
from support.strategies import fewer
from support.training_loops import INF, after, give, made, scaler_at, steps

import ampopt
from ampopt import DynamicLossScale, GradScaler, StaticLossScale
from ampopt.loss_scale.presets import PRESETS
from ampopt.testing.bits import bits


def fused_sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, fused=True)


@st.composite
def scales(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        return StaticLossScale(2.0**10, drop_overflow_update=draw(st.booleans()))
    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": draw(st.integers(1, 3))}
    if draw(st.booleans()):
        return DynamicLossScale.like(draw(st.sampled_from(sorted(PRESETS))), **options)
    modes = st.sampled_from(["consecutive", "cumulative", "per_backoff"])
    options.update(hysteresis=draw(st.integers(1, 3)), hysteresis_mode=draw(modes))
    if draw(st.booleans()):
        options.update(min_scale=2.0**9, max_scale=2.0**11)
    return DynamicLossScale(**options)


@pytest.mark.parametrize("cls", [ampopt.SGD, Plain, torch.optim.SGD, fused_sgd])
@fewer(1)
@given(scales(), st.lists(st.booleans(), max_size=12))
def test_any_schedule_is_followed(cls, scale, overflows):
    scaler = GradScaler("cpu", loss_scale=scale)
    for overflowed in overflows:
        optimizer, params = made(cls)  # a fresh one, as an overflow may be let pass
        scaler.scale(torch.zeros(()))
        assert scaler.get_scale() == scale.item()
        before = bits(params)
        give(optimizer, INF if overflowed else 1.0, scale.item())
        scaler.step(optimizer)
        drops = overflowed and scale.drop_overflow_update
        assert (bits(params) == before) is drops
        assert scaler.skipped is drops
        scale = scale.next(overflowed)
        scaler.update()
        assert scaler.skipped is drops
    assert scaler.loss_scale is not None
    assert scaler.loss_scale.state_dict() == scale.state_dict()


def test_settings_can_be_read_and_changed():
    scaler = scaler_at(8.0, GradScaler, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    assert scaler.get_growth_factor() == 4.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 3
    scaler.set_growth_factor(2.0)
    scaler.set_backoff_factor(0.5)
    optimizer, _ = made(torch.optim.SGD)
    after(scaler, optimizer, [1.0, 1.0], False)
    scaler.set_growth_interval(2)  # which has passed
    assert after(scaler, optimizer, [1.0, INF], False)[0]["scale"] == 16.0
    assert scaler.get_scale() == 8.0
    for change, wrong in (
        (scaler.set_growth_factor, 1.0),
        (scaler.set_backoff_factor, -1.0),
        (scaler.set_backoff_factor, 1.0),
        (scaler.set_growth_interval, 0),
    ):
        with pytest.raises(ValueError, match=str(wrong)):
            change(wrong)
    assert scaler.get_scale() == 8.0
    static = GradScaler("cpu", loss_scale=StaticLossScale(2.0))
    for call in (static.get_growth_factor, lambda: static.set_growth_interval(2)):
        with pytest.raises(RuntimeError, match="it is constant"):
            call()


@pytest.mark.parametrize("when", ["before", "after unscale_", "after step"])
def test_settings_changed_in_mid_iteration_stay(when):
    scaler = scaler_at(8.0, GradScaler, growth_interval=1)
    optimizer, _ = made(ampopt.SGD)
    give(optimizer, 1.0)
    for now in ("before", "after unscale_", "after step"):
        if now == "after unscale_":
            scaler.unscale_(optimizer)
        if now == "after step":
            scaler.step(optimizer)
        if now == when:
            scaler.set_growth_factor(4.0)
    scaler.update()
    assert scaler.get_growth_factor() == 4.0
    assert scaler.get_scale() == (32.0 if when == "before" else 16.0)
    after(scaler, optimizer, [1.0], False)
    assert scaler.get_scale() == (128.0 if when == "before" else 64.0)


@pytest.mark.parametrize("overflows", [(False, False), (True, False), (False, True)])
def test_settings_changed_between_two_steps_apply_from_the_next_iteration_on(overflows):
    scaler = scaler_at(8.0, GradScaler, growth_interval=1)
    pair = [made(ampopt.SGD)[0] for _ in overflows]
    for optimizer, overflowed in zip(pair, overflows, strict=True):
        give(optimizer, INF if overflowed else 1.0)
        scaler.step(optimizer)
        scaler.set_growth_factor(4.0)
    scaler.update()
    assert scaler.get_scale() == (4.0 if any(overflows) else 16.0)
    after(scaler, pair[0], [1.0], False)
    assert scaler.get_scale() == (16.0 if any(overflows) else 64.0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"init_scale": 0.0}, ValueError),
        ({"init_scale": float("nan")}, ValueError),
        ({"init_scale": 1e39}, ValueError),
        ({"growth_factor": 1.0}, ValueError),
        ({"backoff_factor": 0.0}, ValueError),
        ({"backoff_factor": -1.0}, ValueError),
        ({"growth_interval": 0}, ValueError),
        ({"growth_interval": 2.5}, TypeError),
        ({"loss_scale": 8.0}, TypeError),
        ({"loss_scale": StaticLossScale(2.0), "init_scale": 4.0}, ValueError),
    ],
)
def test_t7_arguments_are_checked(options, error):
    with pytest.raises(error, match=next(reversed(options))):
        GradScaler("cpu", **options)


@pytest.mark.parametrize("new", [2, 2.0, torch.tensor(2.0), torch.tensor([2.0])])
@pytest.mark.parametrize("kind", [DynamicLossScale, StaticLossScale])
def test_t7_update_takes_a_new_scale(kind, new):
    scale = StaticLossScale(8.0) if kind is StaticLossScale else DynamicLossScale(init_scale=8.0)
    scaler = GradScaler("cpu", loss_scale=scale)
    scaler.scale(torch.zeros(()))
    scaler.update(new)
    assert scaler.get_scale() == 2.0
    assert scaler.scale(torch.ones(())) == 2.0
    for wrong in (0.0, float("inf"), float("nan"), -1):
        for form in (wrong, torch.tensor(float(wrong))):
            with pytest.raises(ValueError, match=r"new_scale must be .* got"):
                scaler.update(form)
    for wrong in (
        torch.ones(2),
        torch.ones((), dtype=torch.int32),
        torch.ones((), requires_grad=True),
    ):
        with pytest.raises(ValueError, match="new_scale"):
            scaler.update(wrong)
    with pytest.raises(TypeError, match="new_scale"):
        scaler.update("2")  # type: ignore[arg-type]
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("new", [2.0**12, torch.tensor(2.0**12)])
def test_update_keeps_the_bounds_of_the_scale(new):
    scale = DynamicLossScale(init_scale=8.0, max_scale=2.0**10)
    scaler = GradScaler("cpu", loss_scale=scale)
    scaler.scale(torch.zeros(()))
    with pytest.raises(
        ValueError, match=r"new_scale must be from .* to max_scale=1024\.0, got 4096\.0"
    ):
        scaler.update(new)
    assert scaler.get_scale() == 8.0


# --- saving and loading --------------------------------------------------------------------------


@fewer(0.5)
@given(steps(5), st.integers(0, 5), st.booleans())
def test_states_interchange_with_torchs_in_mid_training(steps, at, ours_first):
    """A run that changes scalers half way gives the results of a run with either scaler."""
    kinds = [torch.amp.GradScaler, GradScaler]
    runs = []
    for swap in (False, True):
        optimizer, params = made(torch.optim.Adam)
        scaler = kinds[ours_first]("cpu", init_scale=2.0**10, growth_interval=2)
        states = after(scaler, optimizer, steps[:at], False)
        if swap:
            loaded = kinds[not ours_first]("cpu")
            loaded.load_state_dict(scaler.state_dict())
            scaler = loaded
        states += after(scaler, optimizer, steps[at:], False)
        runs.append((states, bits(params)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("as_saved", [lambda number: number, torch.tensor])
@pytest.mark.parametrize("order", [(torch.amp.GradScaler, GradScaler), (GradScaler,) * 2])
def test_finite_steps_that_were_counted_are_loaded(order, as_saved):
    first, second = (cls("cpu", init_scale=4.0, growth_interval=2) for cls in order)
    optimizer, _ = made(torch.optim.SGD)
    assert after(first, optimizer, [1.0], False)[-1]["_growth_tracker"] == 1
    second.load_state_dict({name: as_saved(x) for name, x in first.state_dict().items()})
    assert second._init_growth_tracker == 1  # torch's own test of loading reads it
    assert after(second, optimizer, [1.0], False)[-1]["scale"] == 8.0


@fewer(0.5)
@given(scales(), st.lists(st.booleans(), max_size=4), st.lists(st.booleans(), max_size=4))
def test_any_schedule_is_saved_and_loaded(scale, before, after):
    def run(scaler: Any, overflows: Any) -> None:
        for overflowed in overflows:
            optimizer, _ = made(torch.optim.SGD)
            scaler.scale(torch.zeros(()))
            give(optimizer, INF if overflowed else 1.0)
            scaler.step(optimizer)
            scaler.update()

    scaler = GradScaler("cpu", loss_scale=scale)
    run(scaler, before)
    fresh = type(scale)(**scale._settings())
    loaded = GradScaler("cpu", loss_scale=fresh)
    loaded.load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))
    for each in (scaler, loaded):
        run(each, after)
    assert loaded.state_dict() == scaler.state_dict()
    torchs = torch.amp.GradScaler("cpu")  # takes what it can tell: the scale
    torchs.load_state_dict(scaler.state_dict())
    torchs.scale(torch.zeros(()))
    assert torchs.get_scale() == scaler.get_scale()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_schedule_that_grows_late_still_grows_under_torchs_scaler(name):
    scale = DynamicLossScale.like(name, init_scale=4.0, growth_interval=2)
    for _ in range(2):
        scale = scale.next(False)
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(scale.grad_scaler_state_dict())
    value = torchs.get_scale()
    states = after(torchs, made(torch.optim.SGD)[0], [1.0, 1.0], False)
    assert states[-1]["scale"] == 2 * value


def test_disabled_scalers_save_nothing_and_an_enabled_one_says_so():
    for cls in (GradScaler, torch.amp.GradScaler):
        disabled = cls("cpu", enabled=False)
        assert disabled.state_dict() == {}
        disabled.load_state_dict({})
        disabled.load_state_dict(scaler_at(4.0, GradScaler).state_dict())
        disabled.set_growth_factor(3.0)
        assert disabled.get_scale() == 1.0
    scaler = scaler_at(4.0, GradScaler)
    with pytest.raises(RuntimeError, match="saved from a disabled"):
        scaler.load_state_dict({})
    for wrong in ({"scale": 2.0}, {**scaler.state_dict(), "scale": -1.0}):
        with pytest.raises(ValueError):
            scaler.load_state_dict(wrong)
    static = GradScaler("cpu", loss_scale=StaticLossScale(8.0))
    with pytest.raises(ValueError, match="dynamic scale"):
        static.load_state_dict(scaler.state_dict())
    assert (scaler.get_scale(), static.get_scale()) == (4.0, 8.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent(copied):
    optimizer, _ = made(ampopt.SGD)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, 1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"call update\(\) first"):
        copied(scaler)
    scaler.step(optimizer)
    scaler.update()
    other = copied(scaler)
    states = after(other, optimizer, [INF, 1.0], False)
    assert scaler.get_scale() == 4.0
    assert after(scaler, optimizer, [INF, 1.0], False) == states


def test_a_state_has_the_hysteresis_that_torchs_lacks():
    scale = DynamicLossScale(init_scale=8.0, hysteresis=2)
    scaler, other = (GradScaler("cpu", loss_scale=scale) for _ in range(2))
    for overflows in (1, 2):
        optimizer, _ = made(ampopt.SGD)
        scaler.scale(torch.zeros(()))
        give(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if overflows == 1 else 4.0)
        other.load_state_dict(scaler.state_dict())
        scaler = other
