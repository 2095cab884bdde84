"""Closures under a loss scale: evaluated again until their gradients are finite."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fixtures import either_host
from support.optimizers import SOME_RULES, HostCounted, Plain
from support.strategies import Case, cases, fewer, powers_of_two
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt import NonFiniteGradientError, StepResult, scale_outputs
from ampopt.testing.bits import bits, everything, state_of

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")

INF = float("inf")
OPTIMIZERS = (*SOME_RULES, Plain, HostCounted)


class Training:
    """Two parameters whose gradients overflow above a limit, and a record of closure calls."""

    def __init__(
        self, make: Callable[[Any], Any], limit: float = INF, loss: Any = None, named: bool = False
    ) -> None:
        """Make parameters and optimizer.

        Args:
            make: makes the optimizer.
            limit: a scaled gradient of more than this overflows, as it does in float16.
            loss: to be returned in place of the real one.
            named: give the optimizer names of parameters.
        """
        self.params = [Parameter(torch.tensor([1.0, -2.0])), Parameter(torch.tensor([3.0]))]
        names = ("weight", "bias")
        self.optimizer = make(list(zip(names, self.params, strict=True)) if named else self.params)
        self.limit = limit
        self.loss = loss
        self.scales: list[Any] = []
        self.random: list[Tensor] = []

    def closure(self, scale: Any) -> Any:
        """Compute gradients under ``scale``, as a user's closure for ``unscale_and_step``."""
        self.scales.append(scale)
        self.random.append(torch.rand(()))
        self.optimizer.zero_grad()
        a, b = self.params
        loss = (a * a).sum() + 0.25 * (b * b * b).sum()
        scale_outputs(loss, scale).backward()
        for p in self.params:
            assert p.grad is not None
            p.grad[p.grad.abs() > self.limit] = INF
        return loss if self.loss is None else self.loss

    def unscaling_closure(self, scale: Any) -> tuple[Any, Any, Any]:
        """Compute and unscale gradients: a closure as users write it for ``step_after_unscale``."""
        loss = self.closure(scale)
        return (loss, *self.optimizer.unscale(grads_scaled_by=scale))

    def step(self, form: str, scale: Any, **options: Any) -> StepResult:
        if form == "unscale_and_step":
            return self.optimizer.unscale_and_step(self.closure, scale, **options)
        return self.optimizer.step_after_unscale(
            self.unscaling_closure, current_grad_scale=scale, **options
        )


both_forms = pytest.mark.parametrize("form", ["unscale_and_step", "step_after_unscale"])
every_optimizer = pytest.mark.parametrize("cls", OPTIMIZERS)
on_eager = pytest.mark.parametrize("backend", ["eager"], indirect=True)
"""For tests of what the host does, in which kernels have no part."""


def fails(training: Training, form: str, scale: Any, **options: Any) -> NonFiniteGradientError:
    """The error of a step that gives up. Checks that the step has changed nothing."""
    random = torch.get_rng_state()
    before = everything(training.optimizer)
    with pytest.raises(NonFiniteGradientError) as caught:
        training.step(form, scale, **options)
    random_after = torch.get_rng_state()
    torch.set_rng_state(random)
    assert everything(training.optimizer) == before
    torch.set_rng_state(random_after)
    return caught.value


# --- what a replay is -----------------------------------------------------------------------------


@both_forms
@fewer(0.25)
@given(cases() | st.sampled_from([Case(Plain)]), powers_of_two(4, 8), st.integers(0, 3), st.data())
def test_a_replay_equals_having_started_with_the_smaller_scale(form, case, limit, steps, data):
    kind = data.draw(st.sampled_from(["number", "tensor", "dynamic"]))

    def make_scale(number: float) -> Any:
        if kind == "dynamic":
            return ampopt.DynamicLossScale(init_scale=number, growth_interval=2)
        return number if kind == "number" else torch.tensor(number)

    replayed, started_lower = (Training(case.make, limit=limit) for _ in range(2))
    first = replayed.step(form, make_scale(2.0**8))
    lowered = replayed.scales[-1]
    second = started_lower.step(form, make_scale(float(lowered)))
    assert len(started_lower.scales) == 1
    for _ in range(steps):
        for result in (first, second):
            assert result.found_inf == 0
            assert not result.skipped
        assert bits(first.loss) == bits(second.loss)
        assert float(first.scale) == float(second.scale)
        first = replayed.step(form, first.scale)
        second = started_lower.step(form, second.scale)
    assert bits(replayed.params) == bits(started_lower.params)
    assert state_of(replayed.optimizer) == state_of(started_lower.optimizer)


