"""Several optimizers under one decision: all of them step, or none."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fixtures import either_host
from support.optimizers import SOME_RULES, HostCounted, Plain, Signed
from support.strategies import fewer
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR

import ampopt
from ampopt.testing.bits import assert_close, bits, everything
from ampopt.testing.no_sync import assert_no_sync

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")
on_eager = pytest.mark.parametrize("backend", ["eager"], indirect=True)
"""For tests of what the host does, in which kernels have no part."""

INF = float("inf")
NAN = float("nan")
CLASSES: tuple[Any, ...] = (*SOME_RULES, Plain, HostCounted)

Gradients = Sequence[Sequence[float] | None]
"""For each parameter, its gradient as numbers."""


def numbers(n: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(*[st.integers(-64, 64).map(lambda k: k / 16)] * n)


def finite(optimizers: int) -> st.SearchStrategy[list[tuple[float, ...] | None]]:
    """Gradients of two parameters for each optimizer; at least one of them is present."""
    one = st.none() | numbers(2)
    return st.lists(one, min_size=2 * optimizers, max_size=2 * optimizers).filter(any)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Any], list[tuple[Gradients, bool]]]:
    """Classes of one to three optimizers, and gradients of some steps, some with an overflow."""
    classes = draw(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3))
    history: list[tuple[Gradients, bool]] = []
    for bad in draw(st.lists(st.booleans(), min_size=1, max_size=4)):
        step = draw(finite(len(classes)))
        if bad:
            at = draw(st.sampled_from([i for i, g in enumerate(step) if g is not None]))
            step[at] = (draw(st.sampled_from([INF, -INF, NAN])), 1.0)
        history.append((step, bad))
    return classes, history


def made(classes: Sequence[Any], **options: Any) -> tuple[list[Any], list[Parameter]]:
    """Optimizers of two parameters each."""
    params = [Parameter(torch.tensor([0.5, -1.5]) * (i + 1)) for i in range(2 * len(classes))]
    optimizers = [cls(params[2 * i : 2 * i + 2], **options) for i, cls in enumerate(classes)]
    return optimizers, params


def give(params: Sequence[Parameter], gradients: Gradients, scale: float = 1.0) -> None:
    for p, g in zip(params, gradients, strict=True):
        p.grad = None if g is None else torch.tensor(g, dtype=p.dtype) * scale


def all_of(optimizers: Sequence[Any]) -> Any:
    return [everything(optimizer) for optimizer in optimizers]


def as_before(before: Any, after: Any) -> bool:
    """Whether nothing has changed. State that a skipped first step has made is not compared."""
    states = ((x["state"], y["state"]) for x, y in zip(before, after, strict=True))
    return [{**x, "state": None} for x in before] == [{**y, "state": None} for y in after] and all(
        old is None or old == new for x, y in states for old, new in zip(x, y, strict=True)
    )


# --- one decision --------------------------------------------------------------------------------


@fewer(0.25)
@given(case=histories(), exponent=st.integers(-8, 8))
def test_all_optimizers_step_or_none_does(case, exponent):
    classes, history = case
    optimizers, params = made(classes)
    twins, twin_params = made(classes)
    scale = expected = ampopt.DynamicLossScale(init_scale=2.0**exponent, growth_interval=2)
    torch.manual_seed(0)
    for gradients, bad in history:
        give(params, gradients, scale.item())
        before, random_state = all_of(optimizers), torch.get_rng_state()
        result = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale)
        assert result.skipped is bad
        assert result.loss is None
        if bad:
            assert as_before(before, all_of(optimizers))
        else:
            torch.set_rng_state(random_state)
            give(twin_params, gradients, scale.item())
            for twin in twins:
                twin.unscale_and_step(grads_scaled_by=scale.item())
            assert as_before(all_of(twins), all_of(optimizers))
        scale, expected = result.scale, expected.next(bad)
        assert scale.state_dict() == expected.state_dict()


@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
@fewer(0.15)
@given(
    history=st.lists(finite(2), min_size=1, max_size=3),
    overflow=st.sampled_from([None, 0, 3]),
    max_norm=st.sampled_from([None, 0.0, 0.25, 1.0, 64.0, INF]),
    exponent=st.integers(-8, 8),
)
def test_several_optimizers_equal_one_of_all_their_parameters(
    cls, history, overflow, max_norm, exponent
):
    optimizers, params = made([cls, cls])
    one_params = [Parameter(p.detach().clone()) for p in params]
    one = cls([{"params": one_params[:2]}, {"params": one_params[2:]}])
    if overflow is not None:
        history[-1][overflow] = (NAN, 1.0)
    scale: Any = 2.0**exponent
    for gradients in history:
        give(params, gradients, float(scale))
        give(one_params, gradients, float(scale))
        single = one.unscale_and_step(grads_scaled_by=scale, max_norm=max_norm)
        several = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale, max_norm=max_norm)
        assert bits(several) == bits(single)
        for p, q in zip(params, one_params, strict=True):
            # Unscaling and clipping is one multiplication where it is two in one optimizer.
            assert_close(p, q, ulps=8 if max_norm else 0, size=16)
        if max_norm is not None:
            for optimizer in optimizers:
                assert bits(optimizer.grad_norm) == bits(one.grad_norm)
        scale = several.scale


@pytest.mark.parametrize("classes", [(ampopt.AdamW, HostCounted), (HostCounted, ampopt.SGD)])
@pytest.mark.parametrize("bad", [False, True])
def test_a_common_norm_clips_them_all(classes, bad):
    optimizers, params = made(classes)
    give(params, [(3.0, 0.0), None, (0.0, 4.0), (0.0, INF if bad else 0.0)], 4.0)
    before, in_hooks = all_of(optimizers), []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda each, *_: in_hooks.append(each.grad_norm))
    result = ampopt.unscale_and_step(optimizers, grads_scaled_by=4.0, max_norm=1.0)
    assert result.skipped is bad
    assert [bits(norm) for norm in in_hooks] == [bits(o.grad_norm) for o in optimizers]
    assert as_before(before, all_of(optimizers)) is bad
    if not bad:
        assert [o.grad_norm.item() for o in optimizers] == [5.0, 5.0]
        clipped, clipped_params = made(classes)
        give(clipped_params, [(3.0, 0.0), None, (0.0, 4.0), (0.0, 0.0)])
        torch.nn.utils.clip_grad_norm_(clipped_params, 1.0)
        torch.manual_seed(0)
        for optimizer in clipped:
            optimizer.step()
        for p, q in zip(params, clipped_params, strict=True):
            assert_close(p, q, size=2**14)  # the noise of HostCounted is 2**-10 at most


def test_masters_and_float64_beside_float32():
    params = [
        Parameter(torch.ones(2, dtype=dtype))
        for dtype in (torch.float16, torch.float64, torch.float32)
    ]
    optimizers = [
        ampopt.SGD(params[:1], lr=0.5, master_weights=True),
        ampopt.SGD(params[1:2], lr=0.5),
        Plain(params[2:], lr=0.5),
    ]
    give(params, [(1.0, -1.0), (2.0, 2.0), (4.0, INF)], 8.0)
    before = all_of(optimizers)
    result = ampopt.unscale_and_step(optimizers, grads_scaled_by=8.0)
    assert result.skipped and result.scale.item() == 4.0
    assert all_of(optimizers)[1:] == before[1:]
    assert bits(params[0]) == before[0]["parameters"][0]
    give(params, [(1.0, -1.0), (2.0, 2.0), (4.0, 4.0)], 4.0)
    ampopt.unscale_and_step(optimizers, grads_scaled_by=result.scale)
    assert [p.tolist() for p in params] == [[0.5, 1.5], [0.0, 0.0], [-1.0, -1.0]]


# --- with what was accumulated -------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
@fewer(0.2)
@given(
    micro_batches=st.lists(finite(2), min_size=2, max_size=3),
    accumulating=st.sampled_from([(0,), (1,), (0, 1)]),
    overflow=st.none() | st.tuples(st.integers(0, 1), st.sampled_from([0, 3])),
    max_norm=st.sampled_from([None, 0.25, 64.0]),
    exponent=st.integers(-8, 8),
)
def test_sums_of_each_are_as_those_of_one_optimizer(
    cls, micro_batches, accumulating, overflow, max_norm, exponent
):
    """The sums of all parameters. Without ``accumulate``, gradients add up in ``p.grad``."""
    optimizers, params = made([cls, cls])
    one_params = [Parameter(p.detach().clone()) for p in params]
    one = cls([{"params": one_params[:2]}, {"params": one_params[2:]}])
    if overflow is not None:
        place, param = overflow
        micro_batches[place][param] = (NAN, 1.0)
    scale = ampopt.DynamicLossScale(init_scale=2.0**exponent, growth_interval=2)
    for _ in range(2):
        for gradients in micro_batches:
            for p, g in zip([*params, *one_params], [*gradients, *gradients], strict=True):
                if g is not None:
                    (p * torch.tensor(g)).sum().mul(scale.item()).backward()
            if gradients is micro_batches[-1]:
                break
            for place in accumulating:
                optimizers[place].accumulate(grads_scaled_by=scale)
            one.accumulate(grads_scaled_by=scale)
        single = one.unscale_and_step(grads_scaled_by=scale, max_norm=max_norm)
        several = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale, max_norm=max_norm)
        assert several.skipped is (overflow is not None) is single.skipped
        assert several.scale.state_dict() == single.scale.state_dict()
        for p, q in zip(params, one_params, strict=True):
            assert_close(p, q, ulps=8 if max_norm else 0, size=16)
        for optimizer in optimizers if max_norm else ():
            assert bits(optimizer.grad_norm) == bits(one.grad_norm)
        for optimizer in (*optimizers, one):
            optimizer.zero_grad()
        scale = several.scale


def test_sums_are_clipped_together_without_a_scale():
    optimizers, params = made([ampopt.SGD, ampopt.SGD], lr=1.0)
    give(params, [(3.0, 0.0), None, (0.0, 4.0), None])
    optimizers[0].accumulate()
    result = ampopt.unscale_and_step(optimizers, max_norm=2.5)
    assert result.scale is None and not result.skipped
    assert [optimizer.grad_norm for optimizer in optimizers] == [5.0, 5.0]
    assert_close(params[0].detach(), torch.tensor([-1.0, -1.5]), ulps=64)
    assert_close(params[2].detach(), torch.tensor([1.5, -6.5]), ulps=64)


@pytest.mark.parametrize("first", ["window", "micro_batch"])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (1, 2)])
def test_each_optimizer_drops_its_own_bad_micro_batches(first, bad):
    """``bad`` are calls of ``accumulate``: call 0 by the first, 1 and 2 by the second optimizer."""
    optimizers, params = made([ampopt.SGD, ampopt.SGD], lr=0.5)
    before = all_of(optimizers)
    scale = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=1)
    give(params, [(INF if 0 in bad else 4.0, 4.0), None, None, None])
    optimizers[0].accumulate(grads_scaled_by=scale, drop=first)
    for call in (1, 2):
        give(params, [None, None, (INF if call in bad else 4.0, 4.0), None])
        optimizers[1].accumulate(grads_scaled_by=scale, drop="micro_batch")
    result = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale)
    assert result.scale.item() == (2.0 if bad else 8.0)
    assert result.skipped is (bad in [(0,), (1, 2)])
    if result.skipped:
        assert as_before(before, all_of(optimizers))
    else:
        assert params[0].tolist() == [0.0, -2.0] and params[2].tolist() == [0.5, -5.5]
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_watch_sees_the_sums_before_they_are_clipped(max_norm):
    optimizers, params = made([ampopt.SGD, ampopt.SGD], lr=0.5)
    watches = [ampopt.Watch(optimizer) for optimizer in optimizers]
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    for bad in (False, True):
        give(params, [(12.0, 0.0), None, (0.0, INF if bad else 16.0), None], float(scale) / 4)
        for optimizer in optimizers:
            optimizer.accumulate(grads_scaled_by=scale)
        result = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale, max_norm=max_norm)
        assert result.overflowed == (["group 1, parameter 0"] if bad else [])
        scale = result.scale
    seen = [watch.read() for watch in watches]
    assert [one["skips"] for one in seen] == [1, 1]
    largest = [parameter["largest"] for one in seen for parameter in one["parameters"].values()]
    assert [x for x in largest if x] == [3.0, 4.0]


def test_after_a_refused_call_the_sums_are_kept():
    optimizers, params = made([ampopt.SGD, ampopt.SGD], lr=0.5)
    give(params, [(4.0, 4.0), None, None, None])
    optimizers[0].accumulate(grads_scaled_by=4.0)
    params[2].grad = torch.sparse_coo_tensor(
        torch.tensor([[0]]), [4.0], (2,), check_invariants=True
    )
    with pytest.raises(TypeError, match="the gradient of group 1, parameter 0 is sparse"):
        ampopt.unscale_and_step(optimizers, grads_scaled_by=4.0)
    params[2].grad = None
    optimizers[0].step()
    assert params[0].tolist() == [0.0, -2.0]


def test_a_sum_that_no_step_can_use_leaves_the_gradients_of_other_optimizers():
    optimizers, params = made([ampopt.SGD, ampopt.SGD], lr=0.5)
    give(params, [None, None, (4.0, 4.0), None])
    optimizers[1].accumulate(grads_scaled_by=4.0)
    give(params, [(4.0, 4.0), None, None, None])
    params[2].data = torch.ones(3)
    with pytest.raises(RuntimeError, match="sum of the gradients of group 0, parameter 0 has"):
        ampopt.unscale_and_step(optimizers, grads_scaled_by=4.0)
    assert optimizers[0].state_dict()["state"] == {}  # raises between accumulate and the step
    optimizers[1].zero_grad()
    ampopt.unscale_and_step(optimizers, grads_scaled_by=4.0)
    assert params[0].tolist() == [0.0, -2.0]


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_rule_based_optimizers_do_not_synchronize(backend):
    optimizers, params = made([ampopt.Adam, Signed])
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    for place, number in enumerate((1.0, INF, NAN, 2.0)):
        before = bits(params)
        give(params, [(1.0, number), (1.0, 2.0), None, (0.0, 1.0)])
        # The first step sends its tables to the device.
        with assert_no_sync() if place else contextlib.nullcontext():
            result = ampopt.unscale_and_step(optimizers, scale, max_norm=1.0)
        assert (bits(params) == before) is (number in (INF, NAN) or number != number)
        scale = result.scale


# --- what may be given ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_without_a_scale_nothing_is_checked(max_norm):
    optimizers, params = made([ampopt.SGD, Plain], lr=1.0)
    give(params, [(3.0, 0.0), None, (0.0, 4.0), None])
    result = ampopt.unscale_and_step(optimizers, max_norm=max_norm)
    assert (result.scale, result.skipped) == (None, False)
    clip = 1.0 if max_norm is None else 0.2
    expected = [[0.5 - 3.0 * clip, -1.5], [1.5, -4.5 - 4.0 * clip]]
    for p, numbers in zip((params[0], params[2]), expected, strict=True):
        assert_close(p.detach(), torch.tensor(numbers), ulps=64)
    give(params, [(NAN, 0.0), None, (0.0, 4.0), None])
    ampopt.unscale_and_step(optimizers)
    assert params[0].isnan().any() and not params[2].isnan().any()


def test_a_scale_may_have_overflowed_updates_applied():
    optimizers, params = made([ampopt.SGD, Plain], lr=1.0)
    give(params, [(INF, 0.0), None, (2.0, 4.0), None])
    scale = ampopt.StaticLossScale(2.0, drop_overflow_update=False)
    result = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale)
    assert result.found_inf > 0 and not result.skipped and result.scale is scale
    assert params[0].tolist() == [-INF, -1.5]
    assert params[2].tolist() == [0.5, -6.5]


@pytest.mark.parametrize("skip_by", ["host", "transaction", "step"])
def test_each_skips_in_its_own_way(skip_by):
    class Told(Plain):
        def update(self) -> None:
            if self.found_inf is None or not self.found_inf > 0:
                super().update()

    optimizers, params = made([ampopt.SGD, Told])
    optimizers[1].skip_by = skip_by
    for number in (1.0, INF):
        give(params, [(1.0, 1.0), None, (1.0, number), None])
        before = all_of(optimizers)
        assert ampopt.unscale_and_step(optimizers, 1.0).skipped is (number == INF)
        assert as_before(before, all_of(optimizers)) is (number == INF)


def test_an_optimizer_without_gradients_gets_the_common_flag():
    optimizers, params = made([ampopt.SGD, HostCounted, ampopt.Adam])
    hooks: list[Any] = []
    told: list[bool] = []

    def hook(optimizer: Any, *_: Any) -> None:
        hooks.append(optimizer)
        told.append(bool(optimizer.found_inf > 0))

    for optimizer in optimizers:
        optimizer.register_step_post_hook(hook)
    watch = ampopt.Watch(optimizers[0])
    for number in (1.0, INF):
        give(params, [None] * 4 + [(1.0, number)] * 2, 2.0)
        before = all_of(optimizers[:2])
        assert ampopt.unscale_and_step(optimizers, grads_scaled_by=2.0).skipped is (number == INF)
        assert all_of(optimizers[:2]) == before
        assert optimizers[2].state[params[4]]["step"] == 1
    assert hooks == optimizers * 2
    assert told == [False] * 3 + [True] * 3
    recent = [{"scale": 2.0, "skipped": False}, {"scale": 2.0, "skipped": True}]
    assert [{k: entry[k] for k in recent[0]} for entry in watch.read()["recent"]] == recent


def test_a_call_without_any_gradients_changes_nothing():
    optimizers, params = made([ampopt.SGD, Plain])
    scale, before = ampopt.DynamicLossScale(growth_interval=1), all_of(optimizers)
    calls: list[int] = []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
    result = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale, max_norm=1.0)
    assert result.scale is scale and result.found_inf == 0
    assert all_of(optimizers) == before
    assert len(calls) == 2
    assert [o.grad_norm.item() for o in optimizers] == [0.0, 0.0]
    assert ampopt.unscale_and_step([ampopt.SGD([{"params": []}])], 2.0).found_inf == 0


def test_sums_without_any_gradient_change_nothing():
    optimizers, params = made([ampopt.SGD, Plain])
    before = all_of(optimizers)
    for optimizer in optimizers:
        optimizer.accumulate(grads_scaled_by=2.0)
    assert ampopt.unscale_and_step(optimizers, grads_scaled_by=2.0).found_inf == 0
    assert all_of(optimizers) == before


def test_optimizers_that_are_no_longer_used_are_not_kept_in_memory():
    optimizers, params = made([ampopt.SGD, ampopt.Adam])
    give(params, [(1.0, 2.0)] * 4)
    ampopt.unscale_and_step(optimizers, grads_scaled_by=1.0)
    kept = [weakref.ref(value) for value in (*optimizers, *params)]
    del optimizers[0], params[:2]  # `optimizers` has the other one still
    gc.collect()
    assert [reference() is None for reference in kept] == [True, False, True, True, False, False]


def test_hooks_and_schedulers_see_every_attempt():
    optimizers, params = made([ampopt.SGD, Plain, HostCounted])
    calls: list[str] = []
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    for number in (INF, 1.0):
        give(params, [(1.0, number)] * 6)
        ampopt.unscale_and_step(iter(optimizers), grads_scaled_by=1.0)
        for scheduler in schedulers:
            scheduler.step()  # which warns if it has seen no step
    assert calls == ["pre", "post"] * 6


def test_the_returned_scale_must_be_used_next():
    optimizers, params = made([ampopt.SGD, Plain])
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    give(params, [(1.0, 1.0)] * 4)
    following = ampopt.unscale_and_step(optimizers, grads_scaled_by=scale).scale
    for again in (
        lambda: ampopt.unscale_and_step(optimizers, grads_scaled_by=scale),
        lambda: optimizers[1].unscale_and_step(grads_scaled_by=scale),
    ):
        with pytest.raises(RuntimeError, match="so assign it"):
            again()
    optimizers[0].unscale_and_step(grads_scaled_by=following)
    optimizers[1].unscale_and_step(grads_scaled_by=following)


# --- what is refused -----------------------------------------------------------------------------


class OwnControlPoint(Plain):
    def unscale_and_step(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")


def pending(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    optimizers[1].unscale(grads_scaled_by=1.0)
    return optimizers


def float16(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    param = Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    return [*optimizers, Plain([param])]


def sparse(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    params[3].grad = torch.sparse_coo_tensor(
        torch.tensor([[0]]), [1.0], (2,), check_invariants=True
    )
    return optimizers[::-1]


def wrong_state(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    optimizers[1].state[params[2]]["exp_avg"] = torch.zeros(5)
    return optimizers


def expanded(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    param = Parameter(torch.ones(1).expand(2))
    param.grad = torch.ones(2)
    return [*optimizers, ampopt.SGD([param])]


def negated(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    param = Parameter(torch.full((2,), 1 - 1j).conj().imag)
    param.grad = torch.ones(2)
    return [*optimizers, ampopt.SGD([param])]


def conjugated(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    param = Parameter(torch.full((2,), 1 - 1j).conj())
    param.grad = torch.full((2,), 1j)
    return [*optimizers, ampopt.SGD([param])]


def integers(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    params[2].grad = None
    extra = torch.ones(2, dtype=torch.int32)
    extra.grad = torch.ones(2, dtype=torch.int32)
    optimizers[1].param_groups[0]["params"].append(extra)
    return optimizers


def in_eval_mode(optimizers: list[Any], params: list[Parameter]) -> list[Any]:
    param = Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    averaging = ampopt.ScheduleFreeAdamW([param])
    averaging.eval()
    return [*optimizers, averaging]


def with_extra(cls: Any) -> Callable[..., list[Any]]:
    return lambda optimizers, params: [*optimizers, cls([Parameter(torch.ones(2))])]


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "none": (lambda o, p: [], ValueError, "one or more optimizers, got none"),
    "one itself": (lambda o, p: o[0], TypeError, "a list of optimizers, got one: call its own"),
    "nothing": (lambda o, p: None, TypeError, "must be a list of optimizers, got NoneType"),
    "twice": (lambda o, p: [*o, o[0]], ValueError, "SGD 2 .* 0; pass each optimizer once"),
    "shared": (
        lambda o, p: [*o, ampopt.SGD(p[1:2])],
        ValueError,
        "optimizers 0 and 2 share a parameter, group 0, parameter 0 of the latter",
    ),
    "torch's": (
        with_extra(torch.optim.SGD),
        TypeError,
        "got torch.optim.sgd.SGD: import it from ampopt",
    ),
    "no optimizer": (
        lambda o, p: [*o, 3],
        TypeError,
        "must be an ampopt.Optimizer, got builtins.int",
    ),
    "closure": (with_extra(ampopt.LBFGS), TypeError, "LBFGS needs a closure"),
    "own": (with_extra(OwnControlPoint), TypeError, "OwnControlPoint defines its own unscale_and"),
    "pending": (pending, RuntimeError, r"Call step_after_unscale\(\) first.*, or zero_grad\(\)"),
    "float16": (float16, RuntimeError, "group 0, parameter 0 is float16"),
    "sparse": (sparse, RuntimeError, "Adam does not support sparse gradients"),
    "state": (wrong_state, ValueError, "exp_avg"),
    "expanded": (expanded, RuntimeError, "is expanded: several of its elements share one place"),
    "negated": (negated, RuntimeError, "is a lazily negated view, whose memory has other values"),
    "conjugated": (conjugated, RuntimeError, "is a lazily conjugated view"),
    "integers": (integers, TypeError, "is torch.int32"),
    "eval mode": (in_eval_mode, RuntimeError, r"call train\(\)"),
}


@on_eager
@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_cannot_go_together_are_refused_unchanged(case):
    spoil, error, match = REFUSED[case]
    optimizers, params = made([ampopt.SGD, ampopt.Adam], lr=0.5)
    for _ in range(2):
        give(params, [(1.0, 2.0)] * 4)
        ampopt.unscale_and_step(optimizers, grads_scaled_by=1.0)
    given_ones = spoil(optimizers, params)
    before, grads = all_of(optimizers), bits([p.grad for p in params])
    with pytest.raises(error, match=match):
        ampopt.unscale_and_step(given_ones, grads_scaled_by=1.0)
    assert all_of(optimizers) == before
    assert bits([p.grad for p in params]) == grads


@on_eager
@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"grads_scaled_by": 0.0}, ValueError, "got 0.0"),
        ({"grads_scaled_by": "2"}, TypeError, "got str"),
        ({"grads_scaled_by": torch.ones(2)}, ValueError, r"got shape \(2,\)"),
        ({"grads_scaled_by": 1.0, "max_norm": -1.0}, ValueError, "0 or more, or None, got -1.0"),
        ({"max_norm": NAN}, ValueError, "0 or more, or None, got nan"),
    ],
)
def test_arguments_out_of_range_are_refused_unchanged(arguments, error, match):
    optimizers, params = made([ampopt.SGD, Plain])
    give(params, [(1.0, 2.0)] * 4)
    before, grads = all_of(optimizers), bits([p.grad for p in params])
    with pytest.raises(error, match=match):
        ampopt.unscale_and_step(optimizers, **arguments)
    assert all_of(optimizers) == before
    assert bits([p.grad for p in params]) == grads
