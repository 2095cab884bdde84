"""The text of a profile for each way to step, to read and to launch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.optimizers import HostCounted, Plain, Signed
from torch.nn import Parameter

import ampopt
from ampopt import profile
from ampopt.profiling import Look, Profile
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON

NO_LOOK = "The host looked at no tensor, so on a GPU it would wait for nothing."
WHERE = Path(__file__).name
INF = float("inf")


@pytest.fixture
def eager():
    ampopt.set_backend("eager")


@pytest.fixture
def on_a_device(eager, monkeypatch):
    """CPU tensors that the host must not read, as on an accelerator."""
    device = Eager()
    monkeypatch.setattr("ampopt.backend._cpu_backend", lambda name: device)


def made(cls: Any, **options: Any) -> Any:
    named = [(name, Parameter(torch.ones(2))) for name in ("weight", "bias")]
    for _, p in named:
        p.grad = torch.ones(2)
    return cls(named, **options)


def said(optimizer: Any, *, scale: Any = 1.0, steps: int = 1) -> str:
    with profile(optimizer) as report:
        for _ in range(steps):
            optimizer.unscale_and_step(grads_scaled_by=scale)
    return str(report)


def test_a_rule(eager):
    assert said(made(ampopt.AdamW), steps=2) == (
        "AdamW: 2 steps. In the last one:\n"
        "  2 parameters (weight, bias): by the rule, on the eager backend\n" + NO_LOOK
    )


def test_the_reason_for_a_new_plan_is_shown(eager):
    optimizer = made(ampopt.AdamW)
    weight, bias = optimizer.param_groups[0]["params"]
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    with profile(optimizer) as report:
        for grad in (None, torch.ones(2)):  # needs no other plan
            bias.grad = grad
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        for _ in range(2):
            weight.data = weight.data.clone()
            optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert report.plans == {"AdamW": {"weight was moved to other memory": 2}}
    assert str(report) == (
        "AdamW: 4 steps. In the last one:\n"
        "  2 parameters (weight, bias): by the rule, on the eager backend\n"
        "  plan of its steps made again 2 times: weight was moved to other memory\n" + NO_LOOK
    )


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_launches_are_counted_and_a_missing_gradient_is_named(monkeypatch):
    monkeypatch.setattr("ampopt.backend._chosen", "triton")
    optimizer = made(Signed)
    optimizer.param_groups[0]["params"][1].grad = None
    assert said(optimizer, scale=ampopt.DynamicLossScale(init_scale=4.0)) == (
        "Signed: 1 step. In the last one:\n"
        "  1 parameter (weight): by the rule, on the triton backend\n"
        "  1 parameter (bias): not stepped, without a gradient\n"
        "ampopt launched 3 kernels, 3 a step: 1 control, 1 detect, 1 update.\n" + NO_LOOK
    )


def hand_written(path: str, which: str = "a hand-written step") -> str:
    return f"  2 parameters (weight, bias): {which}, {path}\n"


LOOKED = "after the host looked at the overflow flag"
UNDONE = "as a transaction: taken, and undone on the device if it overflowed"
FREE = LOOKED + ", which costs nothing on the CPU; "
TRANSACTION = "on a GPU it can be a transaction, if all its states are there"


def flag_read(name: str, *, times: str = "", on_gpu: str = "each time") -> str:
    counted, listed = times or "1 time", f", {times}" if times else ""
    free = " (a transaction on a GPU does not look)" if on_gpu == "for none" else ""
    return (
        f"The host looked at tensors {counted}. That costs nothing on the CPU; on a GPU it would "
        f"wait {on_gpu}:\n  {name}'s overflow flag{listed}: skip this step?{free}"
    )


def test_a_hand_written_step_on_the_cpu(eager):
    header = "Plain: 1 step. In the last one:\n"
    optimizer, twin = made(Plain), made(Plain)
    one_more = "profile one more step to see whether it can be a transaction on a GPU"
    assert said(optimizer) == header + hand_written(FREE + one_more) + flag_read("Plain")
    free = flag_read("Plain", on_gpu="for none")
    for _ in range(2):
        assert said(optimizer) == header + hand_written(FREE + TRANSACTION) + free
    with profile(optimizer) as report:
        for _ in range(2):
            optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert str(report).endswith(flag_read("Plain", times="2 times", on_gpu="for none"))
    assert said(optimizer, scale=None) == header + hand_written("unchecked") + NO_LOOK
    for _ in range(6):
        twin.unscale_and_step(grads_scaled_by=1.0)
    assert all(map(torch.equal, params_of(optimizer), params_of(twin)))


def params_of(optimizer: Any) -> Any:
    return optimizer.param_groups[0]["params"]


def test_a_step_that_cannot_be_a_transaction_on_a_gpu_is_told_so_on_the_cpu(eager):
    optimizer = made(HostCounted)
    path = LOOKED + "; on a GPU too, as the step changes torch's random state"
    for _ in range(2):
        header = "HostCounted: 1 step. In the last one:\n"
        assert said(optimizer) == header + hand_written(path) + flag_read("HostCounted")


@pytest.mark.parametrize(
    ("cls", "skip_by", "paths"),
    [
        (
            Plain,
            "auto",
            [
                UNDONE + ". It added state, so the host looked at the overflow flag",
                UNDONE,
            ],
        ),
        (Plain, "host", [LOOKED + ", as skip_by='host' says"]),
        (
            HostCounted,
            "auto",
            [LOOKED + ", as the step changes torch's random state"] * 2,
        ),
        (Plain, "step", ["which skips by itself"]),
    ],
)
def test_a_hand_written_step_on_a_device(on_a_device, cls, skip_by, paths):
    optimizer = made(cls)
    optimizer.skip_by = skip_by
    for path in paths:
        header = f"{cls.__name__}: 1 step. In the last one:\n"
        looks = flag_read(cls.__name__) if "the host looked" in path else NO_LOOK
        assert said(optimizer) == header + hand_written(path) + looks
    header = f"{cls.__name__}: 1 step. In the last one:\n"
    assert said(optimizer, scale=None) == header + hand_written("unchecked") + NO_LOOK


def test_torchs_own_step(eager):
    optimizer = made(ampopt.SGD)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.detach().to_sparse()
    header = "SGD: 1 step. In the last one:\n"
    expected = hand_written(FREE + TRANSACTION, "torch's own step")
    assert said(optimizer) == header + expected + flag_read("SGD", on_gpu="for none")


def test_reads_in_the_loop_are_shown_with_their_line(eager):
    optimizer = made(ampopt.SGD)
    with profile(optimizer) as report:
        for _ in range(2):
            assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
        optimizer.unscale_and_step(grads_scaled_by=1.0).found_inf.item()
        optimizer.param_groups[0]["params"][0].detach().add(1)
    line = test_reads_in_the_loop_are_shown_with_their_line.__code__.co_firstlineno + 4
    assert str(report) == (
        "SGD: 3 steps. In the last one:\n"
        "  2 parameters (weight, bias): by the rule, on the eager backend\n"
        "The host looked at tensors 3 times. That costs nothing on the CPU; on a GPU it would wait "
        "each time:\n"
        f"  {WHERE}:{line}, 2 times: "
        "assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped\n"
        f"  {WHERE}:{line + 1}: optimizer.unscale_and_step(grads_scaled_by=1.0).found_inf.item()"
    )


def test_what_a_scale_reads_on_the_cpu_alone_is_not_shown(eager):
    with profile(made(ampopt.SGD)) as report:
        ampopt.DynamicLossScale(init_scale=4.0).next(torch.zeros(()))
    assert str(report).endswith(NO_LOOK)


def test_reads_in_a_closure_are_shown(eager):
    optimizer = made(ampopt.SGD)

    def closure(scale: Any) -> Any:
        optimizer.zero_grad()
        loss: Any = sum(p.sum() for p in optimizer.param_groups[0]["params"])
        ampopt.scale_outputs(loss, scale).backward()
        return loss

    with profile(optimizer) as report:
        optimizer.unscale_and_step(closure, grads_scaled_by=1.0)
    assert str(report).endswith(
        "on a GPU it would wait each time:\n"
        "  a closure's replay, 2 times: is the loss finite, did a gradient overflow?"
    )


def test_the_reads_and_the_checks_of_lbfgs_are_shown(eager):
    optimizer = ampopt.LBFGS([torch.nn.Parameter(torch.ones(2))], max_iter=2)

    def closure(scale: Any) -> Any:
        optimizer.zero_grad()
        loss = params_of(optimizer)[0].square().sum()
        ampopt.scale_outputs(loss, scale).backward()
        return loss

    for scale, path in (1.0, "checked after each evaluation"), (None, "unchecked"):
        with profile(optimizer) as report:
            optimizer.unscale_and_step(closure, grads_scaled_by=scale)
        assert f"a hand-written step, {path}\n" in str(report)
        assert "\n  torch's LBFGS, " in str(report)
        assert ("a closure's replay" in str(report)) == (scale is not None)


def test_several_optimizers_and_none(eager):
    a, b = made(ampopt.SGD), made(ampopt.SGD)
    with profile(a, b) as report:
        a.step()
    assert str(report) == (
        "SGD 1: 1 step. In the last one:\n"
        "  2 parameters (weight, bias): by the rule, on the eager backend\n"
        "SGD 2: 0 steps\n" + NO_LOOK
    )
    with pytest.raises(ValueError, match=r"profile\(optimizer\)"), profile():
        pass
    with pytest.raises(TypeError, match=r"torch\.optim\.sgd\.SGD: import it from ampopt"):
        with profile(made(torch.optim.SGD)):
            pass


def test_several_hand_written_steps_each_have_their_path_and_flag(eager):
    a, b = made(Plain), made(HostCounted)
    for optimizer in (a, b):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    with profile(a, b) as report:
        a.unscale_and_step(grads_scaled_by=1.0)
        for _ in range(2):
            b.unscale_and_step(grads_scaled_by=1.0)
    counter = "HostCounted.param_groups[0]['step']"
    assert str(report) == (
        "Plain: 1 step. In the last one:\n"
        + hand_written(FREE + TRANSACTION)
        + "HostCounted: 2 steps. In the last one:\n"
        + hand_written(LOOKED + "; on a GPU too, as the step changes " + counter)
        + "The host looked at tensors 3 times. That costs nothing on the CPU; on a GPU it would "
        "wait 2 times:\n"
        "  Plain's overflow flag: skip this step? (a transaction on a GPU does not look)\n"
        "  HostCounted's overflow flag, 2 times: skip this step?"
    )


def test_many_parameters_are_not_all_named(eager):
    params = [(f"layer{i}", Parameter(torch.ones(1))) for i in range(4)]
    for _, param in params:
        param.grad = torch.ones(1)
    assert "  4 parameters (layer0, layer1, layer2, ...): by the rule" in said(ampopt.SGD(params))


def test_a_report_on_a_gpu_says_what_ran_and_what_waited():
    assert str(Profile(kernels=["a", "b"])) == (
        "2 kernels ran in all, whoever launched them.\nThe host never waited for the device."
    )
    report = Profile(kernels=["a"])
    report.looks[Look("train.py:3", "loss.item()")] += 2
    assert str(report) == (
        "1 kernel ran in all, whoever launched them.\nThe host waited for the device 2 times:\n"
        "  train.py:3, 2 times: loss.item()"
    )


def test_a_step_within_the_step_of_a_subclass_is_not_counted(eager):
    class Derived(ampopt.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    made(ampopt.SGD)  # torch puts hooks around the step of a class that has instances
    optimizer = made(Derived)
    with profile(optimizer) as report:
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        optimizer.step()
    assert report.steps == {"Derived": 2}


def test_profiling_leaves_no_hooks_behind(eager):
    optimizer = made(Plain)
    before = ampopt._step.step_rollback.SkipPolicy.step  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ZeroDivisionError), profile(optimizer):
        _ = 1 / 0
    assert ampopt._step.step_rollback.SkipPolicy.step is before  # pyright: ignore
    assert not optimizer._optimizer_step_post_hooks
