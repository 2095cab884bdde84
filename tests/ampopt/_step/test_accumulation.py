"""``accumulate``: the sums, the steps that use them, and the calls that are refused in between."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cuda_graphs import FakeGraphs
from support.optimizers import OWN, Plain
from support.strategies import fewer
from support.training_loops import INF, scaler_at
from torch.nn import Parameter

import ampopt
from ampopt import DynamicLossScale, StaticLossScale, scale_outputs
from ampopt._step import accumulation
from ampopt.testing.bits import bits, everything
from ampopt_kernels.language import HAS_TRITON

every_backend = pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
HALVES = (torch.float16, torch.bfloat16)


def params_of(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in (5, 3)]


def give(params: Any, *numbers: float, scale: float = 1.0) -> None:
    """Run a backward pass: the gradient of each parameter is its number times ``scale``."""
    loss = sum((p * (n * scale)).sum() for p, n in zip(params, numbers, strict=True))
    loss.backward()  # type: ignore[union-attr]


def after(cls: Callable[..., Any], step: Callable[[Any, Any], Any], **options: Any) -> Any:
    """The bits of an optimizer after two cycles of ``step``, so that states of the first count."""
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    params = params_of(dtype)
    optimizer = cls(params, lr=0.125, **options)
    for _ in range(2):
        step(optimizer, params)
        optimizer.zero_grad()
    return everything(optimizer)


# --- what it is for -------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("cls", [ampopt.AdamW, *OWN, ampopt.Muon])
def test_losses_may_have_scales_of_their_own(backend, cls):
    """As apex's ``num_losses``: one step takes both losses, and each has a scale of its own."""
    if cls is ampopt.Muon:
        cls = lambda params, lr: ampopt.Muon([params[0].view(5, 1).detach()], lr=lr)  # noqa: E731
    scales: list[Any] = [DynamicLossScale(init_scale=s, growth_interval=1) for s in (1024.0, 4.0)]

    def apart(optimizer, params):
        params = optimizer.param_groups[0]["params"]
        for p in params:
            p.grad = torch.full_like(p, 3.0 * 1024)
        found, scales[0] = optimizer.accumulate(grads_scaled_by=1024.0)
        assert found == 0 and all(p.grad is None for p in params)
        for p in params:
            p.grad = torch.full_like(p, -1.0 * 4)
        optimizer.unscale_and_step(grads_scaled_by=4.0)

    def at_once(optimizer, params):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()

    assert after(cls, apart) == after(cls, at_once)


def test_each_loss_lowers_its_own_scale_and_the_step_one_for_both():
    params = params_of()
    optimizer = ampopt.AdamW(params)
    a, b = (DynamicLossScale(init_scale=s, growth_interval=1) for s in (8.0, 32.0))
    before = bits(params)
    give(params, INF, 1.0)
    found, next_a = optimizer.accumulate(grads_scaled_by=a)
    give(params, 1.0, 1.0)
    result = optimizer.unscale_and_step(grads_scaled_by=b)
    assert found > 0 and result.skipped
    assert result.overflowed == ["group 0, parameter 0"]
    assert (next_a.item(), result.scale.item()) == (4.0, 16.0)  # b's is of the whole cycle
    assert bits(params) == before
    optimizer.zero_grad()
    give(params, 1.0, 1.0)
    found, next_a = optimizer.accumulate(grads_scaled_by=next_a)
    give(params, 1.0, 1.0)
    result = optimizer.unscale_and_step(grads_scaled_by=result.scale)
    assert not result.skipped and found == 0
    assert (next_a.item(), result.scale.item()) == (8.0, 32.0)


