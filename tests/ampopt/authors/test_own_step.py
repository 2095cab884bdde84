"""Subclasses that override ``step``: what they add is skipped together with the step."""

import functools
from typing import Any

import pytest
import torch
from support.fixtures import either_host
from support.optimizers import Plain
from support.training_loops import INF, both_ways, overflow, scaler_for
from torch.nn import Parameter

import ampopt
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.rule_step import RuleStep
from ampopt.testing.bits import bits, everything

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")
on_eager = pytest.mark.parametrize("backend", ["eager"], indirect=True)
"""For tests of what the host does, in which kernels have no part."""


class Shrinking(ampopt.AdamW):
    """A rule-based optimizer whose ``step`` also changes parameters and a param group itself."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)
        loss = super().step(closure)
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        return loss


@both_ways
def test_code_of_a_subclass_around_the_step_is_skipped_with_it(split):
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


@both_ways
def test_code_around_a_rule_is_rolled_back_with_the_writes_of_its_kernels(split):
    class Undone(Shrinking):
        skip_by = "transaction"

    param = Parameter(torch.ones(3))
    optimizer = Undone([param])
    for number in (2.0, INF, 4.0, INF):
        before = everything(optimizer)
        param.grad = torch.full((3,), number)
        if split:
            optimizer.unscale(grads_scaled_by=2.0)
            optimizer.step_after_unscale()
        else:
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        assert (everything(optimizer) == before) is (number == INF)


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


def test_a_subclass_without_its_own_step_skips_too():
    class Renamed(ampopt.AdamW):
        pass

    class Derived(Shrinking):
        pass

    assert Renamed._step_supports_amp_scaling
    params = [Parameter(torch.ones(3))]
    assert isinstance(Renamed(params)._ampopt, RuleStep)
    assert isinstance(Derived(params)._ampopt, HandwrittenStep)


@pytest.mark.parametrize("made_before", [False, True])
def test_a_subclass_skips_whichever_class_was_made_first(made_before):
    """At the first instance of a class, torch wraps the ``step`` of the class to run hooks."""

    class Base(ampopt.AdamW):
        pass

    if made_before:
        Base([Parameter(torch.ones(3))])

    class Renamed(Base):
        pass

    # Of float16, whose gradients a hand-written step refuses.
    param = Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Renamed([param], lr=0.5)
    param.grad = torch.ones_like(param)
    scaler_for(param).step(optimizer)
    assert (param < 1.0).all()


@pytest.mark.parametrize("made_before", [False, True])
def test_a_class_without_a_step_hides_no_inherited_one(made_before):
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


@on_eager
@pytest.mark.parametrize("theirs", [torch.optim.SGD, ampopt.SGD, Plain])
@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_step_made_with_wraps_is_the_authors_own(theirs, made_before, scaler):
    """``functools.wraps`` also copies the attributes by which torch marks a wrapped step."""

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


class Moded(ampopt.SGD):
    """A rule with a mode in which steps raise."""

    trains = True

    def check_step(self) -> None:
        if not self.trains:
            raise RuntimeError("not in this mode")


STEPS = {
    "step": lambda o: o.step(),
    "unscale": lambda o: o.unscale(2.0),
    "unscale_and_step": lambda o: o.unscale_and_step(grads_scaled_by=2.0),
    "max_norm": lambda o: o.unscale_and_step(max_norm=1.0),
    "closure": lambda o: o.unscale_and_step(lambda scale: 1.0, 2.0),
    "together": lambda o: ampopt.unscale_and_step([o], 2.0),
    "GradScaler": lambda o: scaler_for(o.param_groups[0]["params"][0]).step(o),
}


@on_eager
@pytest.mark.parametrize("call", STEPS)
@pytest.mark.parametrize("around", [False, True])
def test_a_step_that_is_refused_changes_nothing_and_the_next_is_taken(call, around):
    class Around(Moded):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    param = Parameter(torch.ones(3))
    optimizer = (Around if around else Moded)([param], lr=0.5, momentum=0.5)
    param.grad = torch.ones(3)
    optimizer.trains = False
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="not in this mode"):
        STEPS[call](optimizer)
    assert everything(optimizer) == before
    assert param.grad.tolist() == [1.0] * 3
    optimizer.trains = True
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert param.tolist() == [0.75] * 3


def test_a_step_is_refused_between_an_unscale_and_itself():
    param = Parameter(torch.ones(3))
    optimizer = Moded([param], lr=0.5)
    param.grad = torch.ones(3)
    optimizer.unscale(1.0)
    optimizer.trains = False
    with pytest.raises(RuntimeError, match="not in this mode"):
        optimizer.step_after_unscale()
    assert param.tolist() == [1.0] * 3
    optimizer.trains = True
    optimizer.step_after_unscale()
    assert param.tolist() == [0.5] * 3


@pytest.mark.parametrize("backend", ["eager", "eager on a device", "triton"], indirect=True)
@both_ways
def test_a_step_around_a_rule_may_leave_the_skip_to_it(split, backend):
    """With ``skip_by = "step"``, the rule is skipped on the device, and the code around it runs."""

    class Counting(ampopt.AdamW):
        skip_by = "step"

        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
            return super().step(closure)

    param, twin = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer, reference = Counting([param]), ampopt.AdamW([twin])
    for number in (4.0, INF, 8.0):
        param.grad = torch.full((3,), number)
        if split:
            optimizer.unscale(grads_scaled_by=2.0)
            result = optimizer.step_after_unscale()
        else:
            result = optimizer.unscale_and_step(grads_scaled_by=2.0)
        assert result.skipped == (number == INF)
        if number != INF:
            twin.grad = torch.full((3,), number / 2)
            reference.step()
    assert bits(param) == bits(twin)
    assert optimizer.param_groups[0]["calls"] == 3


def test_a_step_around_a_rule_is_warned_of_where_the_host_would_wait(monkeypatch):
    monkeypatch.setattr(HandwrittenStep, "decision_device", torch.device("cuda"))
    optimizer = Shrinking([Parameter(torch.ones(3))])
    with pytest.warns(UserWarning, match="Shrinking.step overrides the step of a rule"):
        _ = optimizer._ampopt.skip_policy
    optimizer = Shrinking([Parameter(torch.ones(3))])
    optimizer.skip_by = "host"
    assert optimizer._ampopt.skip_policy.mode == "host"


def test_a_class_whose_states_no_step_would_make_is_refused():
    """Torch's step makes states by ``_init_group``, and the step by a rule does not call it."""
    groups = []

    def init_group(self: Any, group: Any, *lists: Any) -> Any:
        groups.append(group)
        return torch.optim.SGD._init_group(self, group, *lists)

    with pytest.raises(TypeError, match="Mine overrides _init_group.*use ampopt.extend of it"):
        type("Mine", (ampopt.SGD,), {"_init_group": init_group})
    cls = ampopt.extend(type("Mine", (torch.optim.SGD,), {"_init_group": init_group}))
    param = Parameter(torch.ones(3))
    optimizer = cls([param], lr=0.5)
    param.grad = torch.ones(3)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert groups == optimizer.param_groups and param.tolist() == [0.5] * 3

    class OwnStep(ampopt.SGD):
        _init_group: Any = init_group

        def step(self, closure: Any = None) -> Any:
            return torch.optim.SGD.step(self, closure)

    OwnStep([param])
