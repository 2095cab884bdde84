"""``torch.amp.GradScaler`` steps and skips an optimizer as its control points do."""

from typing import Any

import pytest
import torch
from support.fixtures import either_host
from support.optimizers import SOME_RULES, Plain, sgd
from support.training_loops import INF, scaler_at, scaler_for
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")
on_eager = pytest.mark.parametrize("backend", ["eager"], indirect=True)
"""For tests of what the host does, in which kernels have no part."""


@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
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
@pytest.mark.parametrize("cls", SOME_RULES)
def test_any_flag_above_zero_skips(cls, flag, shape):
    """Torch's fused kernels skip only at a flag of 1; flags of two devices add up to 2 (T2)."""
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


def test_an_overflow_by_unscaling_is_skipped_under_torchs_scaler(param):
    """Torch's scaler tests scaled gradients only (trap T5)."""
    param.grad = torch.tensor([1e37, 1.0, 1.0])
    before, flags = bits(param), []
    optimizer = sgd(param)
    optimizer.register_step_post_hook(lambda o, *_: flags.append(bool(o.found_inf)))
    scaler_for(param, init_scale=2.0**-10).step(optimizer)
    assert bits(param) == before and flags == [True]


@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
def test_a_step_without_gradients_does_nothing_under_torchs_scaler(cls, param):
    optimizer, flags = cls([param]), []
    optimizer.register_step_post_hook(lambda o, *_: flags.append(o.found_inf))
    scaler = scaler_for(param)
    param.grad, before = None, bits(param)
    scaler.step(optimizer)
    assert bits(param) == before and flags == [None]
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()


class ReadsScaler(Plain):
    """Supports torch's GradScaler by itself, as a fused optimizer of torch does."""

    _step_supports_amp_scaling = True


@on_eager
@pytest.mark.parametrize("cls", [*SOME_RULES, Plain, ReadsScaler])
@pytest.mark.parametrize("scaler_unscales", [False, True])
def test_a_scaler_does_not_step_a_pending_unscale(param, cls, scaler_unscales):
    """The scaler would unscale a second time, or has done so in ``unscale_``."""
    optimizer = cls([param])
    scaler = scaler_for(param)
    optimizer.unscale(grads_scaled_by=4.0)
    if scaler_unscales:
        scaler.unscale_(optimizer)
    before = bits((param, param.grad))
    with pytest.raises(RuntimeError, match=r"GradScaler\.step.*: an unscale is pending"):
        scaler.step(optimizer)
    assert bits((param, param.grad)) == before
    optimizer.step_after_unscale()
    assert bits(param) != before[0]


@on_eager
@pytest.mark.parametrize("cls", [*SOME_RULES, Plain, ReadsScaler])
def test_a_scaler_steps_with_gradients_that_have_replaced_unscaled_ones(param, cls):
    optimizer = cls([param])
    scaler = scaler_for(param)
    before = bits(param)
    optimizer.unscale(grads_scaled_by=4.0)
    param.grad = torch.ones_like(param)
    scaler.step(optimizer)
    assert bits(param) != before
    assert optimizer.pending is None


@on_eager
@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer: optimizer.unscale_and_step(grads_scaled_by=4.0),
        lambda optimizer: optimizer.unscale(grads_scaled_by=4.0),
        lambda optimizer: ampopt.unscale_and_step([optimizer], grads_scaled_by=4.0),
    ],
)
@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
def test_gradients_that_a_scaler_unscaled_are_not_unscaled_again(param, cls, call):
    optimizer = cls([param])
    scaler = scaler_at(4.0, ampopt.GradScaler)
    scaler.unscale_(optimizer)
    before = bits((param, param.grad))
    with pytest.raises(RuntimeError, match=r"scaler\.step\(optimizer\)"):
        call(optimizer)
    assert bits((param, param.grad)) == before
    scaler.step(optimizer)
    scaler.update()
    assert bits(param) != before[0]


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


class Wrapper:
    def __init__(self, optimizer: ampopt.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@on_eager
@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_wrapper_that_keeps_what_the_scaler_sets_is_warned_of(param, cls, unscale_first):
    optimizer = cls([param])
    scaler = scaler_for(param)
    scaler.step(optimizer)
    scaler.update()
    optimizer.step()  # no warning: the scaler's step before it got its values
    if unscale_first:
        scaler.unscale_(optimizer)
    with pytest.warns(RuntimeWarning, match=f"Pass the {cls.__name__} itself to scaler.step"):
        scaler.step(Wrapper(optimizer))


def test_grad_scaler_and_hooks_keep_no_state_by_the_identity_of_the_optimizer(param):
    """By ``id(optimizer)``, a scaler would unscale twice through a wrapper (trap T6)."""
    optimizer = sgd(param)
    optimizer.unscale(grads_scaled_by=4.0)
    wrapper: Any = Wrapper(optimizer)
    with pytest.raises(RuntimeError, match="pending"):
        wrapper.unscale_and_step(grads_scaled_by=4.0)
    wrapper.step_after_unscale()
    assert param.tolist() == [1 - 0.5 / 8, -2 - 1 / 8, 3 + 4 / 8]
