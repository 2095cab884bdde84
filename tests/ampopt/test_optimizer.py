"""The control points: their order, what they take and return, and what else reads them."""

import ast
import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import EVERY_RULE, RULE_BASED, HostCounted, Plain, Signed, torch_twin
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampopt
from ampopt import StepResult, Unscaled
from ampopt.testing.bits import bits, everything

pytestmark = pytest.mark.usefixtures("backend")

INF = float("inf")
ORDINARY = (Plain, HostCounted)
WITHOUT_CLOSURE = (*RULE_BASED, *ORDINARY)


@pytest.fixture
def param() -> Parameter:
    p = Parameter(torch.tensor([1.0, -2.0, 3.0]))
    p.grad = torch.tensor([0.5, 1.0, -4.0])
    return p


def sgd(param: Parameter, **options: Any) -> ampopt.SGD:
    return ampopt.SGD([param], lr=0.5, **options)


def overflow(param: Parameter) -> None:
    param.grad = torch.tensor([1.0, INF, 1.0])


# --- the order of calls ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda opt: opt.unscale(grads_scaled_by=2.0),
        lambda opt: opt.unscale_and_step(grads_scaled_by=2.0),
        lambda opt: opt.unscale_and_step(lambda scale: 1.0, 2.0),
        lambda opt: opt.step_after_unscale(lambda scale: 1.0, 2.0),
        lambda opt: opt.state_dict(),
        lambda opt: opt.load_state_dict({"state": {}, "param_groups": []}),
        copy.deepcopy,
        pickle.dumps,
    ],
    ids=[
        "unscale",
        "unscale_and_step",
        "unscale_and_step(closure)",
        "step_after_unscale(closure)",
        "state_dict",
        "load_state_dict",
        "deepcopy",
        "pickle",
    ],
)
def test_a_pending_unscale_refuses_what_cannot_follow_it(param, call):
    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=2.0)
    before = everything(optimizer), bits(param.grad)
    with pytest.raises(RuntimeError, match=r"step_after_unscale\(\) first, or zero_grad\(\)"):
        call(optimizer)
    assert (everything(optimizer), bits(param.grad)) == before
    optimizer.step_after_unscale()  # still pending, and still good


def test_step_after_unscale_without_one_names_unscale(param):
    optimizer = sgd(param)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"Call unscale\(grads_scaled_by=scale\) first"):
        optimizer.step_after_unscale()
    assert everything(optimizer) == before


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE)
def test_step_after_unscale_may_be_called_once(param, cls):
    optimizer = cls([param])
    optimizer.unscale(grads_scaled_by=2.0)
    optimizer.step_after_unscale()
    with pytest.raises(RuntimeError, match="nothing is unscaled"):
        optimizer.step_after_unscale()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_discards_a_pending_unscale(param, set_to_none):
    optimizer = sgd(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    optimizer.unscale(grads_scaled_by=scale)
    optimizer.zero_grad(set_to_none)
    assert param.grad is None if set_to_none else not param.grad.any()
    param.grad = torch.ones(3)
    # Nothing was stepped with the scale, so that it may be used again.
    optimizer.unscale_and_step(grads_scaled_by=scale)
    assert param.tolist() == [0.75, -2.25, 2.75]


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE)
def test_a_plain_step_applies_gradients_as_they_are_and_ends_the_pending_state(cls):
    twins = [Parameter(torch.ones(3)) for _ in range(2)]
    plain, unscaled = (cls([p]) for p in twins)
    for p in twins:
        overflow(p)
    found_inf, scale = unscaled.unscale(grads_scaled_by=ampopt.DynamicLossScale(init_scale=1.0))
    assert found_inf > 0
    torch.manual_seed(0)
    unscaled.step()
    torch.manual_seed(0)
    plain.step()
    assert bits(twins[0]) == bits(twins[1])
    with pytest.raises(RuntimeError, match="nothing is unscaled"):
        unscaled.step_after_unscale()
    unscaled.unscale(grads_scaled_by=scale)  # and the returned scale is good


