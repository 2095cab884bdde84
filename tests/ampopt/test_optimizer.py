"""The control points: their order, their results, and their effect on autograd and copies."""

import copy
import pickle

import pytest
import torch
from support.optimizers import OF_EACH_KIND, SOME_RULES, Plain, Signed, sgd
from support.training_loops import INF, overflow
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.backend import host_may_look
from ampopt.testing.bits import bits, everything

pytestmark = pytest.mark.usefixtures("backend")


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
    with pytest.raises(RuntimeError, match=r"step_after_unscale\(\) first.*, or zero_grad\(\)"):
        call(optimizer)
    assert (everything(optimizer), bits(param.grad)) == before
    optimizer.step_after_unscale()  # still pending, and still good


def test_step_after_unscale_without_one_names_unscale(param):
    optimizer = sgd(param)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"Call unscale\(grads_scaled_by=scale\) first"):
        optimizer.step_after_unscale()
    assert everything(optimizer) == before


@pytest.mark.parametrize("cls", OF_EACH_KIND)
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


@pytest.mark.parametrize("cls", OF_EACH_KIND)
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
    with pytest.raises(RuntimeError, match="so assign it"):
        optimizer.unscale(grads_scaled_by=scale)


def test_unscale_leaves_unscaled_gradients_to_read(param):
    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=4.0)
    assert param.grad.tolist() == [0.125, 0.25, -1.0]


@pytest.mark.parametrize("cls", SOME_RULES)
def test_unscale_and_step_of_a_rule_leaves_gradients_as_they_were(param, cls):
    before = bits(param.grad)
    cls([param]).unscale_and_step(grads_scaled_by=4.0, max_norm=0.5)
    assert bits(param.grad) == before


# --- results --------------------------------------------------------------------------------------


def test_results_are_named_tuples(param):
    optimizer = sgd(param)
    unscaled = optimizer.unscale(grads_scaled_by=2.0)
    assert unscaled._fields == ("found_inf", "scale")
    result = optimizer.step_after_unscale()
    assert result._fields == ("loss", "found_inf", "scale")
    assert result.loss is None
    assert isinstance(result.skipped, bool)


@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
def test_step_is_torchs_step(cls):
    """Closures and return values are those of torch, also between calls of other methods."""
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


# --- what autograd knows of a step ----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("cls", OF_EACH_KIND)
def test_a_second_backward_pass_after_a_step_is_refused(param, cls):
    """The gradients would be those of other parameters, as after torch's step."""
    optimizer = cls([param], lr=0.5)
    loss = param.square().sum()
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("cls", OF_EACH_KIND)
def test_a_second_backward_pass_after_a_skip_works_on_the_cpu(param, cls):
    """As with torch's scaler. In a closure, it works after any skip."""
    optimizer = cls([param], lr=0.5)
    loss = param.square().sum()

    def closure(scale):
        optimizer.zero_grad()
        (loss * (scale if scale < 8 else INF)).backward(retain_graph=True)
        return loss

    scale = torch.tensor(16.0)
    if host_may_look(param.device) or cls is Plain:
        closure(scale)
        result = optimizer.unscale_and_step(grads_scaled_by=scale)
        assert result.skipped
        scale = result.scale
    _, _, scale = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
    assert scale == 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
