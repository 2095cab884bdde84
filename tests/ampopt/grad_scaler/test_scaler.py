"""``ampopt.GradScaler`` in a loop written for torch's scaler, and its further methods."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import CLOSURE_FREE, OWN, Plain
from support.strategies import fewer
from support.training_loops import INF, after, give, made, scaler_at, steps

import ampopt
from ampopt import DynamicLossScale, GradScaler, StaticLossScale
from ampopt.testing.bits import bits, everything

TORCHS = [getattr(torch.optim, cls.__name__) for cls in CLOSURE_FREE]
each_kind = pytest.mark.parametrize(
    "cls", [ampopt.AdamW, ampopt.Muon, *OWN, torch.optim.AdamW, torch.optim.Adagrad]
)


def fused_adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **options)


@pytest.mark.parametrize("cls", [*TORCHS, *CLOSURE_FREE, Plain, fused_adamw])
@fewer(0.2)
@given(steps(), st.booleans(), st.integers(1, 3), st.sampled_from([0.5, 0.25]))
def test_the_same_loop_with_the_same_results(cls, steps, unscale_first, interval, backoff):
    runs = []
    for scaler_class in (torch.amp.GradScaler, GradScaler):
        scaler = scaler_class(
            "cpu", init_scale=2.0**10, growth_interval=interval, backoff_factor=backoff
        )
        optimizer, params = made(cls)
        states = after(scaler, optimizer, steps, unscale_first)
        runs.append((bits(params), states, everything(optimizer)))
    assert runs[0] == runs[1]


def test_one_of_several_optimizers_overflows():
    """Each optimizer skips by its own flag, and the scale is lowered once if any flag is set."""
    for flags in ((False, True), (True, False), (True, True)):
        pair = [made(cls)[0] for cls in (ampopt.AdamW, Plain)]
        scaler = scaler_at(4.0, GradScaler)
        before = [everything(o)["parameters"] for o in pair]
        for optimizer, bad in zip(pair, flags, strict=True):
            give(optimizer, INF if bad else 1.0)
            scaler.step(optimizer)
        assert scaler.skipped
        assert [scaler.was_skipped(o) for o in pair] == list(flags)
        scaler.update()
        assert scaler.get_scale() == 2.0
        stayed = [everything(o)["parameters"] == b for o, b in zip(pair, before, strict=True)]
        assert stayed == list(flags)


@each_kind
def test_calls_out_of_order_are_refused_with_the_one_to_make(cls):
    optimizer, _ = made(cls)
    scaler = GradScaler("cpu", init_scale=4.0)
    give(optimizer, 1.0)
    before = everything(optimizer)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match=r"scaler\.scale\(loss\)\.backward\(\) first"):
            call(optimizer)
    assert everything(optimizer) == before
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"Call step\(optimizer\) and update\(\)"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    after = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"Call update\(\)"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step\(\)\. Call update\(\)"):
        scaler.unscale_(optimizer)
    assert everything(optimizer) == after


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
def test_max_norm_is_refused_after_unscale(cls):
    optimizer, params = made(cls)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, 1.0, 4.0)
    scaler.unscale_(optimizer)
    before = bits(params)
    with pytest.raises(RuntimeError, match=r"max_norm=0\.5.*leave unscale_\(\) out, or"):
        scaler.step(optimizer, max_norm=0.5)
    assert bits(params) == before
    scaler.step(optimizer, max_norm=None)
    assert bits(params) != before


# --- what happened -------------------------------------------------------------------------------


class Returning(Plain):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return "taken"


class TorchReturning(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return "taken"


@pytest.mark.parametrize("cls", [Returning, TorchReturning])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_step_returns_what_the_optimizer_returned(cls, unscale_first):
    optimizer, _ = made(cls)
    for number, returned in ((1.0, "taken"), (INF, None)):
        scaler = scaler_at(4.0, GradScaler)
        give(optimizer, number)
        if unscale_first:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) == returned
        assert scaler.skipped is (returned is None)


def test_whether_a_step_was_skipped_is_known_until_the_next():
    scaler = scaler_at(4.0, GradScaler)
    optimizer, _ = made(ampopt.AdamW)
    other, _ = made(ampopt.AdamW)
    assert not scaler.skipped
    with pytest.raises(RuntimeError, match="was not stepped"):
        scaler.was_skipped(optimizer)
    for number in (INF, 1.0):
        give(optimizer, number)
        scaler.step(optimizer)
        for _ in range(3):  # also after an iteration without a step
            assert scaler.skipped is scaler.was_skipped(optimizer) is (number == INF)
            with pytest.raises(RuntimeError, match="was not stepped"):
                scaler.was_skipped(other)
            scaler.update()


@each_kind
@pytest.mark.parametrize("unscale_first", [False, True])
def test_an_optimizer_without_gradients_is_not_stepped(cls, unscale_first):
    optimizer, _ = made(cls)
    other, _ = made(ampopt.AdamW)
    scaler = scaler_at(4.0, GradScaler, growth_interval=2)
    before = everything(optimizer)
    for _ in range(3):  # which do not count
        if unscale_first:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) is None
        assert not scaler.skipped
        scaler.update()
    assert everything(optimizer) == before
    give(other, 1.0)
    for _ in range(2):
        scaler.step(optimizer)
        scaler.step(other)
        scaler.update()
    assert scaler.get_scale() == 8.0


# --- dropping an unscale -------------------------------------------------------------------------


@each_kind
def test_discard_drops_an_unscale(cls):
    """A discarded overflow has no effect on the scale."""
    torch.manual_seed(0)
    optimizer, params = made(cls)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, INF)
    scaler.unscale_(optimizer)
    scaler.discard(optimizer)
    assert all(p.grad is None or not p.grad.any() for p in params)
    give(optimizer, 1.0, 4.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert not scaler.skipped
    scaler.update()
    assert scaler.get_scale() == 4.0
    torch.manual_seed(0)
    clean, clean_params = made(cls)
    clean_scaler = scaler_at(4.0, GradScaler)
    give(clean, 1.0, 4.0)
    clean_scaler.unscale_(clean)
    clean_scaler.step(clean)
    assert bits(params) == bits(clean_params)


def test_discard_without_arguments_drops_all_and_without_an_unscale_does_nothing():
    scaler = scaler_at(4.0, GradScaler)
    pair = [made(cls)[0] for cls in (ampopt.AdamW, torch.optim.AdamW)]
    for optimizer in pair:
        give(optimizer, 1.0)
    before = [everything(o) for o in pair]
    scaler.discard()
    scaler.discard(pair[0])
    assert [everything(o) for o in pair] == before
    for optimizer in pair:
        scaler.unscale_(optimizer)
    scaler.discard()
    for optimizer in pair:
        give(optimizer, 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.discard()  # too late: it was stepped
    assert not scaler.skipped
    with pytest.raises(RuntimeError, match=r"Call update\(\)"):
        scaler.step(pair[1])


def test_discard_of_one_optimizer_keeps_what_was_unscaled_for_another():
    scaler = scaler_at(4.0, GradScaler)
    one, other = made(ampopt.AdamW)[0], made(ampopt.AdamW)[0]
    for optimizer in (one, other):
        give(optimizer, INF)
        scaler.unscale_(optimizer)
    scaler.discard(one)
    give(one, 1.0)
    assert all(p.grad.any() for group in other.param_groups for p in group["params"])
    for optimizer in (one, other):
        scaler.step(optimizer)
    assert (scaler.was_skipped(one), scaler.was_skipped(other)) == (False, True)


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.Muon, *OWN])
def test_zero_grad_drops_an_unscale_too(cls):
    optimizer, _ = made(cls)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, INF)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    give(optimizer, 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert not scaler.skipped


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.Muon, *OWN])
@pytest.mark.parametrize("grad", [1.0, INF])
@pytest.mark.parametrize("scale", [StaticLossScale(4.0), DynamicLossScale(init_scale=4.0)])
def test_a_plain_step_after_an_unscale_is_the_step_of_the_iteration(cls, grad, scale):
    optimizer, params = made(cls)
    scaler = GradScaler("cpu", loss_scale=scale)
    scaler.scale(torch.zeros(()))
    give(optimizer, grad)
    scaler.unscale_(optimizer)
    optimizer.step()
    stepped = bits(params)
    for call in (scaler.step, scaler.unscale_):  # either would unscale the gradients once more
        with pytest.raises(RuntimeError, match=r"step\(\)"):
            call(optimizer)
    assert bits(params) == stepped
    assert scaler.was_skipped(optimizer) == (grad == INF)
    scaler.update()
    halves = grad == INF and isinstance(scale, DynamicLossScale)
    assert scaler.get_scale() == (2.0 if halves else 4.0)


def test_update_drops_an_unscale_without_a_step_but_counts_its_overflow():
    optimizer, _ = made(ampopt.AdamW)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, INF)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    give(optimizer, 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def test_update_keeps_an_unscale_that_is_not_of_the_scaler():
    optimizer, _ = made(ampopt.AdamW)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, 1.0)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    give(optimizer, 1.0)
    optimizer.unscale(grads_scaled_by=4.0)
    scaler.update()
    assert optimizer.pending is not None


@pytest.mark.parametrize("options", [{}, {"master_weights": True}])
@pytest.mark.parametrize("accumulates", [False, True])
def test_update_drops_an_unscale_from_masters_and_sums_too(options, accumulates):
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16 if options else None))
    optimizer = ampopt.SGD([weight], lr=1.0, **options)
    scaler = scaler_at(4.0, GradScaler)
    if accumulates:
        scaler.scale(weight).backward()
        optimizer.accumulate(scaler.loss_scale)
    scaler.scale(weight).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    assert optimizer.pending is None
    weight.grad = None
    assert weight.grad_dtype == weight.dtype
    scaler.scale(3 * weight).backward()
    scaler.step(optimizer)
    assert weight.item() == -2.0
    assert weight.grad is not None
    assert weight.grad.item() == 3.0


@each_kind
def test_loading_drops_an_unscale_without_a_step(cls):
    """The state is of another moment than the gradients."""
    optimizer, params = made(cls)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, INF)
    scaler.unscale_(optimizer)
    scaler.load_state_dict(scaler_at(8.0, GradScaler).state_dict())
    scaler.step(optimizer)  # with gradients of zero, or without
    scaler.update()
    assert not scaler.skipped
    give(optimizer, 1.0, 8.0)
    scaler.step(optimizer)
    assert not scaler.skipped
    assert all((p.grad == 1.0).all() for p in params)
    scaler.update()
    assert scaler.get_scale() == 8.0


# --- disabled ------------------------------------------------------------------------------------


@each_kind
def test_a_disabled_scaler_only_steps(cls):
    results = []
    for scaler in (None, GradScaler("cpu", enabled=False)):
        torch.manual_seed(0)
        optimizer, params = made(cls)
        give(optimizer, 1.0)
        if scaler is None:
            optimizer.step()
        else:
            loss = torch.ones(())
            assert scaler.scale(loss) is loss
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.loss_scale is None and not scaler.skipped
            assert not scaler.was_skipped(optimizer)
        results.append(bits(params))
    assert results[0] == results[1]


def test_a_disabled_scaler_clips():
    optimizer, params = made(ampopt.SGD, lr=1.0)
    before = [p.detach().clone() for p in params]
    give(optimizer, 4.0)
    GradScaler("cpu", enabled=False).step(optimizer, max_norm=1.0)
    moved = torch.cat([(b - p).flatten() for b, p in zip(before, params, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(1.0))


def test_a_disabled_scaler_steps_with_what_the_user_has_unscaled():
    optimizer, (param, _) = made(ampopt.SGD, lr=1.0)
    give(optimizer, 1.0, 4.0)
    before = param.detach().clone()
    optimizer.unscale(4.0)
    GradScaler("cpu", enabled=False).step(optimizer)
    assert torch.equal(before - param, torch.ones_like(param))


def test_a_disabled_scaler_passes_a_closure_on():
    optimizer, _ = made(torch.optim.SGD)
    scaler = GradScaler("cpu", enabled=False)
    assert scaler.step(optimizer, lambda: 2.0) == scaler.step(optimizer, closure=lambda: 2.0) == 2.0


def test_a_disabled_scaler_ignores_its_schedule_as_torchs():
    torch.amp.GradScaler("cpu", growth_factor=0.0, enabled=False)
    GradScaler("cpu", growth_factor=0.0, enabled=False)
    GradScaler("cpu", 2.0, loss_scale=ampopt.StaticLossScale(4.0), enabled=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_for_cuda_without_cuda_it_is_disabled_with_a_warning():
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling"):
        scaler = GradScaler()
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), None])
def test_an_object_that_is_not_an_optimizer_is_refused(call, given):
    scaler = scaler_at(2.0, GradScaler)
    kind = type(given).__name__
    with pytest.raises(TypeError, match=rf"{call}\(\) takes an optimizer, .* got {kind}"):
        getattr(scaler, call)(given)


@pytest.mark.parametrize("dropped_by", [None, "zero_grad", "update"])
def test_a_hand_written_step_that_raised_is_not_unscaled_twice(dropped_by):
    class Raising(torch.optim.SGD):
        raises = True

        def step(self, closure: Any = None) -> Any:
            if self.raises:
                raise ZeroDivisionError
            return super().step(closure)

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = ampopt.extend(Raising)([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    optimizer.raises = False
    if dropped_by is not None:
        optimizer.zero_grad(set_to_none=False) if dropped_by == "zero_grad" else scaler.update()
        weight.grad.fill_(4.0)  # pyright: ignore[reportOptionalMemberAccess]
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0
    assert not scaler.was_skipped(optimizer)
