"""The control points: their order, their results, and their effect on autograd and copies."""

import copy
import pickle
import weakref

import pytest
import torch
from support.fixtures import either_host
from support.optimizers import OF_EACH_KIND, SOME_RULES, Plain, sgd
from support.training_loops import INF, overflow
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.backend import backend_for
from ampopt.testing.bits import bits, everything
from ampopt.testing.no_sync import assert_no_sync
from ampopt.testing.pretended_device import as_on_a_device

backend = either_host
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


class ReadsScaler(Plain):
    """Supports torch's GradScaler by itself, as a fused optimizer of torch does."""

    _step_supports_amp_scaling = True


class AroundRule(ampopt.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def with_step_on_instance(params):
    """An optimizer of torch, patched after somebody has set a step on the instance."""
    optimizer = torch.optim.Adagrad(params)
    inner = optimizer.step
    optimizer.step = lambda closure=None: inner(closure)
    return ampopt.patch_optimizer(optimizer)


STEPPED_PLAINLY = (
    *OF_EACH_KIND,
    AroundRule,
    ReadsScaler,
    ampopt.Muon,
    with_step_on_instance,
)


@pytest.mark.parametrize("cls", STEPPED_PLAINLY)
@pytest.mark.parametrize("number", [1.0, INF])
@pytest.mark.parametrize("drops", [True, False], ids=["drops", "applies"])
def test_a_plain_step_after_unscale_is_step_after_unscale(cls, number, drops):
    twins = [Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizers = [cls([p]) for p in twins]
    changes: list[bool] = []
    skips: list[bool] = []
    for p, optimizer, step in zip(twins, optimizers, ("step", "step_after_unscale"), strict=True):
        flags: list[bool] = []
        optimizer.register_step_post_hook(
            lambda o, *_, flags=flags: flags.append(o.found_inf is not None and o.found_inf > 0)
        )
        torch.manual_seed(0)
        scale = ampopt.StaticLossScale(2.0, drop_overflow_update=drops)
        for value in (1.0, number, 2.0):
            p.grad = torch.tensor([[1.0, value], [-2.0, 1.0]])
            optimizer.unscale(grads_scaled_by=scale)
            before = bits(p)
            getattr(optimizer, step)()
            assert optimizer.pending is None
            changes.append(bits(p) != before)
            skips.append(bool(flags[-1]))  # the hooks of a nested step come first
    assert bits(twins[0]) == bits(twins[1])
    assert everything(optimizers[0])["state"] == everything(optimizers[1])["state"]
    assert skips == [False, number == INF and drops, False] * 2
    if drops:  # else parameters may be NaN by then
        assert changes == [not skipped for skipped in skips]


def test_a_plain_step_does_not_wait_for_the_flag_it_follows(param, monkeypatch):
    optimizer = ampopt.AdamW([param])
    overflow(param)
    before = bits(param)
    with as_on_a_device(), assert_no_sync():
        optimizer.unscale(grads_scaled_by=2.0)
        optimizer.step()
    assert bits(param) == before


@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.LBFGS, Plain])
def test_a_step_with_a_closure_is_refused_between_unscale_and_step(cls, param):
    optimizer = cls([param])
    optimizer.unscale(grads_scaled_by=2.0)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"^step\(closure\): an unscale is pending"):
        optimizer.step(lambda: 1.0)
    assert everything(optimizer) == before
    optimizer.zero_grad()
    param.grad = torch.ones(3)
    optimizer.step(lambda: 1.0)


@pytest.mark.parametrize("number", [1.0, INF])
def test_the_step_of_a_rule_follows_what_its_closure_unscales(number):
    param = Parameter(torch.ones(3))
    optimizer = sgd(param)

    def closure():
        optimizer.zero_grad()
        param.grad = torch.tensor([2.0, number, 2.0])
        optimizer.unscale(grads_scaled_by=2.0)
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert param.tolist() == ([1.0, 1.0, 1.0] if number == INF else [0.5, 0.75, 0.5])


# --- the end of an unscale ------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*OF_EACH_KIND, ampopt.Muon])
def test_a_loop_that_leaves_the_step_out_after_an_overflow_runs_on(cls):
    """The loop that reads the flag itself, and clears gradients by the model."""
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer, scale = cls(model.parameters()), 8.0
    for value in (1.0, INF, INF, 1.0):
        model.zero_grad()
        ampopt.scale_outputs(value * model(torch.ones(2, 2)).sum(), scale).backward()
        found_inf, scale = optimizer.unscale(scale)
        before = bits(model.weight)
        if not found_inf.item():
            optimizer.step()
        assert (bits(model.weight) == before) is (value == INF)
    assert scale.item() == 2.0