@every_backend
@pytest.mark.parametrize("dtype, masters", [(HALVES[0], True), (HALVES[1], False)], ids=str)
@pytest.mark.parametrize("control", ["unscale_and_step", "unscale", "step"])
def test_half_precision_gradients_add_up_in_float32(backend, dtype, masters, control):
    """Paddle's ``master_grad``. In half precision, 1 + 2**-12 + 2**-12 + 2 would be 3."""
    params = params_of(dtype)
    whole = [Parameter(p.detach().float()) for p in params]
    optimizer = ampopt.SGD(params, lr=0.5, master_weights=masters)
    reference = ampopt.SGD(whole, lr=0.5)
    small = 2.0**-12
    for cycle in range(2):
        for gradient in (1.0, small, small, 2.0):
            for p in params:
                p.grad = torch.full_like(p, gradient)
            optimizer.accumulate(grads_scaled_by=1.0)
        for p in whole:
            p.grad = torch.full_like(p, 3.0 + 2 * small)
        reference.step()
        if control == "step":
            optimizer.step()
        elif control == "unscale":
            optimizer.unscale(grads_scaled_by=1.0)
            held: Any = optimizer.master_params() if masters else params
            assert all((p.grad.float() == 3.0 + 2 * small).all() for p in held)
            optimizer.step_after_unscale()
        else:
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert all(p.grad is None and p.grad_dtype == dtype for p in params)
        if not masters:  # which step from what was rounded
            with torch.no_grad():
                for q in whole:
                    q.copy_(q.to(dtype))
        for p, q, master in zip(params, whole, optimizer.master_params(), strict=True):
            assert torch.equal(p, q.to(dtype)), cycle
            assert torch.equal(master.float(), q)


@every_backend
@fewer(0.5)
@given(
    grads=st.lists(st.integers(-8, 8), min_size=1, max_size=5),
    bad=st.sets(st.integers(0, 4)),
    left=st.booleans(),
)
def test_a_micro_batch_may_be_rejected_by_itself(backend, grads, bad, left):
    """The sum is scaled up to stand for the whole batch. Without any good one, the step skips."""
    bad &= set(range(len(grads)))
    params = params_of()
    optimizer = ampopt.SGD(params, lr=0.25)
    reference = copy.deepcopy(params)
    scale = DynamicLossScale(init_scale=4.0, growth_interval=1)
    for place, number in enumerate(grads):
        give(params, INF if place in bad else number, number, scale=4.0)
        if place < len(grads) - 1 or not left:
            found, _ = optimizer.accumulate(grads_scaled_by=scale, drop="micro_batch")
            assert bool(found > 0) == (place in bad)
        elif len(grads) == 1:
            return  # nothing was accumulated
    result = optimizer.unscale_and_step(grads_scaled_by=scale)
    kept = [number for place, number in enumerate(grads) if place not in bad]
    assert result.skipped == (not kept)
    assert result.scale.item() == (2.0 if bad else 8.0)
    share = sum(kept) * len(grads) / max(len(kept), 1)
    for p, q in zip(params, reference, strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 0.25 * share)


@every_backend
def test_a_dropped_micro_batch_changes_no_bit_of_the_step(backend):
    """The step is bitwise that of the mean of the other micro-batches."""

    def accumulated(*gradients: float) -> Any:
        def cycle(optimizer, params):
            for n in gradients:
                give(params, n, n)
                optimizer.accumulate(grads_scaled_by=1.0, drop="micro_batch")
            optimizer.unscale_and_step(grads_scaled_by=1.0)

        return after(ampopt.AdamW, cycle)

    assert accumulated(INF, 1.0, INF, -3.0) == accumulated(2.0, -6.0)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_plain_step_uses_the_micro_batches_that_were_kept(bad):
    """If no micro-batch was kept, the step is that of gradients of 0."""
    params = params_of()
    optimizer = ampopt.SGD(params, lr=0.5)
    expected = [p.detach() - 0.5 * (2.0 if bad < 2 else 0.0) for p in params]
    for place in range(2):
        give(params, *[INF if place < bad else 1.0] * 2)
        optimizer.accumulate(grads_scaled_by=1.0, drop="micro_batch")
    optimizer.step()
    for p, value in zip(params, expected, strict=True):
        assert torch.equal(p.detach(), value)