def test_a_plain_step_after_unscale_counts_as_stepping_with_the_scale(param):
    optimizer = sgd(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    optimizer.unscale(grads_scaled_by=scale)
    optimizer.step()
    with pytest.raises(RuntimeError, match="rebind"):
        optimizer.unscale(grads_scaled_by=scale)


def test_unscale_leaves_unscaled_gradients_to_read(param):
    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=4.0)
    assert param.grad.tolist() == [0.125, 0.25, -1.0]


@pytest.mark.parametrize("cls", RULE_BASED)
def test_unscale_and_step_of_a_rule_leaves_gradients_as_they_were(param, cls):
    before = bits(param.grad)
    cls([param]).unscale_and_step(grads_scaled_by=4.0, max_norm=0.5)
    assert bits(param.grad) == before


# --- what grads_scaled_by may be ------------------------------------------------------------------


def stepped(param: Parameter, scale: Any, split: bool) -> StepResult:
    optimizer = sgd(param)
    if not split:
        return optimizer.unscale_and_step(grads_scaled_by=scale)
    unscaled = optimizer.unscale(grads_scaled_by=scale)
    assert isinstance(unscaled, Unscaled)
    result = optimizer.step_after_unscale()
    assert result.found_inf is unscaled.found_inf
    assert result.scale is unscaled.scale
    return result


both_ways = pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])


@both_ways
def test_none_is_a_plain_step_that_checks_nothing(param, split):
    overflow(param)
    result = stepped(param, None, split)
    assert result.scale is None
    assert result.found_inf == 0
    assert not result.skipped
    assert param.tolist() == [0.5, -INF, 2.5]


@both_ways
def test_none_is_a_plain_step_also_without_gradients(split):
    """What a step does without gradients is its own affair where nothing is checked."""
    param = Parameter(torch.ones(2))
    optimizer = HostCounted([param])
    if split:
        optimizer.unscale()
        optimizer.step_after_unscale()
    else:
        optimizer.unscale_and_step()
    assert optimizer.param_groups[0]["step"] == 1


@both_ways
@pytest.mark.parametrize("bad", [False, True])
def test_the_flag_is_a_float32_scalar(param, split, bad):
    if bad:
        overflow(param)
    found_inf = stepped(param, 1.0, split).found_inf
    assert found_inf.dtype == torch.float32
    assert found_inf.shape == ()
    assert found_inf.device == param.device
    assert bool(found_inf > 0) is bad


@both_ways
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(
    "given, dtype, shape",
    [
        (8, torch.float32, ()),
        (8.0, torch.float32, ()),
        (torch.tensor(8.0), torch.float32, ()),
        (torch.tensor([8.0]), torch.float32, (1,)),
        (torch.tensor([[8.0]], dtype=torch.float64), torch.float64, (1, 1)),
        (torch.tensor(8.0, dtype=torch.float16), torch.float32, ()),
        (torch.tensor(8.0, requires_grad=True), torch.float32, ()),
    ],
)
def test_a_bare_number_is_followed_by_itself_or_half(param, split, bad, given, dtype, shape):
    before = bits(given)
    if bad:
        overflow(param)
    result = stepped(param, given, split)
    assert isinstance(result.scale, Tensor)
    assert (result.scale.dtype, result.scale.shape) == (dtype, shape)
    assert not result.scale.requires_grad
    assert result.scale.item() == (4.0 if bad else 8.0)
    assert result.skipped is bad
    assert bits(given) == before  # stepping changes no scale
    if not bad:
        assert param.tolist() == [1 - 0.5 / 16, -2 - 1 / 16, 3 + 4 / 16]


@both_ways
def test_one_checks_without_scaling(param, split):
    result = stepped(param, 1.0, split)
    assert param.tolist() == [0.75, -2.5, 5.0]
    assert result.scale.item() == 1.0
    overflow(param)
    assert stepped(param, 1.0, split).skipped
    assert param.tolist() == [0.75, -2.5, 5.0]


