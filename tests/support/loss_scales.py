"""Strategies of dynamic loss scales and their histories, and what a step may change in a scale."""

import math
from unittest import mock

import torch
from hypothesis import strategies as st

from ampopt.loss_scale import dynamic
from ampopt.loss_scale.dynamic import DynamicLossScale

__all__ = [
    "CEILING",
    "FLOOR",
    "advanced",
    "counters",
    "flags",
    "float32",
    "histories",
    "normal_numbers",
    "on_device_path",
    "powers",
    "scales",
    "settings_of_scales",
    "state",
]

FLOOR = 2.0**-126
CEILING = torch.finfo(torch.float32).max

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
    """A dynamic scale after any number of steps."""
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
