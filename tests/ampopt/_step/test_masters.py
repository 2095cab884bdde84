"""float16 and bfloat16 parameters, with float32 master weights and without."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fresh_states import is_fresh
from support.gpus import ON_A_GPU
from support.optimizers import SOME_RULES, Plain, Signed
from support.strategies import (
    Case,
    History,
    cases,
    fewer,
    gradients,
    histories,
    non_finite_steps,
    parameters,
    set_gradients,
)
from support.torch_options import ELEMENTWISE, OptionSet, named
from support.training_loops import both_ways
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

import ampopt
from ampopt.testing.bits import assert_close, bits, everything, state_of
from ampopt_kernels.rule import MASTER

pytestmark = [
    # Of kernels interpreted: ampopt_kernels/passes.
    pytest.mark.parametrize("backend", ["eager", "eager on a device", ON_A_GPU], indirect=True),
    pytest.mark.usefixtures("backend"),
]

HALF = (torch.float16, torch.bfloat16)
INF = float("inf")
RICH = {
    "SGD": "nesterov",
    "Adam": "amsgrad",
    "AdamW": "amsgrad",
    "Adagrad": "initial_accumulator_value",
    "Adamax": "nonzero weight_decay",
    "ASGD": "averaging",
    "NAdam": "weight_decay, momentum_decay",
    "RMSprop": "momentum",
    "Rprop": "odd etas",
}
"""For each optimizer, the options under which it keeps all the states that it can."""

each_half = pytest.mark.parametrize("dtype", HALF, ids=str)
# What a dtype rounds, it rounds for all rules.
each_rule = pytest.mark.parametrize(
    ("name", "dtype"), [(name, HALF[i % 2]) for i, name in enumerate(ELEMENTWISE)], ids=str
)
scales = st.sampled_from([1.0, 2.0**3, 2.0**-3])  # by which half-precision gradients stay exact


def half(*numbers: float, dtype: torch.dtype = torch.float16) -> Parameter:
    return Parameter(torch.tensor(numbers, dtype=dtype))


def attempt(optimizer: Any, scale: Any, split: bool) -> Any:
    if not split:
        return optimizer.unscale_and_step(grads_scaled_by=scale)
    optimizer.unscale(grads_scaled_by=scale)
    return optimizer.step_after_unscale()


def masters_of(optimizer: Any) -> list[Tensor]:
    return [master for _, master in optimizer.params_and_masters()]


def states(optimizer: Any) -> list[Any]:
    """For each parameter, its states without the master; ``None`` if no step has changed them."""
    return [
        None
        if not state
        or all(
            is_fresh(name, value)
            for name, value in state.items()
            if name not in ("master_param", "sum")
        )
        else {name: value for name, value in state.items() if name != "master_param"}
        for state in state_of(optimizer)
    ]


def assert_rounded(optimizer: Any) -> None:
    """Check that every parameter equals its master, rounded to the parameter's dtype."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, master in zip(params, masters_of(optimizer), strict=True):
        assert master.dtype == torch.float32
        assert bits(p) == bits(master.to(p.dtype))


# --- masters are a float32 run -------------------------------------------------------------------


@fewer(0.6)
@given(cases(), histories(dtypes=HALF), scales, st.booleans())
def test_masters_train_as_float32_parameters_do_on_the_same_gradients(case, history, scale, split):
    params = history.build()
    wide = [Parameter(p.detach().float()) for p in params]
    optimizer, reference = with_masters(case, params), case.make(wide)
    for step, overflows in zip(history.steps, history.overflows, strict=True):
        set_gradients(params, step, scale)
        if not overflows:
            for p, grad in zip(wide, step, strict=True):
                p.grad = None if grad is None else grad.tensor().float()
            reference.step()
        assert attempt(optimizer, scale, split).skipped is overflows
        assert_rounded(optimizer)
    assert bits(masters_of(optimizer)) == bits(wide)
    assert states(optimizer) == states(reference)


def with_masters(case: Case, params: list[Parameter], masters: bool = True) -> Any:
    """An optimizer with ``master_weights`` set in its param group, not by its constructor."""
    return case.make([{"params": params, "master_weights": masters}])


@each_rule
def test_every_rule_keeps_masters_and_float32_states(name, dtype):
    options = rich(name)
    params = [half(0.3, -1.7, 2.1, dtype=dtype), half(*[0.7] * 5, dtype=dtype)]
    wide = [Parameter(p.detach().float()) for p in params]
    optimizer = options.ours(params, master_weights=True)
    reference = options.ours(wide)
    for step in range(1, 4):
        for p, q in zip(params, wide, strict=True):
            p.grad = torch.linspace(-1.0, 2.0, p.numel()).div(step).to(dtype)
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        assert_rounded(optimizer)
    assert bits(masters_of(optimizer)) == bits(wide)
    for p, q in zip(params, wide, strict=True):
        state = dict(optimizer.state[p])
        assert state.pop("master_param") is not None
        assert all(value.dtype == torch.float32 for value in state.values())
        assert bits(state) == bits(dict(reference.state[q]))


def rich(name: str) -> OptionSet:
    return named(name, RICH.get(name, "default"))