@both_ways
@pytest.mark.parametrize("bad", [False, True])
def test_a_static_scale_is_followed_by_itself(param, split, bad):
    if bad:
        overflow(param)
    scale = ampopt.StaticLossScale(2.0)
    optimizer = sgd(param)
    for _ in range(2):  # and may be used again
        result = optimizer.unscale_and_step(grads_scaled_by=scale)
        assert result.scale is scale
        assert result.skipped is bad
    assert stepped(param, scale, split).scale is scale


@both_ways
@pytest.mark.parametrize("bad", [False, True])
def test_a_dynamic_scale_is_followed_by_its_successor(param, split, bad):
    if bad:
        overflow(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0, growth_interval=3, hysteresis=2)
    expected = scale.next(bad)
    result = stepped(param, scale, split)
    assert isinstance(result.scale, ampopt.DynamicLossScale)
    assert result.scale.state_dict() == expected.state_dict()
    assert scale.item() == 2.0


@both_ways
def test_a_scale_without_a_device_goes_to_that_of_the_parameters(param, split):
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    assert scale.device is None
    result = stepped(param, scale, split)
    assert scale.device == param.device
    assert result.scale.device == param.device


# --- scales and the optimizers that stepped with them ---------------------------------------------


@both_ways
def test_a_dynamic_scale_that_was_stepped_with_is_refused(param, split):
    optimizer = sgd(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    if split:
        optimizer.unscale(grads_scaled_by=scale)
        optimizer.step_after_unscale()
    else:
        optimizer.unscale_and_step(grads_scaled_by=scale)
    before = everything(optimizer), bits(param.grad)
    for again in (
        lambda: optimizer.unscale(grads_scaled_by=scale),
        lambda: optimizer.unscale_and_step(grads_scaled_by=scale),
        lambda: optimizer.unscale_and_step(lambda scale: 1.0, scale),
        lambda: optimizer.step_after_unscale(lambda scale: 1.0, scale),
    ):
        with pytest.raises(RuntimeError, match="returns the scale to use next, so rebind it"):
            again()
    assert (everything(optimizer), bits(param.grad)) == before


def test_a_skip_counts_as_stepping_with_the_scale(param):
    optimizer = sgd(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    overflow(param)
    optimizer.unscale_and_step(grads_scaled_by=scale)
    with pytest.raises(RuntimeError, match="rebind"):
        optimizer.unscale_and_step(grads_scaled_by=scale)


def test_a_copy_of_a_scale_may_be_used_where_the_scale_was():
    param = Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    optimizer = sgd(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    saved = copy.deepcopy(scale)
    optimizer.unscale_and_step(grads_scaled_by=scale)
    optimizer.unscale_and_step(grads_scaled_by=saved)


@pytest.mark.parametrize("bad", [(False, False), (True, False), (False, True), (True, True)])
def test_several_optimizers_share_one_scale(bad):
    params = [Parameter(torch.ones(2)) for _ in bad]
    optimizers = [sgd(p) for p in params]
    scale = ampopt.DynamicLossScale(init_scale=8.0, growth_interval=1)
    for p, overflows in zip(params, bad, strict=True):
        p.grad = torch.tensor([8.0, INF if overflows else 8.0])
    first, second = (o.unscale_and_step(grads_scaled_by=scale) for o in optimizers)
    assert (first.skipped, second.skipped) == bad
    assert first.scale.item() == (4.0 if bad[0] else 16.0)
    following = ampopt.next_scale(first.scale, second.scale)
    assert following.item() == (4.0 if any(bad) else 16.0)
    for o in optimizers:
        o.unscale_and_step(grads_scaled_by=following)


@pytest.mark.parametrize("kind", ["number", "static", "dynamic"])
@pytest.mark.parametrize("how", ["joined", "split", "plain step", "closure", "unscaling closure"])
def test_no_gradients_are_no_error_and_do_not_count_towards_growth(kind, how):
    param = Parameter(torch.ones(2))
    optimizer = sgd(param, momentum=0.9)
    kinds = {
        "number": lambda: 2.0,
        "static": lambda: ampopt.StaticLossScale(2.0),
        "dynamic": lambda: ampopt.DynamicLossScale(init_scale=2.0, growth_interval=2),
    }
    scale = kinds[kind]()
    before = bits(param)
    for _ in range(3):
        if how == "joined":
            result = optimizer.unscale_and_step(grads_scaled_by=scale)
        elif how == "closure":
            result = optimizer.unscale_and_step(lambda scale: 1.0, scale)
        elif how == "unscaling closure":
            result = optimizer.step_after_unscale(
                lambda scale: (1.0, *optimizer.unscale(scale)), scale
            )
        else:
            result = optimizer.unscale(grads_scaled_by=scale)
            if how == "plain step":
                optimizer.step()
            else:
                result = optimizer.step_after_unscale()
        assert result.found_inf == 0
        scale = result.scale
    assert float(scale) == 2.0
    assert bits(param) == before
    assert optimizer.state_dict()["state"] == {}
    if kind == "dynamic":
        assert scale.state_dict()["growth"] == 0


def test_gradients_that_all_left_after_unscale_leave_nothing_to_step(param):
    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=2.0)
    param.grad = None
    before = bits(param)
    assert not optimizer.step_after_unscale().skipped
    assert bits(param) == before


def test_an_optimizer_may_have_no_parameters_yet():
    optimizer = ampopt.SGD([{"params": []}], lr=0.5)
    assert optimizer.unscale_and_step(grads_scaled_by=2.0).found_inf == 0
    param = Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones(1)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert param.item() == 0.75


# --- results --------------------------------------------------------------------------------------


def test_results_are_named_tuples(param):
    optimizer = sgd(param)
    unscaled = optimizer.unscale(grads_scaled_by=2.0)
    assert unscaled._fields == ("found_inf", "scale")
    result = optimizer.step_after_unscale()
    assert result._fields == ("loss", "found_inf", "scale")
    assert result.loss is None
    assert isinstance(result.skipped, bool)


@pytest.mark.parametrize("cls", [*RULE_BASED, Plain])
def test_step_is_torchs_step(cls):
    """Same closures, same return value, with or without the control points around it."""
    param = Parameter(torch.ones(2))
    optimizer = cls([param])
    assert optimizer.step() is None

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 2.0
    assert not torch.equal(param.detach(), torch.ones(2))


def test_grad_norm_is_a_device_tensor_of_the_last_clipped_step(param):
    optimizer = sgd(param)
    assert optimizer.grad_norm is None
    optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=INF)
    assert isinstance(optimizer.grad_norm, Tensor)
    assert optimizer.grad_norm.shape == ()
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(17.25).sqrt() / 2)


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("how", ["alone", "several", "closure"])
@pytest.mark.parametrize("cls", [ampopt.SGD, Plain])
def test_grad_norm_without_gradients_is_0_not_that_of_an_earlier_step(cls, how, scale):
    param = Parameter(torch.ones(2))
    optimizer = cls([param], lr=0.5)
    for expected in (5.0, 0.0, 5.0):
        param.grad = torch.tensor([3.0, 4.0]) * (scale or 1.0) if expected else None
        if how == "alone":
            optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        elif how == "several":
            ampopt.unscale_and_step([optimizer], grads_scaled_by=scale, max_norm=1.0)
        else:
            optimizer.unscale_and_step(lambda _: 1.0, scale, max_norm=1.0)
        norm = optimizer.grad_norm
        assert (norm.item(), norm.dtype, norm.shape) == (expected, torch.float32, ())


