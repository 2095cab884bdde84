"""The step path does not synchronize.

CPU tensors under Triton's interpreter stand for a device's: every way for Python to read the values
of a tensor is made an error, dispatched by torch or not. Only tests on a real device can show a
copy that waits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.optimizers import EVERY_RULE, Signed
from torch.nn import Parameter

import ampopt
from ampopt._step import plan
from ampopt.testing.no_sync import ReadBack, assert_no_sync
from ampopt_kernels.check_rule import try_out
from ampopt_kernels.language import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")

INF = float("inf")


@pytest.fixture(autouse=True, scope="module")
def triton() -> None:
    ampopt.set_backend("triton")


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: int(x),
        lambda x: [0, 1][x.long()],
        lambda x: x.nonzero(),
        lambda x: x.equal(x),
        lambda x: torch.allclose(x, x),
        lambda x: x[x > 0],
        lambda x: np.asarray(x),
        lambda x: f"{x}",
        lambda x: 1.0 if x > 0 else 2.0,
    ],
)
def test_the_detector_catches_a_planted_synchronization(look):
    with pytest.raises(ReadBack), assert_no_sync():
        look(torch.ones(()))


def test_the_detector_catches_a_synchronization_within_a_step(monkeypatch):
    optimizer, _ = made(Signed)
    run = plan.run

    def looks(*args: Any) -> Any:
        decision = run(*args)
        if decision.found_inf.item() > 0:
            raise RuntimeError
        return decision

    monkeypatch.setattr(plan, "run", looks)
    with pytest.raises(ReadBack), assert_no_sync():
        optimizer.unscale_and_step(grads_scaled_by=2.0)


def made(cls: Any) -> tuple[Any, list[Parameter]]:
    """A new optimizer whose rule is not checked yet, as before the first step of a process."""
    try_out.cache_clear()
    params = [Parameter(torch.ones(3)), Parameter(torch.ones((), dtype=torch.float64))]
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    return cls([{"params": [p]} for p in params]), params


SCALES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 2.0,
    "tensor": lambda: torch.tensor(2.0),
    "static": lambda: ampopt.StaticLossScale(2.0),
    "dynamic": lambda: ampopt.DynamicLossScale(init_scale=2.0, growth_interval=1),
    "dynamic with hysteresis": lambda: ampopt.DynamicLossScale(init_scale=2.0, hysteresis=2),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("split", [False, True])
def test_no_kind_of_scale_is_read_on_the_host(kind, split):
    optimizer, params = made(ampopt.AdamW)
    scale = SCALES[kind]()
    with assert_no_sync():
        for value in (2.0, INF, 2.0):
            params[0].grad = torch.full((3,), value)
            if split:
                optimizer.unscale(grads_scaled_by=scale)
                scale = optimizer.step_after_unscale().scale
            else:
                scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
            ampopt.scale_outputs(torch.ones(()), scale)
            optimizer.zero_grad()
    if kind not in ("none", "static"):
        assert float(scale) != 2.0 or kind == "dynamic with hysteresis"


@contextmanager
def nothing_is_sent() -> Iterator[None]:
    """Within the block, an error is raised if numbers of the host are copied to a device.

    Filling memory on the device with a number is no copy.
    """
    refuse = mock.Mock(side_effect=AssertionError("a tensor is made of the host's numbers"))
    with (
        mock.patch("ampopt_kernels.devices.captures", lambda device: True),
        mock.patch.object(torch, "tensor", refuse),
        mock.patch.object(torch, "as_tensor", refuse),
    ):
        yield


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("split", [False, True])
def test_a_step_like_the_one_before_sends_nothing(kind, split):
    optimizer, params = made(ampopt.AdamW)
    scale = SCALES[kind]()
    for step, value in enumerate((2.0, 2.0, INF, 3.0)):
        for p in params:
            assert p.grad is not None
            p.grad.fill_(value)  # where they were
        with assert_no_sync(), nothing_is_sent() if step >= 2 else nullcontext():
            if split:
                optimizer.unscale(grads_scaled_by=scale)
                scale = optimizer.step_after_unscale().scale
            else:
                scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale


def test_copies_from_the_host_are_noticed():
    optimizer, params = made(ampopt.AdamW)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    for p in params:
        p.grad = torch.full_like(p, 2.0)  # elsewhere
    with pytest.raises(RuntimeError, match="would have to send them"), nothing_is_sent():
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    with pytest.raises(AssertionError, match="of the host's numbers"), nothing_is_sent():
        torch.tensor(1.0)


@pytest.mark.parametrize("cls", EVERY_RULE)
def test_no_control_point_of_any_rule_synchronizes(cls):
    optimizer, params = made(cls)
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0)
    with assert_no_sync():
        for value in (2.0, INF, 2.0):
            for p in params:
                p.grad = torch.full_like(p, value)
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        optimizer.unscale(grads_scaled_by=scale)
        optimizer.step_after_unscale()
        optimizer.step()
        assert optimizer.grad_norm is not None
    assert scale.item() == 1.0


@pytest.mark.parametrize("cls", EVERY_RULE)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_loop_written_for_grad_scaler_does_not_synchronize(cls, unscale_first):
    optimizer, params = made(cls)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = params[0].detach().clone()
    with assert_no_sync():
        for value in (INF, 2.0):
            optimizer.zero_grad()
            scaler.scale(params[0].sum() + params[1].float())
            for p in params:
                p.grad = torch.full_like(p, value)
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0
    assert params[0].isfinite().all()
    assert not torch.equal(params[0], before)


def test_changes_between_steps_do_not_synchronize():
    """New groups, other rates and missing gradients copy tables to the device, and nothing back."""
    optimizer, params = made(ampopt.AdamW)
    with assert_no_sync():
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        optimizer.param_groups[0]["lr"] = 0.5
        params[0].grad = None
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        params.append(Parameter(torch.ones(2)))
        params[-1].grad = torch.ones(2)
        optimizer.add_param_group({"params": [params[-1]]})
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert not torch.equal(params[-1].detach(), torch.ones(2))


def test_results_that_synchronize_say_so():
    optimizer, _ = made(ampopt.SGD)
    result = optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert "ynchronizes" in (ampopt.StepResult.skipped.__doc__ or "")
    with pytest.raises(ReadBack), assert_no_sync():
        _ = result.skipped
