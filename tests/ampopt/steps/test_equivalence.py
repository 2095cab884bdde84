"""Special cases in which steps are torch's: dtypes, lazy views, changes between steps, sparse.

That steps do not depend on the scale, the split, the order, the layout, copies and checkpoints is
shown for every optimizer by ``ampopt/testing/test_built_ins.py``, and that they are torch's, with
every option, by ``ampopt/optim/test_torch_parity.py``.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.gpus import ON_A_GPU
from support.optimizers import SOME_RULES, Plain
from support.strategies import (
    Case,
    History,
    Scale,
    cases,
    fewer,
    histories,
    loss_scales,
    set_gradients,
)
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing import as_on_a_device
from ampopt.testing.bits import assert_close, bits, state_of

pytestmark = [
    pytest.mark.parametrize("backend", ["eager", "triton", ON_A_GPU], indirect=True),
    pytest.mark.usefixtures("backend"),
]

INF = float("inf")
TORCH = (ampopt.SGD, ampopt.Adam, ampopt.AdamW)
FULL = (torch.float32, torch.float64, torch.complex64, torch.complex128)
HALF = (torch.bfloat16, torch.float16)

Step = Callable[[Any, Any], Any]


def joined(optimizer: Any, scale: Any) -> Any:
    return optimizer.unscale_and_step(grads_scaled_by=scale)


def split(optimizer: Any, scale: Any) -> Any:
    optimizer.unscale(grads_scaled_by=scale)
    return optimizer.step_after_unscale()


def plain(optimizer: Any, scale: Any) -> Any:
    return optimizer.step()


def train(
    case: Case,
    history: History,
    scale: Scale,
    step: Step,
    groups: Callable[[list[Parameter]], Any] = list,
) -> tuple[list[Parameter], Any]:
    """Train on ``history`` with scaled gradients, and return parameters and optimizer."""
    torch.manual_seed(0)
    params = history.build()
    optimizer = case.make(groups(params))
    given_scale = scale.make()
    for gradients in history.steps:
        number = 1.0 if given_scale is None else float(given_scale)
        set_gradients(params, gradients, number)
        result = step(optimizer, given_scale)
        given_scale = None if result is None else result.scale
    return params, optimizer


# --- torch ----------------------------------------------------------------------------------------


def assert_same_training(
    params: Sequence[Tensor], optimizer: Any, twins: Sequence[Tensor], reference: Any
) -> None:
    """Check that both agree within a few units in the last place of numbers up to 64."""
    for p, twin in zip(params, twins, strict=True):
        assert_close(p, twin, ulps=4, size=16)
        ours, theirs = optimizer.state[p], reference.state.get(twin, {})
        for name, value in theirs.items():
            if isinstance(value, Tensor):
                assert_close(ours[name].to(value.dtype), value, ulps=4, size=16)


@fewer(0.4)
@given(cases(classes=TORCH), st.data())
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_parameters_step_as_well_as_torchs(dtype, case, data):
    """Arithmetic is in float32 and rounds once, so the error is at most that of torch."""
    history = data.draw(histories(dtypes=[dtype], max_steps=2, overflows=False, absent=False))
    params, _ = train(case, history, Scale("none", 1.0), plain)
    twins = history.build()
    exact = [p.detach().double().requires_grad_() for p in twins]
    reference, truth = case.torch(twins), case.torch(exact)
    for gradients in history.steps:
        set_gradients(twins, gradients)
        for p, twin in zip(exact, twins, strict=True):
            p.grad = None if twin.grad is None else twin.grad.double()
        reference.step()
        truth.step()
    for p, twin, true in zip(params, twins, exact, strict=True):
        # torch's own may be NaN, where float16 cannot hold eps.
        theirs = (twin.double() - true).abs().nan_to_num(torch.inf)
        allowed = 2 * theirs + 2 * torch.finfo(dtype).eps * true.abs().clamp_min(1.0)
        assert ((p.double() - true).abs() <= allowed).all(), (p, twin, true)


def test_loading_torchs_checkpoint_of_a_first_undampened_step():
    """Torch recognizes a first step by the missing buffer. The checkpoint has a buffer."""
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    reference = torch.optim.SGD([params[0]], lr=0.5, momentum=0.5, dampening=0.5)
    params[0].grad = torch.ones(2)
    reference.step()
    optimizer = ampopt.SGD([params[1]], lr=0.5, momentum=0.5, dampening=0.5)
    with torch.no_grad():
        params[1].copy_(params[0])
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for p, opt in zip(params, (reference, optimizer), strict=True):
        p.grad = torch.full((2,), 3.0)
        opt.step()
    assert bits(params[0]) == bits(params[1])


# --- the scale ------------------------------------------------------------------------------------


@fewer(0.25)
@given(cases(), histories(overflows=False), st.floats(0.01, 100.0))
def test_any_other_scale_changes_little(case, history, number):
    params, _ = train(case, history, Scale("number", number), joined)
    unscaled_params, _ = train(case, history, Scale("none", 1.0), plain)
    eps = case.options.get("eps", 1.0)
    for p, twin in zip(params, unscaled_params, strict=True):
        if eps >= 0.125:  # a smaller one turns the rounding of a gradient near zero into a step
            assert_close(p, twin, ulps=64, size=16)


# --- norms ----------------------------------------------------------------------------------------


def clipped(optimizer: Any, scale: Any) -> Any:
    return optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=0.5)


@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
def test_an_infinite_max_norm_only_measures(cls):
    twins = [Parameter(torch.ones(3)) for _ in range(2)]
    measured, reference = (cls([p]) for p in twins)
    for p in twins:
        p.grad = torch.full((3,), 1e10)
    measured.unscale_and_step(grads_scaled_by=1.0, max_norm=INF)
    reference.unscale_and_step(grads_scaled_by=1.0)
    assert bits(twins[0]) == bits(twins[1])
    torch.testing.assert_close(measured.grad_norm, torch.tensor(3e20).sqrt())


def test_the_norm_of_float32_gradients_may_exceed_float32_when_squared():
    param = Parameter(torch.zeros(2))
    optimizer = ampopt.SGD([param], lr=1.0)
    param.grad = torch.tensor([3e30, 4e30])
    result = optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=5.0)
    assert not result.skipped
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(5e30))
    torch.testing.assert_close(param.detach(), torch.tensor([-3.0, -4.0]))


# --- groups, order, layouts, dtypes ---------------------------------------------------------------


def test_a_neighbour_that_has_taken_more_steps_changes_no_bit():
    """With several step counts, scalars are a vector, by which torch divides differently."""
    results = []
    for beside in (True, False):
        param, other = (Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
        params = [param, other] if beside else [param]
        optimizer = ampopt.Adam(params, lr=0.01, betas=(0.5, 0.0))
        for size in (None, 0.0, 1.0):
            param.grad = None if size is None else torch.full_like(param, size)
            other.grad = torch.ones_like(other)
            optimizer.step()
        results.append(bits(param))
    assert results[0] == results[1]


@pytest.mark.parametrize("step", [plain, joined, split])
@pytest.mark.parametrize("view", ["conjugate", "negative"])
def test_lazy_conjugates_and_negatives_are_what_they_stand_for(step, view):
    """Autograd may leave a lazy conjugate as the gradient of a complex parameter."""
    if view == "conjugate":
        param = Parameter(torch.tensor([1 + 1j, 2 - 1j]))
        (param.conj() * torch.tensor([1j, 2j])).real.sum().backward()
        assert param.grad is not None
        assert param.grad.is_conj()
        expected = torch.tensor([1 - 0.5 + 0j, 0]) * 0 + param.detach() - 0.5 * param.grad.clone()
    else:
        param = Parameter(torch.tensor([1.0, 2.0]))
        param.grad = torch.tensor([1j, 2j]).conj().imag
        assert param.grad.is_neg()
        expected = torch.tensor([1.5, 3.0])
    for _ in range(2):  # a second time, the plan of the first step is there
        grad = param.grad
        step(ampopt.SGD([param], lr=0.5), 1.0)
        assert_close(param.detach(), expected.resolve_conj())
        with torch.no_grad():
            param.add_(0.5 * grad)


def test_a_lazy_negative_is_noticed_between_ordinary_gradients():
    param = Parameter(torch.zeros(2))
    optimizer = ampopt.SGD([param], lr=1.0)
    for _ in range(2):
        param.grad = torch.ones(2)
        optimizer.step()
        param.grad = torch.ones(2)._neg_view()
        optimizer.step()
        assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("step", [plain, joined, split])
@pytest.mark.parametrize("wide", ["gradient", "parameter"])
def test_float64_on_either_side_is_computed_in_float64(step, wide):
    param = Parameter(torch.zeros(2, dtype=torch.float64 if wide == "parameter" else torch.float32))
    other = torch.float32 if wide == "parameter" else torch.float64
    param.grad_dtype = other  # type: ignore[attr-defined]
    optimizer = ampopt.SGD([param], lr=0.1)
    with torch.no_grad():
        param.fill_(1 + 2.0**-40)
    param.grad = torch.full((2,), 0.5, dtype=other)
    step(optimizer, 1.0)
    assert param.dtype == (torch.float64 if wide == "parameter" else torch.float32)
    expected = torch.full((2,), (1 + 2.0**-40) - 0.1 * 0.5, dtype=torch.float64)
    torch.testing.assert_close(param.detach(), expected.to(param.dtype), rtol=1e-15, atol=0)


def test_low_precision_parameters_may_have_float32_gradients():
    param = Parameter(torch.zeros(2, dtype=torch.float16))
    param.grad_dtype = torch.float32  # type: ignore[attr-defined]
    for step in (plain, joined, split):
        with torch.no_grad():
            param.zero_()
        param.grad = torch.full((2,), 2.0**-30)
        step(ampopt.SGD([param], lr=2.0**30), 1.0)
        assert param.tolist() == [-1.0, -1.0]


# --- what changes between steps -------------------------------------------------------------------


def twins_of(case: Case, count: int = 2) -> tuple[list[Parameter], Any, list[Parameter], Any]:
    params, twins = ([Parameter(torch.ones(3)) for _ in range(count)] for _ in range(2))
    return params, case.make(params), twins, case.torch(twins)


def both_step(*trainings: tuple[Sequence[Parameter], Any], grads: Sequence[float | None]) -> None:
    for params, optimizer in trainings:
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else torch.tensor([g, -g, 2 * g])
        optimizer.step()


def test_momentum_switched_off_and_on_again_keeps_its_buffer():
    params, optimizer, twins, reference = twins_of(Case(ampopt.SGD, {"lr": 0.1, "momentum": 0.9}))
    trainings = ((params, optimizer), (twins, reference))
    for momentum in (0.9, 0.0, 0.0, 0.9, 0.5):
        for _, opt in trainings:
            opt.param_groups[0]["momentum"] = momentum
        both_step(*trainings, grads=(1.0, -2.0))
    assert_same_training(params, optimizer, twins, reference)


@pytest.mark.parametrize("where", [contextlib.nullcontext, as_on_a_device])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_tensor_has_one_element_of_any_shape(shape, where):
    params = [Parameter(torch.ones(3)) for _ in range(3)]
    with where():
        optimizer = ampopt.AdamW(params, lr=torch.full(shape, 0.5))
        for p in params:
            p.grad = torch.ones(3)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    twin = Parameter(torch.ones(3))
    twin.grad = torch.ones(3)
    ampopt.AdamW([twin], lr=0.5).step()
    assert all(bits(p) == bits(twin) for p in params)


def test_amsgrad_may_be_switched_on_mid_training():
    """Torch raises a KeyError. Here the maximum starts with the next step."""
    params = [Parameter(torch.ones(3))]
    optimizer = ampopt.Adam(params, lr=0.1)
    both_step((params, optimizer), grads=(1.0,))
    optimizer.param_groups[0]["amsgrad"] = True
    both_step((params, optimizer), grads=(0.5,))
    state = optimizer.state[params[0]]
    assert bits(state["max_exp_avg_sq"]) == bits(state["exp_avg_sq"])


def test_a_parameter_may_shrink_in_place_of_its_storage():
    """Address and stride stay the same. No element beyond the new size may be written."""
    storage = torch.ones(4)
    param = Parameter(storage)
    optimizer = ampopt.SGD([param], lr=0.5)
    param.grad = torch.ones(4)
    optimizer.step()
    param.grad = None
    param.data = storage[:2]
    param.grad = torch.ones(2)
    optimizer.step()
    assert storage.tolist() == [0.0, 0.0, 0.5, 0.5]


# --- torch's own step -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [plain, joined, split])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_step_as_torchs(step, momentum):
    tables = [Parameter(torch.ones(4, 2)) for _ in range(2)]
    optimizer = ampopt.SGD([tables[0]], lr=0.5, momentum=momentum)
    reference = torch.optim.SGD([tables[1]], lr=0.5, momentum=momentum)
    for index in ([0, 2, 2], [1], [2, 0]):
        for table, scale in zip(tables, (1.0 if step is plain else 8.0, 1.0), strict=True):
            table.grad = None
            looked_up = torch.nn.functional.embedding(torch.tensor(index), table, sparse=True)
            (looked_up.sum() * scale).backward()
        step(optimizer, 8.0)
        reference.step()
    assert bits(tables[0]) == bits(tables[1])


@pytest.mark.parametrize("step", [plain, joined, split])
def test_sparse_gradients_of_a_group_that_was_added_are_stepped_as_any(step):
    tables = [[Parameter(torch.ones(3, 2)) for _ in range(2)] for _ in range(2)]
    whole = ampopt.Adagrad(tables[0], initial_accumulator_value=0.25)
    grown = ampopt.Adagrad(tables[1][:1], initial_accumulator_value=0.25)
    grown.add_param_group({"params": tables[1][1:]})
    for optimizer, pair in ((whole, tables[0]), (grown, tables[1])):
        for table in pair:
            torch.nn.functional.embedding(torch.tensor([0, 2]), table, sparse=True).sum().backward()
        step(optimizer, 1.0)
    assert bits(tables[0]) == bits(tables[1])
    assert bits(tables[0]) != bits([torch.ones(3, 2)] * 2)


@pytest.mark.parametrize("step", [joined, split])
def test_sparse_duplicates_that_overflow_in_their_sum_are_skipped(step):
    table = Parameter(torch.ones(2, 1))
    optimizer = ampopt.SGD([table], lr=0.5)
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.full((2, 1), 3e38), (2, 1), check_invariants=True
    )
    assert step(optimizer, 1.0).skipped
    assert table.tolist() == [[1.0], [1.0]]


def test_differentiable_steps_are_torchs():
    """Also if no optimizer of torch's own class was made before."""
    start = torch.tensor([1.0, 2.0], requires_grad=True)
    moved = []
    for cls in (ampopt.SGD, torch.optim.SGD):
        weight = torch.tensor(0.5, requires_grad=True)
        param = start.detach().clone().requires_grad_()
        updated = param.clone()
        optimizer = cls([updated.detach().requires_grad_()], lr=0.1, differentiable=True)
        (inner,) = optimizer.param_groups[0]["params"]
        inner = inner.detach().requires_grad_()
        optimizer.param_groups[0]["params"] = [inner.clone()]
        (carried,) = optimizer.param_groups[0]["params"]
        carried.grad = weight * torch.tensor([1.0, 3.0])
        optimizer.step()
        (derivative,) = torch.autograd.grad(carried.sum(), weight)
        moved.append((bits(carried), bits(derivative)))
    assert moved[0] == moved[1]
    assert moved[0][1].shown == repr(torch.tensor(-0.4).item())


