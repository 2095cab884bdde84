"""Steps that change what is stepped: a plan that is kept steps as a new one."""

import gc
import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from support.gpus import ON_A_GPU
from support.langevin import Langevin
from support.strategies import fewer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import assert_same, everything

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
MIXED = (FLOAT32, torch.float16, BFLOAT16)
KINDS: dict[str, tuple[Any, tuple[torch.dtype, ...], dict[str, Any]]] = {
    "AdamW": (ampopt.AdamW, (FLOAT32, torch.float64), {}),
    "masters": (ampopt.AdamW, MIXED, {"master_weights": True}),
    "rounded stochastically": (ampopt.SGD, (BFLOAT16,), {"param_rounding": "stochastic"}),
    "complex": (ampopt.AdamW, (torch.complex64, FLOAT32), {}),
    "half precision": (ampopt.Lion, (FLOAT32, BFLOAT16), {}),
    "several scalar states": (ampopt.NAdam, (FLOAT32,), {}),
    "states of 8 bits": (ampopt.AdamW, (FLOAT32,), {"state_bits": 8}),
    "sums": (ampopt.NovoGrad, (FLOAT32,), {}),
    "norms of parameters": (ampopt.LAMB, (FLOAT32,), {}),
    "row and column statistics": (ampopt.Adafactor, (FLOAT32,), {}),
    "random numbers": (Langevin, (FLOAT32,), {}),
}
WITH_COLUMNS = (
    *("masters", "states of 8 bits", "sums", "row and column statistics"),
    "random numbers",
)
"""Those that differ in the columns of a kernel's table."""
SHAPES = [(3,), (2, 4), (4, 2), (2, 4), (5,), (2, 4)]


class Step(NamedTuple):
    """One step of a training.

    Attributes:
        present: which parameters have gradients.
        how: by which calls the step is made.
        size: a factor of the gradients.
        overflows: the parameter whose gradient overflows; -1 for none.
        change: what is done before the step; a key of :data:`REPLACED`.
    """

    present: frozenset[int]
    how: str
    size: float
    overflows: int
    change: str = "nothing"


def replace_states(params: list[Parameter], optimizer: Any, index: int, n: int) -> None:
    """Replace ``n`` states of a parameter by equal tensors."""
    state = optimizer.state.get(params[index], {})
    for name in [name for name, value in state.items() if isinstance(value, torch.Tensor)][:n]:
        state[name] = state[name].clone(memory_format=torch.preserve_format)


def lay_gradient_out_otherwise(params: list[Parameter]) -> None:
    if params[1].grad is not None:
        params[1].grad = params[1].grad.t().contiguous().t()


def add_group(params: list[Parameter], optimizer: Any) -> None:
    params.append(Parameter(torch.ones(2, 3, dtype=params[0].dtype)))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.5})
    appear(params, optimizer)


def appear(params: list[Parameter], optimizer: Any) -> None:
    params[-1].grad = torch.ones_like(params[-1])


REPLACED: dict[str, Any] = {
    "nothing": lambda params, optimizer: None,
    "a state": lambda params, optimizer: replace_states(params, optimizer, 2, 1),
    "all states": lambda params, optimizer: replace_states(params, optimizer, 1, 9),
    "memory": lambda params, optimizer: setattr(params[3], "data", params[3].data.clone()),
    "no state": lambda params, optimizer: optimizer.state.pop(params[0], None),
    "a group more": add_group,
    "layout of a gradient": lambda params, optimizer: lay_gradient_out_otherwise(params),
}
"""What is done to parameters, gradients and states before a step."""


STEPS = st.builds(
    Step,
    st.frozensets(st.sampled_from(range(len(SHAPES)))),
    st.sampled_from(["at once", "clipped", "unscaled first", "accumulated", "plain", "closure"]),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.sampled_from([-1, -1, -1, 0, 1, 5]),
    st.sampled_from(sorted(REPLACED)),
)


