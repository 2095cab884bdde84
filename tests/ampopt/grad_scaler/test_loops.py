"""A loop written for ``torch.amp.GradScaler``, with the optimizer's import swapped."""

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fixtures import either_host
from support.gpus import DEVICE, needs_gpu, no_waiting
from support.optimizers import BY_RULE, CLOSURE_FREE, OWN, Plain
from support.strategies import fewer
from support.training_loops import INF, Step, give, iterate, made, scaler_at, steps
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything, state_of
from ampopt.testing.no_sync import assert_no_sync

backend = either_host
on_each_backend = pytest.mark.usefixtures("backend")
each_optimizer = pytest.mark.parametrize("cls", CLOSURE_FREE)
each_of_all = pytest.mark.parametrize("cls", [*CLOSURE_FREE, *OWN])
both_ways = pytest.mark.parametrize("unscale_first", [False, True])


# --- the same results ----------------------------------------------------------------------------


@on_each_backend
@each_optimizer
@fewer(0.1)
@given(steps(), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_results_are_those_of_torchs_loop(cls, steps, unscale_first, clip):
    runs = []
    for optimizer_class in (cls, getattr(torch.optim, cls.__name__)):
        optimizer, params = made(optimizer_class)
        scaler = scaler_at(2.0**10, growth_interval=2)
        for step in steps:
            iterate(scaler, optimizer, step, unscale_first, clip)
        runs.append((params, scaler.state_dict(), optimizer.state_dict()["state"]))
    (ours, our_scale, our_state), (theirs, their_scale, their_state) = runs
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert our_scale == their_scale
    for key, state in their_state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(our_state[key][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", CLOSURE_FREE)
def test_several_optimizers_with_one_scaler_skip_each_for_itself(first):
    runs = []
    for of in (ampopt, torch.optim):
        pair = [made(getattr(of, name))[0] for name in (first.__name__, "AdamW")]
        scaler = scaler_at(2.0**4, growth_interval=2)
        for numbers in ((1.0, 2.0), (INF, 2.0), (1.0, INF), (3.0, 1.0)):
            for optimizer, number in zip(pair, numbers, strict=True):
                give(optimizer, number, scaler.get_scale())
                scaler.step(optimizer)
            scaler.update()
        params = [p for o in pair for group in o.param_groups for p in group["params"]]
        runs.append((params, scaler.state_dict()))
    (ours, our_scale), (theirs, their_scale) = runs
    assert our_scale == their_scale
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_whole_loop_with_autocast_and_clipping():
    results: list[Any] = []
    for of in (ampopt, torch.optim):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = of.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        x, y = torch.randn(16, 4), torch.randint(2, (16,))
        loss = torch.zeros(())
        for _ in range(12):
            with torch.autocast("cpu", torch.float16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append((loss.detach(), scaler.get_scale()))
    assert results[0][1] == results[1][1] < 2.0**20
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)


@on_each_backend
@each_of_all
def test_a_skipped_first_step_leaves_the_state_as_if_fresh(cls):
    skipping, _ = made(cls)
    clean, _ = made(cls)
    scaler = scaler_at(2.0**4)
    torch.manual_seed(0)
    iterate(scaler, skipping, INF, False)
    iterate(scaler, skipping, 1.0, False)
    torch.manual_seed(0)
    iterate(scaler_at(2.0**3), clean, 1.0, False)
    assert everything(skipping)["parameters"] == everything(clean)["parameters"]
    assert state_of(skipping) == state_of(clean)


# --- an author's own part in it ------------------------------------------------------------------


def test_a_step_that_reads_the_flag_itself_is_left_alone():
    class Own(Plain):
        _step_supports_amp_scaling = True
        seen: list[Any] = []

        def step(self, closure: Any = None) -> Any:
            self.seen.append((vars(self).get("grad_scale"), vars(self).get("found_inf")))

    class Derived(Own):
        pass

    for cls in (Own, Derived):
        cls.seen.clear()
        optimizer, _ = made(cls)
        give(optimizer, INF)
        scaler_at(4.0).step(optimizer)
        ((scale, found_inf),) = cls.seen
        assert (float(scale), float(found_inf)) == (4.0, 1.0)


def test_the_result_of_a_hand_written_step_is_returned():
    class Returns(Plain):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return "taken"

    optimizer, _ = made(Returns)
    scaler = scaler_at(4.0)
    give(optimizer, 1.0)
    assert scaler.step(optimizer) == "taken"
    scaler.update()
    give(optimizer, INF)
    assert scaler.step(optimizer) is None
    give(optimizer, 1.0)
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).loss == "taken"


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.Muon, Plain])
def test_a_step_that_raises_leaves_no_flag_to_the_next(cls, monkeypatch):
    optimizer, _ = made(cls)
    give(optimizer, INF)
    before = everything(optimizer)["parameters"]

    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError("check")

    with monkeypatch.context() as patch:
        patch.setattr("ampopt._step.gradients.params_with_grads", refuse)
        with pytest.raises(KeyError, match="check"):
            scaler_at(4.0).step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    give(optimizer, 1.0)
    optimizer.step()
    assert everything(optimizer)["parameters"] != before


# --- nothing is read back -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager on a device"], indirect=True)
@each_optimizer
@both_ways
def test_no_loop_reads_a_tensor(cls, unscale_first, backend):
    optimizer, params = made(cls)
    scaler = scaler_at(4.0)
    steps = [Step((number,) * 10) for number in (INF, 2.0, INF, 1.0)]
    before = bits(params)
    for step in steps:
        give(optimizer, step)
        with assert_no_sync():
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert bits(params) != before
    assert all(p.isfinite().all() for p in params)
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("cls", BY_RULE)
@pytest.mark.parametrize(
    "scaler_class, unscale_first", [(torch.amp.GradScaler, True), (ampopt.GradScaler, False)]
)
def test_a_loop_runs_on_meta_tensors(cls, scaler_class, unscale_first):
    """An operation that reads a meta tensor, or mixes it with others, raises an error.

    Fake CUDA tensors would not do: a torch that was built without CUDA cannot copy them.
    """
    params = [Parameter(torch.ones(3, 2, device="meta")) for _ in range(2)]
    optimizer = cls(params)
    scaler = scaler_class("cpu", init_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(sum((p * p).sum() for p in params)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    with pytest.raises(RuntimeError, match="meta"):
        scaler.get_scale()


@needs_gpu
@pytest.mark.parametrize("cls", [cls for cls in CLOSURE_FREE if cls is not ampopt.SparseAdam])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ampopt.GradScaler])
@both_ways
def test_no_loop_synchronizes_on_a_gpu(cls, scaler_class, unscale_first):
    """All but SparseAdam, which synchronizes in ``coalesce()`` on a GPU."""
    params = [Parameter(torch.ones(64, 32, device=DEVICE)) for _ in range(2)]
    optimizer, scaler = cls(params), scaler_class(DEVICE, init_scale=2.0**10)
    infinite = torch.full((), INF, device=DEVICE)
    for step in range(6):
        # In the first two, kernels are compiled and memory is taken.
        with no_waiting() if step >= 2 else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = torch.stack([(p * p).sum() for p in params]).sum()
            scaler.scale(loss * infinite if step in (0, 3) else loss).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert all(p.isfinite().all() for p in params)
    assert scaler.get_scale() == 2.0**8
