"""One optimizer, several devices: each tensor is stepped where it is, under one decision.

Devices are pretended (see ``support.pretended_device``), in a process of their own, and run on the
eager backend.
"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.pretended_device import looks, pretending
from support.torch_options import RICH, OptionSet
from torch import Tensor
from torch.nn import Parameter

import ampopt

PLACES = [
    ["pretend:0", "pretend:0"],
    ["pretend:0", "pretend:1"],
    ["pretend:0", "cpu"],
    ["cpu", "pretend:0"],
]
INF = float("inf")


def host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").clone()


def train(options: OptionSet, places: list[str]) -> list[Any]:
    """All that comes of three steps, of which the second overflows on the last device."""
    params = [Parameter(torch.linspace(-1.0, 2.0, 6).reshape(3, 2).to(d)) for d in places]
    optimizer = options.ours(params)
    scale = ampopt.DynamicLossScale(init_scale=4.0)
    seen: list[Any] = []
    for number in (0.5, INF, 0.25):
        for p in params:
            last = p is params[-1]
            p.grad = torch.full((3, 2), 4 * (number if last else 0.5)).to(p.device)
        looks.clear()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        assert not (looks and "cpu" not in places), looks
        assert found_inf.device == scale.value.device == params[0].device
        seen += [host(found_inf), host(scale.value), host(optimizer.grad_norm)]
        seen += [host(p) for p in params]
    optimizer.unscale(grads_scaled_by=scale)
    optimizer.step_after_unscale()
    for p in params:
        assert all(value.device == p.device for value in optimizer.state[p].values())
        seen += [host(p), *(host(v) for v in optimizer.state[p].values())]
    # Loaded where the devices are others, counts go there too.
    moved = options.ours([host(p) for p in params])
    moved.load_state_dict(optimizer.state_dict())
    for p in moved.param_groups[0]["params"]:
        p.grad = torch.ones(3, 2)
    moved.step()
    return seen + [p.detach() for p in moved.param_groups[0]["params"]]


def check_a_scaler() -> None:
    """One flag and one scale for all devices of an optimizer, and for all optimizers."""
    places = ["pretend:0", "pretend:1", "pretend:0"]
    params = [Parameter(torch.ones(3, device=d)) for d in places]
    optimizers = [ampopt.SGD(params[:2], lr=0.5), ampopt.SGD(params[2:], lr=0.5)]
    scaler = ampopt.GradScaler("cpu", loss_scale=ampopt.DynamicLossScale(init_scale=4.0))
    for overflowed in (True, False):
        for p in params:
            p.grad = torch.full((3,), 4.0, device=p.device)
        if overflowed:
            params[1].grad = torch.full((3,), INF, device="pretend:1")
        scaler.scale(torch.ones((), device="pretend:0"))  # as the loss of a loop is
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        stepped = [host(p).lt(1).all().item() for p in params]
        assert stepped == ([False, False, True] if overflowed else [True, True, True])
        assert scaler.get_scale() == 2.0


def check_the_device() -> None:
    """It notices what must not be done."""
    here, other = torch.ones(2, device="pretend:0"), torch.ones(2, device="pretend:1")
    with pytest.raises(AssertionError, match="add of tensors on"):
        _ = here + other
    with pytest.raises(AssertionError, match="not waited for"):
        here.to("cpu", non_blocking=True)
    with pytest.raises(AssertionError, match="that is not pinned is not waited for"):
        torch.ones(2).to("pretend:0", non_blocking=True)
    assert not looks
    here.sum().item()
    assert looks == ["_local_scalar_dense"]


def main() -> None:
    ampopt.set_backend("eager")
    rules = [options for options in RICH if options.name in ("SGD", "Adam", "ASGD", "NAdam")]
    expected = {options.name: train(options, ["cpu", "cpu"]) for options in rules}
    with pretending():
        check_the_device()
        for options in rules:
            for places in PLACES:
                actual = train(options, places)
                for a, b in zip(actual, expected[options.name], strict=True):
                    same = torch.allclose(a, b, rtol=1e-5, atol=1e-6)
                    assert same, f"{options} on {places}: {a}, and on the CPU {b}"
        check_a_scaler()
        there = torch.tensor(2.0, device="pretend:0")
        scaled = ampopt.scale_outputs([torch.ones(2), torch.ones(2, device="pretend:0")], there)
        assert [t.device.type for t in scaled] == ["cpu", "pretend"]
        assert all(host(t).eq(2).all() for t in scaled)


def test_devices_step_skip_and_clip_together_and_the_host_never_reads_too_early():
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env={**settings, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
