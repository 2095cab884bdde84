"""The arguments of loss scales: which are refused, and how numbers are rounded."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.loss_scales import CEILING, FLOOR, float32, normal_numbers

from ampopt.loss_scale.arguments import check_scale_number
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.static import StaticLossScale


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
            ({"max_scale": 1e39}, ValueError, r"or math.inf for no ceiling, got 1e\+39"),
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
