"""LBFGS under a loss scale: torch's steps, with finite gradients only."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fixtures import either_host
from support.strategies import fewer, powers_of_two
from support.torch_options import OPTION_SETS
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt import NonFiniteGradientError, scale_outputs
from ampopt.testing.bits import bits, everything

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")

INF = float("inf")


class Valley:
    """Minimizes Rosenbrock's function; gradients above a limit overflow."""

    def __init__(
        self, cls: Any, limit: float = INF, start: tuple[float, ...] = (-1.25, 2.0), **options: Any
    ) -> None:
        self.params = [Parameter(torch.tensor(x)) for x in start]
        self.optimizer = cls(self.params, **options)
        self.limit = limit
        self.scales: list[Any] = []
        self.fails_at: int | None = None
        self.spoils_at: int | None = None

    def closure(self, scale: Any = None) -> Tensor:
        self.scales.append(scale)
        if len(self.scales) == self.fails_at:
            raise KeyError("evaluation")
        self.optimizer.zero_grad()
        x, y = self.params
        loss = (1 - x) ** 2 + 100 * (y - x * x) ** 2
        scale_outputs(loss, scale).backward()
        for p in self.params:
            assert p.grad is not None
            p.grad[p.grad.abs() > self.limit] = INF
        if self.spoils_at is not None and len(self.scales) >= self.spoils_at:
            self.params[1].grad = torch.tensor(torch.nan)
        return loss.detach()

    def unscaling_closure(self, scale: Any) -> tuple[Any, Any, Any]:
        loss = self.closure(scale)
        return (loss, *self.optimizer.unscale(grads_scaled_by=scale))

    def step(self, form: str, scale: Any, **options: Any) -> Any:
        if form == "unscale_and_step":
            return self.optimizer.unscale_and_step(self.closure, scale, **options)
        return self.optimizer.step_after_unscale(self.unscaling_closure, scale, **options)


both_forms = pytest.mark.parametrize("form", ["unscale_and_step", "step_after_unscale"])
line_searches = pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
on_eager = pytest.mark.parametrize("backend", ["eager"], indirect=True)
"""For tests of what the host does, in which kernels have no part."""


@on_eager
@pytest.mark.parametrize("options", [s for s in OPTION_SETS if s.name == "LBFGS"], ids=str)
def test_lbfgs_is_torchs(options):
    target = torch.linspace(-1.0, 1.0, 5)

    def train(optimizer_of: Any) -> Any:
        p = torch.zeros(5, requires_grad=True)
        optimizer = optimizer_of([p])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ((p - target) ** 4).sum() + (p.prod() - 1) ** 2
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(4)]
        return bits([p, losses])

    assert train(options.ours) == train(options.torchs)


def options_of(line_search: str | None) -> dict[str, Any]:
    lr = 1.0 if line_search else 2.0**-10
    return {"lr": lr, "max_iter": 4, "history_size": 3, "line_search_fn": line_search}