# --- hooks, schedulers, exceptions ----------------------------------------------------------------


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE)
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


@pytest.mark.parametrize("cls", RULE_BASED)
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
def test_whoever_watches_steps_sees_those_of_the_control_points(cls, bad, seen):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    param.grad = torch.tensor([1.0, INF if bad else 2.0, 4.0])
    assert seen(lambda: optimizer.unscale_and_step(grads_scaled_by=1.0), optimizer)
    assert (param.tolist() == [1.0] * 3) is bad


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE)
def test_a_hook_may_hand_the_step_other_arguments(cls):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: (args, {"closure": None}))
    overflow(param)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE)
@both_ways
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_hook_that_raises_leaves_the_step_to_be_taken_again(cls, split, bad):
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


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE)
def test_schedulers_see_a_step_in_every_attempt(cls):
    """Torch warns, an error here, where a scheduler steps before its optimizer; a skip is not."""
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
    param.grad = torch.ones(1)
    optimizer = Raises([param])
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            optimizer.unscale_and_step(grads_scaled_by=scale)


# --- a subclass with a step of its own ------------------------------------------------------------


class Shrinking(ampopt.AdamW):
    """A rule-based optimizer whose author does something more around the step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)
        loss = super().step(closure)
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        return loss


@both_ways
def test_what_a_subclass_adds_around_the_step_is_skipped_with_it(split):
    param = Parameter(torch.ones(3))
    optimizer = Shrinking([param])
    overflow(param)
    before = everything(optimizer)
    if split:
        optimizer.unscale(grads_scaled_by=2.0)
        optimizer.step_after_unscale()
    else:
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert everything(optimizer) == before

    twin = Parameter(torch.full((3,), 0.5))
    reference = ampopt.AdamW([twin])
    param.grad, twin.grad = torch.full((3,), 2.0), torch.ones(3)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    reference.step()
    assert bits(param) == bits(twin)
    assert optimizer.param_groups[0]["taken"] == 1


def test_grad_scaler_skips_what_a_subclass_adds_around_the_step():
    param = Parameter(torch.ones(3))
    optimizer = Shrinking([param])
    before = everything(optimizer)
    overflow(param)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert everything(optimizer) == before


def test_a_closure_that_fails_within_a_subclass_restores_what_the_subclass_did():
    param = Parameter(torch.ones(3))
    optimizer = Shrinking([param])
    before = everything(optimizer)

    def closure(scale: Any) -> float:
        overflow(param)
        return 1.0

    with pytest.raises(ampopt.NonFiniteGradientError):
        optimizer.unscale_and_step(closure, 2.0, max_replays=1)
    assert everything(optimizer) == before


def test_a_subclass_without_a_step_of_its_own_is_still_told_to_skip():
    class Renamed(ampopt.AdamW):
        pass

    class Derived(Shrinking):
        pass

    assert Renamed._step_supports_amp_scaling
    assert not Renamed._has_own_step
    assert Derived._has_own_step


@pytest.mark.parametrize("made_before", [False, True])
def test_a_subclass_is_told_to_skip_whatever_was_made_before_it(made_before):
    """With the first instance of a class, torch puts a step into it that runs hooks."""

    class Base(ampopt.AdamW):
        pass

    if made_before:
        Base([Parameter(torch.ones(3))])

    class Renamed(Base):
        pass

    # Of float16, whose gradients an ordinary step refuses.
    param = Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Renamed([param], lr=0.5)
    param.grad = torch.ones_like(param)
    scaler_for(param).step(optimizer)
    assert (param < 1.0).all()


@pytest.mark.parametrize("made_before", [False, True])
def test_a_class_without_a_step_hides_that_of_no_other(made_before):
    class Helping(ampopt.Optimizer):
        pass

    if made_before:
        for cls in (Helping, ampopt.Optimizer):
            with pytest.raises(NotImplementedError):
                cls([Parameter(torch.ones(3))], {}).step()

    class Helped(Helping, torch.optim.SGD):
        pass

    class Theirs(torch.optim.SGD):
        pass

    for cls in (Helped, ampopt.extend(Theirs)):
        param = Parameter(torch.ones(3))
        optimizer = cls([param], lr=0.5)
        param.grad = torch.ones(3)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert param.tolist() == [0.5] * 3


@pytest.mark.parametrize("theirs", [torch.optim.SGD, ampopt.SGD, Plain])
@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_step_made_with_wraps_is_the_authors_own(theirs, made_before, scaler):
    """``functools.wraps`` makes it look like the one that it wraps, torch's and our marks too."""

    class Base(theirs):
        pass

    if made_before:
        Base([Parameter(torch.ones(3))])

    class Halving(Base):
        @functools.wraps(Base.step)
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.5)
            return Base.step(self, closure)

    param = Parameter(torch.ones(3))
    optimizer = ampopt.extend(Halving)([param], lr=0.0)
    attempts = []
    optimizer.register_step_post_hook(lambda *_: attempts.append(param.tolist()))
    for third in (INF, 1.0):
        attempts.clear()
        param.grad = torch.tensor([1.0, 1.0, third])
        if scaler:
            scaler_for(param).step(optimizer)
        else:
            optimizer.unscale_and_step(grads_scaled_by=4.0)
        assert attempts[-1] == param.tolist() == [1.0 if third == INF else 0.5] * 3