@every_backend
def test_a_sum_that_overflows_skips(backend):
    params = params_of()
    for drop in ("window", "micro_batch"):
        optimizer = ampopt.SGD(params)
        before = bits(params)
        give(params, 3e38, 1.0)
        assert optimizer.accumulate(grads_scaled_by=1.0, drop=drop).found_inf == 0
        give(params, 3e38, 1.0)  # of which no gradient overflows
        found_inf, _ = optimizer.accumulate(grads_scaled_by=1.0, drop=drop)
        assert found_inf == (drop == "window")
        result = optimizer.unscale_and_step(grads_scaled_by=2.0)
        assert result.skipped and result.scale == 1.0
        assert bits(params) == before


@every_backend
@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_gradients_accumulated_unchecked_are_checked_at_the_step(backend, drop):
    params = params_of()
    optimizer = ampopt.SGD(params)
    before = bits(params)
    give(params, INF, 1.0)
    assert optimizer.accumulate(drop=drop) == (0.0, None)
    give(params, 1.0, 1.0)
    result = optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert result.skipped and result.scale == 1.0
    assert bits(params) == before


# --- what may follow ------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("cls", [ampopt.AdamW, *OWN])
def test_max_norm_clips_the_sum(backend, cls):
    def apart(optimizer, params):
        give(params, 6.0, 0.0, scale=8.0)
        optimizer.accumulate(grads_scaled_by=8.0)
        give(params, 0.0, 8.0, scale=2.0)
        assert not optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0).skipped
        norms.append(optimizer.grad_norm.item())

    def at_once(optimizer, params):
        give(params, 6.0, 8.0)
        assert not optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=1.0).skipped
        norms.append(optimizer.grad_norm.item())

    norms: list[float] = []
    assert after(cls, apart) == after(cls, at_once)
    assert norms == [norms[0]] * 4


@pytest.mark.parametrize("cls", [ampopt.AdamW, *OWN])
def test_a_plain_step_applies_the_sum_or_skips(cls):
    def apart(optimizer, params):
        give(params, 1.0, 2.0, scale=4.0)
        optimizer.accumulate(grads_scaled_by=4.0)
        give(params, 1.0, 1.0)
        optimizer.step()

    def at_once(optimizer, params):
        give(params, 2.0, 3.0)
        optimizer.step()

    assert after(cls, apart) == after(cls, at_once)
    for scale, drop, bad, skips in (
        (1.0, "window", INF, True),
        (1.0, "micro_batch", INF, True),
        (None, "window", INF, False),
        (ampopt.StaticLossScale(1.0, drop_overflow_update=False), "window", INF, False),
    ):
        params = params_of()
        optimizer = cls(params, lr=0.5)
        for step in (optimizer.step, optimizer.unscale_and_step):
            before = bits(params)
            give(params, bad, 1.0)
            optimizer.accumulate(grads_scaled_by=scale, drop=drop)
            result = step()
            assert (bits(params) == before) is skips
            assert result is None or result.skipped is skips
            assert optimizer.pending is None


def test_optimizers_that_step_together_without_a_scale_follow_the_flags_of_their_cycles():
    params = params_of()
    optimizers = [ampopt.SGD([p]) for p in params]
    give(params, 1.0, INF)
    before = bits(params)
    for optimizer in optimizers:
        optimizer.accumulate(grads_scaled_by=1.0)
    assert ampopt.unscale_and_step(optimizers).skipped
    assert bits(params) == before


def test_without_a_scale_no_gradient_is_tested():
    params = params_of()
    optimizer = ampopt.SGD(params)
    give(params, INF, 1.0)
    found, scale = optimizer.accumulate()
    assert found == 0 and scale is None
    result = optimizer.unscale_and_step()
    assert not result.skipped and result.scale is None
    assert not params[0].isfinite().any()


@pytest.mark.parametrize("cls", [ampopt.AdamW, *OWN])
def test_gradients_clipped_between_unscale_and_step_are_applied(cls):
    def apart(optimizer, params):
        for n in (1.0, 2.0):
            give(params, n, n, scale=4.0)
            optimizer.accumulate(grads_scaled_by=4.0)
        optimizer.unscale(grads_scaled_by=4.0)
        assert [p.grad[0].item() for p in params] == [3.0, 3.0]
        params[0].grad.mul_(0.5)
        params[1].grad = params[1].grad * 2
        assert not optimizer.step_after_unscale().skipped

    def at_once(optimizer, params):
        give(params, 1.5, 6.0)
        optimizer.step()

    assert after(cls, apart) == after(cls, at_once)