TELLING = [
    Step(frozenset({0, 2, 3, 5}), "at once", 1.0, -1),
    Step(frozenset({1, 2, 3, 4, 5}), "clipped", 4.0, -1),
    Step(frozenset({0, 1, 3}), "unscaled first", 1.0, -1),
    Step(frozenset({0, 2, 5}), "clipped", 4.0, 5),
    Step(frozenset({1, 2, 5}), "at once", 1.0, -1),
]
"""Steps between which step counts differ, and neighbours in one buffer gain and lose gradients."""
ONE_DTYPE = [Step(frozenset({0}), "at once", 0.5, -1), Step(frozenset({1}), "at once", 0.5, -1)]
"""The first gradients are float32, and the second ones float64 for some kinds; so is their norm."""
ALL = frozenset(range(len(SHAPES)))
GROWING = [
    Step(ALL - {2, 4}, "at once", 1.0, -1),
    Step(ALL - {4}, "at once", 0.5, -1, "a group more"),
    Step(ALL, "clipped", 4.0, -1, "a state"),
    Step(ALL - {2}, "at once", 1.0, 0, "all states"),
    Step(ALL, "at once", 1.0, -1, "memory"),
    Step(ALL, "clipped", 0.5, -1, "layout of a gradient"),
    Step(ALL, "at once", 1.0, -1, "a state"),
]
"""Each step but the first changes what another plan was made of."""


def trained(kind: str, steps: list[Step], watched: bool, *, forgets: bool) -> list[Any]:
    """What a training leaves after each step.

    Args:
        kind: the key of :data:`KINDS`.
        steps: the steps.
        watched: whether there are a watch and a limit of the norm.
        forgets: whether every step makes a new plan and new rows.
    """
    cls, dtypes, options = KINDS[kind]
    params = []
    for i, shape in enumerate(SHAPES):
        values = torch.linspace(-1, 2, torch.Size(shape).numel()).view(shape)
        params.append(Parameter(values.to(dtypes[i % len(dtypes)])))
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.25}]
    optimizer = cls(groups, lr=0.5, **options)
    watch = ampopt.Watch(optimizer) if watched else None
    if watched:
        ampopt.skip_when(optimizer, norm=1e4)
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=2)
    after = []
    for step in steps:
        for i, p in enumerate(params):
            p.grad = None
            if i in step.present:
                # Their squares are exact, so a norm does not depend on the order of the sum.
                grad = (torch.arange(float(p.numel())) % 5 - 2 + i % 3) * step.size
                grad[-1] = float("inf") if step.overflows == i else grad[-1]
                p.grad = grad.view(p.shape).to(p.dtype)
        REPLACED[step.change](params, optimizer)
        if forgets:
            optimizer._ampopt.runner.plan = None
        if step.how == "at once":
            scale = optimizer.unscale_and_step(grads_scaled_by=scale).scale
        elif step.how == "clipped":
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=0.75).scale
        elif step.how == "unscaled first":
            scale = optimizer.unscale(grads_scaled_by=scale).scale
            optimizer.step_after_unscale()
        elif step.how == "accumulated":
            optimizer.accumulate(grads_scaled_by=scale)
            scale = optimizer.unscale_and_step(grads_scaled_by=scale).scale
        elif step.how == "closure" and step.overflows < 0:
            closure = lambda *_: torch.ones(())  # noqa: E731
            scale = optimizer.unscale_and_step(closure, grads_scaled_by=scale).scale
        elif step.overflows < 0:
            optimizer.step()
        after.append(everything(optimizer))
        after.append([scale.state_dict(), watch and watch.read()])
    return after


@pytest.mark.parametrize(
    "kind, backend",
    [
        *itertools.product(KINDS, ("eager", "compiled")),
        *((kind, "triton") for kind in WITH_COLUMNS),
        *(pytest.param(kind, *ON_A_GPU.values, marks=ON_A_GPU.marks) for kind in KINDS),
    ],
    indirect=["backend"],
)
def test_a_plan_that_is_kept_steps_as_a_new_one(kind, backend):
    # The interpreter takes ten times as long, so it runs the examples below only.
    phases = [Phase.explicit] if backend == "triton" else [Phase.explicit, Phase.generate]

    @settings(fewer(0.3), phases=phases)
    @example(TELLING, True)
    @example(ONE_DTYPE, True)
    @example(GROWING, False)
    @given(st.lists(STEPS, min_size=3, max_size=4), st.booleans())
    def check(steps, watched):
        torch.manual_seed(0)
        random.seed(0)
        kept, new = (trained(kind, steps, watched, forgets=forgets) for forgets in (False, True))
        for number, (ours, expected) in enumerate(zip(kept, new, strict=True)):
            assert_same(ours, expected, f"after step {number // 2}")

    check()


