"""A learning-rate scheduler behind a gate counts only steps that were not skipped."""

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import HostCounted, Plain, Signed
from support.strategies import fewer
from torch.nn import Parameter
from torch.optim import lr_scheduler as schedulers

import ampopt
from ampopt import lr_scheduler_gate
from ampopt.scheduler_gate import LRSchedulerGate
from ampopt.testing.bits import bits
from ampopt.testing.no_sync import assert_no_sync
from ampopt_kernels.language import HAS_TRITON

INF = float("inf")


def chained(optimizer: Any) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.75)]
    )


def sequential(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.25, 1.0, 3), schedulers.StepLR(optimizer, 2, 0.5)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


class EveryStep(schedulers.LRScheduler):
    """A scheduler as users write them, with a state and a hyperparameter of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.seen: list[int] = []
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        self.seen.append(self.last_epoch)
        for group in self.optimizer.param_groups:
            group["seen"] = len(self.seen)
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


MAKE: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 0.5**n),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 1 - 1 / (n + 1)),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.25, 1.0, 4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.75),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.25, 1.0, 3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=20),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.125, 4),
    "EveryStep": EveryStep,
}
every_scheduler = pytest.mark.parametrize("name", MAKE)


def made(
    cls: Any = ampopt.SGD, tensor_lr: bool = False, **options: Any
) -> tuple[Any, list[Parameter]]:
    """An optimizer of two groups with different learning rates."""
    params = [Parameter(torch.tensor([0.5, -1.5])) for _ in range(2)]
    lrs = [torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr for lr in (0.5, 0.25)]
    if cls is ampopt.SGD:
        options["momentum"] = 0.5  # OneCycleLR cycles it
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, lrs, strict=True)]
    return cls(groups, **options), params


def attempt(optimizer: Any, params: list[Parameter], bad: bool, how: str = "joined") -> None:
    for p in params:
        p.grad = torch.tensor([1.0, INF if bad else -1.0])
    if how == "joined":
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    elif how == "split":
        optimizer.unscale(grads_scaled_by=1.0)
        optimizer.step_after_unscale()
    elif how == "several":
        ampopt.unscale_and_step([optimizer], grads_scaled_by=1.0)
    elif how == "closure":

        def closure(scale: Any) -> float:
            for p in params:
                p.grad = torch.tensor([1.0, -1.0])
            return 1.0

        optimizer.unscale_and_step(closure, grads_scaled_by=1.0)
    else:
        cls = torch.amp.GradScaler if how == "torch's scaler" else ampopt.GradScaler
        scaler = cls("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()


HOWS = ("joined", "split", "several", "closure", "torch's scaler", "our scaler")


def arguments(name: str, number: int) -> tuple[float, ...]:
    return (float(-(number % 3)),) if name == "ReduceLROnPlateau" else ()


def groups_of(optimizer: Any) -> Any:
    """The entries of param groups that schedulers write."""
    others = ("params", "step")
    return bits([{k: v for k, v in g.items() if k not in others} for g in optimizer.param_groups])


def steps_of(scheduler: Any) -> int:
    """The count of the scheduler; of the first one in a ``ChainedScheduler``, which has none."""
    behind = getattr(scheduler, "scheduler", scheduler)
    if isinstance(behind, schedulers.ChainedScheduler):
        behind = behind._schedulers[0]
    return behind.last_epoch


def calls() -> st.SearchStrategy[list[bool | None]]:
    """For each call of a gate: whether the step before it overflows; ``None`` for no step."""
    return st.lists(st.sampled_from([False, False, True, None]), min_size=1, max_size=12)


# --- without a gate ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, how", [*((name, HOWS[0]) for name in MAKE), *(("StepLR", how) for how in HOWS[1:])]
)
@pytest.mark.parametrize("cls", [ampopt.SGD, Plain])
def test_torchs_schedulers_count_attempts_and_do_not_warn(name, how, cls):
    optimizer, params = made(cls)
    plain, plain_params = made(torch.optim.SGD)
    scheduler, expected = MAKE[name](optimizer), MAKE[name](plain)
    for number, bad in enumerate((True, False, True, False, False)):
        attempt(optimizer, params, bad, how)
        scheduler.step(*arguments(name, number))
        plain.step()
        expected.step(*arguments(name, number))
        assert bits(scheduler.get_last_lr()) == bits(expected.get_last_lr())


# --- what happened -------------------------------------------------------------------------------


@every_scheduler
@fewer(0.25)
@given(
    history=calls(),
    delay=st.none() | st.integers(0, 4),
    tensor_lr=st.booleans(),
    cls=st.sampled_from([ampopt.SGD, ampopt.Adam, Signed, Plain, HostCounted]),
)
def test_the_scheduler_advances_only_for_steps_that_were_not_skipped(
    name, history, delay, tensor_lr, cls
):
    cls = ampopt.SGD if name == "OneCycleLR" else cls
    optimizer, params = made(cls, tensor_lr)
    gate = lr_scheduler_gate(MAKE[name](optimizer), delay=delay)
    clean, clean_params = made(cls, tensor_lr)
    scheduler = MAKE[name](clean)
    late: list[bool] = []  # whether the last calls were for skips
    metric = 0
    for bad in history:
        if bad is not None:
            attempt(optimizer, params, bad)
            late.append(bad)
        gate.step(*arguments(name, metric))
        # It is as far as the steps that happened, and as those that it does not know of.
        known = len(late) - (delay or 0)
        steps = sum(not bad for bad in late[: max(known, 0)]) + min(len(late), delay or 0)
        while steps_of(scheduler) < steps:
            attempt(clean, clean_params, False)
            scheduler.step(*arguments(name, metric))
            metric += 1
        if name != "ReduceLROnPlateau" or not (delay or any(late)):
            assert groups_of(optimizer) == groups_of(clean)
        assert steps_of(gate) == steps


@pytest.mark.parametrize("how", [*HOWS, "plain"])
@pytest.mark.parametrize("cls", [ampopt.SGD, Plain, HostCounted, torch.optim.SGD])
def test_a_gate_sees_every_way_to_step(how, cls):
    if cls is torch.optim.SGD and how not in ("torch's scaler", "our scaler", "plain"):
        return  # it has no control points
    optimizer, params = made(cls)
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5))
    lrs = []
    for bad in (True, False, True, False):
        if how == "plain":
            optimizer.step()
        else:
            attempt(optimizer, params, bad, how)
        gate.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    if how in ("plain", "closure"):  # which never skip
        assert lrs == [0.25, 0.125, 0.0625, 0.03125]
    else:
        assert lrs == [0.5, 0.25, 0.25, 0.125]


def test_a_fused_step_of_torch_is_recognized_by_the_flag_of_the_scaler():
    param = Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([param], lr=1.0, fused=True)
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    lrs = []
    for number in (INF, 1.0, INF):
        scaler.scale(torch.zeros(()))
        param.grad = torch.tensor([1.0, number])
        scaler.step(optimizer)
        scaler.update()
        gate.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    assert lrs == [1.0, 0.5, 0.5]
    param.grad = None  # the flag is a number then
    scaler.step(optimizer)
    gate.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_applied_overflows_count_as_steps():
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5))
    params[0].grad = torch.tensor([INF, 1.0])
    optimizer.unscale_and_step(
        grads_scaled_by=ampopt.StaticLossScale(1.0, drop_overflow_update=False)
    )
    gate.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("delay", [0, 1])
def test_one_step_of_several_between_two_calls_is_enough(delay):
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5), delay=delay)
    epochs: list[list[bool]] = [[True, False, True], [True, True], [], [False], [False]]
    for epoch in epochs:
        for bad in epoch:
            attempt(optimizer, params, bad)
        gate.step()
    assert gate.last_epoch == 3


def test_without_a_step_the_scheduler_does_not_advance():
    optimizer, _ = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5))
    gate.step()
    gate.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- delay ---------------------------------------------------------------------------------------


def test_a_skip_is_subtracted_after_the_delay():
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5), delay=2)
    epochs = []
    for bad in (False, True, True, False, False, False, False):
        attempt(optimizer, params, bad)
        gate.step()
        epochs.append(gate.last_epoch)
    assert epochs == [1, 2, 3, 3, 3, 4, 5]


@fewer(0.5)
@given(history=calls(), delays=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_two_gates_of_one_optimizer_do_not_disturb_each_other(history, delays):
    optimizer, params = made()
    gates = [
        lr_scheduler_gate(schedulers.ExponentialLR(optimizer, factor), delay=delay)
        for factor, delay in zip((0.5, 0.75), delays, strict=True)
    ]
    alone = []
    for delay in delays:
        other, other_params = made()
        alone.append((other, other_params, lr_scheduler_gate(
            schedulers.ExponentialLR(other, 0.5), delay=delay
        )))  # fmt: skip
    for bad in history:
        for one, its_params in ((optimizer, params), *((o, p) for o, p, _ in alone)):
            if bad is not None:
                attempt(one, its_params, bad)
        for gate in (*gates, *(gate for _, _, gate in alone)):
            gate.step()
        assert [g.last_epoch for g in gates] == [gate.last_epoch for _, _, gate in alone]
        expected = 0.5 * 0.5 ** gates[0].last_epoch * 0.75 ** gates[1].last_epoch
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_no_call_waits_for_the_last_steps(monkeypatch):
    ampopt.set_backend("triton")
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5), delay=3)
    for bad in (False, True, False):
        attempt(optimizer, params, bad)
        with assert_no_sync():
            gate.step()
    attempt(optimizer, params, False)
    gate.step()
    attempt(optimizer, params, False)
    with pytest.raises(AssertionError), assert_no_sync():
        gate.step()  # which learns of the second one


class Event:
    """A fake event of a device. It records that the host has waited for it."""

    waited: list["Event"] = []

    def record(self, stream: Any) -> None:
        assert stream == "a stream"

    def synchronize(self) -> None:
        Event.waited.append(self)


@pytest.mark.parametrize("reload", [False, True])
def test_on_an_accelerator_the_delay_is_eight(monkeypatch, reload):
    gate_module: Any = sys.modules["ampopt.scheduler_gate"]
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5))
    outcomes = iter([False, True, *[False] * 20])
    Event.waited = []

    def outcome(attempts: list[Any]) -> Any:
        return gate_module._AllSkipped(next(outcomes), [Event()], True)

    monkeypatch.setattr(gate_module, "_outcome", outcome)
    epochs = []
    for number in range(12):
        attempt(optimizer, params, False)
        gate.step()
        epochs.append(gate.last_epoch)
        if reload and number == 3:
            state = gate.state_dict()
            gate = lr_scheduler_gate(gate.detach())
            gate.load_state_dict(state)
    assert epochs == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11]
    if not reload:
        assert len(Event.waited) == 12 - gate_module.DELAY


# --- checkpoints ---------------------------------------------------------------------------------


@every_scheduler
@fewer(0.15)
@given(history=calls(), at=st.integers(0, 11), delay=st.none() | st.integers(0, 3))
def test_saving_and_loading_changes_nothing(name, history, at, delay):
    optimizer, params = made()
    gate = lr_scheduler_gate(MAKE[name](optimizer), delay=delay)
    saved = None
    for index, bad in enumerate(history):
        if bad is not None:
            attempt(optimizer, params, bad)
        gate.step(*arguments(name, index))
        if index == at:
            weights = [p.detach().clone() for p in params]
            saved = copy.deepcopy((gate.state_dict(), optimizer.state_dict(), weights))
    if saved is None:
        return
    resumed, resumed_params = made()
    resumed_gate = lr_scheduler_gate(MAKE[name](resumed), delay=delay)
    with torch.no_grad():
        for p, weight in zip(resumed_params, saved[2], strict=True):
            p.copy_(weight)
    resumed.load_state_dict(saved[1])
    resumed_gate.load_state_dict(saved[0])
    for index, bad in enumerate(history[at + 1 :], at + 1):
        if bad is not None:
            attempt(resumed, resumed_params, bad)
        resumed_gate.step(*arguments(name, index))
    assert bits(resumed_params) == bits(params)
    assert groups_of(resumed) == groups_of(optimizer)
    assert steps_of(resumed_gate) == steps_of(gate)


@every_scheduler
def test_checkpoints_are_exchanged_with_schedulers_without_a_gate(name):
    optimizer, params = made()
    gate = lr_scheduler_gate(MAKE[name](optimizer), delay=2)
    for bad in (False, True, False):
        attempt(optimizer, params, bad)
        gate.step(*arguments(name, 0))
    state = copy.deepcopy(gate.state_dict())
    other, other_params = made()
    scheduler = MAKE[name](other)
    scheduler.load_state_dict(state)
    assert steps_of(scheduler) == 3
    back = lr_scheduler_gate(MAKE[name](made()[0]))
    back.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    assert steps_of(back) == 3


@pytest.mark.parametrize("reload", [False, True])
def test_a_gate_subtracts_every_skip_it_learns_of_at_once(reload):
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5), delay=3)
    for bad in (True, True, False):
        attempt(optimizer, params, bad)
        gate.step()
    state = gate.state_dict()
    epochs = []
    for number in range(4):
        if number == 0 or reload:
            gate = lr_scheduler_gate(gate.detach(), delay=0)
            gate.load_state_dict(state)
        attempt(optimizer, params, False)
        gate.step()
        epochs.append(gate.last_epoch)
        state = gate.state_dict()
    assert epochs == [3, 3, 4, 5]


def test_steps_before_loading_are_forgotten():
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5))
    attempt(optimizer, params, False)
    gate.load_state_dict(gate.state_dict())
    gate.step()
    assert gate.last_epoch == 0


def test_on_the_cpu_a_gates_state_is_its_schedulers():
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.StepLR(optimizer, 2))
    for bad in (False, True):
        attempt(optimizer, params, bad)
        gate.step()
    assert gate.state_dict() == gate.scheduler.state_dict()


# --- the gate itself -----------------------------------------------------------------------------


def test_a_gate_is_a_scheduler_with_the_attributes_of_its_scheduler():
    optimizer, _ = made()
    scheduler = schedulers.StepLR(optimizer, 3, gamma=0.5)
    gate = lr_scheduler_gate(scheduler)
    assert isinstance(gate, schedulers.LRScheduler)
    assert gate.scheduler is scheduler and gate.optimizer is optimizer
    assert (gate.gamma, gate.step_size, gate.base_lrs) == (0.5, 3, [0.5, 0.25])
    assert gate.get_last_lr() == [0.5, 0.25]
    with pytest.raises(AttributeError, match="nothing"):
        gate.nothing  # noqa: B018


def test_attributes_set_on_a_gate_are_set_on_its_scheduler():
    """Torch's ``SequentialLR`` assigns to schedulers, and torchtitan does when it resumes."""
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.LambdaLR(optimizer, lambda count: 0.5**count))
    gate.last_epoch = 5
    attempt(optimizer, params, False)
    gate.step()
    assert gate.last_epoch == gate.scheduler.last_epoch == 6
    assert gate.get_last_lr() == [0.5 * 0.5**6, 0.25 * 0.5**6]