@each_half
@given(exponent=st.integers(1, 6), steps=st.integers(1, 9), sign=st.sampled_from([1.0, -1.0]))
@fewer(0.2)
def test_updates_below_half_an_ulp_add_up_in_masters_and_are_lost_without(
    dtype, exponent, steps, sign
):
    # Below 1 numbers are half as far apart as above, and half of that rounds to 1, which is even.
    tiny = torch.finfo(dtype).eps / 4 * 2.0**-exponent
    params = [half(1.0, dtype=dtype) for _ in range(2)]
    kept = ampopt.SGD([params[0]], lr=tiny, master_weights=True)
    lost = ampopt.SGD([params[1]], lr=tiny)
    for _ in range(steps):
        for p, optimizer in zip(params, (kept, lost), strict=True):
            p.grad = torch.full_like(p, sign)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert masters_of(kept)[0].item() == 1.0 - sign * steps * tiny
    assert_rounded(kept)
    assert params[1].item() == 1.0


@given(cases(), histories(dtypes=(torch.float32, torch.float64, torch.complex64)), scales)
@fewer(0.3)
def test_other_parameters_need_no_masters_and_get_none(case, history, scale):
    def train(masters: bool) -> tuple[Any, Any]:
        params = history.build()
        optimizer = with_masters(case, params, masters)
        for step in history.steps:
            set_gradients(params, step, scale)
            optimizer.unscale_and_step(grads_scaled_by=scale)
        assert all(a is b for a, b in zip(optimizer.master_params(), params, strict=True))
        return bits(params), state_of(optimizer)

    assert train(True) == train(False)


def test_groups_choose_for_themselves():
    params = [half(1.0), half(1.0), Parameter(torch.ones(1)), half(1.0, dtype=torch.bfloat16)]
    groups = [
        {"params": [params[0], params[2]], "master_weights": True},
        {"params": [params[1]]},
        {"params": [params[3]], "master_weights": True},
    ]
    optimizer = ampopt.SGD(groups, lr=2.0**-13, momentum=0.5)
    for _ in range(8):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    has = {i: "master_param" in optimizer.state[p] for i, p in enumerate(params)}
    assert has == {0: True, 1: False, 2: False, 3: True}
    expected = params[2].item()  # a float32 parameter beside them
    assert expected < 1.0
    for p in (params[0], params[3]):
        assert optimizer.state[p]["master_param"].item() == expected
        assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    assert params[1].item() == 1.0
    assert optimizer.state[params[1]]["momentum_buffer"].dtype == torch.float16


@pytest.mark.parametrize("split", [False, True])
def test_masters_that_are_turned_off_and_on_again_begin_where_the_parameter_is(split):
    p = half(1.0, -2.0)
    optimizer = ampopt.AdamW([p], lr=0.125, master_weights=True)
    for turned_on in (True, False, True):
        optimizer.param_groups[0]["master_weights"] = turned_on
        before = p.detach().clone()
        p.grad = torch.full((2,), 8.0).half()
        attempt(optimizer, 8.0, split=split and turned_on)
        assert (MASTER in optimizer.state[p]) == turned_on
        torch.testing.assert_close(
            before - p.detach(), torch.full((2,), 0.125).half(), rtol=0.1, atol=0.0
        )


def test_a_group_added_later_has_the_options_of_the_constructor():
    optimizer = ampopt.AdamW([half(1.0)], master_weights=True)
    for which in (optimizer, copy.deepcopy(optimizer)):
        late = [half(1.0), half(1.0)]
        which.add_param_group({"params": [late[0]]})
        which.add_param_group({"params": [late[1]], "master_weights": False})
        for p in late:
            p.grad = torch.ones_like(p)
        which.step()
        assert "master_param" in which.state[late[0]]
        assert "master_param" not in which.state[late[1]]


def test_an_initial_value_is_not_rounded_to_the_parameters_dtype():
    """Torch makes Adagrad's sums in the constructor, in the dtype of the parameter: float16."""
    p, q = half(1.0), Parameter(torch.ones(1))
    optimizer = ampopt.Adagrad([p], initial_accumulator_value=0.1, master_weights=True)
    reference = ampopt.Adagrad([q], initial_accumulator_value=0.1)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    reference.step()
    assert bits(optimizer.state[p]["sum"]) == bits(reference.state[q]["sum"])


# --- unscale -------------------------------------------------------------------------------------


@fewer(0.4)
@given(cases(), parameters(dtypes=HALF), scales, st.data())
def test_unscale_puts_float32_gradients_on_masters_and_rounds_them_to_the_parameters(
    case, params, scale, data
):
    made = [p.parameter() for p in params]
    optimizer = with_masters(case, made)
    step = data.draw(gradients(params))
    set_gradients(made, step, scale)
    found_inf, _ = optimizer.unscale(grads_scaled_by=scale)
    assert found_inf == 0
    for p, master, grad in zip(made, masters_of(optimizer), step, strict=True):
        if grad is None:
            assert master.grad is None and p.grad is None
        else:
            assert master.grad is not None and p.grad is not None
            assert torch.equal(master.grad, grad.tensor().float())
            assert bits(p.grad) == bits(master.grad.to(p.dtype))
    shown = bits([p.grad for p in made])
    optimizer.step_after_unscale()
    assert bits([p.grad for p in made]) == shown
    assert all(master.grad is None for master in masters_of(optimizer))


@fewer(0.4)
@given(cases(), parameters(dtypes=HALF), st.sampled_from([0.125, 1.0, 64.0]), st.data())
def test_clipping_masters_between_the_calls_is_max_norm(case, params, max_norm, data):
    step = data.draw(gradients(params))
    trained = []
    for split in (False, True):
        made = [p.parameter() for p in params]
        optimizer = with_masters(case, made)
        for _ in range(2):
            set_gradients(made, step, 4.0)
            if split:
                optimizer.unscale(grads_scaled_by=4.0)
                norm = clip_grad_norm_(optimizer.master_params(), max_norm)
                optimizer.step_after_unscale()
            else:
                optimizer.unscale_and_step(grads_scaled_by=4.0, max_norm=max_norm)
                norm = optimizer.grad_norm
        trained.append((masters_of(optimizer), norm))  # pyright: ignore
    (joined, norm), (split_up, expected) = trained
    if norm is not None:
        assert_close(norm, expected)
    if case.cls is not Signed:  # which makes a step of the sign of noise
        for ours, theirs in zip(joined, split_up, strict=True):
            # A denominator may be as small as the numbers that rounding leaves of 1 / 256.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@both_ways
