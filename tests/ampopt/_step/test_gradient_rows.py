"""``accumulate`` and ``unscale`` after calls like them: every change in between is noticed."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import fewer
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import ampopt
from ampopt.testing.bits import bits

SHAPES = ((2, 3), (4,), (3, 2))
FORMS = {
    "dense": lambda values: values.clone(),
    "strided": lambda values: values.mT.contiguous().mT if values.ndim == 2 else values.clone(),
    "expanded": lambda values: values.reshape(-1)[:1].expand(values.shape),
    "absent": lambda values: None,
}


def made(dtype: torch.dtype = torch.float32) -> tuple[list[Parameter], ampopt.Optimizer]:
    params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    return params, ampopt.SGD(params, lr=1.0, master_weights=dtype != torch.float32)


def micro_batch(params: list[Parameter], forms: list[str], number: float) -> list[Tensor]:
    """Set gradients of these forms; return what they add to the sums."""
    for param, form in zip(params, forms, strict=True):
        values = torch.arange(1.0, 1 + param.numel(), dtype=param.dtype).view(param.shape) + number
        param.grad = FORMS[form](values)
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(sorted(FORMS)), min_size=3, max_size=3),
            st.sampled_from(["again", "again", "step", "step with these"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_sums_are_right_whichever_gradients_come(batches):
    params, optimizer = made()
    expected = [torch.zeros(shape) for shape in SHAPES]
    for number, (forms, then) in enumerate([*batches, (["dense"] * 3, "step")]):
        added = micro_batch(params, forms, number)
        if then != "step with these":
            optimizer.accumulate(grads_scaled_by=1.0)
            assert all(param.grad is None for param in params)
        expected = [total - more for total, more in zip(expected, added, strict=True)]
        if then != "again":
            optimizer.unscale_and_step(grads_scaled_by=1.0)
            for param, total in zip(params, expected, strict=True):
                torch.testing.assert_close(param.detach(), total, rtol=0, atol=0)


def alike(optimizer: ampopt.Optimizer, params: list[Parameter], calls: int = 3) -> None:
    """Accumulate and step until rows of earlier calls are in use, then begin a cycle."""
    for _ in range(2):
        for _ in range(calls):
            micro_batch(params, ["dense"] * 3, 0)
            optimizer.accumulate(grads_scaled_by=1.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    micro_batch(params, ["dense"] * 3, 0)
    optimizer.accumulate(grads_scaled_by=1.0)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_parameter_may_get_its_first_gradient_late(accumulates):
    params, optimizer = made()
    alike(optimizer, params)
    optimizer.zero_grad()
    before = [param.detach().clone() for param in params]
    micro_batch(params, ["dense", "absent", "dense"], 0)
    optimizer.accumulate(grads_scaled_by=1.0)
    added = micro_batch(params, ["dense"] * 3, 0)
    if accumulates:
        optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    for param, old, grad, times in zip(params, before, added, (2, 1, 2), strict=True):
        assert torch.equal(param.detach(), old - times * grad)


def test_a_parameter_that_was_added_is_noticed():
    params, optimizer = made()
    alike(optimizer, params)
    new = Parameter(torch.zeros(5))
    optimizer.add_param_group({"params": [new]})
    micro_batch(params, ["dense"] * 3, 0)
    new.grad = torch.ones(5)
    optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert new.tolist() == [-1.0] * 5


@pytest.mark.parametrize("in_its_group", [True, False])
def test_a_parameter_that_replaces_another_is_noticed(in_its_group):
    params, optimizer = made()
    alike(optimizer, params)
    new = Parameter(torch.zeros(4))
    if not in_its_group:
        group = optimizer.param_groups[0]
        optimizer.param_groups[0] = {**group, "params": list(group["params"])}
    optimizer.param_groups[0]["params"][1] = new
    micro_batch(params, ["dense"] * 3, 0)  # the model has the replaced one still
    new.grad = torch.ones(4)
    optimizer.accumulate(grads_scaled_by=1.0)
    assert new.grad is None
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert new.tolist() == [-1.0] * 4


def test_other_dtypes_are_noticed():
    params, optimizer = made()
    alike(optimizer, params)
    optimizer.zero_grad()
    before = params[0].detach().clone()
    params[0].grad_dtype = None
    micro_batch(params, ["dense"] * 3, 0)
    params[0].grad = torch.full(SHAPES[0], 0.1, dtype=torch.float64)
    optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    torch.testing.assert_close(params[0].detach(), before - 0.1)
    added = torch.zeros(SHAPES[0])
    for _ in range(2):
        added += micro_batch(params, ["dense"] * 3, 0)[0]
        optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    torch.testing.assert_close(params[0].detach(), before - 0.1 - added)


@pytest.mark.parametrize("change", ["resized", "resized since", "sparse"])
def test_what_is_refused_at_first_is_refused_later(change):
    params, optimizer = made()
    alike(optimizer, params)
    micro_batch(params, ["dense"] * 3, 0)
    error: type[Exception] = RuntimeError
    if change == "resized":
        params[1].grad = None
        params[1].data = torch.zeros(6)
        params[1].grad = torch.ones(6)
    elif change == "resized since":
        params[1].data = torch.zeros(6)
        error = ValueError
    else:
        params[0].grad, error = torch.ones(SHAPES[0]).to_sparse(), TypeError
    with pytest.raises(error):
        optimizer.accumulate(grads_scaled_by=1.0)


def test_an_overflow_is_found_and_named_in_every_call():
    params, optimizer = made()
    alike(optimizer, params)
    micro_batch(params, ["dense"] * 3, 0)
    params[2].grad = torch.full(SHAPES[2], float("inf"))
    flag, _ = optimizer.accumulate(grads_scaled_by=1.0)
    assert flag > 0
    micro_batch(params, ["dense"] * 3, 0)
    assert optimizer.accumulate(grads_scaled_by=1.0)[0] == 0
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).overflowed == ["group 0, parameter 2"]


def test_no_gradient_is_kept():
    params, optimizer = made()
    for _ in range(3):
        micro_batch(params, ["dense"] * 3, 0)
        grads = [weakref.ref(param.grad) for param in params]
        optimizer.accumulate(grads_scaled_by=1.0)
        gc.collect()
        assert all(ref() is None for ref in grads)


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(4), torch.zeros(8)[::2], torch.zeros(1).expand(4), torch.zeros(4).half()],
    ids=["dense", "strided", "expanded", "half"],
)
def test_a_sum_that_a_user_has_given_other_memory_is_made_anew(memory):
    """The memory that it had may be freed by now, and its new one is the user's."""
    params, optimizer = made()
    before = memory.clone()
    for cycle in range(1, 4):
        for _ in range(2):
            micro_batch(params, ["dense"] * 3, 0)
            optimizer.accumulate(grads_scaled_by=1.0)
        optimizer.unscale()
        total = params[1].grad
        assert total is not None and total.tolist() == [2.0, 4.0, 6.0, 8.0]
        optimizer.step_after_unscale()
        assert params[1].tolist() == [-2.0 * cycle, -4.0 * cycle, -6.0 * cycle, -8.0 * cycle]
        total.data = memory
    assert torch.equal(memory, before)


