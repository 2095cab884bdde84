"""Loss scales are immutable, move to a device once, and can be saved, copied and pickled."""

import copy
import gc
import io
import json
import math
import pickle
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gpus import DEVICE, needs_gpu, no_waiting
from support.loss_scales import (
    FLOOR,
    advanced,
    counters,
    flags,
    float32,
    histories,
    on_device_path,
    scales,
    settings_of_scales,
    state,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt import GradScaler
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.combining import next_scale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale

STATIC = StaticLossScale(2.0).state_dict()


class TestValueSemantics:
    @given(scale=scales(), flag=flags)
    def test_stepping_changes_nothing(self, scale, flag):
        value, counters, generation = scale.value, scale._counters, scale._generation
        before = state(scale)
        scale.next(flag)
        with on_device_path():
            scale.next(flag)
        next_scale(scale.next(True), scale.next(False))
        assert scale.value is value and scale._counters is counters
        assert scale._generation is generation
        assert state(scale) == before

    def test_generations_tell_values_apart(self):
        scale = DynamicLossScale()
        others = [
            scale.next(0),
            scale._with(scale.value, counters(scale)),
            copy.copy(scale),
            copy.deepcopy(scale),
            pickle.loads(pickle.dumps(scale)),
            next_scale(scale, scale),
        ]
        loaded = DynamicLossScale()
        before = loaded._generation
        loaded.load_state_dict(scale.state_dict())
        assert loaded._generation is not before
        assert len({id(s._generation) for s in [scale, loaded, *others]}) == 8

    def test_a_generation_dies_with_its_scale(self):
        scale = DynamicLossScale()
        seen = weakref.WeakSet([scale._generation])
        assert scale._generation in seen
        scale = scale.next(0)
        gc.collect()
        assert not seen

    def test_moving_to_a_device_keeps_the_generation(self):
        scale = DynamicLossScale()
        generation = scale._generation
        scale._place("cpu")
        assert scale._generation is generation

    def test_only_a_static_scale_may_be_used_again(self):
        assert StaticLossScale(1.0)._generation is None
        assert DynamicLossScale()._generation is not None

    def test_protocol_of_a_dynamic_scale(self):
        scale = DynamicLossScale(growth_interval=3, growth_offsets=(2, 1), hysteresis=2)
        assert scale.drop_overflow_update is True
        assert scale._policy == (2.0, 0.5, 5.0, 4.0, 2.0, 1.0, 0.0, FLOOR, math.inf, -1.0)
        assert counters(scale).tolist() == [0, 2]
        successor = scale._with(torch.tensor(3.0), torch.tensor([1, 1], dtype=torch.int32))
        assert type(successor) is DynamicLossScale
        assert state(successor) == (3.0, [1, 1])
        assert successor._policy is scale.next(0)._policy is scale._policy

    def test_protocol_of_a_static_scale(self):
        scale = StaticLossScale(3.0)
        assert scale.value.dtype == torch.float32 and scale.value.shape == ()
        assert scale._policy is scale._counters is None
        assert scale._with(torch.tensor(1.0), torch.zeros(2)) is scale
        assert scale.next(1.0) is scale
        assert scale.drop_overflow_update is True
        assert StaticLossScale(3.0, False).drop_overflow_update is False
        assert (scale.item(), float(scale)) == (3.0, 3.0)

    def test_a_loss_scale_is_abstract(self):
        with pytest.raises(TypeError, match="abstract"):
            LossScale()  # type: ignore[abstract]


class TestDevice:
    @pytest.mark.parametrize("make", [DynamicLossScale, lambda **kw: StaticLossScale(8.0, **kw)])
    def test_goes_where_it_is_first_used(self, make):
        scale = make()
        assert scale.value.device.type == "cpu" and scale.device is None
        scale._place("meta")
        assert scale.value.device.type == "meta" and scale.device == torch.device("meta")
        scale._place(torch.device("meta"))
        with pytest.raises(
            ValueError, match=r"lives on meta, where .* but is used on cpu.*device="
        ):
            scale._place("cpu")

    @pytest.mark.parametrize("make", [DynamicLossScale, lambda **kw: StaticLossScale(8.0, **kw)])
    def test_device_argument(self, make):
        assert make(device="meta").value.device.type == "meta"
        placed = make(device="cpu")
        placed._place("cpu")
        with pytest.raises(ValueError, match="lives on cpu, but is used on meta"):
            placed._place("meta")

    def test_the_default_device_is_not_the_scale_s(self):
        with torch.device("meta"):
            dynamic, static = DynamicLossScale(), StaticLossScale(2.0)
            assert dynamic.next(1.0).item() == 2**15
        assert dynamic.value.is_cpu and counters(dynamic).is_cpu and static.value.is_cpu

    def test_a_flag_places_a_scale_and_its_successors(self):
        scale = DynamicLossScale()
        assert scale.next(0).device is None
        successor = scale.next(torch.zeros((), device="meta"))
        assert scale.device == successor.device == torch.device("meta")
        assert counters(successor).device.type == "meta"

    def test_a_flag_on_a_device_is_not_waited_for(self):
        scale = DynamicLossScale(device="cpu")
        with pytest.raises(ValueError, match=r"found_inf is on meta.*wait.*device='meta'"):
            scale.next(torch.zeros((), device="meta"))

    def test_only_item_and_the_like_read_the_number(self):
        """Meta tensors have no values, and fake tensors refuse to be read."""
        scale = DynamicLossScale.like("megatron", device="meta")
        for flag in (1.0, torch.zeros(1, device="meta"), torch.zeros(())):
            repr(next_scale(scale.next(flag), scale.next(0)))
        with FakeTensorMode():
            scale = DynamicLossScale()
            successor = scale.next(torch.zeros(()))
            repr(next_scale(successor, scale.next(1)))
            assert successor.value.shape == () and counters(successor).shape == (2,)

    def test_repr_shows_the_number_only_if_it_is_on_the_host(self):
        scale = DynamicLossScale(init_scale=4.0, hysteresis=2).next(1).next(1)
        assert repr(scale).startswith("DynamicLossScale(value=2.0, growth_factor=2.0, ")
        assert "hysteresis=2" in repr(scale) and repr(scale).endswith("device=None)")
        assert str(scale) == f"{scale}" == repr(scale) and "4.0" not in repr(scale)
        assert (f"{scale:g}", f"{scale:>6.1f}") == ("2", "   2.0")
        with pytest.raises(ValueError, match="format"):
            format(scale, "?")
        assert scale.item() == float(scale) == 2.0

    def test_repr_does_not_synchronize(self):
        scale = DynamicLossScale(init_scale=4.0, device="meta").next(1)
        static = StaticLossScale(8.0, drop_overflow_update=False, device="meta")
        refuse = mock.Mock(side_effect=AssertionError("synchronizes"))
        names = ("item", "tolist", "__float__", "__bool__", "__repr__", "cpu")
        with mock.patch.multiple(torch.Tensor, **dict.fromkeys(names, refuse)):
            assert repr(scale).startswith("DynamicLossScale(value=<on meta>, growth_factor=2.0")
            assert "4.0" not in repr(scale) and repr(scale).endswith("device='meta')")
            assert f"{scale:g}" == "<on meta>"
            # What never was anything but a number is one on any device.
            assert f"{static:g}" == "8"
            assert repr(static) == (
                "StaticLossScale(value=8.0, drop_overflow_update=False, device='meta')"
            )

    @needs_gpu(with_real="memory: the host may read the CPU's")
    @given(settings=settings_of_scales(), history=histories)
    def test_cuda_does_not_synchronize(self, settings, history):
        host, device = DynamicLossScale(**settings), DynamicLossScale(**settings)
        with no_waiting():
            for overflow in history:
                flag = torch.full((), float(overflow), device=DEVICE)
                device = next_scale(device.next(flag), device.next(overflow))
                host = host.next(overflow)
            f"{device!r} {device:g}"
        assert state(device) == state(host)


class TestState:
    @given(scale=scales(), other=scales(), history=histories)
    def test_round_trips_at_any_moment(self, scale, other, history):
        saved = scale.state_dict()
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(scale), copy.copy(scale), pickle.loads(pickle.dumps(scale))]
        for form in (saved, torch.load(buffer, weights_only=True), json.loads(json.dumps(saved))):
            loaded = copy.deepcopy(other)
            loaded.load_state_dict(form)
            copies.append(loaded)
        for one in copies:
            assert one.state_dict() == saved and type(one) is DynamicLossScale
            assert state(advanced(one, history)) == state(advanced(scale, history))
        assert scale.state_dict() == saved

    @given(scale=scales(), history=histories)
    def test_a_scale_saved_whole_loads_where_only_weights_may(self, scale, history):
        buffer = io.BytesIO()
        torch.save({"dynamic": scale, "static": StaticLossScale(0.5)}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert state(advanced(loaded["dynamic"], history)) == state(advanced(scale, history))
        assert loaded["static"].item() == 0.5

    @given(overflows=histories, later=histories)
    def test_resumes_from_the_state_of_torchs_scaler(self, overflows, later):
        param = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param])

        def update(scaler, overflow):
            param.grad = torch.full((1,), math.inf if overflow else 0.0)
            scaler.unscale_(optimizer)
            scaler.update()

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scaler.scale(torch.ones(()))
        for overflow in overflows:
            update(scaler, overflow)
        scale = DynamicLossScale(init_scale=8.0)
        scale.load_state_dict(scaler.state_dict())
        for overflow in later:
            assert scale.item() == scaler.get_scale()
            update(scaler, overflow)
            scale = scale.next(overflow)
        assert scale.item() == scaler.get_scale()

    def test_settings_that_torchs_scaler_lacks_stay(self):
        scale = DynamicLossScale(hysteresis=2, min_scale=1.0).next(1)
        scale.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
        assert (scale.item(), scale.state_dict()["budget"]) == (4.0, 2)
        assert scale.state_dict()["min_scale"] == 1.0

    @given(scale=scales(), other=scales())
    def test_resumes_from_the_state_of_ampopts_scaler(self, scale, other):
        other.load_state_dict(GradScaler("cpu", loss_scale=scale).state_dict())
        assert other.item() == scale.item()
        static = StaticLossScale(2.0)
        static.load_state_dict(GradScaler("cpu", loss_scale=StaticLossScale(4.0)).state_dict())
        assert static.item() == 4.0

    @pytest.mark.parametrize(
        ("scale", "change", "message"),
        [
            (
                StaticLossScale(2.0),
                {},
                "a StaticLossScale cannot load .* Load it into a Dyn",
            ),
            (DynamicLossScale(), {"scale": 0.0}, "scale must be positive"),
            (DynamicLossScale(), {"growth_factor": 1.0}, "growth_factor must be"),
            (DynamicLossScale(), {"_growth_tracker": ...}, r"missing: \['_growth_tracker'\]"),
            (
                DynamicLossScale(),
                dict.fromkeys(torch.amp.GradScaler("cpu").state_dict(), ...),
                "state is empty",
            ),
            (
                DynamicLossScale(),
                {**dict.fromkeys(torch.amp.GradScaler("cpu").state_dict(), ...), "model": {}},
                r"found: \['model'\]",
            ),
        ],
    )
    def test_an_invalid_state_of_a_scaler_changes_nothing(self, scale, change, message):
        saved = {**torch.amp.GradScaler("cpu").state_dict(), **change}
        before = scale.state_dict()
        with pytest.raises(ValueError, match=message):
            scale.load_state_dict({k: v for k, v in saved.items() if v is not ...})
        assert scale.state_dict() == before

    def test_holds_plain_objects(self):
        for scale in (DynamicLossScale().next(1), StaticLossScale(2.0)):
            for value in scale.state_dict().values():
                assert type(value) in (int, float, str, bool, tuple)

    def test_static_round_trip(self):
        scale = StaticLossScale(0.1, drop_overflow_update=False)
        loaded = StaticLossScale(2.0, device="meta")
        loaded.load_state_dict(scale.state_dict())
        assert loaded.value.device.type == "meta"
        for one in (loaded, copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
            assert one.state_dict() == scale.state_dict()
            assert one.item() == float32(0.1) and one.drop_overflow_update is False
            assert one is not scale

    def test_loading_keeps_the_device_and_earlier_values(self):
        scale = DynamicLossScale(device="meta")
        value, successor = scale.value, scale.next(0.0)
        scale.load_state_dict(DynamicLossScale(init_scale=4.0, growth_interval=7).state_dict())
        assert scale.value.device.type == counters(scale).device.type == "meta"
        assert scale.value is not value
        assert scale._schedule.first_growth == 7
        assert successor._schedule.first_growth == 2000
        fresh = DynamicLossScale()
        fresh.load_state_dict(DynamicLossScale(init_scale=4.0).state_dict())
        assert fresh.device is None and fresh.item() == 4.0

    def test_copies_keep_whether_they_have_a_device(self):
        for one in (DynamicLossScale(), StaticLossScale(1.0)):
            assert copy.deepcopy(one).device is None
            one._place("cpu")
            assert copy.deepcopy(one).device == torch.device("cpu")

    def test_copies_share_no_memory(self):
        scale = DynamicLossScale()
        clone = copy.deepcopy(scale)
        clone.value.zero_()
        counters(clone).zero_()
        assert state(scale) == (2.0**16, [0, 1])

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"scale": math.nan}, ValueError, "scale must be positive.*got nan"),
            ({"scale": 0.0}, ValueError, "scale must be positive"),
            ({"scale": "8"}, TypeError, "'8' of type str"),
            ({"scale": True}, TypeError, "True of type bool"),
            ({"scale": 2.0**30}, ValueError, r"scale must be from.*max_scale=.*got 1073741824.0"),
            ({"scale": 2.0**-30}, ValueError, "min_scale"),
            ({"growth": -1}, ValueError, "growth must be from 0"),
            ({"growth": 3}, ValueError, "growth, .* must be less than 3"),
            ({"growth": 1.0}, TypeError, "growth must be an int, got 1.0 of type float"),
            ({"budget": 3}, ValueError, "budget, .* must be at most hysteresis=2, got 3"),
            ({"budget": -1}, ValueError, "budget must be from 0"),
            ({"hysteresis_mode": "per_backoff", "budget": 0}, ValueError, "budget must be from 1"),
            ({"hysteresis_mode": "never"}, ValueError, "'consecutive', 'cumulative'"),
            ({"growth_factor": 1.0}, ValueError, "growth_factor"),
            ({"growth_offsets": [0]}, ValueError, "growth_offsets"),
            ({"init_scale": 2.0**40}, ValueError, "min_scale <= init_scale <= max_scale"),
            (
                {"type": "StaticLossScale"},
                ValueError,
                "its entry 'type' is 'Static",
            ),
            ({"type": None}, ValueError, "its entry 'type' is None"),
            ({"colour": 1}, ValueError, r"unknown: \['colour'\]"),
            ({"scale": ...}, ValueError, r"missing: \['scale'\]"),
            ({"hysteresis": ...}, ValueError, r"missing: \['hysteresis'\]"),
        ],
    )
    def test_a_bad_state_changes_nothing(self, change, error, message):
        settings = {"growth_interval": 3, "hysteresis": 2, "min_scale": 1.0, "max_scale": 2.0**20}
        good = DynamicLossScale(**settings).next(0).state_dict()
        bad = {k: v for k, v in {**good, **change}.items() if v is not ...}
        scale = DynamicLossScale().next(1)
        before = scale.state_dict(), scale.value, scale._counters, scale._generation
        with pytest.raises(error, match=message):
            scale.load_state_dict(bad)
        assert before[0] == scale.state_dict()
        assert all(
            a is b
            for a, b in zip(
                before[1:], (scale.value, scale._counters, scale._generation), strict=True
            )
        )
        scale.load_state_dict(good)

    @pytest.mark.parametrize(
        ("bad", "error", "message"),
        [
            ({**STATIC, "value": 0.0}, ValueError, "value must be positive"),
            ({**STATIC, "drop_overflow_update": 1}, TypeError, "True or False"),
            ({"type": "StaticLossScale", "value": 1.0}, ValueError, "missing"),
            ({**STATIC, "type": "DynamicLossScale"}, ValueError, "of a StaticLossScale"),
            ([], TypeError, "must be a dict, got list"),
        ],
    )
    def test_a_bad_static_state_changes_nothing(self, bad, error, message):
        scale = StaticLossScale(4.0)
        value, generation = scale.value, scale._generation
        with pytest.raises(error, match=message):
            scale.load_state_dict(bad)
        assert scale.value is value and scale._generation is generation and scale.item() == 4.0