@given(cases(), non_finite_steps(dtypes=HALF), st.integers(0, 2), st.data())
@fewer(0.4)
def test_a_skip_changes_no_bit_of_masters_parameters_and_states(split, case, drawn, steps, data):
    params, bad = drawn
    made = [p.parameter() for p in params]
    optimizer = with_masters(case, made)
    for _ in range(steps):
        set_gradients(made, data.draw(gradients(params, absent=False)))
        optimizer.step()
    before = everything(optimizer)
    set_gradients(made, bad)
    assert attempt(optimizer, 1.0, split).skipped
    after = everything(optimizer)
    assert after["parameters"] == before["parameters"]
    assert after["random"] == before["random"]
    assert all(master.grad is None for master in masters_of(optimizer))
    for p, old, new in zip(made, before["state"], after["state"], strict=True):
        if old:
            assert new == old
        elif new:
            # Made by the skip: the master is the parameter, the others are as if fresh, which is
            # 0.0 or -0.0.
            assert new["master_param"] == bits(p.detach().float())
            others = optimizer.state[p].items()
            assert not any(value.any() for name, value in others if name != "master_param")


@both_ways
@pytest.mark.parametrize("cls", [cls for cls in SOME_RULES if cls is not Signed])
def test_tiny_float16_gradients_are_not_flushed(cls, split):
    """Unscaled in float16, the gradient 2 ** -10 / 2 ** 16 would be 0."""
    param, wide = half(0.0), Parameter(torch.zeros(1))
    options = {"lr": 2.0**20} if cls is ampopt.SGD else {"lr": 2.0, "eps": 2.0**-26}
    optimizer, reference = cls([param], master_weights=True, **options), cls([wide], **options)  # pyright: ignore
    param.grad = torch.full((1,), 2.0**-10, dtype=torch.float16)
    wide.grad = torch.full((1,), 2.0**-26)
    attempt(optimizer, 2.0**16, split)
    reference.step()
    assert wide.item() != 0
    assert bits(masters_of(optimizer)) == bits([wide])


@pytest.mark.parametrize("leave", ["step", "skip", "plain step", "zero_grad", "failed closure"])
def test_the_gradients_of_masters_are_dropped_in_the_end(leave):
    param = half(1.0, 2.0)
    optimizer = ampopt.SGD([param], lr=0.5, master_weights=True)
    param.grad = torch.tensor([2.0, INF if leave == "skip" else 2.0], dtype=torch.float16)
    if leave == "failed closure":

        def closure(scale: Any) -> Any:
            optimizer.unscale(scale)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            optimizer.step_after_unscale(closure, 4.0)
    else:
        optimizer.unscale(grads_scaled_by=4.0)
        ends: dict[str, Any] = {"plain step": optimizer.step, "zero_grad": optimizer.zero_grad}
        ends.get(leave, optimizer.step_after_unscale)()
    (master,) = optimizer.master_params()
    assert master.grad is None
    # The next step takes the parameter's own gradient.
    before = master.clone()
    param.grad = torch.ones_like(param)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert torch.equal(master, before - 0.5)


def test_a_master_whose_gradient_is_removed_after_unscale_is_not_stepped():
    """The step must not fall back on the parameter's own gradient, which is still scaled."""
    params = [half(1.0), half(1.0)]
    optimizer = ampopt.SGD(params, lr=0.5, master_weights=True)
    for rest in (0, 1):
        for p in params:
            p.grad = torch.full_like(p, 4.0)
        optimizer.unscale(grads_scaled_by=4.0)
        masters_of(optimizer)[rest].grad = None
        before = bits(params[rest])
        optimizer.step_after_unscale()
        assert bits(params[rest]) == before
        assert params[1 - rest].item() == 0.5


def test_a_parameter_whose_gradient_is_removed_after_unscale_is_not_stepped():
    """``model.zero_grad()`` removes all, which ends the unscale."""
    params = [half(1.0), half(1.0)]
    optimizer = ampopt.SGD(params, lr=0.5, master_weights=True)
    for n_removed, step in ((1, optimizer.step_after_unscale), (2, optimizer.step)):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.unscale(grads_scaled_by=1.0)
        for p in params[:n_removed]:
            p.grad = None
        step()
        assert [p.item() for p in params] == [1.0, 0.5]
        assert all(master.grad is None for master in optimizer.master_params())


def test_a_gradient_that_is_removed_after_unscale_is_absent_from_a_new_plan_too():
    params = [half(1.0) for _ in range(9)]
    optimizer = ampopt.SGD(params, lr=0.5, master_weights=True)
    for n_present in (1, 9):  # the second step makes a plan
        for p in params[:n_present]:
            p.grad = torch.ones_like(p)
        optimizer.unscale(grads_scaled_by=1.0)
        if n_present == 9:
            params[0].grad = None
        optimizer.step_after_unscale()
    assert [p.item() for p in params] == [0.5] * 9