def test_a_parameter_may_be_resized_between_cycles():
    param = Parameter(torch.zeros(4))
    optimizer = ampopt.SGD([param], lr=1.0)
    for size in (4, 6, 2):
        param.data, param.grad = torch.zeros(size), None
        for _ in range(2):
            param.grad = torch.ones(size)
            optimizer.accumulate(grads_scaled_by=1.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert param.tolist() == [-2.0] * size


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_in_a_group_twice_is_added_once():
    param = Parameter(torch.zeros(4))
    optimizer = ampopt.SGD([param, param], lr=1.0)
    for _ in range(3):
        param.grad = torch.ones(4)
        optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert param.tolist() == [-3.0] * 4


# --- unscale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(sorted(FORMS)), min_size=3, max_size=3), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_gradients_are_unscaled_once_whichever_come(dtype, batches):
    params, optimizer = made(dtype)
    expected = [torch.zeros(shape) for shape in SHAPES]
    for number, (forms, share) in enumerate([*batches, (["dense"] * 3, True)]):
        micro_batch(params, forms, number)
        if share and params[0].grad is not None and params[0].grad.is_contiguous():
            params[2].grad = params[0].grad.view(SHAPES[2])
        divided = [torch.zeros_like(p) if p.grad is None else p.grad / 2 for p in params]
        optimizer.unscale(grads_scaled_by=2.0)
        pairs = list(optimizer.params_and_masters())
        for (param, full), grad in zip(pairs, divided, strict=True):
            assert param.grad is None or torch.equal(param.grad, grad)
            assert (full.grad is None) == (param.grad is None)
            assert full.grad is None or torch.equal(full.grad, grad.float())
        optimizer.step_after_unscale()
        expected = [total - grad for total, grad in zip(expected, divided, strict=True)]
        for (_, full), total in zip(pairs, expected, strict=True):
            assert torch.equal(full.detach(), total)


def test_an_unscale_after_others_finds_overflows_and_norms():
    params, optimizer = made()
    for number in (0.0, 1.0, float("inf"), 2.0, float("nan")):
        micro_batch(params, ["dense"] * 3, 0)
        grad = params[1].grad
        assert grad is not None
        grad[0] = number
        norm = sum(p.grad.square().sum() for p in params if p.grad is not None) ** 0.5 / 2
        flag, _ = optimizer.unscale(grads_scaled_by=2.0)
        assert (flag > 0) == (number - number != 0)
        result = optimizer.step_after_unscale()
        assert result.overflowed == ["group 0, parameter 1"] * bool(flag > 0)
        micro_batch(params, ["dense"] * 3, 0)
        assert params[1].grad is not None
        params[1].grad[0] = number
        optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=float("inf"))
        torch.testing.assert_close(optimizer.grad_norm, norm, equal_nan=True)