def stepped(optimizer: Any, present: Iterable[Parameter]) -> None:
    """Take one step in which only the parameters ``present`` have gradients."""
    optimizer.zero_grad()
    for p in present:
        p.grad = torch.ones_like(p)
    optimizer.unscale_and_step(grads_scaled_by=2.0)


def reasons(optimizer: Any) -> list[str]:
    """The reasons for new plans since the last call of this function."""
    runner = optimizer._ampopt.runner
    found = list(runner.reasons.elements())
    runner.reasons.clear()
    return found


def of_parameters(n: int, dtype: torch.dtype = FLOAT32) -> tuple[list[Parameter], Any]:
    params = [Parameter(torch.ones(2, 3, dtype=dtype)) for _ in range(n)]
    return params, ampopt.AdamW(params)


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("dtype", [FLOAT32, torch.complex64], ids=str)
def test_sets_that_alternate_or_are_random_need_no_new_plan(dtype, backend):
    params, optimizer = of_parameters(6, dtype)
    stepped(optimizer, params)
    assert reasons(optimizer) == ["the first step"]
    draw = random.Random(0)
    for present in ([], params[:1], params[1:], *(draw.sample(params, 4) for _ in range(4))):
        stepped(optimizer, present)
    params[2].requires_grad_(False)
    stepped(optimizer, params[:2])
    stepped(optimizer, params)
    assert reasons(optimizer) == []


def replace_state(params: list[Parameter], optimizer: Any) -> None:
    replace_states(params, optimizer, 1, 1)


def move_state(params: list[Parameter], optimizer: Any) -> None:
    average = optimizer.state[params[1]]["exp_avg"]
    average.data = average.data.clone()


CHANGES: dict[str, tuple[Any, str]] = {
    "moved": (
        lambda params, _: setattr(params[1], "data", params[1].data.clone()),
        "group 0, parameter 1 was moved to other memory",
    ),
    "state replaced": (replace_state, "a state of group 0, parameter 1 was replaced"),
    "state moved": (move_state, "a state of group 0, parameter 1 was moved to other memory"),
    "state of another dtype": (
        lambda params, optimizer: setattr(
            optimizer.state[params[1]]["exp_avg"], "data", torch.ones(2, 3, dtype=BFLOAT16)
        ),
        "a state of group 0, parameter 1 has another shape, dtype or layout",
    ),
    "rule": (
        lambda _, optimizer: setattr(optimizer, "rule", replace(optimizer.rule)),
        "the rule was replaced",
    ),
    "state removed": (
        lambda params, optimizer: optimizer.state.pop(params[1]),
        "states were added to optimizer.state, or removed",
    ),
    "group": (
        lambda _, optimizer: optimizer.add_param_group({"params": [Parameter(torch.ones(3))]}),
        "a param group was added or removed",
    ),
    "first gradient": (appear, "group 0, parameter 11 has a gradient for the first time"),
    "loaded": (
        lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        "optimizer.state was replaced",
    ),
    "flag": (
        lambda _, optimizer: optimizer.param_groups[0].update(weight_decay=0.0),
        "weight_decay was turned on or off in a group",
    ),
    "option": (
        lambda _, optimizer: optimizer.param_groups[0].update(master_weights=True),
        "master_weights of a group was changed",
    ),
    "type of a number": (
        lambda _, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
        "a hyperparameter of a group has another type, such as a tensor in place of a float",
    ),
    "list": (
        lambda params, optimizer: optimizer.param_groups[0].update(params=list(params)),
        "the list of parameters of group 0 was replaced",
    ),
    "removed": (
        lambda _, optimizer: optimizer.param_groups[0]["params"].pop(0),
        "parameters of a group were replaced or removed, or are in another order",
    ),
}


