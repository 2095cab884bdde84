"""A scale that has fallen too far is said once, when the host has its number anyway."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ampopt
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


def test_45_batches_of_nan_are_said_once_and_with_what_to_do():
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
def test_it_is_said_where_the_host_has_the_number(look):
    scale = fallen(41)
    assert len(told(lambda: look(scale))) == 1
    assert told(lambda: look(scale.next(True))) == []  # once for all that follow
    assert told(lambda: look(fallen(40))) == []  # 2**-24, which float16 has


@pytest.mark.parametrize("skipped", [True, False])
def test_whoever_asks_whether_a_step_was_skipped_is_told(skipped):
    result = ampopt.StepResult(None, torch.tensor(float(skipped)), fallen(41))
    assert len(told(lambda: result.skipped)) == skipped


def test_a_floor_of_ones_own_is_said():
    (said,) = told(fallen(4, init_scale=8.0, min_scale=2.0).item)
    assert "from 8 to 2, its floor (min_scale=2)" in said
    assert told(fallen(1, init_scale=8.0, min_scale=2.0).item) == []


def test_a_scale_that_begins_there_has_not_fallen():
    assert told(fallen(3, init_scale=1.0, min_scale=1.0).item) == []
    assert told(ampopt.DynamicLossScale(init_scale=2.0**-30).item) == []


def test_nothing_is_said_by_printing_or_looks():
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


def test_a_copy_says_it_itself():
    scale = fallen(41)
    assert len(told(scale.item)) == 1
    assert len(told(copy.deepcopy(scale).item)) == 1
