import copy
import gc
import io
import json
import math
import pickle
import weakref
from fractions import Fraction
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.gpus import DEVICE, needs_gpu, no_waiting
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt import GradScaler
from ampopt.loss_scale import dynamic
from ampopt.loss_scale.arguments import check_scale_number
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.combining import next_scale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale

FLOOR = 2.0**-126
CEILING = torch.finfo(torch.float32).max

STATIC = StaticLossScale(2.0).state_dict()

powers = st.integers(-126, 127).map(lambda e: 2.0**e)
normal_numbers = st.floats(FLOOR, CEILING, width=32)
flags = st.one_of(st.booleans(), st.sampled_from([0.0, 1.0, 2.0, 0.5, math.inf]))
# Runs of finite steps with single overflows between them, and runs of overflows.
histories = st.lists(
    st.one_of(st.booleans().map(lambda x: [x]), st.integers(1, 9).map(lambda n: [False] * n)),
    max_size=20,
).map(lambda runs: [x for run in runs for x in run])


@st.composite
def settings_of_scales(draw):
    low, init, high = sorted(draw(st.tuples(*[st.one_of(powers, normal_numbers)] * 3)))
    interval = draw(st.integers(1, 5))
    period = draw(st.integers(1 - interval, 2))
    return {
        "init_scale": init,
        "growth_factor": draw(st.sampled_from([2.0, 1.001, 3.0, 1e30])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.8, 1e-30, 0.999])),
        "growth_interval": interval,
        "hysteresis": draw(st.integers(1, 3)),
        "hysteresis_mode": draw(st.sampled_from(["consecutive", "cumulative", "per_backoff"])),
        "min_scale": low,
        "max_scale": draw(st.sampled_from([high, math.inf])),
        "growth_offsets": (period + draw(st.integers(0, 2)), period),
    }


@st.composite
def scales(draw):
    """A dynamic scale somewhere in its life."""
    return advanced(DynamicLossScale(**draw(settings_of_scales())), draw(histories))


def advanced(scale, history):
    for overflow in history:
        scale = scale.next(overflow)
    return scale


def counters(scale):
    assert scale._counters is not None
    return scale._counters


def state(scale):
    """What a step could change: the value and the counters."""
    return scale.value.item(), counters(scale).tolist()


def on_device_path():
    """The path that devices take, on the CPU: tensors instead of numbers."""
    return mock.patch.object(dynamic, "host_may_read", lambda *values: False)


def float32(number):
    return torch.tensor(number, dtype=torch.float32).item()


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
        """Against a simulation that looks at the whole history, and keeps no counters."""
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

    def test_growth_that_float32_cannot_hold_is_not_taken(self):
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

    def test_placing_keeps_the_generation(self):
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
        assert scale._policy == (2.0, 0.5, 5.0, 4.0, 2.0, 1.0, 0.0, FLOOR, math.inf, 0.0)
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

    def test_nothing_but_asking_reads_the_number(self):
        """Meta tensors have none to read, and fake ones refuse."""
        scale = DynamicLossScale.like("megatron", device="meta")
        for flag in (1.0, torch.zeros(1, device="meta"), torch.zeros(())):
            repr(next_scale(scale.next(flag), scale.next(0)))
        with FakeTensorMode():
            scale = DynamicLossScale()
            successor = scale.next(torch.zeros(()))
            repr(next_scale(successor, scale.next(1)))
            assert successor.value.shape == () and counters(successor).shape == (2,)

    def test_shown_is_the_number_that_the_host_has_and_no_other(self):
        scale = DynamicLossScale(init_scale=4.0, hysteresis=2).next(1).next(1)
        assert repr(scale).startswith("DynamicLossScale(value=2.0, growth_factor=2.0, ")
        assert "hysteresis=2" in repr(scale) and repr(scale).endswith("device=None)")
        assert str(scale) == f"{scale}" == repr(scale) and "4.0" not in repr(scale)
        assert (f"{scale:g}", f"{scale:>6.1f}") == ("2", "   2.0")
        with pytest.raises(ValueError, match="format"):
            format(scale, "?")
        assert scale.item() == float(scale) == 2.0

    def test_a_number_on_a_device_is_not_waited_for_to_be_shown(self):
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
    def test_goes_on_where_torchs_scaler_stopped(self, overflows, later):
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

    def test_what_torchs_scaler_does_not_say_stays(self):
        scale = DynamicLossScale(hysteresis=2, min_scale=1.0).next(1)
        scale.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
        assert (scale.item(), scale.state_dict()["budget"]) == (4.0, 2)
        assert scale.state_dict()["min_scale"] == 1.0

    @given(scale=scales(), other=scales())
    def test_goes_on_where_our_scaler_stopped(self, scale, other):
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
        ],
    )
    def test_a_scalers_state_that_cannot_be_changes_nothing(self, scale, change, message):
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

    def test_loading_keeps_the_device_and_what_was_handed_out(self):
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