@both_forms
@every_optimizer
def test_the_same_closure_is_run_again_with_the_backed_off_scale(form, cls):
    training = Training(cls, limit=100.0)  # the largest gradient is 6.75
    result = training.step(form, 64.0)
    assert [float(scale) for scale in training.scales] == [64.0, 32.0, 16.0, 8.0]
    assert result.scale.item() == 8.0
    assert result.loss.item() == 11.75  # unscaled
    assert result.found_inf.dtype == torch.float32
    assert result.found_inf == 0


@both_forms
@every_optimizer
def test_closures_step_as_plain_steps_do(form, cls):
    with_scale, without = Training(cls), Training(cls)
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0**10)
    for _ in range(3):
        torch.manual_seed(0)
        scale = with_scale.step(form, scale).scale
        torch.manual_seed(0)
        without.optimizer.step(lambda: without.closure(None))
    assert bits(with_scale.params) == bits(without.params)


@both_forms
@every_optimizer
def test_without_a_scale_nothing_is_checked_or_replayed(form, cls):
    training = Training(cls, limit=0.0)
    before = bits(training.params)
    result = training.step(form, None)
    assert training.scales == [None]
    assert result.scale is None
    assert result.found_inf == 0
    assert bits(training.params) != before


@both_forms
@every_optimizer
def test_a_static_scale_that_applies_overflows_is_not_replayed(form, cls):
    training = Training(cls, limit=6.0)
    before = bits(training.params)
    scale = ampopt.StaticLossScale(1.0, drop_overflow_update=False)
    result = training.step(form, scale)
    assert training.scales == [scale]
    assert result.found_inf > 0
    assert not result.skipped
    assert bits(training.params) != before


@both_forms
def test_the_first_replay_already_has_a_smaller_scale_despite_hysteresis(form):
    training = Training(ampopt.SGD, limit=100.0)
    training.step(form, ampopt.DynamicLossScale(init_scale=32.0, hysteresis=2))
    assert [scale.item() for scale in training.scales] == [32.0, 32.0, 16.0, 8.0]


@both_forms
def test_a_scale_passed_to_a_closure_cannot_be_used_again(form):
    training = Training(ampopt.SGD, limit=100.0)
    scale = ampopt.DynamicLossScale(init_scale=16.0)
    result = training.step(form, scale)
    for used in training.scales:
        if used is not result.scale:
            assert used.item() in (16.0, 8.0)
    for stale in (scale, training.scales[-1]):
        with pytest.raises(RuntimeError, match="so assign it"):
            training.step(form, stale)
    training.step(form, result.scale)


@every_optimizer
def test_max_norm_clips_what_the_last_evaluation_left(cls):
    clipped, reference = Training(cls, limit=100.0), Training(cls)
    torch.manual_seed(0)
    clipped.step("unscale_and_step", 64.0, max_norm=1.0)
    torch.manual_seed(0)
    for _ in range(4):
        reference.closure(8.0)
    reference.optimizer.unscale_and_step(grads_scaled_by=8.0, max_norm=1.0)
    assert bits(clipped.params) == bits(reference.params)
    assert bits(clipped.optimizer.grad_norm) == bits(reference.optimizer.grad_norm)
    assert clipped.optimizer.grad_norm.item() > 1.0


@pytest.mark.parametrize("cls", SOME_RULES)
def test_float16_parameters_are_replayed_in_float32(cls):
    param = Parameter(torch.tensor([0.5, 1.0], dtype=torch.float16))
    twin = Parameter(param.detach().clone())
    optimizer, reference = cls([param]), cls([twin])

    def closure(scale: Any) -> Tensor:
        optimizer.zero_grad()
        loss = (param * torch.tensor([1.0, 2.0**-12], dtype=torch.float16)).sum()
        scale_outputs(loss, scale).backward()
        return loss.detach()

    result = optimizer.unscale_and_step(closure, 2.0**17)
    assert result.scale.item() == 2.0**15
    twin.grad = torch.tensor([1.0, 2.0**-12], dtype=torch.float16)
    reference.step()
    assert bits(param) == bits(twin)


