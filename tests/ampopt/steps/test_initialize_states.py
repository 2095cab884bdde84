"""``initialize_states`` makes what a skipped first step leaves, and changes nothing else."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import EVERY_RULE, Plain, Signed
from support.strategies import fewer
from torch import nn
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

import ampopt
from ampopt.testing.bits import bits, everything

pytestmark = [
    pytest.mark.usefixtures("backend"),
    # The host makes states; kernels have no part in it.
    pytest.mark.parametrize("backend", ["eager"], indirect=True),
]

SHAPES = ((64, 128), (3, 2), (0, 2), (2, 2))  # the first is large enough for small states
WITH_OTHERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (ampopt.AdamW, {"amsgrad": True}),
    (ampopt.SGD, {"momentum": 0.5, "nesterov": True}),
    (ampopt.RMSprop, {"centered": True, "momentum": 0.5}),
    (ampopt.Adagrad, {"initial_accumulator_value": 0.1}),
    (ampopt.Muon, {}),
    (ampopt.SparseAdam, {}),
)
EACH = [*((cls, {}) for cls in EVERY_RULE), *WITH_OTHERS]


@st.composite
def options(draw: st.DrawFn) -> tuple[torch.dtype, dict[str, Any]]:
    """A dtype of parameters, and the options of a rule."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    chosen: dict[str, Any] = {"state_bits": draw(st.sampled_from([32, 16, 8]))}
    chosen["master_weights"] = masters = draw(st.booleans())
    if masters:
        chosen["master_bits"] = draw(st.sampled_from([32, 24]))
    else:
        chosen["param_rounding"] = draw(st.sampled_from(["nearest", "stochastic"]))
    return dtype, chosen


def params_of(dtype: torch.dtype) -> list[Parameter]:
    params = [Parameter((torch.arange(m * n).reshape(m, n) / 64).to(dtype)) for m, n in SHAPES]
    return [*params, Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)]


def give_gradients(optimizer: Any, params: list[Parameter], last: float = 1.0) -> None:
    for p in params:
        if p.requires_grad:
            grad = torch.full_like(p, last)
            p.grad = grad.to_sparse(1) if isinstance(optimizer, ampopt.SparseAdam) else grad


@pytest.mark.parametrize(("cls", "of_class"), EACH)
@fewer(0.1)
@given(chosen=options(), present=st.sets(st.integers(0, len(SHAPES) - 1)))
def test_it_makes_what_a_skipped_first_step_leaves(cls, of_class, chosen, present):
    dtype, own = chosen
    own = own if issubclass(cls, ampopt.ElementwiseOptimizer) and cls is not Signed else {}
    (ours, params), (skipped, others) = (
        (cls(params, **of_class, **own), params) for params in (params_of(dtype), params_of(dtype))
    )
    give_gradients(skipped, others, float("inf"))
    assert skipped.unscale_and_step(grads_scaled_by=1.0).skipped
    for place in present:
        params[place].grad = torch.ones_like(params[place])
    before = bits(params), [p.grad for p in params], torch.get_rng_state()
    gradients = bits([p.grad for p in params])
    ours.initialize_states()
    assert bits(params) == before[0] and all(
        p.grad is g for p, g in zip(params, before[1], strict=True)
    )
    assert bits([p.grad for p in params]) == gradients
    assert torch.equal(torch.get_rng_state(), before[2])
    assert bits(ours.state_dict()) == bits(skipped.state_dict())
    once = bits(ours.state_dict())
    ours.initialize_states()
    assert bits(ours.state_dict()) == once


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.Adafactor, ampopt.Muon])
def test_it_changes_no_state_that_exists_and_no_later_step(cls):
    histories = []
    for initializes in (False, True):
        params = params_of(torch.float32)
        optimizer = cls(params)
        for count in range(1, 1 + len(SHAPES)):
            give_gradients(optimizer, params[:count])
            optimizer.unscale_and_step(grads_scaled_by=2.0)
            before = {p: bits(dict(optimizer.state[p])) for p in params[:count]}
            if initializes:
                optimizer.initialize_states()
            assert {p: bits(dict(optimizer.state[p])) for p in params[:count]} == before
        histories.append(bits(params))
    assert histories[0] == histories[1]


def training(steps: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4)).bfloat16()
    optimizer = ampopt.AdamW(model.parameters(), master_weights=True, state_bits=8)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 256).reshape(4, 64).bfloat16() * (step + 1)
        ampopt.scale_outputs(model(inputs).float().square().mean(), 8.0).backward()
        optimizer.unscale_and_step(grads_scaled_by=8.0)


def test_a_strict_load_fills_the_states_and_training_goes_on_bitwise():
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = training(3)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    other, resumed = training(0)
    before = bits(list(other.parameters()))
    resumed.initialize_states()
    made = get_state_dict(other, resumed)
    assert bits(list(other.parameters())) == before
    assert [s["step"].item() for s in resumed.state.values()] == [0.0] * 4

    def layout(tree: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype, t.device), tree)

    assert layout(made[1]["state"]) == layout(saved[1]["state"])
    set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    for each in ((model, optimizer), (other, resumed)):
        train(*each, 2)
    assert bits(list(other.parameters())) == bits(list(model.parameters()))
    assert everything(resumed)["state"] == everything(optimizer)["state"]


@pytest.mark.parametrize("after", ["unscale", "accumulate"])
def test_it_is_refused_before_a_step_that_is_due(param, after):
    optimizer = ampopt.AdamW([param])
    getattr(optimizer, after)(grads_scaled_by=2.0)
    with pytest.raises(RuntimeError, match=f"^initialize_states: .*{after}"):
        optimizer.initialize_states()
    assert not optimizer.state
    optimizer.step()
    optimizer.initialize_states()


@pytest.mark.parametrize(
    "make",
    [
        ampopt.LBFGS,
        Plain,
        lambda params: ampopt.AdamW(params, differentiable=True),
        lambda params: ampopt.SGD(params, momentum=0.5, dampening=0.5),
    ],
    ids=["LBFGS", "own step", "differentiable", "dampening"],
)
def test_a_step_that_makes_its_states_itself_is_said(param, make):
    optimizer = make([param])
    with pytest.raises(NotImplementedError, match="^initialize_states: "):
        optimizer.initialize_states()
    assert not optimizer.state