class TestNextScale:
    @given(scale=scales(), f=flags, g=flags)
    def test_is_the_successor_under_either_flag(self, scale, f, g):
        expected = state(scale.next(max(float(f), float(g))))
        assert state(next_scale(scale.next(f), scale.next(g))) == expected
        assert state(next_scale(scale.next(g), scale.next(f))) == expected

    @given(scale=scales(), several=st.lists(flags, min_size=1, max_size=5))
    def test_of_any_number(self, scale, several):
        expected = scale.next(sum(map(float, several)))
        assert state(next_scale(*(scale.next(f) for f in several))) == state(expected)

    @given(scale=scales())
    def test_an_overflow_prevails_over_an_optimizer_that_saw_no_gradients(self, scale):
        unchanged = scale._with(scale.value, counters(scale))
        lowered = scale.next(True)
        value, (growth, budget) = state(next_scale(lowered, unchanged))
        assert (value, growth) == (lowered.item(), 0)
        # At the floor "per_backoff" is refilled without the value showing it.
        if value != scale.item() or scale._settings()["hysteresis_mode"] != "per_backoff":
            assert budget == counters(lowered)[1]

    def test_a_placed_scale_decides_the_device(self):
        scale = DynamicLossScale()
        placed = DynamicLossScale(device="cpu")
        assert next_scale(scale, placed).device == torch.device("cpu")
        assert next_scale(placed, scale).device == torch.device("cpu")
        assert next_scale(scale, scale).device is None
        on_meta = DynamicLossScale(device="meta")
        for pair in ((scale, on_meta), (on_meta, scale), (placed, on_meta)):
            assert next_scale(*pair).device == torch.device("meta")

    def test_none_static_and_tensors(self):
        assert next_scale(None, None) is None
        assert next_scale(None) is None and next_scale(None, None, None) is None
        static = StaticLossScale(2.0)
        assert next_scale(static, StaticLossScale(2.0)) is static
        smaller = next_scale(torch.tensor([8.0]), torch.tensor(4.0), torch.tensor([[6.0]]))
        assert smaller.shape == (1,) and smaller.item() == 4.0
        assert next_scale(torch.tensor(3.0), torch.tensor(math.nan)).isnan()

    @pytest.mark.parametrize(
        "pair",
        [
            (None, torch.tensor(1.0)),
            (DynamicLossScale(), StaticLossScale(2.0**16)),
            (torch.tensor(1.0), StaticLossScale(1.0)),
            (DynamicLossScale(), None),
            (1.0, 2.0),
            (DynamicLossScale(), DynamicLossScale(), None),
        ],
    )
    def test_kinds_do_not_mix(self, pair):
        with pytest.raises(TypeError, match=type(pair[-1]).__name__):
            next_scale(*pair)

    def test_settings_must_agree(self):
        with pytest.raises(ValueError, match="growth_interval=7"):
            next_scale(DynamicLossScale(), DynamicLossScale(growth_interval=7))
        with pytest.raises(ValueError, match="drop_overflow_update=False"):
            next_scale(StaticLossScale(2.0), StaticLossScale(2.0, drop_overflow_update=False))

    @pytest.mark.parametrize("preset", ["torch", "megatron"])
    def test_scales_may_have_begun_at_different_numbers(self, preset):
        larger = DynamicLossScale.like(preset, init_scale=8.0)
        smaller = DynamicLossScale.like(preset, init_scale=4.0)
        for pair in ((larger, smaller), (smaller, larger)):
            assert next_scale(*pair).item() == 4.0
        assert next_scale(larger.next(0.0), smaller).state_dict()["growth"] == 0
        static = StaticLossScale(1.0)
        for pair in ((static, StaticLossScale(2.0)), (StaticLossScale(2.0), static)):
            assert next_scale(*pair) is static

    @pytest.mark.parametrize("bad", [torch.ones(2), torch.ones(0), torch.ones((), dtype=torch.int)])
    def test_tensors_must_be_scales(self, bad):
        with pytest.raises(ValueError, match="one floating-point element"):
            next_scale(torch.tensor(1.0), bad)


