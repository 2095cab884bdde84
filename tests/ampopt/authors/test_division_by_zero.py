"""Division by zero in a rule gives an infinity or NaN, as on a GPU, and raises no exception."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

import ampopt
from ampopt_kernels import Rule, State, jit, tl


@jit
def _scalars(s, h):
    (count,) = s
    lr, warm_up, power = h
    left = warm_up - count  # 0 at one step
    inverse = 1 / power  # where there is none
    rate = tl.where(left > 0, lr / (1 + left), lr) + tl.where(left == 0, 0.0, 0.0 * (1 / left))
    return (count + 1,), (rate, tl.where(power > 0, inverse, 1.0), warm_up, lr)


@jit
def _update(p, g, state, h, flags):
    rate, inverse, warm_up, lr = h
    share = tl.where(warm_up > 0, lr / warm_up, 0.0)  # of numbers, among them a 0
    return p - rate * inverse * g - share * g, state


class Dividing(ampopt.ElementwiseOptimizer):
    rule = Rule(
        update=_update,
        scalars=_scalars,
        hyper=("lr", "warm_up", "power"),
        scalar_state=(State("count"),),
    )

    def __init__(self, params: Any, warm_up: float, power: float) -> None:
        super().__init__(params, {"lr": 0.5, "warm_up": warm_up, "power": power})


@pytest.mark.parametrize(
    "backend", ["eager", "eager on a device", "triton", "compiled"], indirect=True
)
@given(
    warm_up=st.sampled_from([0, 0.0, 2.0]),
    power=st.sampled_from([0, 0.0, 2.0]),
    absent=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_division_by_zero_in_an_unselected_branch_has_no_effect(backend, warm_up, power, absent):
    """Also if a parameter lacks gradients in some steps, so that step counts differ."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = Dividing(params, warm_up, power)
    expected, count = [1.0, 1.0], [0, 0]
    for missing in absent:
        for i, param in enumerate(params):
            param.grad = None if i and missing else torch.ones_like(param)
            if param.grad is not None:
                rate = 0.5 / (1 + warm_up - count[i]) if warm_up > count[i] else 0.5
                share = 0.5 / warm_up if warm_up > 0 else 0.0
                expected[i] -= rate * (1 / power if power > 0 else 1.0) + share
                count[i] += 1
        optimizer.step()
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), torch.full_like(param, value))


@jit
def _takes_it(s, h):
    return s, (h[0] / h[1], (h[1] - h[1]) / h[1])


@jit
def _keeps_it(p, g, state, h, flags):
    return p + h[0] * g, (state[0] + h[1],)


@pytest.mark.parametrize(
    "backend", ["eager", "eager on a device", "triton", "compiled"], indirect=True
)
def test_a_division_by_zero_gives_infinity_or_nan(backend):
    class Takes(ampopt.ElementwiseOptimizer):
        rule = Rule(
            update=_keeps_it, scalars=_takes_it, hyper=("lr", "zero"), state=(State("kept"),)
        )

    param = Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, -1.0, 2.0])
    optimizer = Takes([param], {"lr": 0.5, "zero": 0.0})
    optimizer.step()
    assert param.tolist() == [float("inf"), float("-inf"), float("inf")]
    assert optimizer.state[param]["kept"].isnan().all()
