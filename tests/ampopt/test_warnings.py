"""A warning has the line of the user's code, whichever way the call takes from there."""

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import ampopt


def scheduled(optimizer: Any) -> Callable[[], Any]:
    """The step, in the wrapper that torch's schedulers put around it."""
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer.step


def hooked(optimizer: Any) -> Callable[[], Any]:
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer.step


def under_torchs_scaler(optimizer: Any) -> Callable[[], Any]:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    return lambda: scaler.step(optimizer)


@pytest.mark.parametrize(
    "way",
    [
        lambda optimizer: optimizer.step,
        lambda optimizer: optimizer.unscale_and_step,
        lambda optimizer: torch.no_grad()(optimizer.step),
        scheduled,
        hooked,
        under_torchs_scaler,
    ],
    ids=["step", "unscale_and_step", "no_grad", "scheduled", "hooked", "under_torchs_scaler"],
)
def test_a_warning_has_the_line_of_the_user(way):
    param = Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    optimizer = ampopt.AdamW([param])
    call = way(optimizer)
    with pytest.warns(UserWarning, match="in float16, as torch's") as caught:
        call()
    (warning,) = caught
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() in (
        "call()",
        "return lambda: scaler.step(optimizer)",
    )