def test_an_edited_gradient_of_a_master_is_applied():
    param = half(1.0, 1.0)
    optimizer = ampopt.SGD([param], lr=0.5, master_weights=True)
    for _ in range(2):  # with a plan, and with one that is renewed
        param.grad = torch.full_like(param, 8.0)
        optimizer.unscale(grads_scaled_by=4.0)
        (master,) = optimizer.master_params()
        master.grad = torch.tensor([0.5, 1.0])
        optimizer.step_after_unscale()
    assert param.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_expanded_gradient_is_shown_unscaled(dtype):
    """All elements share one element of memory, so the unscaled gradient is a new tensor."""
    p = half(1.0, 1.0, dtype=dtype)
    p.grad = torch.full((1,), 8.0, dtype=dtype).expand(2)
    optimizer = ampopt.SGD([p], lr=0.5, master_weights=True)
    optimizer.unscale(grads_scaled_by=4.0)
    assert p.grad.tolist() == [2.0, 2.0]
    optimizer.step_after_unscale()
    assert p.tolist() == [0.0, 0.0]


# --- clipping masters that have no gradients yet --------------------------------------------------

EARLY = (
    r"master_params\(\) was read after backward\(\).*max_norm=.*unscale\(grads_scaled_by=scale\)"
)


def step_with_a_scaler(optimizer: Any) -> None:
    scaler = ampopt.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def steps_early(optimizer: Any) -> list[Any]:
    return [
        lambda: optimizer.unscale_and_step(grads_scaled_by=4.0),
        lambda: optimizer.unscale(grads_scaled_by=4.0) and optimizer.step_after_unscale(),
        lambda: ampopt.unscale_and_step([optimizer], grads_scaled_by=4.0),
        lambda: step_with_a_scaler(optimizer),
        optimizer.step,
    ]


@pytest.mark.parametrize("way", range(5))
def test_clipping_masters_before_they_have_gradients_is_warned_of_once(way):
    """Scripts for apex clip at this point, because apex has unscaled the gradients by then."""
    p = half(1.0, 1.0)
    optimizer = ampopt.SGD([p], lr=0.5, master_weights=True)
    step = steps_early(optimizer)[way]
    p.grad = torch.full_like(p, 8.0)
    clip_grad_norm_(optimizer.master_params(), 0.1)
    with pytest.warns(UserWarning, match=EARLY):
        step()
    optimizer.zero_grad()
    p.grad = torch.full_like(p, 8.0)
    clip_grad_norm_(optimizer.master_params(), 0.1)
    step()


@pytest.mark.parametrize("zero", ["optimizer", "model", "in place"])
def test_reading_masters_after_a_step_is_no_reason_to_warn(zero):
    """An average of weights reads masters after a step, whose gradients may still exist."""
    model = torch.nn.Linear(2, 1).half()
    optimizer = ampopt.SGD(model.parameters(), lr=0.5, master_weights=True)
    for _ in range(3):
        if zero == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        else:
            model.zero_grad(set_to_none=zero == "model")
        model(torch.ones(1, 2).half()).sum().backward()
        optimizer.unscale_and_step(grads_scaled_by=4.0)
        assert all(master.dtype == torch.float32 for master in optimizer.master_params())


def clip(p: Parameter) -> None:
    torch.nn.utils.clip_grad_norm_([p], max_norm=0.1)


def replace(p: Parameter) -> None:
    p.grad = torch.zeros_like(p)


def accumulate(p: Parameter) -> None:
    (p.float().sum() * 4).backward()


@pytest.mark.parametrize("edit", [clip, replace, accumulate])
@pytest.mark.parametrize(
    "how", ["ours", "overflow", "without a scale", "scaler", "plain step", "closure"]
)
def test_editing_the_gradient_of_the_parameter_raises_and_names_the_masters(edit, how):
    """The edit would be lost: steps use the gradients that ``unscale`` put on the masters."""
    params = [Parameter(torch.ones(2)), half(1.0, -2.0)]
    names = [("wide", params[0]), ("narrow", params[1])]
    optimizer = ampopt.AdamW(names, lr=0.5, master_weights=True)
    params[1].grad = torch.ones_like(params[1])
    optimizer.unscale(1.0)  # which makes the master
    optimizer.zero_grad()
    for p in params:
        p.grad = torch.full_like(p, INF if how == "overflow" else 4.0)
    before = bits([*params, *masters_of(optimizer)])
    scaler = ampopt.GradScaler("cpu", init_scale=4.0)

    def closure(scale: Any) -> Any:
        found = optimizer.unscale(scale)
        edit(params[1])
        return 1.0, *found

    def attempt() -> Any:
        if how == "closure":
            scale = ampopt.StaticLossScale(4.0, drop_overflow_update=False)
            return optimizer.step_after_unscale(closure, scale)
        if how == "scaler":
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
        else:
            optimizer.unscale(None if how == "without a scale" else 4.0)
        edit(params[1])
        if how == "scaler":
            return scaler.step(optimizer)
        return optimizer.step() if how == "plain step" else optimizer.step_after_unscale()

    with pytest.raises(RuntimeError, match=r"gradient of narrow was changed.*master_params\(\)"):
        attempt()
    assert bits([*params, *masters_of(optimizer)]) == before
    assert all(s.keys() <= {MASTER} for s in optimizer.state.values())
    optimizer.zero_grad()
    params[1].grad = torch.full_like(params[1], 4.0)
    assert not optimizer.unscale_and_step(grads_scaled_by=4.0).skipped
    assert optimizer.pending is None and bits(params[1]) != before[1]


def test_an_overridden_step_that_edits_the_parameters_gradient_raises_too():
    class Centered(ampopt.SGD):
        skip_by = "host"  # the default, which is warned of where the host has to wait for it

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad -= p.grad.mean()
            return super().step(closure)

    param = half(1.0, 2.0)
    optimizer = Centered([param], lr=0.5, master_weights=True)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="was changed after unscale"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("full", [torch.full, lambda shape, x: torch.tensor(x).expand(shape)])