# --- from and to torch's scaler -------------------------------------------------------------------


@given(overflows=st.lists(st.booleans(), max_size=9), after=st.lists(st.booleans(), max_size=9))
def test_torchs_scaler_goes_on_where_a_scale_stopped(overflows, after):
    scale = DynamicLossScale(init_scale=8.0, growth_interval=3, backoff_factor=0.25)
    for overflowed in overflows:
        scale = scale.next(overflowed)
    state = scale.grad_scaler_state_dict()
    scaler = torch.amp.GradScaler("cpu")
    assert set(state) == set(scaler.state_dict())
    scaler.load_state_dict(state)
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for overflowed in after:
        scale = scale.next(overflowed)
        scaler.scale(torch.zeros(()))
        param.grad = torch.full((1,), float("inf") if overflowed else 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.state_dict() == scale.grad_scaler_state_dict()


def test_a_static_scale_stays_constant_under_torchs_scaler():
    scaler = torch.amp.GradScaler("cpu")
    state = StaticLossScale(8.0).grad_scaler_state_dict()
    scaler.load_state_dict({**state, "growth_interval": 1})  # a growth factor above 1 would show
    param = torch.nn.Parameter(torch.ones(1))
    for number in (1.0, float("inf")):
        scaler.scale(torch.zeros(()))
        param.grad = torch.full((1,), number)
        scaler.step(torch.optim.SGD([param], lr=0.0))
        scaler.update()
        assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    "saved",
    [
        {},  # of a disabled scaler
        torch.amp.GradScaler("cpu").state_dict(),
        GradScaler("cpu", loss_scale=DynamicLossScale.like("megatron")).state_dict(),
        DynamicLossScale().state_dict(),
        StaticLossScale(1.0).state_dict(),
        StaticLossScale(1024.0, drop_overflow_update=False).state_dict(),
        GradScaler("cpu", loss_scale=StaticLossScale(1024.0)).state_dict(),
    ],
    ids=["disabled", "torch", "GradScaler", "dynamic", "static", "larger", "GradScaler of static"],
)
def test_a_scale_of_one_takes_the_state_of_a_run_that_scaled_and_stays(saved):
    scale = StaticLossScale(1.0)
    scale.load_state_dict(saved)
    assert scale.state_dict() == StaticLossScale(1.0).state_dict()
    if saved and "StaticLossScale" not in str(saved):
        with pytest.raises(ValueError):
            StaticLossScale(2.0).load_state_dict(saved)
    for wrong in ({"scale": 2.0}, {"type": "Other"}, 3):
        with pytest.raises((TypeError, ValueError)):
            scale.load_state_dict(wrong)  # type: ignore[arg-type]
    of_one = StaticLossScale(1.0, drop_overflow_update=False)
    scale.load_state_dict(of_one.state_dict())
    assert scale.state_dict() == of_one.state_dict()