# --- torch.amp.GradScaler -------------------------------------------------------------------------


def scaler_for(param: Parameter, init_scale: float = 4.0) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=100)
    scaler.scale(torch.zeros(()))  # makes its tensors
    assert param.grad is not None
    return scaler


@pytest.mark.parametrize("cls", [*RULE_BASED, Plain])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_steps_and_skips_as_the_hooks_do(cls, unscale_first):
    twins = [Parameter(torch.ones(3)) for _ in range(2)]
    scaled, hooked = (cls([p]) for p in twins)
    twins[0].grad = torch.ones(3)
    scaler = scaler_for(twins[0])
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=100)
    for third in (4.0, INF, 2.0, float("nan"), 3.0):
        for p in twins:
            p.grad = torch.tensor([1.0, -2.0, third])
        before = bits(twins[0])
        if unscale_first:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        result = hooked.unscale_and_step(grads_scaled_by=scale)
        scale = result.scale
        assert bits(twins[0]) == bits(twins[1])
        assert (bits(twins[0]) == before) == result.skipped
        assert scaler.get_scale() == scale.item()
    assert bits(dict(scaled.state[twins[0]])) == bits(dict(hooked.state[twins[1]]))


def test_grad_scaler_leaves_nothing_on_the_optimizer(param):
    optimizer = sgd(param)
    scaler_for(param).step(optimizer)
    before = param.detach().clone()
    param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(param.detach(), before - 0.5)