def test_a_float32_gradient_of_a_half_precision_parameter_may_be_edited(full, shared):
    """The parameter and its master share a float32 gradient."""
    params: list[Any] = [half(1.0, 2.0), half(1.0, 2.0)]
    optimizer = ampopt.SGD(params, lr=0.5, master_weights=True)
    for param in params:
        param.grad_dtype = None
    params[0].grad = full((2,), 8.0)
    params[1].grad = params[0].grad if shared else full((2,), 8.0)
    optimizer.unscale(grads_scaled_by=4.0)
    for param in params:
        param.grad.mul_(0.5)
    optimizer.step_after_unscale()
    assert [param.tolist() for param in params] == [[0.5, 1.5]] * 2


def test_a_frozen_parameter_has_no_master():
    params = [half(1.0), half(2.0).requires_grad_(False)]
    optimizer = ampopt.AdamW(params, master_weights=True)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert masters_of(optimizer)[1] is params[1]
    assert params[1] not in optimizer.state
    params[0].requires_grad_(False)
    params[1].requires_grad_(True)
    assert [master.dtype for master in masters_of(optimizer)] == [torch.float32] * 2


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_masters_made_before_the_first_step_are_copied(name, copied):
    optimizer = getattr(ampopt, name)([half(1.0, -2.0)], lr=0.1, master_weights=True)
    (master,) = optimizer.master_params()
    master.fill_(1.0001)  # which float16 cannot hold
    before = everything(optimizer)
    twin = copied(optimizer)
    assert everything(twin) == everything(optimizer) == before
    for o in (optimizer, twin):
        o.param_groups[0]["params"][0].grad = half(1.0, 2.0).detach()
        o.unscale_and_step(grads_scaled_by=1.0)
    assert everything(twin) == everything(optimizer)


# --- without masters -----------------------------------------------------------------------------


def test_float16_without_masters_is_not_unscaled_and_the_message_says_what_to_do():
    params = [half(1.0, dtype=torch.bfloat16), half(1.0)]
    optimizer = ampopt.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    before = everything(optimizer), bits([p.grad for p in params])
    with pytest.raises(RuntimeError, match=r"unscale_and_step\(\)") as raised:
        optimizer.unscale(grads_scaled_by=2.0)
    assert "group 0, parameter 1 is float16" in str(raised.value)
    assert "master_weights=True" in str(raised.value)
    assert (everything(optimizer), bits([p.grad for p in params])) == before
    optimizer.unscale_and_step(grads_scaled_by=2.0)  # nothing is pending


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("cls", [ampopt.SGD, Plain])
def test_pairs_of_float16_are_not_unscaled_in_place_either(cls):
    param = Parameter(torch.ones(2, dtype=torch.complex64).to(torch.complex32))
    optimizer = cls([param], lr=0.5)
    param.grad = torch.full((2,), 1e-5 + 1e-5j).to(torch.complex32)
    before = bits([param, param.grad])
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0 is complex32.*unscale_and_step"):
        optimizer.unscale(grads_scaled_by=2.0**10)
    assert bits([param, param.grad]) == before
    assert optimizer.pending is None


@each_half
def test_unscaling_without_a_scale_puts_gradients_on_masters_too(dtype):
    param = half(1.0, 1.0, dtype=dtype)
    optimizer = ampopt.SGD([param], lr=1.0, master_weights=True)
    param.grad = torch.tensor([3.0, 4.0], dtype=dtype)
    optimizer.unscale(None)
    (master,) = optimizer.master_params()
    clip_grad_norm_([master], max_norm=1.0)
    optimizer.step_after_unscale()
    assert_close(master.detach(), torch.tensor([0.4, 0.2]), size=1.0)
    assert master.grad is None


def test_a_refused_unscale_leaves_nothing_on_the_masters():
    kept, other = half(1.0), half(1.0)
    optimizer = ampopt.SGD(
        [{"params": [kept], "master_weights": True}, {"params": [other]}], lr=1.0
    )
    before = everything(optimizer)
    for p in (kept, other):
        p.grad = torch.full_like(p, 4.0)
    with pytest.raises(RuntimeError, match="group 1, parameter 0 is float16"):
        optimizer.unscale(grads_scaled_by=4.0)
    assert everything(optimizer) == before
    for p in (kept, other):
        p.grad = torch.full_like(p, 8.0)
    optimizer.unscale_and_step(grads_scaled_by=4.0)
    assert kept.item() == other.item() == -1.0


@fewer(0.3)
@given(cases(), histories(dtypes=(torch.bfloat16,), overflows=False), scales)
def test_bfloat16_without_masters_is_unscaled_in_place(case, history, scale):
    def train(split: bool) -> tuple[Any, Any]:
        params = history.build()
        optimizer = case.make(params)
        for step in history.steps:
            set_gradients(params, step, scale)
            attempt(optimizer, scale, split)
            if split:
                for p, grad in zip(params, step, strict=True):
                    assert (p.grad is None) == (grad is None)
                    if grad is not None:
                        assert torch.equal(p.grad, grad.tensor())
        return bits(params), state_of(optimizer)

    assert train(split=True) == train(split=False)