@pytest.mark.parametrize("ends", [None, "unscale"])
def test_zero_grad_discards_the_sums(ends):
    def dropped(optimizer, params):
        give(params, INF, 1.0)
        optimizer.accumulate(grads_scaled_by=2.0)
        if ends:
            optimizer.unscale(grads_scaled_by=2.0)
        optimizer.zero_grad()
        at_once(optimizer, params)

    def at_once(optimizer, params):
        give(params, 1.0, 1.0)
        assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped

    assert after(ampopt.AdamW, dropped) == after(ampopt.AdamW, at_once)


@pytest.mark.parametrize("scaler_class", [ampopt.GradScaler])
@pytest.mark.parametrize("unscales", [False, True])
def test_ampopts_grad_scaler_steps_with_the_sum(scaler_class, unscales):
    def apart(optimizer, params):
        scaler = scaler_at(4.0, scaler_class)
        give(params, 1.0, 2.0, scale=8.0)
        optimizer.accumulate(grads_scaled_by=8.0)
        give(params, 1.0, 1.0, scale=4.0)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not scaler.skipped

    def at_once(optimizer, params):
        give(params, 2.0, 3.0)
        optimizer.step()

    assert after(ampopt.AdamW, apart) == after(ampopt.AdamW, at_once)


def test_each_micro_batch_may_have_gradients_of_other_parameters():
    """A parameter without a gradient in one micro-batch is stepped with the sum over the others."""

    def apart(optimizer, params):
        (params[0] * 2).sum().backward()
        optimizer.accumulate(grads_scaled_by=1.0)
        (params[1] * 3).sum().backward()
        optimizer.accumulate(grads_scaled_by=1.0)
        (params[0] * 2).sum().backward()
        optimizer.unscale_and_step(grads_scaled_by=1.0)

    def at_once(optimizer, params):
        give(params, 4.0, 3.0)
        optimizer.step()

    assert after(ampopt.AdamW, apart) == after(ampopt.AdamW, at_once)


def test_accumulating_without_gradients_changes_nothing():
    params = params_of()
    optimizer = ampopt.AdamW(params)
    scale = DynamicLossScale(init_scale=4.0, growth_interval=1)
    found, successor = optimizer.accumulate(grads_scaled_by=scale)
    assert found == 0 and successor.item() == 4.0
    result = optimizer.unscale_and_step(grads_scaled_by=scale)
    assert not result.skipped and result.scale.item() == 4.0  # does not count towards growth
    assert not optimizer.state


