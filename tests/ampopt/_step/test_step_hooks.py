"""Step hooks, profilers and schedulers of torch see steps of control points, skipped or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fixtures import either_host
from support.optimizers import OF_EACH_KIND, SOME_RULES, HostCounted, Plain
from support.training_loops import INF, both_ways, overflow
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampopt
from ampopt.testing.bits import bits, everything

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")
on_eager = pytest.mark.parametrize("backend", ["eager"], indirect=True)
"""For tests of what the host does, in which kernels have no part."""


@on_eager
@pytest.mark.parametrize("cls", OF_EACH_KIND)
@both_ways
def test_step_hooks_run_on_every_attempt(cls, split):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def attempt() -> None:
        calls.clear()
        if split:
            optimizer.unscale(grads_scaled_by=1.0)
            optimizer.step_after_unscale()
        else:
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert calls == ["before", "after"]

    attempt()  # without gradients
    param.grad = torch.ones(3)
    attempt()
    overflow(param)
    attempt()  # skipped


def seen_by_hooks_of_all(attempt: Callable[[], None], optimizer: Any) -> bool:
    calls: list[str] = []
    hooks = (
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    )
    try:
        attempt()
    finally:
        for hook in hooks:
            hook.remove()
    return calls == ["before", "after"]


def seen_by_a_profiler(attempt: Callable[[], None], optimizer: Any) -> bool:
    profile = torch.autograd.profiler.profile()
    with profile:
        attempt()
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    return [event.name for event in profile.function_events or ()].count(name) == 1


def seen_by_a_scheduler(attempt: Callable[[], None], optimizer: Any) -> bool:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    attempt()
    scheduler.step()  # which warns if it has not seen the step
    return True


def seen_by_who_replaced_the_step(attempt: Callable[[], None], optimizer: Any) -> bool:
    calls: list[None] = []
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    optimizer.step = step
    attempt()
    return bool(calls)


def seen_by_who_replaced_the_step_of_the_class(attempt: Callable[[], None], optimizer: Any) -> bool:
    calls: list[None] = []
    cls, original = type(optimizer), type(optimizer).step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "step", step)
        attempt()
    return bool(calls)


@on_eager
@pytest.mark.parametrize("cls", SOME_RULES)
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(
    "seen",
    [
        seen_by_hooks_of_all,
        seen_by_a_profiler,
        seen_by_a_scheduler,
        seen_by_who_replaced_the_step,
        seen_by_who_replaced_the_step_of_the_class,
    ],
)
def test_hooks_and_profilers_of_torch_see_the_steps_of_control_points(cls, bad, seen):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    param.grad = torch.tensor([1.0, INF if bad else 2.0, 4.0])
    assert seen(lambda: optimizer.unscale_and_step(grads_scaled_by=1.0), optimizer)
    assert (param.tolist() == [1.0] * 3) is bad


@on_eager
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("seen", [seen_by_hooks_of_all, seen_by_a_profiler, seen_by_a_scheduler])
def test_they_see_the_steps_of_a_hand_written_optimizer(bad, seen):
    param = Parameter(torch.ones(3))
    optimizer = Plain([param])
    param.grad = torch.tensor([1.0, INF if bad else 2.0, 4.0])
    assert seen(lambda: optimizer.unscale_and_step(grads_scaled_by=1.0), optimizer)


@on_eager
@pytest.mark.parametrize("cls", OF_EACH_KIND)
def test_a_pre_hook_may_replace_the_arguments_of_the_step(cls):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: (args, {"closure": None}))
    overflow(param)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param.tolist() == [1.0, 1.0, 1.0]


@on_eager
@pytest.mark.parametrize("cls", OF_EACH_KIND)
@both_ways
@pytest.mark.parametrize("bad", [False, True])
def test_after_a_step_hook_raises_the_step_can_be_repeated(cls, split, bad):
    torch.manual_seed(0)
    twins = [Parameter(torch.ones(3)) for _ in range(2)]
    disturbed, calm = (cls([p]) for p in twins)
    scales = [ampopt.DynamicLossScale(init_scale=2.0) for _ in twins]
    for p in twins:
        p.grad = torch.tensor([1.0, INF if bad else 2.0, 4.0])

    def refuse(*_: Any) -> None:
        raise KeyError("hook")

    before = everything(disturbed)
    hook = disturbed.register_step_pre_hook(refuse)
    if split:
        disturbed.unscale(grads_scaled_by=scales[0])
    with pytest.raises(KeyError, match="hook"):
        disturbed.step_after_unscale() if split else disturbed.unscale_and_step(
            grads_scaled_by=scales[0]
        )
    assert everything(disturbed) == before
    hook.remove()
    if split:
        result = disturbed.step_after_unscale()
    else:
        twins[0].grad = torch.tensor([1.0, INF if bad else 2.0, 4.0])
        result = disturbed.unscale_and_step(grads_scaled_by=scales[0])
    torch.manual_seed(0)
    expected = calm.unscale_and_step(grads_scaled_by=scales[1])
    assert result.skipped is expected.skipped is bad
    if cls is not HostCounted:
        assert bits(twins[0]) == bits(twins[1])
    # Nothing of the disturbed attempt is left for a step that knows no scale.
    for p, opt in zip(twins, (disturbed, calm), strict=True):
        p.grad = torch.ones(3)
        torch.manual_seed(0)
        opt.step()
    if cls is not HostCounted:
        assert bits(twins[0]) == bits(twins[1])


@on_eager
@pytest.mark.parametrize("cls", OF_EACH_KIND)
def test_schedulers_see_a_step_in_every_attempt(cls):
    """Torch warns if a scheduler steps before its optimizer. A skipped step must not cause that."""
    param = Parameter(torch.ones(3))
    optimizer = cls([param], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    overflow(param)
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    param.grad = torch.ones(3)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_an_ordinary_step_that_raises_is_not_marked_as_stepped():
    class Raises(Plain):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("no step")

    param = Parameter(torch.ones(1))
    optimizer = Raises([param])
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        param.grad = torch.ones(1)
        with pytest.raises(ArithmeticError):
            optimizer.unscale_and_step(grads_scaled_by=scale)


@pytest.mark.parametrize("cls", OF_EACH_KIND)
@pytest.mark.parametrize("how", ["joined", "split", "several", "torch's scaler", "our scaler"])
def test_a_post_hook_has_the_flag_of_its_step(cls, how):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    flags: list[Any] = []
    optimizer.register_step_post_hook(lambda o, *_: flags.append(o.found_inf))
    scaler: Any = ampopt.GradScaler("cpu", init_scale=4.0)
    if how == "torch's scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # pyright: ignore

    for overflows in (False, True, False, True):  # none has the flag of the step before
        param.grad = torch.tensor([1.0, INF if overflows else 2.0, 4.0])
        if how == "joined":
            optimizer.unscale_and_step(grads_scaled_by=4.0)
        elif how == "split":
            optimizer.unscale(grads_scaled_by=4.0)
            optimizer.step_after_unscale()
        elif how == "several":
            ampopt.unscale_and_step([optimizer], 4.0)
        else:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        (flag,) = flags
        flags.clear()
        assert flag.shape == () and flag.dtype == torch.float32
        assert bool(flag > 0) == overflows

    param.grad = torch.ones(3)
    optimizer.step()
    assert flags[0] is None or not flags[0] > 0


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("cls", [ampopt.SGD, Plain])
def test_the_flag_in_a_post_hook_is_of_skips_not_of_applied_overflows(cls, drop):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    flags: list[Any] = []
    optimizer.register_step_post_hook(lambda o, *_: flags.append(bool(o.found_inf > 0)))
    overflow(param)
    scale = ampopt.StaticLossScale(4.0, drop_overflow_update=drop)
    assert optimizer.unscale_and_step(grads_scaled_by=scale).found_inf > 0
    assert flags == [drop]


def test_an_ordinary_step_of_torch_gets_no_flag():
    """Torch's steps refuse ``grad_scale`` and ``found_inf`` if they are not fused."""

    class Theirs(torch.optim.AdamW):
        pass

    param = Parameter(torch.ones(3))
    optimizer = ampopt.extend(Theirs)([param], lr=0.5)
    optimizer.register_step_post_hook(lambda *_: None)
    for _ in range(2):
        param.grad = torch.ones(3)
        assert not optimizer.unscale_and_step(grads_scaled_by=2.0).skipped
    assert param[0] < 0.5