@pytest.mark.parametrize("flag", [2.0, 1.0, 0.5])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("cls", RULE_BASED)
def test_any_flag_above_zero_skips(cls, flag, shape):
    """Torch's fused kernels skip on exactly 1, but a sum over devices is 2 (trap T2)."""
    param = Parameter(torch.ones(2))
    optimizer = cls([param])
    param.grad = torch.ones(2)
    before = bits(param)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.full(shape, flag)
    optimizer.step()
    assert bits(param) == before
    assert not any(state.any() for state in optimizer.state[param].values())
    optimizer.found_inf = torch.zeros(shape)
    optimizer.step()
    assert bits(param) != before


def test_grad_scaler_cannot_make_us_apply_an_overflow_by_unscaling(param):
    """It looks at scaled gradients alone (trap T5)."""
    param.grad = torch.tensor([1e37, 1.0, 1.0])
    before = bits(param)
    scaler_for(param, init_scale=2.0**-10).step(sgd(param))
    assert bits(param) == before


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_steps_sparse_gradients(bad, unscale_first):
    param = Parameter(torch.ones(3, 2))
    optimizer = ampopt.SGD([param], lr=0.5)
    param.grad = torch.zeros(3, 2)
    scaler = scaler_for(param)
    values = torch.tensor([[4.0, INF if bad else 8.0]])
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), values, (3, 2), check_invariants=True)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    row = [1.0, 1.0] if bad else [0.5, 0.0]
    assert param.tolist() == [[1.0, 1.0], row, [1.0, 1.0]]


