"""Steps that change what is stepped: a plan that is kept or extended steps as a new one."""

import gc
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.counted_operations import counted
from support.gpus import ON_A_GPU
from support.langevin import Langevin
from support.strategies import fewer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import ampopt
from ampopt._step import plan, state_checks
from ampopt._step.rows import RuleRows
from ampopt.testing.bits import assert_same, everything

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
MIXED = (FLOAT32, torch.float16, BFLOAT16)
KINDS: dict[str, tuple[Any, tuple[torch.dtype, ...], dict[str, Any]]] = {
    "AdamW": (ampopt.AdamW, (FLOAT32, torch.float64), {}),
    "masters": (ampopt.AdamW, MIXED, {"master_weights": True}),
    "masters in bundles": (ampopt.AdamW, (torch.float16,), {"master_weights": True}),
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
            optimizer._ampopt.runner.drop_plan()
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


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton", ON_A_GPU], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_is_kept_or_extended_steps_as_a_new_one(kind, backend, monkeypatch):
    monkeypatch.setattr(plan, "SHARE", 0)  # however much changes, no whole plan is made for that

    @fewer(0.5)
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


def reasons(optimizer: Any) -> tuple[list[str], list[str]]:
    """The reasons for new plans, and for extensions, since the last call of this function."""
    runner = optimizer._ampopt.runner
    found = list(runner.reasons.elements()), list(runner.extensions.elements())
    runner.reasons.clear()
    runner.extensions.clear()
    return found


def of_parameters(n: int) -> tuple[list[Parameter], Any]:
    params = [Parameter(torch.ones(2, 3)) for _ in range(n)]
    return params, ampopt.AdamW(params)


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_sets_that_alternate_or_are_random_need_no_new_plan(backend):
    params, optimizer = of_parameters(6)
    stepped(optimizer, params)
    assert reasons(optimizer) == (["the first step"], [])
    draw = random.Random(0)
    for present in ([], params[:1], params[1:], *(draw.sample(params, 4) for _ in range(4))):
        stepped(optimizer, present)
    params[2].requires_grad_(False)
    stepped(optimizer, params[:2])
    stepped(optimizer, params)
    assert reasons(optimizer) == ([], [])


@pytest.mark.parametrize("backend", ["eager"], indirect=True)
def test_parameters_that_appeared_in_different_steps_are_stepped_as_few_operations(backend):
    def operations(sizes: Iterable[int]) -> int:
        params, optimizer = of_parameters(12)
        for n in sizes:
            stepped(optimizer, params[:n])
        # Few steps run ``Rule.scalars``, each for several to come.
        return min(counted(lambda: stepped(optimizer, params)).total() for _ in range(2))

    at_once = operations([12, *range(1, 12)])  # with the same step counts
    # One more bundle, and copies of two averages and a count, and back.
    assert operations(range(1, 13)) <= at_once + 30


def replace_state(params: list[Parameter], optimizer: Any) -> None:
    replace_states(params, optimizer, 1, 1)


def move_state(params: list[Parameter], optimizer: Any) -> None:
    average = optimizer.state[params[1]]["exp_avg"]
    average.data = average.data.clone()


EXTENDING: dict[str, tuple[Any, str]] = {
    "moved": (
        lambda params, _: setattr(params[1], "data", params[1].data.clone()),
        "group 0, parameter 1 was moved to other memory",
    ),
    "state replaced": (replace_state, "a state of group 0, parameter 1 was replaced"),
    "state moved": (move_state, "a state of group 0, parameter 1 was moved to other memory"),
    "state removed": (
        lambda params, optimizer: optimizer.state.pop(params[1]),
        "states were added to optimizer.state, or removed",
    ),
    "group": (
        lambda _, optimizer: optimizer.add_param_group({"params": [Parameter(torch.ones(3))]}),
        "a param group was added or removed",
    ),
    "first gradient": (appear, "group 0, parameter 11 has a gradient for the first time"),
}
MAKING: dict[str, tuple[Any, str]] = {
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
    "removed": (
        lambda _, optimizer: optimizer.param_groups[0]["params"].pop(0),
        "parameters of a group were replaced or removed, or are in another order",
    ),
    "watch": (
        lambda _, optimizer: ampopt.Watch(optimizer),
        "a Watch or skip_when was added or removed, or a step failed",
    ),
}


@pytest.mark.parametrize("change", [*EXTENDING, *MAKING])
def test_a_plan_that_is_extended_or_made_again_says_why(change):
    apply, reason = (EXTENDING | MAKING)[change]
    params, optimizer = of_parameters(12)
    stepped(optimizer, params[:-1])
    stepped(optimizer, params[:2])
    assert reasons(optimizer) == (["the first step"], [])
    apply(params, optimizer)
    with_grads = params if change == "first gradient" else params[:-1]
    stepped(optimizer, with_grads)
    stepped(optimizer, with_grads[1:])
    assert reasons(optimizer) == (([], [reason]) if change in EXTENDING else ([reason], []))


def test_a_whole_plan_is_made_after_many_changes():
    params, optimizer = of_parameters(24)
    stepped(optimizer, params[:16])
    reasons(optimizer)
    for n in range(17, 25):
        stepped(optimizer, [params[0], *params[8:n]])
    made, extended = reasons(optimizer)
    assert len(made) == 1 and len(extended) == 7
    stepped(optimizer, params)  # the whole plan has rows of those that had no gradient then
    assert reasons(optimizer) == ([], [])
    assert [int(optimizer.state[p]["step"]) for p in (params[1], params[8])] == [2, 10]


def test_a_whole_plan_is_made_after_many_steps_without_a_change(monkeypatch):
    monkeypatch.setattr(plan, "SETTLED", 3)
    params, optimizer = of_parameters(12)
    for n in (11, *[12] * 9):
        stepped(optimizer, params[:n])
    assert reasons(optimizer) == (
        ["the first step", "the plan was extended, and 3 steps have changed nothing since"],
        ["group 0, parameter 11 has a gradient for the first time"],
    )


@pytest.mark.parametrize("change", [appear, add_group, replace_state])
def test_a_change_of_one_parameter_makes_one_row_and_checks_one_state(change, monkeypatch):
    params, optimizer = of_parameters(12)
    stepped(optimizer, params[:11])
    rows = optimizer._ampopt.runner.plan.works[0].rows.copy()
    made, checked = [], []
    make, check = RuleRows._row, state_checks._check_state
    monkeypatch.setattr(RuleRows, "_row", lambda *a: made.append(a[1].tensor) or make(*a))
    monkeypatch.setattr(
        state_checks, "_check_state", lambda *a: checked.append(a[1].param) or check(*a)
    )
    change(params, optimizer)
    optimizer.step()
    expected = params[1] if change is replace_state else params[-1]
    assert len(made) == len(checked) == 1
    assert made[0] is checked[0] is expected
    rows_now = optimizer._ampopt.runner.plan.works[0].rows
    assert [rows_now[i] is not row for i, row in enumerate(rows)] == [
        change is replace_state and row.param is not None and row.owner.key == id(params[1])
        for row in rows
    ]


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_the_memory_of_a_replaced_state_of_a_large_parameter_is_freed(backend):
    params = [Parameter(torch.ones(30_000)), *(Parameter(torch.ones(3)) for _ in range(10))]
    optimizer = ampopt.AdamW(params)
    stepped(optimizer, params)
    old = StorageWeakRef(optimizer.state[params[0]]["exp_avg"].untyped_storage())
    replace_states(params, optimizer, 0, 9)
    stepped(optimizer, params)
    assert reasons(optimizer)[1] == ["a state of group 0, parameter 0 was replaced"]
    gc.collect()
    assert old.expired()


def test_a_state_that_shares_memory_with_another_is_refused_where_a_plan_would_be_extended():
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
    assert reasons(optimizer)[0] == ["the first step"]
