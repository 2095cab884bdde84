"""Which hand-written steps are rolled back on the device, and which the host skips."""

import random
import unittest
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.host_state_optimizers import (
    HOST_TOO,
    Attribute,
    InGroup,
    InState,
    Iterating,
    Noise,
    Sparse,
    seen,
)
from support.tensor_only_optimizers import (
    TENSORS_ONLY,
    Data,
    Foreach,
    Nested,
    Odd,
    OneBuffer,
    Scattered,
    Slow,
    Views,
    made,
    set_gradients,
)
from support.training_loops import INF
from torch.nn import Parameter

import ampopt
from ampopt._step.step_rollback import SkipPolicy
from ampopt.testing.bits import bits
from ampopt.testing.no_sync import assert_no_sync
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON

pytestmark = pytest.mark.usefixtures("as_on_a_device")


# --- how it was skipped --------------------------------------------------------------------------


def after_steps(cls: type[ampopt.Optimizer], steps: int = 4) -> SkipPolicy:
    optimizer, params = made(cls)
    for _ in range(steps):
        set_gradients(params, (1.0, 1.0))
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    return optimizer._ampopt.skip_policy


@pytest.mark.parametrize("cls", TENSORS_ONLY)
def test_a_step_that_keeps_all_in_tensors_is_undone_on_the_device(cls):
    skip_policy = after_steps(cls)
    assert (skip_policy.mode, skip_policy.reason) == ("transaction", None)


@pytest.mark.parametrize("cls", HOST_TOO)
def test_a_step_that_changes_python_state_is_skipped_by_the_host(cls):
    assert after_steps(cls, 7).mode == "host"


@pytest.mark.parametrize(
    "cls, reason",
    [
        (InGroup, "changes InGroup.param_groups[0]['lr']"),
        (InState, "changes InState.state[...]['step']"),
        (Attribute, "changes Attribute['taken']"),
        (Noise, "changes torch's random state"),
        (Sparse, "has state that cannot be inspected: Sparse.held, a Tensor of torch.sparse_coo"),
        (Iterating, "has state that cannot be inspected: Iterating.held, a list_iterator"),
    ],
)
def test_the_reason_for_skipping_by_the_host_is_named(cls, reason):
    with unittest.TestCase().assertLogs("ampopt._step.step_rollback", "INFO") as logged:
        found = after_steps(cls).reason
    assert found is not None
    assert found == reason
    assert (
        f"{cls.__name__}.step {found}: before every step, the CPU waits to read the overflow flag"
        in "\n".join(logged.output)
    )


@pytest.mark.parametrize("skip_by", ["host", "transaction"])
@pytest.mark.parametrize("cls", [Foreach, InGroup])
def test_skip_by_of_the_class_decides(cls, skip_by):
    decided = type(cls.__name__, (cls,), {"skip_by": skip_by})
    assert after_steps(decided).mode == skip_by


def test_an_unknown_way_to_skip_is_refused():
    optimizer, params = made(Foreach)
    optimizer.skip_by = "device"
    set_gradients(params, (1.0, 1.0))
    with pytest.raises(ValueError, match="'auto', 'host', 'transaction' or 'step', got 'device'"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)


def test_on_the_cpu_the_host_reads_the_flag(monkeypatch):
    backend = Eager(host_sees=True)
    monkeypatch.setattr("ampopt._step.step_rollback.backend_for", lambda _: backend)
    skip_policy = after_steps(Foreach)
    assert (skip_policy.mode, skip_policy.reason) == ("host", None)


def test_the_host_reads_the_flag_of_a_step_that_makes_state():
    optimizer, params = made(Foreach)
    have_read_flag = []
    for step in [(1.0, None)] * 3 + [(1.0, 1.0)] * 3:
        set_gradients(params, step)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        have_read_flag.append(optimizer._ampopt.skip_policy.has_read_flag)
    assert have_read_flag == [True, False, False] * 2


def test_first_steps_that_overflow_do_not_count_as_growth():
    optimizer, params = made(Foreach)
    for x in [INF] * 40 + [1.0] * 2:
        set_gradients(params, (x, x))
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert optimizer._ampopt.skip_policy.mode == "transaction"


