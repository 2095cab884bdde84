"""``ampopt.GradScaler`` runs a closure again with a smaller scale while it overflows."""

from typing import Any

import pytest
import torch
from support.optimizers import CLOSURE_FREE, OWN, HostCounted, Plain
from support.training_loops import INF, give, made, scaler_at

import ampopt
from ampopt import GradScaler, NonFiniteGradientError
from ampopt.testing.bits import bits


def closure_of(
    scaler: GradScaler, optimizer: Any, seen: list[float], *, takes_scale: bool = False
) -> Any:
    """A closure that appends its scale to ``seen``, and overflows under scales above 4."""

    def scaled_by(scale: Any) -> Any:
        optimizer.zero_grad()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        loss = torch.stack([(p - 3).square().sum() for p in params]).sum()
        scaled = scaler.scale(loss) if scale is None else ampopt.scale_outputs(loss, scale)
        seen.append(float(scaled.detach() / loss.detach()))
        (scaled * (INF if seen[-1] > 4 else 1.0)).backward()
        return loss.detach()

    return scaled_by if takes_scale else lambda: scaled_by(None)


CLOSURES = [*(cls for cls in CLOSURE_FREE if cls is not ampopt.SparseAdam), ampopt.LBFGS, *OWN]
"""All but SparseAdam: the closure's gradients are dense."""


@pytest.mark.parametrize("cls", CLOSURES)
@pytest.mark.parametrize("how", ["by position", "by name", "taking the scale"])
def test_an_overflowed_closure_is_run_again_with_a_smaller_scale(cls, how):
    results = []
    for init in (16.0, 4.0):
        torch.manual_seed(0)
        optimizer, params = made(cls)
        scaler = GradScaler("cpu", init_scale=init)
        seen: list[float] = []
        closure = closure_of(scaler, optimizer, seen, takes_scale=how == "taking the scale")
        if how == "by name":
            loss = scaler.step(optimizer, closure=closure)
        else:
            loss = scaler.step(optimizer, closure)
        assert not scaler.skipped
        scaler.update()
        tried = [16.0, 8.0, 4.0] if init == 16.0 else [4.0]
        assert seen[: len(tried)] == tried
        assert set(seen[len(tried) :]) <= {4.0}  # what LBFGS asks for after the first
        results.append((bits(loss), bits(params), scaler.get_scale()))
    assert results[0] == results[1]
    assert results[0][2] == 4.0


def test_none_is_no_closure():
    optimizer, (param, _) = made(ampopt.SGD, lr=1.0)
    before = param.detach().clone()
    give(optimizer, 4.0)
    scaler_at(4.0, GradScaler).step(optimizer, None, max_norm=1e-9)
    torch.testing.assert_close(param, before)


def test_another_argument_is_no_closure():
    class Counted(torch.optim.SGD):
        def step(self, epoch: Any = None) -> Any:  # pyright: ignore
            return epoch

    optimizer, _ = made(Counted)
    give(optimizer, 1.0)
    assert scaler_at(4.0, GradScaler).step(optimizer, 3) == 3


def test_an_argument_after_the_closure_reaches_the_step():
    class Counted(Plain):
        def step(self, closure: Any = None, epoch: int = 0) -> Any:  # pyright: ignore
            super().step()
            return epoch

    optimizer, params = made(Counted)
    before = bits(params)
    give(optimizer, 1.0)
    assert scaler_at(4.0, GradScaler).step(optimizer, None, 3) == 3
    assert bits(params) != before


def test_evaluations_count_as_steps_towards_growth():
    optimizer, _ = made(ampopt.SGD)
    scaler = GradScaler("cpu", init_scale=1.0, growth_interval=2)
    seen: list[float] = []
    for _ in range(4):
        scaler.step(optimizer, closure_of(scaler, optimizer, seen))
        scaler.update()
    assert seen == [1.0, 1.0, 2.0, 2.0]
    assert scaler.scale(torch.ones(())) == scaler.get_scale() == 4.0  # outside a closure too


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.LBFGS, Plain, HostCounted])
def test_a_loss_that_no_scale_repairs_is_an_error_and_changes_nothing(cls):
    optimizer, params = made(cls)
    scaler = GradScaler("cpu", init_scale=16.0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.stack([(p * float("nan")).sum() for p in params]).sum()
        scaler.scale(loss).backward()
        return loss.detach()

    before = bits(params)
    with pytest.raises(NonFiniteGradientError, match="loss is nan"):
        scaler.step(optimizer, closure)
    assert bits(params) == before
    assert not any(optimizer.state.values())
    scaler.update()
    assert scaler.get_scale() == 16.0
    scaler.step(optimizer, closure_of(scaler, optimizer, []))  # and the scaler goes on
    assert bits(params) != before


def test_options_of_replay_reach_the_optimizer():
    optimizer, params = made(ampopt.SGD)
    scaler = GradScaler("cpu", init_scale=16.0)
    with pytest.raises(NonFiniteGradientError, match="1 replays"):
        scaler.step(optimizer, closure_of(scaler, optimizer, []), max_replays=1)
    drawn: list[float] = []

    def closure() -> Any:
        drawn.append(float(torch.rand(())))
        return closure_of(scaler, optimizer, [])()

    scaler.step(optimizer, closure, preserve_rng=True, max_norm=1.0)
    assert len(drawn) == 3 and len(set(drawn)) == 1
    assert optimizer.grad_norm > 1
    moved = torch.cat(
        [(p.detach() - q).flatten() for p, q in zip(params, made(Plain)[1], strict=True)]
    )
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3))


def test_closures_that_cannot_be_run_are_refused():
    optimizer, params = made(ampopt.AdamW)
    torchs, _ = made(torch.optim.AdamW)
    scaler = scaler_at(4.0, GradScaler)
    before = bits(params)
    ran: list[int] = []
    for closure in (lambda a, b: ran.append(1), lambda *, scale: ran.append(1)):
        with pytest.raises(TypeError, match="take no argument"):
            scaler.step(optimizer, closure)
    with pytest.raises(RuntimeError, match="AdamW cannot run a closure again.*in ampopt"):
        scaler.step(torchs, lambda: ran.append(1))
    with pytest.raises(TypeError, match="max_norm, max_replays and preserve_rng"):
        scaler.step(optimizer, lambda: ran.append(1), other=1)
    give(optimizer, 1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"leave unscale_\(\) out"):
        scaler.step(optimizer, lambda: ran.append(1))
    scaler.discard(optimizer)
    assert not ran

    def forgets() -> Any:
        loss = params[0].sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="has not scaled its loss"):
        scaler.step(optimizer, forgets)
    assert bits(params) == before


def test_a_disabled_scaler_runs_closures_once():
    optimizer, _ = made(ampopt.SGD)
    scaler = GradScaler("cpu", enabled=False)
    for takes_scale in (False, True):
        seen: list[float] = []
        closure = closure_of(scaler, optimizer, seen, takes_scale=takes_scale)
        assert scaler.step(optimizer, closure) > 0
        assert seen == [1.0]
    with pytest.raises(RuntimeError, match="disabled"):
        scaler.get_growth_factor()