# --- giving up ------------------------------------------------------------------------------------


@on_eager
@both_forms
@every_optimizer
@pytest.mark.parametrize("max_replays", [0, 1, numpy.int64(3)])
def test_replays_are_bounded(form, cls, max_replays):
    training = Training(cls, limit=0.0)
    error = fails(training, form, 2.0**16, max_replays=max_replays)
    assert len(training.scales) == 1 + max_replays
    assert error.reason == "replays"
    assert f"{max_replays} replays" in str(error)
    assert "if the closure does not call zero_grad(), or ignores the scale" in str(error)


@on_eager
@both_forms
def test_replays_are_bounded_by_default(form):
    training = Training(ampopt.SGD, limit=0.0)
    fails(training, form, ampopt.DynamicLossScale(init_scale=2.0**16))
    assert len(training.scales) == 101


@on_eager
@both_forms
@every_optimizer
@pytest.mark.parametrize("loss", [INF, float("nan"), torch.tensor(-INF), torch.tensor([torch.nan])])
def test_a_loss_that_is_not_finite_ends_replay_at_once(form, cls, loss):
    training = Training(cls, loss=loss)
    error = fails(training, form, 2.0**16)
    assert len(training.scales) == 1
    assert error.reason == "loss"
    assert error.parameters == []  # the gradients happen to be finite
    assert f"the loss is {float(loss)}, which" in str(error)


@on_eager
@both_forms
@every_optimizer
def test_a_scale_of_zero_is_not_used_again(form, cls):
    training = Training(cls, limit=0.0)
    error = fails(training, form, torch.tensor(0.0), max_replays=1)
    assert [float(scale) for scale in training.scales] == [0.0, 2.0**-126]
    assert error.reason == "replays"
    error = fails(training, form, torch.tensor(0.0), max_replays=0)
    assert error.parameters == ["group 0, parameter 0", "group 0, parameter 1"]


@on_eager
@both_forms
@every_optimizer
def test_a_static_scale_has_no_smaller_one(form, cls):
    training = Training(cls, limit=0.0)
    error = fails(training, form, ampopt.StaticLossScale(8.0))
    assert error.reason == "replays"
    assert "no smaller scale" in str(error)
    assert len(training.scales) == 1


@both_forms
@every_optimizer
@pytest.mark.parametrize("named", [False, True])
def test_the_error_names_the_parameters_that_overflowed(form, cls, named):
    training = Training(cls, limit=3.5, named=named)
    error = fails(training, form, 1.0, max_replays=0)
    expected = ["weight", "bias"] if named else ["group 0, parameter 0", "group 0, parameter 1"]
    assert error.parameters == expected
    training.limit = 6.0  # only the bias has 6.75
    error = fails(training, form, 1.0, max_replays=0)
    assert error.parameters == expected[1:]
    assert expected[1] in str(error)
    assert isinstance(error, FloatingPointError)
    assert pickle.loads(pickle.dumps(error)).parameters == error.parameters


@both_forms
@pytest.mark.parametrize("cls", [ampopt.SGD, Plain])
def test_the_error_names_a_parameter_that_overflows_only_by_unscaling(form, cls):
    """The scaled gradient is finite, and overflows when it is divided by the scale (trap T5)."""
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = cls([("fine", params[0]), ("huge", params[1])])

    def closure(scale: Any) -> float:
        params[0].grad, params[1].grad = torch.ones(2), torch.full((2,), 1e37)
        return 1.0

    with pytest.raises(NonFiniteGradientError) as caught:
        if form == "unscale_and_step":
            optimizer.unscale_and_step(closure, 2.0**-10, max_replays=2)
        else:
            optimizer.step_after_unscale(
                lambda scale: (closure(scale), *optimizer.unscale(scale)), 2.0**-10, max_replays=2
            )
    assert caught.value.parameters == ["huge"]