def test_a_number_that_changes_between_steps_is_no_change_of_the_step():
    optimizer, params = made(Foreach)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for x in (1.0, 1.0, 1.0, INF):
        set_gradients(params, (x, x))
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped is (x == INF)
        scheduler.step()
        random.random()
    policy = optimizer._ampopt.skip_policy
    assert (policy.mode, policy.has_read_flag) == ("transaction", False)
    assert optimizer.param_groups[0]["lr"] == 0.125 * 0.5**4


def test_state_that_grows_at_every_step_is_skipped_by_the_host():
    class Logging(Foreach):
        def begin(self):
            self.log = {}

        def update(self, params):
            super().update(params)
            self.log[len(self.log)] = 0.5

    assert after_steps(Logging, 3).mode == "transaction"
    assert after_steps(Logging, 40).mode == "host"


# --- nothing is read back ------------------------------------------------------------------------


@pytest.fixture(params=["eager", "triton"])
def device(request, monkeypatch):
    if request.param == "triton":
        if not HAS_TRITON:
            pytest.skip("Triton cannot be imported here")
        monkeypatch.undo()
        ampopt.set_backend("triton")
    return request.param


@pytest.mark.parametrize("cls", [Foreach, Views, Data, Scattered, Nested, OneBuffer, Slow, Odd])
def test_a_transaction_reads_nothing_back(cls, device):
    optimizer, params = made(cls)
    for _ in range(3):
        set_gradients(params, (1.0, 1.0))
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    before = [seen(optimizer)]
    with assert_no_sync():
        for x in (INF, float("nan")):
            set_gradients(params, (1.0, x))
            optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert [seen(optimizer)] == before
    with assert_no_sync():
        set_gradients(params, (1.0, 1.0))
        optimizer.unscale(grads_scaled_by=2.0)
        optimizer.step_after_unscale()
    assert [seen(optimizer)] != before


def matrices(cls: Any) -> tuple[Any, list[Parameter]]:
    params = [Parameter(torch.eye(3)), Parameter(torch.ones(2, 4))]
    return cls(params), params


def give(params: list[Parameter], x: float, sparse: bool) -> None:
    for p in params:
        p.grad = torch.full_like(p, x)
        if sparse:
            indices, values = torch.tensor([[0, 0]]), torch.full((2, p.shape[1]), x)
            p.grad = torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=True)


@pytest.mark.parametrize("cls", [ampopt.Muon, ampopt.SparseAdam])
@pytest.mark.parametrize("first", [1.0, INF])
def test_optimizers_with_torchs_step_never_read_the_flag(cls, first, device):
    optimizer, params = matrices(cls)
    sparse = cls is ampopt.SparseAdam
    made_before = bits(params)
    for x in (first, INF, 1.0):
        before = bits(params)
        give(params, x, sparse)
        with assert_no_sync():
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        assert (bits(params) == before) is (x == INF)
        assert optimizer._ampopt.skip_policy.mode == "transaction"
        if bits(params) == made_before:
            assert not any(t.any() for s in optimizer.state.values() for t in s.values())
    clean, clean_params = matrices(cls)
    for x in (first, 1.0):
        if x != INF:
            give(clean_params, x / 2, sparse)
            clean.step()
    assert bits(params) == bits(clean_params)


def test_a_subclass_that_overrides_step_is_examined():
    class Counting(ampopt.Muon):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.taken = getattr(self, "taken", 0) + 1

    class Renamed(ampopt.Muon):
        pass

    for cls, read_flag in ((Counting, True), (Renamed, False)):
        optimizer, params = matrices(cls)
        give(params, INF, False)
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
        assert optimizer._ampopt.skip_policy.has_read_flag is read_flag
        assert "taken" not in vars(optimizer)


