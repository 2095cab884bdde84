"""A step that is rolled back on the device changes no bit; changes that cannot be are detected."""

import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.host_state_optimizers import HOST_TOO, InStorage, Iterating, Sparse, seen
from support.strategies import fewer
from support.tensor_only_optimizers import TENSORS_ONLY, Foreach, Fussy, made, set_gradients
from support.training_loops import INF

import ampopt
from ampopt._step.storage_copies import StorageCopies
from ampopt.testing.bits import bits

pytestmark = pytest.mark.usefixtures("as_on_a_device")


# --- whatever the step does, a skipped one has not been -------------------------------------------


def number() -> st.SearchStrategy[float]:
    return st.integers(-64, 64).map(lambda n: n / 16)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[float | None, ...]]:
    """For each step, a number for each of two parameters, of which their gradients are made."""
    number_or_bad = st.one_of(number(), number(), number(), st.sampled_from([INF, float("nan")]))
    step = st.tuples(number_or_bad, st.none() | number_or_bad)
    return draw(st.lists(step, min_size=3, max_size=6))


def overflows(step: tuple[float | None, ...]) -> bool:
    return any(x is not None and not np.isfinite(x) for x in step)


def attempt(optimizer: ampopt.Optimizer, split: bool) -> bool:
    if split:
        optimizer.unscale(grads_scaled_by=1.0)
        return optimizer.step_after_unscale().skipped
    return optimizer.unscale_and_step(grads_scaled_by=1.0).skipped