def test_torchs_own_step_is_not_called_without_gradients(monkeypatch):
    called: list[Any] = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: called.append(self))
    param = Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=0.1, differentiable=True)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    optimizer.unscale(grads_scaled_by=2.0)
    optimizer.step_after_unscale()
    assert called == []
    param.grad = torch.ones(2)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert called == [optimizer]


# --- saving and loading ---------------------------------------------------------------------------


def dtypes_of(history: History) -> set[torch.dtype]:
    return {p.dtype for p in history.params}


def test_loading_keeps_the_dtype_that_a_state_was_saved_with():
    """Torch's loader casts states to the dtype of their parameter, which changes the next steps."""

    class Float32State(Plain):
        def update(self) -> None:
            for p in self.param_groups[0]["params"]:
                mean = self.state[p].setdefault("mean", [torch.zeros(p.shape)])[0]
                mean.add_(p.grad.float() - mean, alpha=0.1)
                p.sub_(mean.to(p.dtype))

    param = Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Float32State([param])
    param.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step()
    loaded = Float32State([param])
    seen: list[torch.dtype] = []
    loaded.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.state[param]["mean"][0].dtype)
    )
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state_of(loaded) == state_of(optimizer)
    assert seen == [torch.float32]


@pytest.mark.parametrize("made", [lambda x: x.requires_grad_(), Parameter], ids=["tensor", "param"])
def test_a_loaded_state_that_requires_grad_does_not_refer_to_the_saved_one(made):
    param = Parameter(torch.ones(2))
    optimizer, loaded = Plain([param]), Plain([param])
    optimizer.state[param]["mean"] = made(torch.ones(2))
    loaded.load_state_dict(optimizer.state_dict())
    mean = loaded.state[param]["mean"]
    assert mean is not optimizer.state[param]["mean"] and type(mean) is type(made(torch.ones(2)))
    assert mean.is_leaf and mean.requires_grad
    assert state_of(copy.deepcopy(loaded)) == state_of(optimizer)