def test_what_no_plan_depends_on_makes_no_new_one():
    params, optimizer = of_parameters(3)
    stepped(optimizer, params)
    reasons(optimizer)
    watch, condition = ampopt.Watch(optimizer), ampopt.skip_when(optimizer, norm=1e4)
    for n in range(4):
        optimizer.state[params[1]]["mine"] = n  # an entry of the user's own
        optimizer.state[f"mine {n}"] = torch.ones(n)
        optimizer.param_groups[0]["mine"] = n
        stepped(optimizer, params)
    watch.close()
    condition.remove()
    stepped(optimizer, params)
    assert reasons(optimizer) == []
    assert watch.read()["steps"] == 4


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_is_made_again_says_why(change, implementation):
    apply, reason = CHANGES[change]
    params, optimizer = of_parameters(12)
    stepped(optimizer, params[:-1])
    stepped(optimizer, params[:2])
    assert reasons(optimizer) == ["the first step"]
    apply(params, optimizer)
    with_grads = params if change == "first gradient" else params[:-1]
    stepped(optimizer, with_grads)
    stepped(optimizer, with_grads[1:])
    assert reasons(optimizer) == [reason]


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_a_new_plan_has_rows_of_parameters_whose_gradients_come_again_later(backend):
    params, optimizer = of_parameters(12)
    for n in range(0, 12, 4):  # four have their first gradients
        stepped(optimizer, params[n : n + 4])
    assert len(reasons(optimizer)) == 3
    stepped(optimizer, params)
    assert reasons(optimizer) == []
    assert [int(optimizer.state[p]["step"]) for p in params] == [2] * 12


@pytest.mark.parametrize("how", ["all states", "one state"])
def test_a_parameter_without_a_gradient_gets_no_states_in_a_new_plan(how):
    params, optimizer = of_parameters(3)
    stepped(optimizer, params)
    optimizer.state.pop(params[0]) if how == "all states" else optimizer.state[params[0]].pop(
        "step"
    )
    before = dict(optimizer.state.get(params[0], {}))
    stepped(optimizer, params[1:])
    assert_same(dict(optimizer.state.get(params[0], {})), before, "after a step without it")


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_the_memory_of_a_replaced_state_of_a_large_parameter_is_freed(backend):
    params = [Parameter(torch.ones(30_000)), *(Parameter(torch.ones(3)) for _ in range(10))]
    optimizer = ampopt.AdamW(params)
    stepped(optimizer, params)
    old = StorageWeakRef(optimizer.state[params[0]]["exp_avg"].untyped_storage())
    replace_states(params, optimizer, 0, 9)
    stepped(optimizer, params)
    assert reasons(optimizer)[1:] == ["a state of group 0, parameter 0 was replaced"]
    gc.collect()
    assert old.expired()


def test_a_state_that_comes_to_share_memory_with_another_is_refused():
    params, optimizer = of_parameters(12)
    stepped(optimizer, params)
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[7]]["exp_avg_sq"]
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises(ValueError, match="shares memory"):
            stepped(optimizer, params)
        assert_same(everything(optimizer), before, "after the refusal")
    replace_state(params, optimizer)
    stepped(optimizer, params)


@pytest.mark.parametrize("backend", ["eager", "compiled"], indirect=True)
def test_a_state_may_not_share_memory_with_a_parameter_that_may_have_a_gradient_later(backend):
    params, optimizer = of_parameters(12)
    stepped(optimizer, params[:11])
    optimizer.state[params[3]]["exp_avg"] = params[11].detach()
    with pytest.raises(ValueError, match="parameter 11 shares memory with the state exp_avg"):
        stepped(optimizer, params[:11])


def test_an_invalid_state_of_a_new_row_changes_nothing_and_the_plan_goes_on():
    params, optimizer = of_parameters(12)
    stepped(optimizer, params[:11])
    optimizer.state[params[11]]["exp_avg"] = torch.ones(5)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"exp_avg of group 0, parameter 11 has shape \(5,\)"):
        stepped(optimizer, params)
    assert_same(everything(optimizer), before, "after the refusal")
    del optimizer.state[params[11]]["exp_avg"]
    stepped(optimizer, params)
    assert [int(optimizer.state[p]["step"]) for p in (params[0], params[11])] == [2, 1]