class FailsOnce(torch.optim.SGD):
    """Its first step raises."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise ZeroDivisionError
        return super().step(closure)


@pytest.mark.parametrize("ends", ["step", "zero_grad"])
def test_gradients_are_not_unscaled_again_after_a_step_that_raised(ends):
    param = Parameter(torch.ones(2))
    optimizer = ampopt.extend(FailsOnce)([param], lr=0.5)
    scale = ampopt.DynamicLossScale(init_scale=4.0)
    param.grad = torch.full((2,), 4.0)
    with pytest.raises(ZeroDivisionError):
        optimizer.unscale_and_step(grads_scaled_by=scale)
    with pytest.raises(RuntimeError, match="an unscale is pending"):
        optimizer.unscale_and_step(grads_scaled_by=scale)
    if ends == "step":
        assert optimizer.step_after_unscale().scale.item() == 4.0
    else:
        optimizer.zero_grad()
        param.grad = torch.full((2,), 4.0)
        optimizer.unscale_and_step(grads_scaled_by=scale)
    assert param.tolist() == [0.5, 0.5]


class OwnStep(ampopt.SGD):
    """Overrides the step of a rule."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


WAYS = ("joined", "split", "plain", "accumulated", "clipped", "GradScaler")


def take(optimizer: Any, param: Parameter, way: str, number: float) -> None:
    """Take a step by ``way`` with gradients of ``number``, under a scale of 4."""
    scaler = ampopt.GradScaler("cpu", init_scale=4.0)
    param.grad = torch.full_like(param, 4.0 * number)
    if way == "accumulated":
        optimizer.accumulate(grads_scaled_by=4.0)
        optimizer.step()
    elif way in ("joined", "clipped"):
        max_norm = 1e3 if way == "clipped" else None
        optimizer.unscale_and_step(grads_scaled_by=4.0, max_norm=max_norm)
    elif way == "GradScaler":
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
    else:
        optimizer.unscale(grads_scaled_by=4.0)
        _ = optimizer.step() if way == "plain" else optimizer.step_after_unscale()


@pytest.mark.parametrize("skip_by", ["host", "transaction"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.lists(st.tuples(st.sampled_from(WAYS), st.booleans()), max_size=6))
def test_an_overridden_step_uses_the_gradients_of_its_own_control_point(skip_by, dtype, history):
    param = Parameter(torch.ones(2, dtype=dtype))
    optimizer = OwnStep([param], lr=2.0**-5, master_weights=True)
    optimizer.skip_by = skip_by
    expected = 1.0
    for way, overflows in history:
        take(optimizer, param, way, INF if overflows else 1.0)
        expected -= 0.0 if overflows else 2.0**-5
        assert param.tolist() == [expected] * 2
        holders = [master for master in optimizer.master_params() if master is not param]
        assert all(master.grad is None for master in holders)


class TwoSteps(ampopt.SGD):
    """Takes two steps of a rule with the same gradients."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skip_by", ["host", "transaction", "step"])
def test_each_step_of_the_rule_in_a_step_has_the_unscaled_gradients(skip_by, dtype, way):
    param = Parameter(torch.ones(2, dtype=dtype))
    ampopt.SGD([param])  # from now on torch's hooks are around its step, too
    optimizer = TwoSteps([param], lr=0.125, master_weights=True)
    optimizer.skip_by = skip_by
    for gradient in (1.0, torch.inf):  # the second is skipped
        take(optimizer, param, way, gradient)
        assert param.tolist() == [0.75, 0.75]
        assert optimizer.pending is None


class OwnMasters(torch.optim.Optimizer):
    """Keeps masters of its own, under the names that ampopt uses for those of a rule."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "master_weights": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            master = state.setdefault("master_param", param.detach().float())
            param.copy_(master.sub_(param.grad, alpha=0.5))


def test_masters_that_a_step_keeps_itself_are_its_own():
    param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer: Any = ampopt.extend(OwnMasters)([param])
    for _ in range(3):
        param.grad = torch.full_like(param, 2.0**-9 * 8.0)
        optimizer.unscale_and_step(grads_scaled_by=8.0)
        assert next(iter(optimizer.master_params())) is param
    assert optimizer.state[param]["master_param"].tolist() == [1.0 - 3 * 2.0**-10] * 3
