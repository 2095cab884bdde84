"""``next_scale`` of the scales that several optimizers returned."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.loss_scales import counters, flags, scales, state

import ampopt
from ampopt.loss_scale.combining import next_scale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale


class TestNextScale:
    @given(scale=scales(), f=flags, g=flags)
    def test_the_next_scale_of_two_is_that_of_an_overflow_in_either(self, scale, f, g):
        expected = state(scale.next(max(float(f), float(g))))
        assert state(next_scale(scale.next(f), scale.next(g))) == expected
        assert state(next_scale(scale.next(g), scale.next(f))) == expected

    @given(scale=scales(), several=st.lists(flags, min_size=1, max_size=5))
    def test_any_number_of_scales_can_be_combined(self, scale, several):
        expected = scale.next(sum(map(float, several)))
        assert state(next_scale(*(scale.next(f) for f in several))) == state(expected)

    @given(scale=scales())
    def test_an_overflow_wins_over_an_optimizer_without_gradients(self, scale):
        unchanged = scale._with(scale.value, counters(scale))
        lowered = scale.next(True)
        value, (growth, budget) = state(next_scale(lowered, unchanged))
        assert (value, growth) == (lowered.item(), 0)
        # At the floor "per_backoff" is refilled without the value showing it.
        if value != scale.item() or scale._settings()["hysteresis_mode"] != "per_backoff":
            assert budget == counters(lowered)[1]

    def test_the_result_is_on_the_device_of_the_scale_that_has_one(self):
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

    def test_a_flag_is_no_scale(self):
        optimizer = ampopt.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        found_inf, scale = optimizer.unscale(grads_scaled_by=2.0)
        with pytest.raises(ValueError, match="next_scale: this is the found_inf"):
            next_scale(scale, found_inf)