def test_a_gate_that_was_detached_sees_no_more_steps():
    optimizer, params = made()
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5))
    scheduler = gate.detach()
    attempt(optimizer, params, False)
    gate.step()
    assert gate.last_epoch == 0
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_a_gate_that_was_not_made_has_no_attributes():
    """A debugger shows such a one, where the gate refused its scheduler."""
    assert not hasattr(LRSchedulerGate.__new__(LRSchedulerGate), "last_epoch")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("cls", [ampopt.SGD, torch.optim.SGD])
def test_a_copy_sees_the_steps_of_the_copied_optimizer_and_continues(copied, cls):
    optimizer, params = made(cls)
    gate = lr_scheduler_gate(schedulers.ExponentialLR(optimizer, 0.5), delay=2)
    runs = [(optimizer, params, gate)]
    epochs = []
    for number, bad in enumerate((False, True, False, False, True, False, False)):
        for one, its_params, _ in runs:
            attempt(one, its_params, bad, "torch's scaler")
        if number == 2:  # between a step and its call, while the skip is not subtracted yet
            runs.append(copied(runs[0]))
        for _, _, its_gate in runs:
            its_gate.step()
        epochs.append({its_gate.last_epoch for _, _, its_gate in runs})
    assert all(len(both) == 1 for both in epochs)
    assert epochs[-1] == {5}  # of seven steps, of which two were skipped
    assert [one.param_groups[0]["lr"] for one, _, _ in runs] == [0.5 * 0.5**gate.last_epoch] * 2