def test_a_call_that_fails_may_be_repeated(monkeypatch):
    """An ``accumulate`` that failed, because no kernel could be compiled, has added nothing."""
    weights = Parameter(torch.ones(3))
    optimizer = ampopt.SGD([weights], lr=1.0)
    weights.grad = torch.ones(3)

    def fails(*args: Any) -> None:
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(accumulation, "run", fails)
        with pytest.raises(RuntimeError, match="no compiler"):
            optimizer.accumulate(grads_scaled_by=1.0, drop="micro_batch")
    poisoned = optimizer._ampopt.accumulation._sums[weights].total
    poisoned.fill_(float("nan"))  # it was never written to
    optimizer.accumulate(grads_scaled_by=1.0, drop="micro_batch")
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("cls", [ampopt.SGD, Plain])
def test_a_step_whose_hook_raises_may_be_repeated(cls):
    param = Parameter(torch.zeros(2))
    optimizer = cls([param], lr=0.5)
    for grad in (1.0, 2.0):
        param.grad = torch.full((2,), grad)
        if grad == 1.0:
            optimizer.accumulate(grads_scaled_by=1.0)
    handle = optimizer.register_step_pre_hook(raises)
    with pytest.raises(ZeroDivisionError):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    handle.remove()
    with pytest.raises(RuntimeError, match="an unscale is pending"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param.grad is not None
    assert param.grad.tolist() == [3.0, 3.0]
    assert not optimizer.step_after_unscale().skipped
    assert param.tolist() == [-1.5, -1.5]


def raises(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_step_that_the_optimizer_refuses_leaves_the_sums():
    param = Parameter(torch.ones(2))
    optimizer = ampopt.ScheduleFreeAdamW([param])
    param.grad = torch.full((2,), 1.0)
    optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"train\(\)"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    optimizer.train()
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param.grad is None
    assert (param != 1).all()


def test_accumulate_does_not_use_up_the_scale():
    params = params_of()
    optimizer = ampopt.AdamW(params)
    scale = DynamicLossScale(init_scale=4.0)
    for _ in range(3):
        give(params, 1.0, 1.0, scale=4.0)
        optimizer.accumulate(grads_scaled_by=scale)
    optimizer.unscale_and_step(grads_scaled_by=scale)
    give(params, 1.0, 1.0, scale=4.0)
    with pytest.raises(RuntimeError, match="used by an earlier step"):
        optimizer.accumulate(grads_scaled_by=scale)


def test_a_static_scale_may_apply_an_overflow():
    params = params_of()
    optimizer = ampopt.SGD(params)
    scale = StaticLossScale(4.0, drop_overflow_update=False)
    give(params, INF, 1.0)
    assert optimizer.accumulate(grads_scaled_by=scale).found_inf > 0
    assert optimizer.unscale_and_step(grads_scaled_by=scale).found_inf > 0
    assert not params[0].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_wider_and_complex_parameters(dtype):
    params = [Parameter(torch.linspace(-1, 1, 4).to(dtype))]
    expected = params[0].detach() - 0.5 * 3
    optimizer = ampopt.SGD(params, lr=0.5)
    for _ in range(3):
        params[0].grad = torch.full_like(params[0], 4.0)
        optimizer.accumulate(grads_scaled_by=4.0)
    assert not optimizer.unscale_and_step(grads_scaled_by=4.0).skipped
    torch.testing.assert_close(params[0].detach(), expected)


def test_gradients_of_one_sum_may_have_several_dtypes():
    param: Any = Parameter(torch.zeros(1))
    param.grad_dtype = None
    optimizer = ampopt.SGD([param], lr=1.0)
    large = torch.tensor([2.0**24])
    for grads in ([large, 1 - large], [large.double() + 1, -large], [large, 1 - large]):
        for param.grad in grads:
            optimizer.accumulate(grads_scaled_by=1.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param.item() == -3.0


# --- what may not ---------------------------------------------------------------------------------


def in_a_cycle(cls: Any = ampopt.AdamW) -> tuple[Any, Any]:
    params = params_of()
    optimizer = cls(params, lr=0.5)
    give(params, 1.0, 1.0)
    optimizer.accumulate(grads_scaled_by=1.0)
    return optimizer, params


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
@pytest.mark.parametrize(
    "call",
    [
        copy.deepcopy,
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict({}),
        lambda optimizer: optimizer.step(lambda: 1.0),
        lambda optimizer: optimizer.unscale_and_step(lambda scale: 1.0, grads_scaled_by=1.0),
        lambda optimizer: optimizer.step_after_unscale(lambda scale: 1.0, current_grad_scale=1.0),
        lambda optimizer: scaler_at(4.0).step(optimizer),
    ],
)
def test_state_dicts_copies_and_closures_are_refused_within_a_cycle(cls, call):
    optimizer, params = in_a_cycle(cls)
    before = bits(params)
    with pytest.raises(RuntimeError, match=r"accumulate\(\) was called"):
        call(optimizer)
    assert bits(params) == before
    assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped  # the cycle is still there
    assert bits(params) != before


def test_a_pending_unscale_comes_first():
    params = params_of()
    optimizer = ampopt.AdamW(params)
    give(params, 1.0, 1.0)
    optimizer.unscale(grads_scaled_by=1.0)
    with pytest.raises(RuntimeError, match="accumulate: an unscale is pending"):
        optimizer.accumulate(grads_scaled_by=1.0)


def test_accumulate_within_a_closure_is_refused():
    params = params_of()
    optimizer = ampopt.AdamW(params)

    def closure(scale):
        give(params, 1.0, 1.0)
        optimizer.accumulate(grads_scaled_by=scale)
        return 1.0

    with pytest.raises(RuntimeError, match="the closure of unscale_and_step called accumulate"):
        optimizer.unscale_and_step(closure, grads_scaled_by=1.0)
    with pytest.raises(TypeError, match="LBFGS evaluates the loss itself"):
        ampopt.LBFGS(params).accumulate(grads_scaled_by=1.0)


def test_wrong_arguments_change_nothing():
    optimizer, params = in_a_cycle()
    give(params, 1.0, 1.0)
    with pytest.raises(ValueError, match="one of 'window', 'micro_batch', got 'batch'"):
        optimizer.accumulate(grads_scaled_by=1.0, drop="batch")
    with pytest.raises(ValueError, match="earlier call since the last step had drop='window'"):
        optimizer.accumulate(grads_scaled_by=1.0, drop="micro_batch")
    with pytest.raises(ValueError, match="got -1.0"):
        optimizer.accumulate(grads_scaled_by=-1.0)
    halves = Plain(params_of(torch.float16))
    give(halves.param_groups[0]["params"], 1.0, 1.0)
    with pytest.raises(RuntimeError, match="unscaled values would underflow"):
        halves.accumulate(grads_scaled_by=1.0)
    table = torch.nn.Embedding(4, 2, sparse=True)
    sparse = ampopt.SGD(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="is sparse"):
        sparse.accumulate(grads_scaled_by=1.0)
    assert not sparse.unscale_and_step(grads_scaled_by=1.0).skipped
    optimizer.unscale(grads_scaled_by=1.0)
    assert [p.grad.unique().item() for p in params] == [2.0, 2.0]


# --- where gradients stay -------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_a_cycle_can_be_captured(monkeypatch):
    """The cycle copies nothing from the host and reads nothing on it, as a CUDA graph requires."""
    ampopt.set_backend("triton")
    given = torch.ones(())

    def cycle(optimizer, params, scale):
        optimizer.zero_grad(set_to_none=False)
        for factor in (1.0, 2.0, 3.0):
            loss = torch.stack([(p * given * factor).sum() for p in params]).sum()
            scale_outputs(loss, scale).backward()
            if factor < 3:
                optimizer.accumulate(grads_scaled_by=scale)
        return optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=2.0)

    results = []
    for captured in (False, True):
        params = params_of()
        optimizer, scale = ampopt.AdamW(params, lr=0.5), StaticLossScale(4.0)
        for p in params:
            p.grad = torch.zeros_like(p)
        for _ in range(3):
            cycle(optimizer, params, scale)
        graphs = FakeGraphs()
        replay: Any = None
        if captured:
            with graphs.capture() as replay:
                cycle(optimizer, params, scale)
        for number in (1.0, INF, 0.5):
            given.fill_(number)
            replay() if captured else cycle(optimizer, params, scale)
        given.fill_(1.0)
        results.append(bits(params))
    assert results[0] == results[1]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without it")
@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.SGD, Plain])
def test_a_save_that_takes_a_step_to_make_states_is_refused_and_loses_nothing(cls):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    results = []
    for saves in (False, True):
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        params = list(model.parameters())
        optimizer = cls(params, lr=0.5)
        give(params, 1.0, 2.0)
        optimizer.accumulate(grads_scaled_by=1.0)
        if saves:
            with pytest.raises(RuntimeError, match=r"accumulate\(\) was called, and no step"):
                get_state_dict(model, optimizer)
            assert [group["lr"] for group in optimizer.param_groups] == [0.5]
            assert all(p.grad is None for p in params) and not optimizer.state
        give(params, 1.0, 1.0)
        assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
        results.append(bits(params))
    assert results[0] == results[1]