def test_master_weights_that_are_turned_on_get_the_unscaled_gradients():
    param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = ampopt.SGD([param], lr=1.0)
    for turned_on in (False, False, True, True):
        if turned_on:  # a group need not have the entry
            optimizer.param_groups[0]["master_weights"] = True
        param.grad = torch.ones_like(param)
        optimizer.unscale(grads_scaled_by=3.0)
        (full,) = optimizer.master_params()
        assert full.grad is not None
        third = torch.tensor(1 / 3, dtype=torch.float32 if turned_on else torch.bfloat16)
        assert full.grad.tolist() == [third.item()] * 3
        optimizer.step_after_unscale()


def replaced_master(optimizer: ampopt.Optimizer, param: Parameter) -> None:
    optimizer.state[param]["master_param"] = optimizer.state[param]["master_param"] + 1.0


def replaced_state(optimizer: ampopt.Optimizer, param: Parameter) -> None:
    optimizer.state[param] = {"master_param": optimizer.state[param]["master_param"] + 1.0}


def replaced_states(optimizer: ampopt.Optimizer, param: Parameter) -> None:
    optimizer.state = copy.copy(optimizer.state)
    replaced_state(optimizer, param)


def loaded(optimizer: ampopt.Optimizer, param: Parameter) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["master_param"] += 1.0
    optimizer.load_state_dict(state)


def moved(optimizer: ampopt.Optimizer, param: Parameter) -> None:
    master = optimizer.state[param]["master_param"]
    master.data = master.data + 1.0


def shortened(optimizer: ampopt.Optimizer, param: Parameter) -> None:
    optimizer.param_groups[0]["master_bits"] = 24


@pytest.mark.parametrize(
    ("change", "shift"),
    [
        (replaced_master, 1),
        (replaced_state, 1),
        (replaced_states, 1),
        (loaded, 1),
        (moved, 1),
        (shortened, 0),
    ],
)
def test_another_master_gets_the_unscaled_gradients(change, shift):
    param = Parameter(torch.zeros(8192, dtype=torch.bfloat16))
    optimizer = ampopt.SGD([param], lr=1.0, master_weights=True)
    for number in range(6):
        if number == 2:
            change(optimizer, param)
        param.grad = torch.full_like(param, 3.0)
        optimizer.unscale(grads_scaled_by=2.0)
        (full,) = optimizer.master_params()
        assert full.grad is not None and full.grad.unique().tolist() == [1.5]
        expected = -1.5 * number + shift * (number >= 2)
        assert full.unique().tolist() == [expected]
        optimizer.step_after_unscale()
        (full,) = optimizer.master_params()
        assert full.grad is None and full.unique().tolist() == [expected - 1.5]