@pytest.mark.parametrize("thing", [3, None, "StepLR"])
def test_an_object_that_is_no_scheduler_is_refused(thing):
    with pytest.raises(TypeError, match="must be a learning-rate scheduler of a torch optimizer"):
        lr_scheduler_gate(thing)


@pytest.mark.parametrize("thing", [3, None, "state"])
def test_an_object_that_is_no_state_dict_is_refused(thing):
    gate = lr_scheduler_gate(schedulers.StepLR(made()[0], 1))
    with pytest.raises(TypeError, match="state_dict must be a dict, got"):
        gate.load_state_dict(thing)


class _OwnGate(LRSchedulerGate):
    """A gate of another class, as that for Accelerate."""


@pytest.mark.parametrize("cls", [LRSchedulerGate, _OwnGate])
def test_a_gate_before_a_gate_is_refused(cls):
    gate = lr_scheduler_gate(schedulers.StepLR(made()[0], 1))
    with pytest.raises(TypeError, match="got LRSchedulerGate"):
        cls(gate)


@pytest.mark.parametrize(
    ("delay", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)]
)
def test_a_delay_out_of_range_is_refused(delay, error):
    scheduler = schedulers.StepLR(made()[0], 1)
    with pytest.raises(error, match=r"delay must be (from 0 to|an int, got)"):
        lr_scheduler_gate(scheduler, delay=delay)


def test_the_steps_of_an_optimizer_in_a_wrapper_are_seen():
    """Accelerate makes schedulers of its wrapper, which has no step hooks."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

        def step(self, closure=None):
            return self.optimizer.step(closure)

    param = Parameter(torch.ones(3))
    wrapper = Wrapper(Wrapper(ampopt.SGD([param], lr=1.0)))
    gate = ampopt.lr_scheduler_gate(schedulers.StepLR(wrapper, 1, gamma=0.5))
    gate.step()
    assert gate.get_last_lr() == [1.0]
    param.grad = torch.ones(3)
    wrapper.step()
    gate.step()
    assert gate.get_last_lr() == [0.5]