def test_grad_scaler_and_hooks_keep_no_state_by_the_identity_of_the_optimizer(param):
    """Keyed by id(optimizer), GradScaler unscales twice through a wrapper (trap T6)."""

    class Wrapper:
        def __init__(self, optimizer: ampopt.SGD) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=4.0)
    wrapper: Any = Wrapper(optimizer)
    with pytest.raises(RuntimeError, match="pending"):
        wrapper.unscale_and_step(grads_scaled_by=4.0)
    wrapper.step_after_unscale()
    assert param.tolist() == [1 - 0.5 / 8, -2 - 1 / 8, 3 + 4 / 8]


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.AdamW, Signed, Plain])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_step_as_the_original_does(cls, duplicate):
    param = Parameter(torch.ones(3))
    optimizer = cls([param])
    param.grad = torch.ones(3)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    twin = duplicate(optimizer)
    (twin_param,) = twin.param_groups[0]["params"]
    assert twin_param is not param
    for p, opt in ((param, optimizer), (twin_param, twin)):
        p.grad = torch.tensor([1.0, 2.0, 3.0])
        opt.unscale_and_step(grads_scaled_by=2.0)
    assert bits(param) == bits(twin_param)


def test_an_optimizer_is_an_instance_of_its_twin_and_of_the_base():
    for cls in (ampopt.SGD, ampopt.Adam, ampopt.AdamW, ampopt.LBFGS):
        optimizer = cls([Parameter(torch.ones(1))], lr=0.5)
        assert isinstance(optimizer, getattr(torch.optim, cls.__name__))
        assert isinstance(optimizer, ampopt.Optimizer)
        twin = getattr(torch.optim, cls.__name__)([Parameter(torch.ones(1))], lr=0.5)
        assert optimizer.defaults == twin.defaults


@pytest.mark.parametrize("cls", [c for c in EVERY_RULE if hasattr(torch.optim, c.__name__)])
def test_a_constructor_shows_the_arguments_that_it_takes(cls):
    """To ``help``, and to who asks whether ``"fused"`` is among them."""
    torchs = inspect.signature(torch_twin(cls)).parameters
    *shown, masters = inspect.signature(cls).parameters.values()
    assert shown == list(torchs.values())
    assert (masters.name, masters.kind, masters.default) == (
        "master_weights", inspect.Parameter.KEYWORD_ONLY, False,
    )  # fmt: skip

    class Author(cls):
        def __init__(self, params: Any, number: int = 3) -> None:
            super().__init__(params)

    assert list(inspect.signature(Author).parameters) == ["params", "number"]


@pytest.mark.parametrize("cls", [c for c in EVERY_RULE if hasattr(torch.optim, c.__name__)])
def test_type_checkers_are_shown_the_same_arguments(cls):
    tree = ast.parse(inspect.getsource(cls))
    (shown,) = (
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    assert isinstance(shown, ast.FunctionDef)
    names: dict[str, Any] = {"ParamsT": Any, "Tensor": Tensor}
    exec(ast.unparse(shown), names)
    found = list(inspect.signature(names["__init__"]).parameters.values())[1:]
    taken = inspect.signature(cls).parameters.values()
    told = [[(p.name, p.kind, p.default) for p in parameters] for parameters in (found, taken)]
    assert told[0] == told[1]


# --- what autograd knows of a step ----------------------------------------------------------------


@pytest.mark.parametrize("cls", WITHOUT_CLOSURE)
def test_a_graph_that_a_step_has_overtaken_is_refused(param, cls):
    """As after a step of torch's: the gradients would be those of other parameters."""
    optimizer = cls([param], lr=0.5)
    loss = param.square().sum()
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