def test_a_master_of_another_shape_is_refused_before_anything_changes():
    param = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = ampopt.SGD([param], lr=1.0, master_weights=True)
    for _ in range(2):
        param.grad = torch.full_like(param, 3.0)
        optimizer.unscale(grads_scaled_by=2.0)
        optimizer.step_after_unscale()
    optimizer.state[param]["master_param"].data = torch.zeros(2)
    param.grad = torch.full_like(param, 3.0)
    with pytest.raises(ValueError, match="group 0, parameter 0"):
        optimizer.unscale(grads_scaled_by=2.0)
    assert param.grad.tolist() == [3.0] * 3 and optimizer.pending is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unscale_keeps_no_gradient(dtype):
    params, optimizer = made(dtype)
    for _ in range(3):
        micro_batch(params, ["dense"] * 3, 0)
        grads = [weakref.ref(param.grad) for param in params]
        optimizer.unscale(grads_scaled_by=1.0)
        optimizer.step_after_unscale()
        optimizer.zero_grad()
        gc.collect()
        assert all(ref() is None for ref in grads)


class OutOfMemory(TorchDispatchMode):
    """The operation by which gradients are checked, or added to sums, finds no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.aminmax.default, torch.ops.aten.mul.Tensor):
            raise MemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["eager"], indirect=True)
@pytest.mark.parametrize("call", ["unscale", "accumulate", "unscale_and_step"])
def test_a_call_that_raises_keeps_no_gradient(backend, call):
    """For a second try there is the memory of the gradients, if the caller clears them."""
    params, optimizer = made()
    for _ in range(3):
        micro_batch(params, ["dense"] * 3, 0)
        grads = [weakref.ref(param.grad) for param in params]
        with pytest.raises(MemoryError), OutOfMemory():
            getattr(optimizer, call)(grads_scaled_by=2.0)
        for param in params:
            param.grad = None
        gc.collect()
        assert all(ref() is None for ref in grads)
        micro_batch(params, ["dense"] * 3, 0)
        getattr(optimizer, call)(grads_scaled_by=2.0)
        optimizer.zero_grad()


def test_a_backward_pass_that_needs_gradients_from_before_unscale_is_refused():
    params, optimizer = made()
    for _ in range(3):
        micro_batch(params, ["dense"] * 3, 0)
        grad = params[0].grad
        assert grad is not None
        weight = torch.ones_like(grad, requires_grad=True)
        product = (weight * grad).sum()  # its backward pass reads the gradient
        optimizer.unscale(grads_scaled_by=2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        optimizer.step_after_unscale()


@pytest.mark.parametrize("gone", [0, 1])
def test_an_optimizer_keeps_no_parameter_of_one_that_has_stepped_with_it(gone):
    params = [Parameter(torch.zeros(3)) for _ in range(2)]
    every = [ampopt.SGD([param], lr=1.0) for param in params]
    for _ in range(3):
        params[0].grad, params[1].grad = torch.ones(3), torch.ones(3)
        ampopt.unscale_and_step(every, grads_scaled_by=1.0)
    left = weakref.ref(params.pop(gone))
    del every[gone]
    gc.collect()
    assert left() is None


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(sorted(FORMS)), min_size=3, max_size=3),
            st.sampled_from([(0, 1), (0, 1), (0,), (1, 0)]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_optimizers_that_step_together_skip_together_whichever_gradients_come(batches):
    params = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    every = ampopt.SGD(params[:1], lr=1.0), ampopt.SGD(params[1:], lr=1.0)
    expected = [torch.zeros(shape) for shape in SHAPES]
    for number, (forms, chosen, overflows) in enumerate(batches):
        added = micro_batch(params, forms, number)
        last = params[0 if chosen == (0,) else 2].grad
        overflows = overflows and last is not None and last.is_contiguous()
        if overflows and last is not None:
            last[0] = float("inf")
        stepped = params[:1] if chosen == (0,) else params
        result = ampopt.unscale_and_step([every[i] for i in chosen], grads_scaled_by=1.0)
        assert result.skipped == overflows
        for i, param in enumerate(params):
            if any(param is p for p in stepped) and not overflows:
                expected[i] = expected[i] - added[i]
            assert torch.equal(param.detach(), expected[i])


@pytest.mark.parametrize("backend", ["compiled", "eager"], indirect=True)
def test_a_norm_does_not_keep_the_graph_of_gradients_that_have_one(backend):
    params, optimizer = made()
    other = Parameter(torch.zeros(3))
    both = [optimizer, ampopt.SGD([other], lr=1.0)]
    for _ in range(2):
        loss = sum((p + 1).pow(3).sum() for p in [*params, other])
        assert isinstance(loss, Tensor)
        grads = torch.autograd.grad(loss, [*params, other], create_graph=True)
        for param, grad in zip([*params, other], grads, strict=True):
            param.grad = grad
        ampopt.unscale_and_step(both, grads_scaled_by=1.0, max_norm=1.0)
        assert optimizer.grad_norm is not None and not optimizer.grad_norm.requires_grad


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["dense", "strided", "absent"]), min_size=2, max_size=2),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_scaler_unscales_for_torchs_optimizer_whichever_gradients_come(batches):
    """As torch's scaler does."""
    every = [[Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(2)]
    optimizers = [torch.optim.SGD(params, lr=1.0) for params in every]
    scalers = ampopt.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, (forms, overflows, unscales) in enumerate(batches):
        for params, optimizer, scaler in zip(every, optimizers, scalers, strict=True):
            scaler.scale(torch.zeros(()))
            micro_batch(params, [*forms, "dense"], number)
            last = params[2].grad
            assert last is not None
            if overflows:
                last[0] = float("inf")
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for param, expected in zip(*every, strict=True):
            assert torch.equal(param.detach(), expected.detach())


@pytest.mark.parametrize("master_weights", [False, True])
def test_unscale_after_the_check_of_a_closure_writes_no_float16_gradient(master_weights):
    """The check reads the gradients of parameters, which unscale must not divide in float16."""
    param = Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = ampopt.SGD([param], lr=1.0, master_weights=master_weights)

    def closure(scale):
        param.grad = torch.full_like(param, scale)
        return torch.ones(())

    for _ in range(2):
        optimizer.unscale_and_step(closure, grads_scaled_by=2.0)
    param.grad = torch.full_like(param, 2.0**-10)
    if not master_weights:
        with pytest.raises(RuntimeError, match="unscaled values would underflow"):
            optimizer.unscale(grads_scaled_by=2.0**15)
        assert param.grad.tolist() == [2.0**-10] * 3
        return
    optimizer.unscale(grads_scaled_by=2.0**15)
    (full,) = optimizer.master_params()
    assert full.grad is not None and full.grad.tolist() == [2.0**-25] * 3


def test_a_sum_that_began_later_than_others_is_added_to():
    params, optimizer = made()
    alike(optimizer, params)
    optimizer.zero_grad()
    for forms in (["dense", "absent", "absent"], ["absent", "dense", "absent"]):
        micro_batch(params, forms, 0)
        optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    before, added = params[1].detach().clone(), torch.zeros(SHAPES[1])
    for forms in (["dense"] * 3, ["absent", "dense", "absent"]):
        added += micro_batch(params, forms, 0)[1]
        optimizer.accumulate(grads_scaled_by=1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert torch.equal(params[1].detach(), before - added)


# --- any calls and changes ------------------------------------------------------------------------

SCALE = 3.0  # by which no half-precision number can be divided without rounding


class Run:
    """A run of two optimizers, and of one of torch's with a scaler."""

    def __init__(self, dtype: torch.dtype, drop: str, *, forgets: bool) -> None:
        """Make the optimizers.

        Args:
            dtype: the dtype of parameters.
            drop: what ``accumulate`` drops.
            forgets: whether to exchange the param groups for equal ones before each call, so that
                no call uses rows that an earlier one has kept.
        """
        self.dtype, self.drop, self.forgets = dtype, drop, forgets
        params = [Parameter(torch.ones(shape, dtype=dtype)) for shape in (*SHAPES, (2,), (3,))]
        self.optimizer = ampopt.SGD([{"params": params[:1]}, {"params": params[1:3]}], lr=0.5)
        self.other, self.torchs = ampopt.SGD(params[3:4], lr=0.5), torch.optim.SGD(params[4:])
        self.optimizers = self.optimizer, self.other, self.torchs
        self.scaler = ampopt.GradScaler("cpu", init_scale=SCALE)

    @property
    def params(self) -> list[Any]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [param for group in groups for param in group["params"]]

    def give(self, forms: list[str], scale: float = SCALE) -> None:
        """Set all gradients: those of the first parameters in these forms."""
        for optimizer in self.optimizers if self.forgets else ():
            optimizer.param_groups[:] = map(dict, optimizer.param_groups)
        for param, form in zip(self.params, [*forms, *["dense"] * 3], strict=False):
            values = torch.arange(1.0, 1 + param.numel()).view(param.shape) * scale
            if form == "infinite":
                values.view(-1)[-1] = float("inf")
            grad = FORMS.get(form, Tensor.clone)(values)
            dtype = torch.float64 if form == "wide" else param.dtype
            param.grad, param.grad_dtype = None, None
            param.grad = None if grad is None else grad.to(dtype)

    def after(self, call: str, forms: list[str], times: int, change: str) -> Any:
        """The bits of everything, and the error, after calls with a change before the last."""
        error = None
        try:
            for time in range(times + 1):
                if time == times:
                    CHANGES[change](self)
                self.give(forms)
                CALLS[call](self, forms)
        except (RuntimeError, TypeError, ValueError) as raised:
            error = str(raised)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.scaler = ampopt.GradScaler("cpu", init_scale=SCALE)
        states = [optimizer.state.get(p) for optimizer in self.optimizers for p in self.params]
        return error, bits([(p, p.grad) for p in self.params]), bits(states)

    def unscale(self, forms: list[str]) -> None:
        self.optimizer.unscale(SCALE)
        for full in self.optimizer.master_params():  # which has a sum, after accumulate
            if full.grad is not None:
                full.grad.data = full.grad.data / 2
        self.optimizer.step_after_unscale()

    def closure(self, forms: list[str]) -> None:
        def loss(scale: float) -> float:
            self.give(forms if scale == SCALE else [], scale)
            return 1.0

        self.optimizer.unscale_and_step(loss, SCALE)

    def scale(self, forms: list[str]) -> None:
        self.scaler.scale(torch.zeros(()))
        self.scaler.step(self.torchs)
        self.scaler.update()

    def turn_masters(self) -> None:
        group = self.optimizer.param_groups[1]
        group["master_weights"] = not group.get("master_weights", False)

    def exchange(self) -> None:
        self.optimizer.param_groups[1]["params"][0] = Parameter(torch.ones(4, dtype=self.dtype))


CHANGES: dict[str, Callable[[Run], Any]] = {
    "none": lambda run: None,
    "masters": Run.turn_masters,
    "exchange": Run.exchange,
}
CALLS: dict[str, Callable[[Run, list[str]], Any]] = {
    "unscale": Run.unscale,
    "accumulate": lambda run, forms: run.optimizer.accumulate(SCALE, drop=run.drop),
    "closure": Run.closure,
    "together": lambda run, forms: ampopt.unscale_and_step(
        [run.optimizer, run.other], SCALE, max_norm=64.0
    ),
    "scaler": Run.scale,
}
SOME = st.sampled_from(
    [["dense"] * 3, ["dense", "absent", "absent"], ["absent", "dense", "absent"]]
)
TURNS = st.tuples(
    st.sampled_from(["unscale", "accumulate", "accumulate", *CALLS]),
    SOME | SOME | st.lists(st.sampled_from([*FORMS, "wide", "infinite"]), min_size=3, max_size=3),
    st.integers(0, 2),
    st.sampled_from(["none", *CHANGES]),
)


@fewer(1.5)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["window", "micro_batch"]),
    st.lists(TURNS, min_size=20, max_size=40),
)
def test_rows_that_are_kept_give_the_bits_of_new_ones(dtype, drop, turns):
    kept, new = Run(dtype, drop, forgets=False), Run(dtype, drop, forgets=True)
    for turn in turns:
        assert kept.after(*turn) == new.after(*turn)