class TestArguments:
    def test_positions_are_refused(self):
        with pytest.raises(TypeError, match="positional"):
            DynamicLossScale(2.0**16)  # type: ignore[misc]

    @pytest.mark.parametrize("name", ["init_scale", "min_scale", "max_scale"])
    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            ("8", TypeError),
            (True, TypeError),
            (None, TypeError),
            (torch.tensor(8.0), TypeError),
            (1j, TypeError),
            (math.nan, ValueError),
            (-1.0, ValueError),
            (0, ValueError),
            (2.0**-127, ValueError),
            (1e39, ValueError),
            (-math.inf, ValueError),
            (-(10**400), ValueError),
        ],
    )
    def test_bad_scales(self, name, bad, error):
        with pytest.raises(error, match=name):
            DynamicLossScale(**{name: bad})

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"init_scale": math.inf}, ValueError, "init_scale must be positive, finite.*got inf"),
            ({"min_scale": math.inf}, ValueError, "min_scale"),
            ({"growth_factor": 1.0}, ValueError, "more than 1, got 1.0.*StaticLossScale"),
            ({"growth_factor": 0.5}, ValueError, "growth_factor"),
            ({"growth_factor": math.inf}, ValueError, "growth_factor"),
            ({"growth_factor": math.nan}, ValueError, "growth_factor"),
            ({"growth_factor": "2"}, TypeError, "growth_factor"),
            ({"growth_factor": True}, TypeError, "growth_factor"),
            ({"backoff_factor": 0.0}, ValueError, "less than 1, got 0.0"),
            ({"backoff_factor": 1}, ValueError, "backoff_factor"),
            ({"backoff_factor": -1}, ValueError, "backoff_factor"),
            ({"backoff_factor": math.nan}, ValueError, "backoff_factor"),
            ({"backoff_factor": None}, TypeError, "backoff_factor"),
            ({"growth_interval": 0}, ValueError, "growth_interval must be from 1 .*got 0"),
            ({"growth_interval": 2**31}, ValueError, "growth_interval"),
            ({"growth_interval": 2000.0}, TypeError, "must be an int, got 2000.0 of type float"),
            ({"growth_interval": True}, TypeError, "growth_interval"),
            ({"growth_interval": "2000"}, TypeError, "growth_interval"),
            ({"hysteresis": 0}, ValueError, "hysteresis must be from 1"),
            ({"hysteresis": 1.5}, TypeError, "hysteresis"),
            ({"hysteresis_mode": "Cumulative"}, ValueError, "'per_backoff', got 'Cumulative'"),
            ({"hysteresis_mode": 2}, TypeError, "hysteresis_mode"),
            ({"init_scale": 1.0, "min_scale": 2.0}, ValueError, r"min_scale=2.0, init_scale=1.0"),
            ({"max_scale": 2.0**15}, ValueError, r"init_scale=65536.0, max_scale=32768.0"),
            ({"growth_offsets": 1}, TypeError, "growth_offsets must be a pair"),
            ({"growth_offsets": (1,)}, ValueError, r"pair of ints, got \(1,\)"),
            ({"growth_offsets": (0.0, 0)}, TypeError, "growth_offsets"),
            ({"growth_offsets": (0, 1)}, ValueError, r"first >= period.*got \(0, 1\)"),
            ({"growth_offsets": (0, -2000)}, ValueError, "growth_interval=2000"),
            ({"growth_interval": 2**31 - 1, "growth_offsets": (1, 0)}, ValueError, "offsets"),
            ({"device": "nowhere"}, RuntimeError, "nowhere"),
            ({"growth_intervall": 2}, TypeError, "growth_intervall"),
        ],
    )
    def test_bad_settings(self, arguments, error, message):
        with pytest.raises(error, match=message):
            DynamicLossScale(**arguments)

    def test_bad_static_arguments(self):
        with pytest.raises(ValueError, match="value must be positive.*got 0"):
            StaticLossScale(0)
        with pytest.raises(TypeError, match="drop_overflow_update must be True or False, got 1"):
            StaticLossScale(1.0, 1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="value must be a number"):
            StaticLossScale("1")  # type: ignore[arg-type]

    def test_the_ends_of_the_range_are_allowed(self):
        DynamicLossScale(init_scale=FLOOR)
        DynamicLossScale(init_scale=CEILING, max_scale=CEILING)
        DynamicLossScale(init_scale=1.0, min_scale=1.0, max_scale=1.0, growth_interval=2**31 - 1)

    @given(low=normal_numbers, number=st.floats(FLOOR, CEILING))
    def test_scales_and_bounds_are_rounded_to_float32(self, low, number):
        scale = DynamicLossScale(init_scale=number, min_scale=number, max_scale=number)
        expected = float32(number)
        assert all(scale._settings()[k] == expected for k in ("min_scale", "max_scale"))
        assert scale.next(0).next(1).item() == expected
        assert check_scale_number(number) == StaticLossScale(number).item() == expected
        assert check_scale_number(low) == low

    def test_other_number_types(self):
        numpy = pytest.importorskip("numpy")
        for number in (4, numpy.float32(4), numpy.int64(4), Fraction(4)):
            assert check_scale_number(number) == 4.0
            assert type(check_scale_number(number)) is float
        scale = DynamicLossScale(growth_interval=numpy.int64(3), hysteresis=numpy.int32(2))
        assert type(scale._settings()["growth_interval"]) is int

    @pytest.mark.parametrize(
        ("bad", "error"),
        [(0.0, ValueError), (-0.0, ValueError), (math.nan, ValueError), (math.inf, ValueError)]
        + [(2.0**-127, ValueError), (3.5e38, ValueError), (10**400, ValueError)]
        + [(True, TypeError), ("1", TypeError), (None, TypeError)],
    )
    def test_bad_scale_numbers(self, bad, error):
        with pytest.raises(error, match="the loss scale must be"):
            check_scale_number(bad)