@on_eager
@both_forms
@every_optimizer
@pytest.mark.parametrize("kth", [1, 2, 3])
def test_a_closure_that_raises_leaves_everything_as_before(form, cls, kth):
    training = Training(cls, limit=100.0)
    training.optimizer.step(lambda: training.closure(None))
    training.scales.clear()
    before = everything(training.optimizer)
    random = torch.get_rng_state()
    evaluate = training.closure

    def raises(scale: Any) -> Any:
        loss = evaluate(scale)
        if len(training.scales) == kth:
            raise KeyError("data")
        return loss

    training.closure = raises  # type: ignore[method-assign]
    scale = ampopt.DynamicLossScale(init_scale=2.0**16)
    with pytest.raises(KeyError, match="data"):
        training.step(form, scale)
    torch.set_rng_state(random)
    assert everything(training.optimizer) == before
    assert len(training.scales) == kth

    # Neither the scale, nor a pending unscale, nor a request of the attempt is left behind.
    training.closure = evaluate  # type: ignore[method-assign]
    twin = Training(cls, limit=100.0)
    twin.optimizer.step(lambda: twin.closure(None))
    for t in (training, twin):
        torch.manual_seed(0)
        t.optimizer.step(lambda t=t: t.closure(None))
    assert bits(training.params) == bits(twin.params) or cls is HostCounted
    training.step(form, scale)


@on_eager
@both_forms
@every_optimizer
def test_giving_up_leaves_no_scale_for_the_next_plain_step(form, cls):
    training = Training(cls, limit=0.0)
    fails(training, form, 2.0**10, max_replays=1)
    untouched = Training(cls)
    training.limit = INF
    for t in (training, untouched):
        torch.manual_seed(0)
        t.closure(None)
        t.optimizer.step()
    assert bits(training.params) == bits(untouched.params)


def test_without_a_scale_a_closure_may_return_no_loss():
    training = Training(ampopt.SGD)

    def closure(scale: Any) -> None:
        training.closure(scale)

    assert training.optimizer.unscale_and_step(closure).loss is None
    twin = Training(ampopt.SGD)
    twin.optimizer.step(lambda: twin.closure(None))
    assert all(map(torch.equal, training.params, twin.params))


