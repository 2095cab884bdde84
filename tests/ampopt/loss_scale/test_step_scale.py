"""What ``grads_scaled_by`` accepts, which scale is returned, and when one may be used again."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fixtures import either_host
from support.optimizers import HostCounted, Plain, sgd
from support.training_loops import INF, both_ways, overflow
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import ampopt
from ampopt import StepResult, Unscaled
from ampopt.loss_scale.step_scale import as_loss_scale, request_for
from ampopt.testing.bits import bits, everything

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")


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
    """Without a test for overflow, a step without gradients is called as usual."""
    param = Parameter(torch.ones(2))
    optimizer = HostCounted([param])
    if split:
        optimizer.unscale()
        optimizer.step_after_unscale()
    else:
        optimizer.unscale_and_step()
    assert optimizer.param_groups[0]["step"] == 1


class RecordedOperations(TorchDispatchMode):
    """Records the operations that make a tensor of known numbers, or copy one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record the operation, and run it."""
        name = func.overloadpacket.__name__
        if name in ("full", "fill_", "zero_", "zeros", "_to_copy", "copy_", "lift_fresh"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_number_passed_again_is_not_sent_again(param):
    uploads: dict = {}

    def sent(number: float) -> Tensor:
        scale = request_for(as_loss_scale(number, param.device, uploads)).scale
        assert scale is not None
        return scale

    first = sent(2.0)
    with RecordedOperations() as writes:
        again = sent(2.0)
    assert writes.seen == []
    other = sent(4.0)
    assert (first.item(), again.item(), other.item()) == (2.0, 2.0, 4.0)


def test_a_tensor_on_meta_is_the_scale_of_parameters_there():
    given = torch.tensor(2.0, device="meta")
    scale = request_for(as_loss_scale(given, given.device, {})).scale
    assert scale is not None and scale.is_meta


@both_ways
@pytest.mark.parametrize("without", [False, True])
def test_the_scale_after_a_number_is_the_callers_own(param, split, without):
    """The user may change the scale in place, also if no parameter had a gradient."""
    optimizer = sgd(param)
    before = param.detach().clone()
    grad, param.grad = param.grad, None if without else param.grad
    result = (
        optimizer.unscale(grads_scaled_by=4.0)
        if split
        else optimizer.unscale_and_step(grads_scaled_by=4.0)
    )
    optimizer.zero_grad()
    assert result.scale.item() == 4.0
    result.scale.zero_()
    param.detach().copy_(before)
    param.grad = grad.clone().fill_(4.0)
    assert not optimizer.unscale_and_step(grads_scaled_by=4.0).skipped
    assert param.tolist() == (before - optimizer.param_groups[0]["lr"]).tolist()


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


def joined_by_accumulate(optimizer: Any, scale: Any) -> Any:
    optimizer.accumulate(grads_scaled_by=scale)
    return optimizer.unscale_and_step(grads_scaled_by=scale).scale


def split_in_two(optimizer: Any, scale: Any) -> Any:
    optimizer.unscale(grads_scaled_by=scale)
    return optimizer.step_after_unscale().scale


REBOUND: dict[str, Any] = {
    "unscale_and_step": lambda o, scale: o.unscale_and_step(grads_scaled_by=scale).scale,
    "unscale": split_in_two,
    "what accumulate returns": lambda o, scale: o.accumulate(grads_scaled_by=scale).scale,
    "accumulate": joined_by_accumulate,
    "together": lambda o, scale: ampopt.unscale_and_step([o], grads_scaled_by=scale).scale,
    "Plain": lambda o, scale: Plain(o.param_groups).unscale_and_step(grads_scaled_by=scale).scale,
}


@pytest.mark.parametrize("way", REBOUND)
@pytest.mark.parametrize("start, expected", [(1.0, 1.0), (2.0, 1.0), (1.5, 0.375)])
def test_one_stays_one_in_a_loop_that_assigns_the_returned_scale(param, way, start, expected):
    """A scale of 1 tests for overflow only; if it were halved, it would never grow back."""
    optimizer, scale = sgd(param), start
    for _ in range(2):
        overflow(param)
        scale = REBOUND[way](optimizer, scale)
        optimizer.zero_grad()
    assert scale.item() == expected


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("one", [1.0, torch.tensor(1.0)])
def test_a_closure_is_run_again_under_less_than_one(param, unscales, one):
    optimizer, seen = sgd(param), []

    def closure(scale: Any) -> Any:
        seen.append(float(scale))
        param.grad = torch.full_like(param, INF if scale > 0.25 else 1.0)
        return (1.0, *optimizer.unscale(scale)) if unscales else 1.0

    if unscales:
        result = optimizer.step_after_unscale(closure, current_grad_scale=one)
    else:
        result = optimizer.unscale_and_step(closure, grads_scaled_by=one)
    assert seen == [1.0, 0.5, 0.25]
    assert result.scale.item() == 0.25
    overflow(param)  # and outside of it one stays one, as before
    assert optimizer.unscale_and_step(grads_scaled_by=one).scale.item() == 1.0


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@given(number=st.sampled_from([3.7, 0.1]) | st.floats(2.0**-20, 2.0**20))
def test_a_closure_gets_the_number_that_gradients_are_divided_by(unscales, by_hand, number):
    """With float64 gradients, a scale that is not rounded to float32 would show."""
    param = Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = sgd(param)

    def closure(scale: Any) -> Any:
        optimizer.zero_grad()
        loss = (param * param).sum()
        (loss * scale if by_hand else ampopt.scale_outputs(loss, scale)).backward()
        return (loss, *optimizer.unscale(scale)) if unscales else loss

    expected = param.detach() * (1 - 2 * optimizer.param_groups[0]["lr"])
    if unscales:
        optimizer.step_after_unscale(closure, current_grad_scale=number)
    else:
        optimizer.unscale_and_step(closure, grads_scaled_by=number)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-14, atol=1e-15)


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
def test_a_dynamic_scale_is_followed_by_its_next_scale(param, split, bad):
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
        with pytest.raises(RuntimeError, match="returns the scale for the next one, so assign it"):
            again()
    assert (everything(optimizer), bits(param.grad)) == before


def test_a_skip_counts_as_stepping_with_the_scale(param):
    optimizer = sgd(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    overflow(param)
    optimizer.unscale_and_step(grads_scaled_by=scale)
    with pytest.raises(RuntimeError, match="so assign it"):
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
        for gradient in (torch.ones(2), None):  # the second step reuses the plan of the first
            param.grad = gradient
            scale = optimizer.unscale_and_step(grads_scaled_by=scale).scale
            assert scale.state_dict()["growth"] == 1


def test_gradients_removed_after_unscale_leave_nothing_to_step(param):
    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=2.0)
    param.grad = None
    before = bits(param)
    with pytest.raises(RuntimeError, match="nothing is unscaled. Call unscale"):
        optimizer.step_after_unscale()
    optimizer.step()
    assert bits(param) == before


def test_an_optimizer_may_have_no_parameters_yet():
    optimizer = ampopt.SGD([{"params": []}], lr=0.5)
    assert optimizer.unscale_and_step(grads_scaled_by=2.0).found_inf == 0
    param = Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones(1)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert param.item() == 0.75