@pytest.mark.parametrize("ending", ["cleared", "replaced"])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.unscale(grads_scaled_by=2.0) and o.step_after_unscale(),
        lambda o: o.unscale_and_step(grads_scaled_by=2.0),
        lambda o: o.accumulate(grads_scaled_by=2.0) and o.step(),
        lambda o: o.state_dict(),
        copy.deepcopy,
    ],
    ids=["unscale", "unscale_and_step", "accumulate", "state_dict", "deepcopy"],
)
def test_an_unscale_whose_gradients_are_gone_is_over(call, ending, masters, sums):
    dtype = torch.bfloat16 if masters else torch.float32
    params = [[Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)] for _ in range(2)]
    optimizers = [ampopt.AdamW(group, lr=0.5, master_weights=masters) for group in params]
    for place, (group, optimizer) in enumerate(zip(params, optimizers, strict=True)):
        if place == 0:  # what the other has not seen must leave no trace
            for p in group:
                p.grad = torch.full((3,), INF if sums else 1.0, dtype=dtype)
            if sums:
                optimizer.accumulate(grads_scaled_by=2.0)
                group[0].grad = torch.ones(3, dtype=dtype)
            optimizer.unscale(grads_scaled_by=2.0)
        for p in group:
            p.grad = None if ending == "cleared" else torch.full((3,), 4.0, dtype=p.grad_dtype)
        call(optimizer)
        assert optimizer.pending is None
        for p in group:
            assert p.grad_dtype == dtype
            p.grad = torch.ones(3, dtype=dtype)
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert bits(params[0]) == bits(params[1])


@pytest.mark.parametrize("cls", OF_EACH_KIND)
def test_a_step_after_gradients_were_cleared_is_a_step_without_an_unscale(cls, param):
    optimizer = cls([param])
    optimizer.unscale(grads_scaled_by=2.0)
    param.grad = None
    assert optimizer.pending is None
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="nothing is unscaled"):
        optimizer.step_after_unscale()
    assert everything(optimizer) == before


@pytest.mark.parametrize("cls", OF_EACH_KIND)
@pytest.mark.parametrize("step", ["step", "step_after_unscale"])
def test_gradients_edited_out_of_place_are_those_of_the_step(cls, step):
    twins = [Parameter(torch.ones(3)) for _ in range(2)]
    for place, p in enumerate(twins):
        optimizer = cls([p])
        torch.manual_seed(0)
        for value in (1.0, INF):
            p.grad = torch.tensor([1.0, value, -2.0])
            optimizer.unscale(grads_scaled_by=1.0)
            if place:
                p.grad.mul_(0.5)
            else:
                p.grad = p.grad * 0.5
            getattr(optimizer, step)()
    assert bits(twins[0]) == bits(twins[1]) and twins[0].isfinite().all()
    p, optimizer = twins[0], cls(twins[:1])
    before, p.grad = bits(p), torch.ones(3)
    optimizer.unscale(grads_scaled_by=1.0)
    p.grad.fill_(INF)
    getattr(optimizer, step)()
    assert bits(p) != before  # gradients are not checked again


@pytest.mark.parametrize("zeroed", ["by the model", "one of two"])
def test_an_unscale_lasts_while_a_gradient_is_left(zeroed):
    """Zeros in place look like an edit, and one parameter may be left out of a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = ampopt.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.unscale(grads_scaled_by=2.0)
    if zeroed == "by the model":
        model.zero_grad(set_to_none=False)
    else:
        model.bias.grad = None
    with pytest.raises(RuntimeError, match="unscale: an unscale is pending"):
        optimizer.unscale(grads_scaled_by=2.0)
    optimizer.step_after_unscale()


def test_an_unscale_without_gradients_is_not_waited_for(param):
    """A rank may have none, while others leave the step out after an overflow."""
    param.grad = None
    optimizer = ampopt.AdamW([param])
    for _ in range(2):
        optimizer.unscale(grads_scaled_by=2.0)
    optimizer.step_after_unscale()
    assert not optimizer.state


def test_a_pending_unscale_keeps_no_gradient_alive(param):
    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=2.0)
    gradient = weakref.ref(param.grad)
    param.grad = None
    assert gradient() is None


def test_a_plain_step_after_unscale_counts_as_stepping_with_the_scale(param):
    optimizer = sgd(param)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    optimizer.unscale(grads_scaled_by=scale)
    optimizer.step()
    with pytest.raises(RuntimeError, match="so assign it"):
        optimizer.unscale(grads_scaled_by=scale)


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
def test_a_run_that_goes_back_to_an_earlier_state_may_use_its_scale_again(param, cls):
    """A search for a learning rate keeps the state and the scale, steps, and returns to both."""
    optimizer = cls([param])
    first = ampopt.DynamicLossScale(init_scale=4.0)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.unscale_and_step(grads_scaled_by=first)
    with pytest.raises(RuntimeError, match="used by an earlier step.* function .* must return it"):
        optimizer.unscale_and_step(grads_scaled_by=first)
    optimizer.load_state_dict(saved)
    assert not optimizer.unscale_and_step(grads_scaled_by=first).skipped


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
    if backend_for(param.device).host_sees:
        closure(scale)
        result = optimizer.unscale_and_step(grads_scaled_by=scale)
        assert result.skipped
        scale = result.scale
    _, _, scale = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
    assert scale == 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