@each_rule
def test_without_masters_arithmetic_is_float32_and_storage_the_parameters(name, dtype):
    param = half(0.3, -1.7, 2.1, dtype=dtype)
    wide = Parameter(param.detach().float())
    optimizer, reference = rich(name).ours([param]), rich(name).ours([wide])
    param.grad = torch.tensor([0.1, -0.2, 0.7]).to(dtype)
    wide.grad = param.grad.float()
    optimizer.step()
    reference.step()
    # From one and the same start: rounded once.
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7}
    torch.testing.assert_close(param.float(), wide, **close)  # pyright: ignore
    for key, value in optimizer.state[param].items():
        assert value.dtype == (torch.float32 if value.ndim == 0 else dtype), key


STEPS = {
    "plain step": lambda optimizer: optimizer.step(),
    "joined": lambda optimizer: optimizer.unscale_and_step(grads_scaled_by=2.0),
    "closure": lambda optimizer: optimizer.unscale_and_step(lambda scale: 1.0, 2.0),
    "several": lambda optimizer: ampopt.unscale_and_step([optimizer], 2.0),
}


@pytest.mark.parametrize("how", STEPS)
def test_states_in_float16_are_warned_of_once(how):
    params = [half(1.0), half(2.0)]
    optimizer = ampopt.AdamW([("first", params[0]), ("second", params[1])])
    params[1].grad = torch.tensor([2.0**-13], dtype=torch.float16)
    match = "AdamW keeps exp_avg, exp_avg_sq of second in float16.*Pass master_weights=True"
    with pytest.warns(UserWarning, match=match):
        STEPS[how](optimizer)
    assert optimizer.state[params[1]]["exp_avg_sq"] == 0  # as it says
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in params:  # which takes a new plan
            p.grad = torch.ones_like(p)
            STEPS[how](optimizer)


@pytest.mark.parametrize("how", STEPS)
def test_a_warning_that_is_made_an_error_changes_nothing(how):
    param = half(1.0)
    optimizer = ampopt.SGD([param], lr=0.5, momentum=0.5)
    param.grad = torch.ones_like(param)
    before = everything(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="SGD keeps momentum_buffer of group 0, parameter 0"):
            STEPS[how](optimizer)
    assert everything(optimizer) == before


def test_a_warning_that_is_made_an_error_steps_none_of_several():
    params = [Parameter(torch.ones(1)), half(1.0)]
    both = [ampopt.Adam([p]) for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="in float16"):
            ampopt.unscale_and_step(both, 2.0)
    assert [p.item() for p in params] == [1.0, 1.0]


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: ampopt.AdamW([half(1.0)], master_weights=True),
        lambda: ampopt.AdamW([half(1.0, dtype=torch.bfloat16)]),
        lambda: ampopt.AdamW([Parameter(torch.ones(1))]),
        lambda: ampopt.SGD([half(1.0)]),  # which keeps none
        lambda: ampopt.AdamW([Parameter(torch.ones(1 << 13).half())], state_bits=8),
    ],
)
def test_other_states_are_not_warned_of(how, make):
    optimizer = make()
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        STEPS[how](optimizer)


# --- checkpoints ---------------------------------------------------------------------------------


def train(optimizer: Any, history: History, steps: slice = slice(None)) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in history.steps[steps]:
        set_gradients(params, step, 2.0)
        optimizer.unscale_and_step(grads_scaled_by=2.0)


@fewer(0.5)
@given(cases(), histories(dtypes=HALF, max_steps=5), st.integers(0, 5))
def test_masters_are_saved_and_loaded_bitwise_at_any_point(case, history, when):
    def make() -> Any:
        return with_masters(case, history.build())

    optimizer, resumed = make(), make()
    train(optimizer, history, slice(when))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(*(o.param_groups[0]["params"] for o in (resumed, optimizer)), strict=True):
        p.data.copy_(q)
    train(optimizer, history, slice(when, None))
    train(resumed, history, slice(when, None))
    assert bits(masters_of(resumed)) == bits(masters_of(optimizer))
    assert_rounded(resumed)
    assert states(resumed) == states(optimizer)


@each_rule
def test_a_checkpoint_of_torchs_continues_with_masters(name, dtype):
    torchs_param = half(0.3, -1.7, dtype=dtype)
    torchs = rich(name).torchs([torchs_param])
    for _ in range(2):
        torchs_param.grad = torch.ones_like(torchs_param)
        torchs.step()
    param = Parameter(torchs_param.detach().clone())
    optimizer = rich(name).ours([param], master_weights=True)
    optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert optimizer.param_groups[0]["master_weights"] is True
    wide = Parameter(param.detach().float())
    reference = rich(name).ours([wide])
    widened = copy.deepcopy(torchs.state_dict())
    for key, value in widened["state"][0].items() if widened["state"] else ():
        widened["state"][0][key] = value.float() if isinstance(value, Tensor) else value
    reference.load_state_dict(widened)
    param.grad, wide.grad = torch.ones_like(param), torch.ones_like(wide)
    optimizer.step()
    reference.step()
    assert bits(masters_of(optimizer)) == bits([wide])
    assert states(optimizer) == states(reference)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torch_continues_a_checkpoint_with_masters(name):
    """A parameter that never had a gradient has a master, but no other state."""
    params = [half(0.3, -1.7, dtype=torch.bfloat16) for _ in range(2)]
    optimizer = rich(name).ours(params, master_weights=True)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert len(masters_of(optimizer)) == 2
    twins = [Parameter(p.detach().clone()) for p in params]
    torchs = rich(name).torchs(twins)
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in twins:
        p.grad = torch.ones_like(p)
    torchs.step()
    assert all(torch.isfinite(p).all() for p in twins)