def test_giving_up_restores_containers_and_tensors_of_groups():
    class Hoarder(Plain):
        """Keeps state in tuples, dicts and lists, and a tensor in the param group."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            group = self.param_groups[0]
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("pair", (torch.zeros(2), {"deep": [torch.zeros(3)]}))
                state["pair"][0].add_(1)
                state["pair"][1]["deep"][0].add_(1)
                state["pair"][1]["deep"].append(torch.ones(1))
            group.setdefault("norm", torch.zeros(())).add_(1)
            group["steps"] = group.get("steps", 0) + 1
            with torch.no_grad():
                group["params"][0].add_(1)
            return None if closure is None else closure()

    training = Training(Hoarder)
    training.optimizer.step()
    (holder,) = (training.optimizer.state[training.params[0]]["pair"][0],)
    training.loss = INF
    fails(training, "unscale_and_step", 1.0)
    assert training.optimizer.state[training.params[0]]["pair"][0] is holder


# --- random state ---------------------------------------------------------------------------------


@on_eager
@both_forms
@every_optimizer
def test_replays_may_have_the_random_state_of_the_first_attempt(form, cls):
    torch.manual_seed(1)
    training = Training(cls, limit=100.0)
    training.step(form, 64.0, preserve_rng=True)
    assert len(training.random) == 4
    assert len(set(map(float, training.random))) == 1

    torch.manual_seed(1)
    once = Training(cls)
    once.step(form, 8.0)
    assert bits(training.params) == bits(once.params)
    torch.manual_seed(1)
    free = Training(cls, limit=100.0)
    free.step(form, 64.0)
    assert len(set(map(float, free.random))) == 4


@on_eager
@both_forms
@every_optimizer
def test_giving_up_restores_a_preserved_random_state(form, cls):
    training = Training(cls, limit=0.0)
    before = everything(training.optimizer)
    with pytest.raises(NonFiniteGradientError):
        training.step(form, 64.0, preserve_rng=True, max_replays=2)
    assert everything(training.optimizer) == before


# --- bad closures ---------------------------------------------------------------------------------


def refused(
    call: Callable[[], Any], error: type[Exception], match: str, optimizer: Any, ran: bool
) -> None:
    before = everything(optimizer)
    with pytest.raises(error, match=match):
        call()
    assert everything(optimizer) == before
    assert optimizer._ampopt.phase.pending is None
    if not ran:
        for group in optimizer.param_groups:
            assert all(p.grad is None for p in group["params"])


@on_eager
@both_forms
@every_optimizer
@pytest.mark.parametrize(
    "closure, match",
    [
        (lambda: 1.0, r"closure\(\) must take the scale as its one argument"),
        (lambda scale, other: 1.0, r"closure\(scale, other\) must take the scale"),
        (lambda *, scale: 1.0, "must take the scale"),
        (2.0, "closure must be callable, got float; a scale is passed by name"),
        (ampopt.StaticLossScale(2.0), "callable, got StaticLossScale"),
    ],
)
def test_a_closure_that_cannot_take_the_scale_is_refused_before_it_runs(form, cls, closure, match):
    training = Training(cls)
    if form == "unscale_and_step":
        call = lambda: training.optimizer.unscale_and_step(closure, 2.0)  # noqa: E731
    else:
        call = lambda: training.optimizer.step_after_unscale(closure, 2.0)  # noqa: E731
    refused(call, TypeError, match, training.optimizer, ran=False)


@on_eager
def test_a_scale_as_the_closure_of_a_plain_step_is_refused():
    training = Training(ampopt.SGD)
    match = r"closure must be callable, got StaticLossScale; a scale is passed by name"
    call = lambda: training.optimizer.step(ampopt.StaticLossScale(2.0))  # noqa: E731
    refused(call, TypeError, match, training.optimizer, ran=False)


@on_eager
@both_forms
@every_optimizer
@pytest.mark.parametrize("takes", [lambda s: s, lambda s=None: s, lambda *s: s, lambda s, t=1: s])
def test_a_closure_may_take_the_scale_in_any_way(form, cls, takes):
    training = Training(cls)
    evaluate = training.closure
    training.closure = lambda *given: (takes(*given), evaluate(*given))[1]  # type: ignore[method-assign]
    training.step(form, 2.0)
    assert training.scales == [2.0]


@on_eager
@every_optimizer
@pytest.mark.parametrize(
    "wrong, got",
    [
        (None, "NoneType"),
        ("loss", "str"),
        ((1.0, 2.0), "tuple"),
        (torch.ones(2), r"a tensor of shape \(2,\)"),
        (torch.ones(0), r"a tensor of shape \(0,\)"),
    ],
)
def test_a_closure_that_returns_no_loss_is_refused(cls, wrong, got):
    training = Training(cls)

    def closure(scale: Any) -> Any:
        training.closure(scale)
        return wrong

    call = lambda: training.optimizer.unscale_and_step(closure, 2.0)  # noqa: E731
    random = torch.get_rng_state()
    before = bits(training.params), state_of(training.optimizer)
    with pytest.raises(TypeError, match=f"closure must return the unscaled loss.*got {got}"):
        call()
    assert (bits(training.params), state_of(training.optimizer)) == before
    torch.set_rng_state(random)
    training.loss = None
    training.step("unscale_and_step", 2.0)


FLAG = torch.zeros(())


@on_eager
@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
@pytest.mark.parametrize(
    "verdict, error, match",
    [
        (lambda loss, flag, scale: loss, TypeError, r"\(loss, found_inf, scale\), got Tensor"),
        (lambda loss, flag, scale: (loss, flag), TypeError, "got tuple"),
        (lambda loss, flag, scale: [loss, flag, scale], TypeError, "got list"),
        (lambda loss, flag, scale: (None, flag, scale), TypeError, "unscaled loss"),
        (lambda loss, flag, scale: (loss, None, scale), TypeError, "its found_inf is None"),
        (lambda loss, flag, scale: (loss, torch.ones(2), scale), TypeError, "its found_inf is"),
        (lambda loss, flag, scale: (loss, flag, "2.0"), TypeError, "its scale is '2.0'"),
        (lambda loss, flag, scale: (loss, flag, -2.0), ValueError, "positive"),
    ],
)
def test_a_closure_of_step_after_unscale_must_return_flag_and_scale(cls, verdict, error, match):
    training = Training(cls)
    before = bits(training.params), state_of(training.optimizer)
    with pytest.raises(error, match=match):
        training.optimizer.step_after_unscale(
            lambda scale: verdict(*training.unscaling_closure(scale)), 2.0
        )
    assert (bits(training.params), state_of(training.optimizer)) == before
    training.step("step_after_unscale", 2.0)  # nothing is pending


@on_eager
@every_optimizer
def test_a_closure_of_step_after_unscale_must_call_unscale(cls):
    training = Training(cls)
    before = bits(training.params), state_of(training.optimizer)
    with pytest.raises(RuntimeError, match=r"must call unscale\(grads_scaled_by=scale\)"):
        training.optimizer.step_after_unscale(
            lambda scale: (training.closure(scale), FLAG, scale), 2.0
        )
    assert (bits(training.params), state_of(training.optimizer)) == before


@on_eager
@every_optimizer
def test_a_closure_of_unscale_and_step_must_not_call_unscale(cls):
    """The gradients would be divided by the scale twice, without an error."""
    training = Training(cls)
    before = bits(training.params), state_of(training.optimizer)
    with pytest.raises(RuntimeError, match="belongs to step_after_unscale"):
        training.optimizer.unscale_and_step(lambda scale: training.unscaling_closure(scale)[0], 2.0)
    assert (bits(training.params), state_of(training.optimizer)) == before
    training.step("unscale_and_step", 2.0)


@on_eager
@every_optimizer
def test_step_after_unscale_with_a_closure_needs_the_scale(cls):
    training = Training(cls)
    refused(
        lambda: training.optimizer.step_after_unscale(training.unscaling_closure),
        TypeError,
        "needs current_grad_scale",
        training.optimizer,
        ran=False,
    )


@pytest.mark.parametrize("given", ["found_inf", "scale"])
def test_step_after_unscale_says_that_a_result_of_unscale_is_no_closure(given):
    training = Training(ampopt.SGD)
    scale = ampopt.DynamicLossScale(init_scale=2.0)
    training.closure(scale)
    unscaled = training.optimizer.unscale(scale)
    before = everything(training.optimizer)
    with pytest.raises(TypeError, match=r"takes a closure, got .*call step_after_unscale\(\)"):
        training.optimizer.step_after_unscale(getattr(unscaled, given))
    assert everything(training.optimizer) == before
    training.optimizer.step_after_unscale()


def test_step_after_unscale_without_a_closure_takes_no_scale():
    training = Training(ampopt.SGD)
    training.closure(2.0)
    training.optimizer.unscale(2.0)
    with pytest.raises(TypeError, match="current_grad_scale only with a closure"):
        training.optimizer.step_after_unscale(current_grad_scale=2.0)
    training.optimizer.step_after_unscale()


@on_eager
@both_forms
@pytest.mark.parametrize("bad", [-1, 1.5, True, "10", None])
def test_max_replays_is_a_whole_number(form, bad):
    training = Training(ampopt.SGD)
    refused(
        lambda: training.step(form, 2.0, max_replays=bad),
        ValueError if bad == -1 else TypeError,
        f"max_replays must be .*, got {bad!r}",
        training.optimizer,
        ran=False,
    )


def test_each_evaluation_of_a_step_with_several_is_replayed():
    """A step of sharpness-aware minimization has two evaluations and one update."""

    class Twice(Plain):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            assert closure is not None
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(1.0)
            closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(1.0)
            loss = closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(0.125 * p.grad)
            return loss

    training, reference = Training(Twice, limit=100.0), Training(Twice)
    result = training.step("unscale_and_step", 64.0)
    assert result.loss.item() == 11.75
    reference.optimizer.step(lambda: reference.closure(None))
    assert bits(training.params) == bits(reference.params)
    assert_finite_and_lowered(training.scales)

    training.limit = 0.0
    fails(training, "unscale_and_step", result.scale, max_replays=1)


def assert_finite_and_lowered(scales: Sequence[Any]) -> None:
    numbers = [float(scale) for scale in scales]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] < numbers[0]