@pytest.mark.parametrize("prefix", ["old_", "max_"])  # NAdam has no max_exp_avg_sq
def test_loading_uses_the_checkpoint_that_a_users_hook_returned(prefix):
    param = Parameter(torch.ones(2))
    optimizer = ampopt.NAdam([param])
    param.grad = torch.ones(2)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    def renamed(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {0: {k.removeprefix(prefix): v for k, v in state_dict["state"][0].items()}}
        return {**state_dict, "state": state}

    loaded = ampopt.NAdam([param])
    loaded.register_load_state_dict_pre_hook(renamed)
    old = {prefix + key: value for key, value in saved["state"][0].items()}
    loaded.load_state_dict({**saved, "state": {0: old}})
    assert state_of(loaded) == state_of(optimizer)


# --- backends -------------------------------------------------------------------------------------


@fewer(0.35)
@given(cases(), histories(dtypes=(*FULL, *HALF)), loss_scales())
def test_backends_agree(backend, case, history, scale):
    assume(scale.kind != "none" or not any(history.overflows))
    assume(not dtypes_of(history) & {torch.float16} or scale.number == 1.0)
    one, first = train(case, history, scale, clipped)
    ampopt.set_backend("eager")
    try:
        two, second = train(case, history, scale, clipped)
    finally:
        ampopt.set_backend(backend.split()[0])
    loose = case.options.get("eps", 1.0) < 0.125
    for p, twin in zip(one, two, strict=True):
        assert_close(p, twin, ulps=2**12 if loose else 4, size=16)
    assert [s and s.keys() for s in state_of(first)] == [s and s.keys() for s in state_of(second)]
