"""The schedule of a dynamic loss scale, and its warning, once, when it has fallen too far."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.loss_scales import (
    CEILING,
    FLOOR,
    advanced,
    counters,
    flags,
    float32,
    histories,
    normal_numbers,
    on_device_path,
    powers,
    scales,
    settings_of_scales,
    state,
)
from torch import nn

import ampopt
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale
from ampopt.testing import as_on_a_device, assert_no_sync

NAN = float("nan")
FALLEN = "the loss scale has fallen from"


def fallen(times: int, **settings: Any) -> ampopt.DynamicLossScale:
    scale = ampopt.DynamicLossScale(**settings)
    for _ in range(times):
        scale = scale.next(True)  # which says nothing: whoever tries a schedule out sees it fall
    return scale


def told(look: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        look()
    return [str(warning.message) for warning in caught]


def test_45_batches_of_nan_warn_once_and_say_what_to_do():
    model = nn.Linear(2, 1)
    optimizer = ampopt.AdamW(model.parameters())
    scale = ampopt.DynamicLossScale()
    step = ampopt.TrainStep(model, nn.MSELoss(), optimizer, scale, autocast=None)

    def train() -> None:
        for _ in range(45):
            step(torch.full((2, 2), NAN), torch.ones(2, 1))

    (said,) = told(train)
    assert said.startswith(f"{FALLEN} 65536 to 2.98023e-08: ")
    assert "first_nonfinite" in said and "checkpoint" in said
    assert told(lambda: step.scale and step.scale.item()) == []


@pytest.mark.parametrize(
    "look",
    [lambda s: s.item(), float, lambda s: s.state_dict()],
    ids=["item", "float", "state_dict"],
)
def test_a_call_that_reads_the_number_warns(look):
    scale = fallen(41)
    assert len(told(lambda: look(scale))) == 1
    assert told(lambda: look(scale.next(True))) == []  # once for all that follow
    assert told(lambda: look(fallen(40))) == []  # 2**-24, which float16 has


@pytest.mark.parametrize("skipped", [True, False])
def test_reading_skipped_warns(skipped):
    result = ampopt.StepResult(None, torch.tensor(float(skipped)), fallen(41))
    assert len(told(lambda: result.skipped)) == skipped


def test_the_warning_names_min_scale():
    (said,) = told(fallen(4, init_scale=8.0, min_scale=2.0).item)
    assert "from 8 to 2, its floor (min_scale=2)" in said
    assert told(fallen(1, init_scale=8.0, min_scale=2.0).item) == []


def test_a_scale_that_starts_low_does_not_warn():
    assert told(fallen(3, init_scale=1.0, min_scale=1.0).item) == []
    assert told(ampopt.DynamicLossScale(init_scale=2.0**-30).item) == []


def test_printing_and_stepping_on_a_device_do_not_warn():
    scale = fallen(60)
    assert told(lambda: f"{scale!r} {scale}") == []
    with as_on_a_device():
        parameter = nn.Parameter(torch.ones(1))
        optimizer = ampopt.SGD([parameter], lr=0.5)
        parameter.grad = torch.full((1,), NAN)

        def step() -> None:
            with assert_no_sync():
                optimizer.unscale_and_step(grads_scaled_by=scale)

        assert told(step) == []


def test_a_copy_warns_by_itself():
    scale = fallen(41)
    assert len(told(scale.item)) == 1
    assert len(told(copy.deepcopy(scale).item)) == 1


def test_a_scale_that_went_back_to_a_checkpoint_warns_when_it_falls_again():
    checkpoint = ampopt.DynamicLossScale().state_dict()
    scale = fallen(41)
    assert len(told(scale.item)) == 1
    scale.load_state_dict(checkpoint)
    for _ in range(41):
        scale = scale.next(True)
    assert len(told(scale.item)) == 1


class TestSchedule:
    @given(
        init=st.one_of(powers, normal_numbers),
        growth=st.one_of(st.just(2.0), st.floats(1.0009765625, 1e6)),
        backoff=st.one_of(st.just(0.5), st.floats(1e-6, 0.9990234375)),
        interval=st.integers(1, 4),
        history=histories,
    )
    @example(init=2.0**-124, growth=2.0, backoff=0.5, interval=2, history=[True] * 4)
    @example(init=2.0**126, growth=2.0, backoff=0.5, interval=1, history=[False] * 4)
    def test_defaults_are_torch_bit_by_bit_down_to_the_floor(
        self, init, growth, backoff, interval, history
    ):
        scale = DynamicLossScale(
            init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
        )
        theirs = torch.tensor(init, dtype=torch.float32)
        tracker = torch.zeros((), dtype=torch.int32)
        for overflow in history:
            scale = scale.next(overflow)
            torch.ops.aten._amp_update_scale_(
                theirs, tracker, torch.tensor(float(overflow)), growth, backoff, interval
            )
            assert counters(scale)[0] == tracker
            if theirs < FLOOR:
                # From here torch goes on to 0, and we do not.
                assert scale.value == FLOOR
                return
            assert torch.equal(scale.value, theirs)

    def test_default_arguments_are_those_of_grad_scaler(self):
        scaler = torch.amp.GradScaler("cpu")
        settings = DynamicLossScale()._settings()
        assert settings["init_scale"] == scaler.get_scale() == 2**16
        assert settings["growth_factor"] == scaler.get_growth_factor() == 2
        assert settings["backoff_factor"] == scaler.get_backoff_factor() == 0.5
        assert settings["growth_interval"] == scaler.get_growth_interval() == 2000
        assert settings["hysteresis"] == 1
        assert settings["hysteresis_mode"] == "consecutive"
        assert (settings["min_scale"], settings["max_scale"]) == (FLOOR, math.inf)

    @given(settings=settings_of_scales(), history=histories)
    def test_follows_its_description(self, settings, history):
        """Compared with a simulation that keeps no counters, but looks at the whole history."""
        scale = DynamicLossScale(**settings)
        value = settings["init_scale"]
        first = settings["growth_interval"] + settings["growth_offsets"][0]
        period = settings["growth_interval"] + settings["growth_offsets"][1]
        mode, limit = settings["hysteresis_mode"], settings["hysteresis"]
        strikes = 0
        for now, overflow in enumerate(history):
            scale = scale.next(overflow)
            since = 0  # finite steps up to this one, since the start or the last overflow
            while since <= now and not history[now - since]:
                since += 1
            if overflow:
                strikes += 1
                if strikes >= limit:
                    value = max(float32(value * settings["backoff_factor"]), settings["min_scale"])
                    strikes = 0 if mode == "per_backoff" else strikes
            else:
                strikes = strikes if mode == "cumulative" else 0
                if since >= first and (since - first) % period == 0:
                    strikes = 0
                    raised = min(value * settings["growth_factor"], settings["max_scale"])
                    value = float32(raised) if float32(raised) < math.inf else value
            assert scale.value.item() == value

    @given(scale=scales(), flag=flags)
    def test_numbers_and_tensors_give_the_same_bits(self, scale, flag):
        expected = scale.next(flag)
        for given_flag in (flag, torch.tensor(flag), torch.tensor([[flag]])):
            assert state(scale.next(given_flag)) == state(expected)
            with on_device_path():
                got = scale.next(given_flag)
            assert state(got) == state(expected)
            assert (got.value.dtype, got.value.shape) == (torch.float32, ())
            assert (counters(got).dtype, counters(got).shape) == (torch.int32, (2,))

    @given(scale=scales(), history=histories)
    def test_stays_within_its_bounds(self, scale, history):
        settings = scale._settings()
        for overflow in history:
            scale = scale.next(overflow)
            value = scale.item()
            assert settings["min_scale"] <= value <= settings["max_scale"]
            assert math.isfinite(value)
            growth, budget = counters(scale).tolist()
            assert 0 <= growth < settings["growth_interval"] + settings["growth_offsets"][0]
            assert 0 <= budget <= settings["hysteresis"]

    @pytest.mark.parametrize("flag", [torch.tensor(2.0), torch.tensor([3]), torch.tensor([[True]])])
    def test_any_flag_above_zero_is_an_overflow(self, flag):
        assert DynamicLossScale().next(flag).item() == 2**15

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bool])
    def test_flags_of_any_real_dtype(self, dtype):
        scale = DynamicLossScale(growth_interval=1)
        assert scale.next(torch.ones((), dtype=dtype)).item() == 2**15
        assert scale.next(torch.zeros((), dtype=dtype)).item() == 2**17

    def test_the_scale_does_not_grow_beyond_float32(self):
        scale = DynamicLossScale(init_scale=2.0**127, growth_interval=1)
        assert scale.next(0).item() == 2.0**127
        bounded = DynamicLossScale(init_scale=2.0**127, growth_interval=1, max_scale=CEILING)
        assert bounded.next(0).item() == CEILING

    @pytest.mark.parametrize(
        ("mode", "alternating", "in_a_row"),
        [("consecutive", 20, 16), ("cumulative", 17, 16), ("per_backoff", 20, 18)],
    )
    def test_hysteresis_has_three_meanings(self, mode, alternating, in_a_row):
        scale = DynamicLossScale(init_scale=2.0**20, hysteresis=2, hysteresis_mode=mode)
        assert advanced(scale, [1, 0, 1, 0, 1, 0, 1]).item() == 2.0**alternating
        assert advanced(scale, [1] * 5).item() == 2.0**in_a_row

    @pytest.mark.parametrize(
        ("bad", "error", "message"),
        [
            ("yes", TypeError, "'yes' of type str"),
            (None, TypeError, "found_inf must be a number, got None"),
            ([1.0], TypeError, "list"),
            (math.nan, ValueError, "nan"),
            (-1.0, ValueError, "-1.0"),
            (torch.zeros(2), ValueError, r"one element, got shape \(2,\)"),
            (torch.zeros(0), ValueError, r"one element, got shape \(0,\)"),
            (torch.zeros((), dtype=torch.complex64), TypeError, "complex64"),
        ],
    )
    @pytest.mark.parametrize("scale", [DynamicLossScale(), StaticLossScale(1.0)])
    def test_bad_flags(self, scale, bad, error, message):
        with pytest.raises(error, match=message):
            scale.next(bad)