def halve_rate(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def cycle_betas(optimizer: Any) -> None:
    """Replace a tuple of numbers, as ``OneCycleLR`` does."""
    optimizer.param_groups[0]["betas"] = (optimizer.param_groups[0]["lr"], 0.5)


def note(optimizer: Any) -> None:
    optimizer.noted = [1.0, {"a": [1.0]}]


def draw_numbers(optimizer: Any) -> None:
    _ = random.random(), np.random.rand(), torch.rand(1)


def move_memory(optimizer: Any) -> None:
    """Give a parameter other memory, as offloading does."""
    param = optimizer.param_groups[0]["params"][0]
    param.data = param.data.clone()


def replace_states(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state.update({key: x.clone() for key, x in state.items() if type(x) is torch.Tensor})


BETWEEN = (halve_rate, cycle_betas, note, draw_numbers, move_memory, replace_states)
"""What programs do between steps, in which it is no change of the step."""


# Authors of the others must not ask for it.
ASKED = [cls for cls in HOST_TOO if cls not in (Sparse, Iterating, InStorage)]


@pytest.mark.parametrize(
    "cls, skip_by",
    [
        *((cls, "transaction") for cls in (*TENSORS_ONLY, *ASKED, Fussy)),
        *((cls, "auto") for cls in (*HOST_TOO, Fussy)),
    ],
    ids=lambda it: getattr(it, "__name__", it),
)
@fewer(0.2)
@given(
    history=histories(),
    split=st.booleans(),
    between=st.lists(st.none() | st.sampled_from(BETWEEN), min_size=6, max_size=6),
)
def test_a_skipped_step_changes_nothing_and_a_finite_one_all_that_it_would(
    cls, skip_by, history, split, between
):
    optimizer, params = made(cls)
    optimizer.skip_by = skip_by
    for step, change in zip(history, between, strict=False):
        if change is not None:
            change(optimizer)
        set_gradients(params, step)
        before = seen(optimizer) if overflows(step) else None
        assert attempt(optimizer, split) is overflows(step)
        if before is not None:
            assert seen(optimizer) == before
    after = seen(optimizer)

    clean, params = made(cls)
    for step, change in zip(history, between, strict=False):
        if change is not None:
            change(clean)
        set_gradients(params, step)
        if not overflows(step):
            clean.step()
    assert after == seen(clean)


# --- exceptions and hooks ------------------------------------------------------------------------


def test_a_step_that_raises_on_finite_gradients_raises():
    class Raises(Foreach):
        def update(self, params):
            super().update(params)
            if self.param_groups[0]["lr"] == 0:
                raise KeyError("no step")

    optimizer, params = made(Raises)
    for lr in (0.5, 0.5, 0.5, 0):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(params, (1.0, 1.0))
        if lr:
            optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert optimizer._ampopt.skip_policy.mode == "transaction"
    with pytest.raises(KeyError, match="no step"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    set_gradients(params, (INF, 1.0))
    before = seen(optimizer)
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    assert seen(optimizer) == before


@pytest.mark.parametrize("skip_by", ["host", "transaction", "auto"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_changes_by_step_hooks_are_not_rolled_back(skip_by, scheduled):
    optimizer, params = made(Foreach)
    optimizer.skip_by = skip_by
    if scheduled:  # torch's schedulers put a wrapper around step
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = torch.zeros(2)
    optimizer.calls = []

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        calls[0] += 1
        opt.calls.append("before")
        opt.param_groups[0]["before"] = opt.param_groups[0].get("before", 0) + 1

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        calls[1] += 1
        opt.calls.append("after")
        opt.state[params[0]].setdefault("hook", torch.zeros(())).add_(1)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    history = [1.0, 1.0, 1.0, INF, 1.0, INF]
    for n, x in enumerate(history, 1):
        set_gradients(params, (x, x))
        before_step = bits(params)
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped is (x == INF)
        assert (bits(params) == before_step) is (x == INF)
        assert calls.tolist() == [n, n]
    assert optimizer.calls == ["before", "after"] * len(history)
    assert optimizer.param_groups[0]["before"] == len(history)
    assert float(optimizer.state[params[0]]["hook"]) == len(history)
    assert optimizer._ampopt.skip_policy.mode == ("host" if skip_by == "host" else "transaction")


@pytest.mark.parametrize("bad", [False, True])
def test_an_error_of_a_step_hook_is_raised(bad):
    optimizer, params = made(Foreach)
    optimizer.skip_by = "transaction"
    set_gradients(params, (INF if bad else 1.0, 1.0))

    def refuse(*_: Any) -> None:
        raise KeyError("hook")

    before = seen(optimizer)
    hook = optimizer.register_step_pre_hook(refuse)
    with pytest.raises(KeyError, match="hook"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert seen(optimizer) == before
    hook.remove()
    optimizer.register_step_post_hook(refuse)
    with pytest.raises(KeyError, match="hook"):
        optimizer.step_after_unscale()
    assert (seen(optimizer) == before) is bad


def test_a_step_set_on_the_instance_is_run_and_rolled_back():
    optimizer, params = made(Foreach)
    original = optimizer.step

    def doubled(self: Any, closure: Any = None) -> None:
        original()
        original()

    optimizer.step = types.MethodType(doubled, optimizer)
    for x in (1.0, 1.0, 1.0, INF):
        set_gradients(params, (x, x))
        before = bits(params)
        optimizer.unscale(grads_scaled_by=1.0)
        assert optimizer.step_after_unscale().skipped is (x == INF)
        assert (bits(params) == before) is (x == INF)
    assert optimizer._ampopt.skip_policy.mode == "transaction"


@pytest.mark.parametrize("skip_by", ["auto", "transaction"])
@pytest.mark.parametrize("lacks", ["cat", "_foreach_lerp_"])
def test_where_a_copy_of_all_tensors_does_not_fit_the_host_reads_the_flag(
    lacks, skip_by, monkeypatch
):
    class TwoWrites(Foreach):
        def update(self, params):
            super().update(params)
            move: Any = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
            move(params, [p.grad for p in params], 0.5)

    def step(optimizer: Any, params: Any, x: float) -> None:
        set_gradients(params, (x, x))
        optimizer.unscale_and_step(grads_scaled_by=1.0)

    def refuse(*arguments: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("CUDA out of memory")

    optimizer, params = made(TwoWrites)
    optimizer.skip_by = skip_by
    clean, clean_params = made(TwoWrites)
    for o, p in ((optimizer, params), (clean, clean_params)):
        for _ in range(2):
            step(o, p, 1.0)
    before = seen(optimizer)
    monkeypatch.setattr(torch, lacks, refuse)
    if skip_by == "transaction":
        with pytest.raises(torch.OutOfMemoryError):
            step(optimizer, params, 2.0)
        assert seen(optimizer) == before
        return
    step(optimizer, params, 2.0)
    step(optimizer, params, INF)
    step(clean, clean_params, 2.0)
    assert seen(optimizer) == seen(clean)
    assert optimizer._ampopt.skip_policy.mode == "host"
    assert "memory" in optimizer._ampopt.skip_policy.reason


@pytest.mark.parametrize("skip_by", ["auto", "transaction"])
def test_where_copies_are_large_the_host_reads_the_flag_unless_a_graph_captures_the_step(
    skip_by, monkeypatch
):
    def step(x: float) -> bool:
        """Whether the host has read the flag."""
        set_gradients(params, (x, x))
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        return optimizer._ampopt.skip_policy.has_read_flag

    optimizer, params = made(Foreach)
    optimizer.skip_by = skip_by
    step(1.0)
    step(1.0)
    assert not step(1.0)
    monkeypatch.setattr(optimizer._ampopt.skip_policy, "most_copied", 8)
    before = seen(optimizer)
    for captured in (False, True, False):
        for module in ("step_rollback", "storage_copies"):
            monkeypatch.setattr(f"ampopt._step.{module}.captures", lambda _, now=captured: now)
        step(INF)
        assert seen(optimizer) == before
        assert step(1.0) == (skip_by == "auto" and not captured)
        assert seen(optimizer) != before
        before = seen(optimizer)
    reason = optimizer._ampopt.skip_policy.reason
    assert reason is None if skip_by == "transaction" else "MiB" in reason


def test_only_the_step_of_muon_which_takes_long_copies_any_size():
    class Other(ampopt.Muon):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for cls, is_limited in ((ampopt.Muon, False), (Other, True), (Foreach, True)):
        optimizer = cls([torch.ones(2, 2, requires_grad=True)], lr=0.5)
        assert (optimizer._ampopt.skip_policy.most_copied < float("inf")) == is_limited


def test_a_step_is_not_taken_twice_if_there_is_no_memory_after_it(monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    optimizer, params = made(Foreach)
    clean, clean_params = made(Foreach)
    set_gradients(params, (1.0, 1.0))
    optimizer.unscale_and_step(grads_scaled_by=1.0)  # the first step reads the flag
    monkeypatch.setattr(StorageCopies, "restore_where", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    for _ in range(2):
        set_gradients(clean_params, (1.0, 1.0))
        clean.step()
    assert bits(params) == bits(clean_params)


@pytest.mark.parametrize("flag", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("skip_by", ["host", "transaction", "auto"])
def test_a_sum_of_flags_skips(skip_by, flag):
    """``torch.amp.GradScaler`` adds up the flags of several devices."""
    optimizer, params = made(Foreach)
    optimizer.skip_by = skip_by
    for found_inf in (0.0, flag):
        set_gradients(params, (1.0, 1.0))
        before = seen(optimizer)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
        optimizer.step()
        assert (seen(optimizer) == before) is (found_inf > 0)
