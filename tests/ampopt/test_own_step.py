"""What a subclass does in a ``step`` of its own is taken and skipped with the step around it."""

import functools
from typing import Any

import pytest
import torch
from support.optimizers import Plain
from support.training_loops import INF, both_ways, overflow, scaler_for
from torch.nn import Parameter

import ampopt
from ampopt._step.by_rule import ByRule
from ampopt._step.ordinary import Ordinary
from ampopt.testing.bits import bits, everything

pytestmark = pytest.mark.usefixtures("backend")


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
    params = [Parameter(torch.ones(3))]
    assert isinstance(Renamed(params)._ampopt, ByRule)
    assert isinstance(Derived(params)._ampopt, Ordinary)


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