def test_a_master_that_has_moved_is_saved_though_no_other_state_is_there_yet():
    """Momentum that is switched on in mid-run has no buffer yet, but the master has moved."""
    param = half(1.0, dtype=torch.bfloat16)
    optimizer = ampopt.SGD([param], lr=0.001, momentum=0.0, master_weights=True)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    twin = half(1.0, dtype=torch.bfloat16)
    twin.data.copy_(param.data)
    loaded = ampopt.SGD([twin], lr=0.001, momentum=0.9, master_weights=True)
    saved = optimizer.state_dict()
    loaded.load_state_dict(copy.deepcopy(saved))
    for each in (optimizer, loaded):
        each.param_groups[0]["params"][0].grad = torch.ones_like(param)
        each.step()
    assert bits(masters_of(loaded)) == bits(masters_of(optimizer))
    torchs = torch.optim.SGD([Parameter(twin.detach().clone())], momentum=0.9)
    torchs.load_state_dict(saved)
    torchs.param_groups[0]["params"][0].grad = torch.ones_like(twin)
    torchs.step()


@pytest.mark.parametrize("name", RICH)
def test_a_master_that_was_written_to_before_the_first_step_is_saved(name):
    """Users fill masters from a float32 model. The saved state has the master and no more."""
    param = half(0.3, -1.7, dtype=torch.bfloat16)
    optimizer = rich(name).ours([param], master_weights=True)
    (master,) = masters_of(optimizer)
    with torch.no_grad():
        master += 1e-4
    before = everything(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert everything(optimizer) == before  # saving adds nothing here
    loaded = rich(name).ours([half(0.3, -1.7, dtype=torch.bfloat16)], master_weights=True)
    loaded.load_state_dict(saved)
    assert bits(masters_of(loaded)) == bits([master])
    torchs = rich(name).torchs([Parameter(param.detach().clone())])
    torchs.load_state_dict(saved)
    for each in (optimizer, loaded, torchs):
        for p in each.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        each.step()
    assert bits(masters_of(loaded)) == bits(masters_of(optimizer))


@fewer(0.3)
@given(st.lists(st.booleans(), min_size=2, max_size=2), st.booleans())
def test_whether_there_are_masters_is_decided_by_the_optimizer_not_the_checkpoint(mine, saved):
    def make(*with_masters: bool) -> ampopt.AdamW:
        return ampopt.AdamW(
            [{"params": [half(1.0, 0.3)], "master_weights": each} for each in with_masters]
        )

    source, optimizer = make(saved, saved), make(*mine)
    for group in source.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    source.step()
    optimizer.load_state_dict(source.state_dict())
    for group, wanted in zip(optimizer.param_groups, mine, strict=True):
        (param,) = group["params"]
        assert group.get("master_weights", False) is wanted
        assert ("master_param" in optimizer.state[param]) is (wanted and saved)
        param.grad = torch.ones_like(param)
    optimizer.step()
    for group, wanted in zip(optimizer.param_groups, mine, strict=True):
        assert ("master_param" in optimizer.state[group["params"][0]]) is wanted


# --- models that are cast after the optimizer was made --------------------------------------------


@pytest.mark.parametrize("bits_of_master", [None, 24, 32])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
def test_a_model_cast_after_the_optimizer_was_made(bits_of_master, steps, dtype, to):
    """Lightning's Fabric does so under "bf16-true": the optimizer goes on as after a restart."""
    model, options = torch.nn.Linear(2, 2, dtype=dtype), {}
    if bits_of_master is not None:
        options = {"master_weights": True, "master_bits": bits_of_master}
    optimizer = ampopt.AdamW(model.named_parameters(), lr=0.1, **options)

    def step(model: torch.nn.Linear, optimizer: ampopt.AdamW) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, dtype=model.weight.dtype)).sum().backward()
        optimizer.unscale_and_step(grads_scaled_by=1.0)

    for _ in range(steps):
        step(model, optimizer)
    model.to(to)
    restarted = copy.deepcopy(model)
    made_then = ampopt.AdamW(restarted.named_parameters(), lr=0.1, **options)
    made_then.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        step(model, optimizer)
        step(restarted, made_then)
    assert model.weight.dtype == to
    assert everything(optimizer) == everything(made_then)


# --- what does not go ----------------------------------------------------------------------------


def test_masters_do_not_go_with_torchs_own_step():
    with pytest.raises(ValueError, match="differentiable=True.*leave one of them out"):
        ampopt.Adam([half(1.0)], differentiable=True, master_weights=True)
    with pytest.raises(ValueError, match="differentiable=True"):
        groups = [{"params": [half(1.0)], "master_weights": True}]
        ampopt.Adam(groups, differentiable=True)


@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.Adagrad])
@pytest.mark.parametrize("call", ["step", "unscale", "unscale_and_step"])
def test_masters_do_not_go_with_sparse_gradients(cls, call):
    param = Parameter(torch.ones(3, 2, dtype=torch.float16))
    optimizer = cls([param], lr=0.5, master_weights=True)
    rows, values = torch.tensor([[1]]), torch.ones(1, 2, dtype=torch.float16)
    param.grad = torch.sparse_coo_tensor(rows, values, (3, 2), check_invariants=True)
    before = everything(optimizer)
    calls: dict[str, Any] = {
        "step": optimizer.step,
        "unscale": lambda: optimizer.unscale(grads_scaled_by=2.0),
        "unscale_and_step": lambda: optimizer.unscale_and_step(grads_scaled_by=2.0),
    }
    with pytest.raises(RuntimeError, match="with master_weights=True does not support sparse"):
        calls[call]()
    assert everything(optimizer) == before
    param.grad = torch.ones_like(param)
    optimizer.unscale_and_step(grads_scaled_by=1.0)  # nothing is pending


# --- closures and torch's scaler -----------------------------------------------------------------


