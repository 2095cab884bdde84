"""Each preset, compared with a transcription of its system's own code."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.schedules_of_others import FLOAT32_MAX, FLOAT32_TINY, SYSTEMS, histories

from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.presets import PRESETS

# name: init, growth, backoff, interval, hysteresis, mode, floor, ceiling, first growth, period
INF, TINY = math.inf, FLOAT32_TINY
TABLE = {
    "torch": (2**16, 2, 0.5, 2000, 1, "consecutive", TINY, INF, 2000, 2000),
    "apex": (2**16, 2, 0.5, 2000, 1, "consecutive", TINY, 2**24, 2000, 2000),
    "deepspeed": (2**16, 2, 0.5, 1000, 2, "cumulative", 1, INF, 1001, 1000),
    "megatron": (2**32, 2, 0.5, 1000, 2, "cumulative", 1, INF, 1000, 1000),
    "paddle": (2**16, 2, 0.5, 2000, 1, "per_backoff", TINY, INF, 2000, 2000),
    "paddle-fleet": (2**15, 2, 0.8, 1000, 2, "per_backoff", 1, INF, 1000, 1000),
    "mindspore": (2**24, 2, 0.5, 2000, 1, "consecutive", 1, INF, 2000, 2000),
    "nnabla": (8, 2, 0.5, 2000, 1, "consecutive", TINY, INF, 2002, 2001),
    "keras": (2**15, 2, 0.5, 2000, 1, "consecutive", TINY, INF, 2000, 2000),
    "jmp": (2**15, 2, 0.5, 2000, 1, "consecutive", 1, INF, 2000, 2000),
    "flax": (2**16, 2, 0.5, 2000, 1, "consecutive", TINY, FLOAT32_MAX, 2001, 2001),
}


def test_every_preset_is_tested():
    assert set(PRESETS) == set(SYSTEMS) == set(TABLE)


@pytest.mark.parametrize("name", SYSTEMS)
@given(
    exponent=st.integers(0, 24),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 3),
    history=histories,
)
@example(exponent=1, window=2, hysteresis=2, history=[True] * 9 + [False] * 9)
@example(exponent=24, window=1, hysteresis=1, history=[False] * 120)
@example(exponent=23, window=1, hysteresis=1, history=[False] * 4 + [True] + [False] * 4)
def test_does_what_the_system_does(name, exponent, window, hysteresis, history):
    overrides = {"init_scale": 2.0**exponent, "growth_interval": window}
    if name in ("deepspeed", "megatron", "paddle", "paddle-fleet"):  # the others have none
        overrides["hysteresis"] = hysteresis
    scale = DynamicLossScale.like(name, **overrides)
    system = SYSTEMS[name](2.0**exponent, window, hysteresis)
    for overflow in history:
        scale = scale.next(overflow)
        system.update(overflow)
        if system.scale > FLOAT32_MAX:  # a system without a ceiling is at infinity, and stays
            assert scale.item() == 2.0**127
            return
        # 0.8 is not a power of two: float32 rounds each product, the retelling does not.
        tolerance = 1e-5 if name == "paddle-fleet" else 0
        assert scale.item() == pytest.approx(system.scale, rel=tolerance, abs=0)


@pytest.mark.parametrize("name", SYSTEMS)
def test_default_constants(name):
    settings = DynamicLossScale.like(name)._settings()
    init, growth, backoff, interval, hysteresis, mode, floor, ceiling, _, _ = TABLE[name]
    del settings["growth_offsets"]
    assert settings == {
        "init_scale": init,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "hysteresis": hysteresis,
        "hysteresis_mode": mode,
        "min_scale": floor,
        "max_scale": ceiling,
    }


@pytest.mark.parametrize("name", SYSTEMS)
def test_first_growth_and_period_at_the_defaults(name):
    *_, first, period = TABLE[name]
    scale = DynamicLossScale.like(name)
    system = SYSTEMS[name](scale.item(), TABLE[name][3], TABLE[name][4])
    grown = []
    for step in range(1, first + period + 1):
        before, scale = scale, scale.next(0)
        system.update(False)
        if scale.item() != before.item():
            grown.append(step)
    assert grown == [first, first + period]
    assert scale.item() == system.scale == 4 * TABLE[name][0]


@pytest.mark.parametrize("name", ["jmp", "torch", "flax"])
def test_the_top_of_float32(name):
    scale = DynamicLossScale.like(name, init_scale=2.0**126, growth_interval=1)
    system = SYSTEMS[name](2.0**126, 1, 1)
    for overflow in [False] * 5 + [True] * 3 + [False] * 7:
        scale = scale.next(overflow)
        system.update(overflow)
        assert scale.item() == system.scale


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_floor(name):
    scale = DynamicLossScale.like(name)
    for _ in range(400):
        scale = scale.next(1)
    assert scale.item() == TABLE[name][6]


@pytest.mark.parametrize(
    ("name", "alternating", "in_a_row"),
    [("megatron", 17, 16), ("deepspeed", 17, 16), ("paddle", 20, 18), ("torch", 20, 16)],
)
def test_hysteresis_of_two(name, alternating, in_a_row):
    scale = DynamicLossScale.like(name, init_scale=2.0**20, hysteresis=2)
    after = {}
    for history in ("x.x.x.x", "xxxxx"):
        after[history] = scale
        for step in history:
            after[history] = after[history].next(step == "x")
    assert after["x.x.x.x"].item() == 2.0**alternating
    assert after["xxxxx"].item() == 2.0**in_a_row


def test_overrides_and_names():
    scale = DynamicLossScale.like("deepspeed", growth_interval=5, min_scale=2.0, device="cpu")
    assert scale._settings()["min_scale"] == 2.0 and scale.device is not None
    assert (scale._schedule.policy.first_growth, scale._schedule.policy.growth_period) == (6, 5)
    for bad in ("Torch", "pytorch", None, 3, ["torch"]):
        with pytest.raises(ValueError, match="'paddle-fleet'.*'flax', got "):
            DynamicLossScale.like(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="window"):
        DynamicLossScale.like("torch", window=3)
    with pytest.raises(ValueError, match="max_scale=16777216.0"):
        DynamicLossScale.like("apex", init_scale=2.0**25)