@both_forms
@line_searches
@fewer(0.1)
@given(powers_of_two(-10, 20), st.integers(1, 3))
def test_a_power_of_two_changes_not_one_bit_of_torchs_steps(form, line_search, number, steps):
    options = options_of(line_search)
    ours, theirs = Valley(ampopt.LBFGS, **options), Valley(torch.optim.LBFGS, **options)
    scale: Any = ampopt.DynamicLossScale(init_scale=number, growth_interval=2)
    for step in range(1, steps + 1):
        result = ours.step(form, scale)
        loss = theirs.optimizer.step(theirs.closure)
        scale = result.scale
        assert bits(result.loss) == bits(loss)
        # One step counts once, however many evaluations it took.
        assert scale.item() == number * 2.0 ** (step // 2)
    assert bits(ours.params) == bits(theirs.params)
    ours_state, theirs_state = (dict(v.optimizer.state[v.params[0]]) for v in (ours, theirs))
    assert bits(ours_state) == bits(theirs_state)
    assert ours_state["func_evals"] == len(ours.scales)


@both_forms
def test_an_overflow_inside_the_line_search_is_replayed(form):
    options = options_of("strong_wolfe")
    free = Valley(torch.optim.LBFGS, **options)
    ours = Valley(ampopt.LBFGS, limit=2.0**18, **options)
    scale: Any = 2.0**8  # the first gradients are some 220, those of later trials more
    for _ in range(5):
        scale = ours.step(form, scale).scale
        free.optimizer.step(free.closure)
    numbers = [float(s) for s in ours.scales]
    assert numbers[1] == numbers[0] == 2.0**8  # the first evaluations are fine
    assert numbers[-1] < numbers[0]
    assert len(ours.scales) > len(free.scales)
    assert bits(ours.params) == bits(free.params)


def snapshot_with_tensors(valley: Valley) -> tuple[Any, dict[str, Any]]:
    state = dict(valley.optimizer.state[valley.params[0]])
    return everything(valley.optimizer), state


@on_eager
@both_forms
@line_searches
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_everything_is_as_before_when_an_evaluation_fails(form, line_search, steps_before, at):
    """Parameters, histories and counts are restored, in a first step and in a later one."""
    valley = Valley(ampopt.LBFGS, **options_of(line_search))
    for _ in range(steps_before):
        valley.step(form, 2.0)
    before, held = snapshot_with_tensors(valley)
    evaluated = len(valley.scales)

    valley.fails_at = evaluated + at
    with pytest.raises(KeyError, match="evaluation"):
        valley.step(form, 2.0)
    assert len(valley.scales) == evaluated + at
    assert everything(valley.optimizer) == before

    valley.fails_at = None
    valley.spoils_at = len(valley.scales) + at
    with pytest.raises(NonFiniteGradientError) as caught:
        valley.step(form, 2.0, max_replays=2)
    assert caught.value.reason == "replays"
    assert caught.value.parameters == ["group 0, parameter 1"]
    assert everything(valley.optimizer) == before
    for key, value in held.items():
        if isinstance(value, Tensor):  # in place: whoever holds it sees the old values
            assert valley.optimizer.state[valley.params[0]][key] is value

    # And goes on as if none of it had happened.
    valley.spoils_at = None
    twin = Valley(ampopt.LBFGS, **options_of(line_search))
    for _ in range(steps_before + 1):
        twin.step(form, 2.0)
    valley.step(form, 2.0)
    assert bits(valley.params) == bits(twin.params)
    assert bits(dict(valley.optimizer.state[valley.params[0]])) == bits(
        dict(twin.optimizer.state[twin.params[0]])
    )


@both_forms
def test_a_loss_that_is_not_finite_is_named(form):
    valley = Valley(ampopt.LBFGS, start=(1e30, 0.0))
    before = everything(valley.optimizer)
    with pytest.raises(NonFiniteGradientError) as caught:
        valley.step(form, 1.0)
    assert caught.value.reason == "loss"
    assert everything(valley.optimizer) == before


def test_a_tuple_of_params_is_restored_when_an_evaluation_fails():
    valley = Valley(ampopt.LBFGS)
    group = valley.optimizer.param_groups[0]
    group["params"] = tuple(group["params"])
    before, valley.fails_at = everything(valley.optimizer), 3
    with pytest.raises(KeyError, match="evaluation"):
        valley.step("unscale_and_step", 2.0)
    assert everything(valley.optimizer) == before


@both_forms
def test_torchs_own_lbfgs_applies_the_overflow(form):
    """Without replay, the same closure makes torch's LBFGS end in NaN."""
    theirs = Valley(torch.optim.LBFGS, limit=100.0)
    theirs.optimizer.step(theirs.closure)
    assert not all(p.isfinite() for p in theirs.params)
    ours = Valley(ampopt.LBFGS, limit=2.0**11)
    ours.step(form, 2.0**8)
    assert all(p.isfinite() for p in ours.params)


@pytest.mark.parametrize(
    "call",
    [
        lambda opt: opt.unscale_and_step(grads_scaled_by=2.0),
        lambda opt: opt.unscale_and_step(),
        lambda opt: (opt.unscale(2.0), opt.step_after_unscale()),
    ],
)
def test_a_missing_closure_is_refused(call):
    valley = Valley(ampopt.LBFGS)
    valley.closure(2.0)
    before = everything(valley.optimizer)
    with pytest.raises(TypeError, match="LBFGS needs a closure"):
        call(valley.optimizer)
    assert everything(valley.optimizer) == before


def test_a_subclass_whose_step_needs_no_closure_is_not_required_to_have_one():
    class Resting(ampopt.LBFGS):
        def step(self, closure=None):  # type: ignore[override]
            return None if closure is None else super().step(closure)

    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    result = Resting([param]).unscale_and_step(grads_scaled_by=2.0)
    assert result.loss is None
    assert param.tolist() == [1.0] * 3


def test_without_a_scale_it_is_torchs_step():
    ours, theirs = Valley(ampopt.LBFGS), Valley(torch.optim.LBFGS)
    result = ours.optimizer.unscale_and_step(ours.closure)
    loss = theirs.optimizer.step(theirs.closure)
    assert result.scale is None
    assert bits(result.loss) == bits(loss)
    assert bits(ours.params) == bits(theirs.params)
    plain = Valley(ampopt.LBFGS)
    assert bits(plain.optimizer.step(plain.closure)) == bits(loss)
    assert bits(plain.params) == bits(theirs.params)


def test_max_norm_clips_every_evaluation():
    ours = Valley(ampopt.LBFGS, lr=0.5, max_iter=1)
    ours.optimizer.unscale_and_step(ours.closure, 4.0, max_norm=1.0)
    theirs = Valley(torch.optim.LBFGS, lr=0.5, max_iter=1)

    def clipped() -> Tensor:
        loss = theirs.closure()
        torch.nn.utils.clip_grad_norm_(theirs.params, 1.0)
        return loss

    theirs.optimizer.step(clipped)
    for p, twin in zip(ours.params, theirs.params, strict=True):
        torch.testing.assert_close(p, twin)


def test_float16_gradients_are_refused_with_the_way_out():
    param = Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = ampopt.LBFGS([param])
    before = everything(optimizer)

    def closure(scale: Any) -> float:
        param.grad = torch.ones(2, dtype=torch.float16)
        return 1.0

    with pytest.raises(RuntimeError, match="group 0, parameter 0 is float16.*torch.autocast"):
        optimizer.unscale_and_step(closure, 2.0)
    assert everything(optimizer) == before


@pytest.mark.parametrize("at", [0, 1, 3])
def test_saving_and_loading_at_any_point_changes_nothing(at):
    """Also the history, which torch's loader casts to the dtype of the first parameter."""
    trained = []
    for saves in (False, True):
        params = [
            Parameter(torch.tensor(-1.25, dtype=torch.bfloat16)),
            Parameter(torch.tensor(2.0)),
        ]
        valley = Valley(ampopt.LBFGS, **options_of("strong_wolfe"))
        valley.params = params
        valley.optimizer = ampopt.LBFGS(params, **options_of("strong_wolfe"))
        for step in range(4):
            if saves and step == at:
                saved = copy.deepcopy(valley.optimizer.state_dict())
                valley.optimizer = ampopt.LBFGS(params, **options_of("strong_wolfe"))
                valley.optimizer.load_state_dict(saved)
            valley.step("unscale_and_step", 2.0)
        trained.append((bits(params), bits(dict(valley.optimizer.state[params[0]]))))
    assert trained[0] == trained[1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_step_as_the_original_does(duplicate):
    """A copy of torch's LBFGS has lost its parameters."""
    valley = Valley(ampopt.LBFGS)
    valley.step("unscale_and_step", 2.0)
    twin = duplicate(valley)
    assert twin.optimizer.param_groups[0]["params"][0] is twin.params[0]
    for v in (valley, twin):
        v.step("unscale_and_step", 2.0)
    assert bits(valley.params) == bits(twin.params)