@each_half
@both_ways
def test_a_closure_is_replayed_until_gradients_are_finite(dtype, split):
    param, wide = half(1.0, -2.0, dtype=dtype), Parameter(torch.tensor([1.0, -2.0]))
    optimizer = ampopt.AdamW([param], lr=0.1, master_weights=True)
    reference = ampopt.AdamW([wide], lr=0.1)
    scale: Any = 4 * torch.finfo(dtype).max
    if scale == INF or scale > torch.finfo(torch.float32).max:
        scale = torch.tensor(scale, dtype=torch.float64)
    seen = []

    def closure(given: Any) -> Any:
        optimizer.zero_grad()
        loss = (param.float() ** 2).sum()
        ampopt.scale_outputs(loss, given).backward()
        seen.append(float(given))
        return (loss, *optimizer.unscale(given)) if split else loss

    for _ in range(2):
        if split:
            result = optimizer.step_after_unscale(closure, scale)
        else:
            result = optimizer.unscale_and_step(closure, scale)
        scale = result.scale
        wide.grad = 2 * wide.detach().to(dtype).float()
        reference.step()
    assert len(seen) > 2  # the first scale was too much
    assert result.loss is not None  # pyright: ignore
    assert_close(masters_of(optimizer)[0], wide.detach(), size=2.0)
    assert_rounded(optimizer)


@each_half
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW"])
@pytest.mark.parametrize("raised", [KeyError, ampopt.NonFiniteGradientError])
def test_a_closure_that_fails_leaves_no_masters_behind(name, dtype, raised):
    params = [half(1.0, -2.0, dtype=dtype), half(3.0, dtype=dtype)]
    optimizer = getattr(ampopt, name)(params, lr=0.1, master_weights=True)
    before = everything(optimizer)

    def closure(scale: Any) -> Any:
        params[0].grad = torch.full_like(params[0], INF)
        params[1].grad = torch.ones_like(params[1])
        verdict = optimizer.unscale(scale)
        if raised is KeyError:
            raise KeyError("data")
        return (1.0, *verdict)

    with pytest.raises(raised):
        optimizer.step_after_unscale(closure, 2.0, max_replays=1)
    assert everything(optimizer) == before


@both_ways
def test_an_overflow_by_unscaling_alone_is_named_with_masters_too(split):
    huge, fine = half(1.0, dtype=torch.bfloat16), half(1.0, dtype=torch.bfloat16)
    named = [("huge", huge), ("fine", fine)]
    optimizer = ampopt.SGD(named, lr=1.0, master_weights=True)  # pyright: ignore

    def closure(scale: Any) -> Any:
        huge.grad, fine.grad = torch.full_like(huge, 1e38), torch.ones_like(fine)
        return (1.0, *optimizer.unscale(scale)) if split else 1.0

    with pytest.raises(ampopt.NonFiniteGradientError) as raised:
        if split:
            optimizer.step_after_unscale(closure, 2.0**-10, max_replays=1)
        else:
            optimizer.unscale_and_step(closure, 2.0**-10, max_replays=1)
    assert raised.value.parameters == ["huge"]


@each_half
def test_step_and_its_closure_work_on_masters(dtype):
    param, wide = half(1.0, -2.0, dtype=dtype), Parameter(torch.tensor([1.0, -2.0]))
    optimizer = ampopt.SGD([param], lr=2.0**-14, master_weights=True)
    reference = ampopt.SGD([wide], lr=2.0**-14)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure) is not None
        wide.grad = torch.ones(2)
        reference.step()
    assert bits(masters_of(optimizer)) == bits([wide])
    assert_rounded(optimizer)


@each_half
@pytest.mark.parametrize("master_weights", [False, True])
@given(st.lists(st.booleans(), min_size=1, max_size=4))
@fewer(0.3)
def test_torchs_grad_scaler_steps_half_precision_parameters(dtype, master_weights, overflows):
    param, wide = half(1.0, -2.0, dtype=dtype), Parameter(torch.tensor([1.0, -2.0]))
    if param.is_cuda and dtype == torch.bfloat16:
        pytest.skip("torch's GradScaler cannot unscale bfloat16 gradients on CUDA")
    optimizer = ampopt.SGD([param], lr=0.25, momentum=0.5, master_weights=master_weights)
    reference = ampopt.SGD([wide], lr=0.25, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for overflow in overflows:
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(param.sum().float()).backward()
        assert param.grad is not None
        assert param.grad.tolist() == [scale, scale]
        if overflow:
            param.grad[1] = INF
        else:
            wide.grad = torch.ones(2)
            reference.step()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale / (2.0 if overflow else 1.0)
    # Sums of powers of two; those of four steps fit the eight bits of bfloat16.
    assert torch.equal(param.float(), wide)
    if master_weights:
        assert bits(masters_of(optimizer)) == bits([wide])


def test_each_parameter_comes_beside_the_tensor_that_steps_update():
    half, full = Parameter(torch.ones(2).bfloat16()), Parameter(torch.ones(2))
    optimizer = ampopt.SGD([{"params": [half]}, {"params": [full]}], lr=0.5, master_weights=True)
    (first, master), (second, itself) = optimizer.params_and_masters()
    assert first is half and second is itself is full
    assert master is optimizer.state[half]["master_param"]
    ((only, same),) = optimizer.params_and_masters(optimizer.param_groups[1])
    assert only is same is full
    with torch.no_grad():
        for _, written in optimizer.params_and_masters():
            written.fill_(1.0 + 2.0**-20)
    assert [*master.tolist(), *full.tolist()] == [1.0 + 2.0**-20] * 4
