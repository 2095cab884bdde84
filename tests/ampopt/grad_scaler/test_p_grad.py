"""``p.grad`` holds unscaled gradients after a scaler's step, as after a step of torch's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import Plain, Signed, torch_twin
from support.strategies import fewer, values
from support.training_loops import INF, Step, give, made, scaler_at, steps
from torch.nn import Parameter

import ampopt
from ampopt import GradScaler
from ampopt.testing.bits import bits
from ampopt.testing.no_sync import assert_no_sync

pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.parametrize("backend", ["eager on a device", "compiled", "triton"], indirect=True),
]
SCALERS = (torch.amp.GradScaler, GradScaler)
each_scaler = pytest.mark.parametrize("scaler_class", SCALERS, ids=["torchs", "ours"])
RULES = (ampopt.SGD, ampopt.AdamW, ampopt.Adafactor)
"""One of each kind: without state, with state, and with row and column statistics."""
POWERS = st.integers(-4, 16).map(lambda n: 2.0**n)


def gradients(optimizer: Any) -> list[torch.Tensor]:
    found = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [grad for grad in found if grad is not None]


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@each_scaler
@pytest.mark.parametrize("cls", [*RULES, ampopt.Muon, ampopt.SparseAdam, Signed, Plain])
@fewer(0.2)
@given(steps(max_size=2), POWERS, st.booleans())
def test_gradients_are_what_torchs_step_leaves(scaler_class, cls, steps, scale, unscale_first):
    left = []
    twin = getattr(torch.optim, cls.__name__, torch.optim.SGD)
    for scaler_class_, cls_ in ((torch.amp.GradScaler, twin), (scaler_class, cls)):
        optimizer, _ = made(cls_)
        scaler = scaler_at(scale, scaler_class_)
        left.append([])
        for step in steps:
            give(optimizer, step, scaler.get_scale())
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            left[-1].append([grad.clone() for grad in gradients(optimizer)])
    assert_equal(left[1], left[0])


@each_scaler
@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_without_zero_grad_gradients_add_up_as_with_torch(scaler_class, cls, unscale_first):
    """Autograd adds the next scaled gradients to the unscaled ones that the step has left."""
    runs = []
    for scaler_class_, cls_ in ((torch.amp.GradScaler, torch_twin(cls)), (scaler_class, cls)):
        optimizer, params = made(cls_)
        scaler = scaler_at(4.0, scaler_class_)
        for _ in range(3):
            scaler.scale(sum(p.square().sum() for p in params)).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        runs.append((gradients(optimizer), params))
    torch.testing.assert_close(runs[1], runs[0])


@each_scaler
@pytest.mark.filterwarnings("ignore:AdamW keeps")  # its states in float16, as torch's does
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
@fewer(0.2)
@given(st.lists(values(torch.float32), min_size=5, max_size=5), st.sampled_from([3.0, 2.0**20]))
def test_half_precision_gradients_are_unscaled_after_the_step(
    scaler_class, dtype, masters, numbers, scale
):
    """The step uses gradients that were not rounded after unscaling; ``p.grad`` keeps its dtype."""
    twins = []
    for _ in range(2):
        p = Parameter(torch.ones(5, dtype=dtype))
        p.grad = torch.tensor(numbers).to(dtype)
        twins.append((p, ampopt.AdamW([p], master_weights=masters)))
    (stepped, optimizer), (expected, other) = twins
    before = expected.grad.clone()
    other.unscale_and_step(grads_scaled_by=scale)
    assert bits(expected.grad) == bits(before)
    scaler_at(scale, scaler_class).step(optimizer)
    assert bits(stepped) == bits(expected)
    assert bits(dict(optimizer.state[stepped])) == bits(dict(other.state[expected]))
    assert_equal(stepped.grad, (before.float() * torch.tensor(1 / scale)).to(dtype))


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_clipped_on_masters_are_those_in_the_parameters(bad):
    p = Parameter(torch.ones(2, dtype=torch.float16))
    p.grad = torch.tensor([3.0 * 8, INF if bad else 4.0 * 8], dtype=torch.float16)
    optimizer = ampopt.SGD([p], lr=1.0, master_weights=True)
    scaler = scaler_at(8.0, GradScaler)
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [3.0, INF if bad else 4.0]  # to be logged
    masters = list(optimizer.master_params())
    torch.nn.utils.clip_grad_value_(masters, 3.5)
    scaler.step(optimizer)
    assert p.grad.tolist() == [3.0, 3.5]
    assert masters[0].grad is None
    assert p.tolist() == ([1.0, 1.0] if bad else [-2.0, -2.5])


@each_scaler
def test_gradients_of_every_layout(scaler_class):
    """Transposed, float64, empty and missing gradients, and kinds that torch's scaler refuses."""
    grads: list[Any] = [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.full((3,), 8.0, dtype=torch.float64),
        torch.ones(0),
        None,
    ]
    if scaler_class is GradScaler:
        number = torch.full((3,), 8 + 4j, dtype=torch.complex64)
        grads += [torch.full((), 8.0).expand(3, 2), number, number.conj()]
    expected = [None if grad is None else grad / 4 for grad in grads]
    params = []
    for grad in grads:
        like = torch.ones(2) if grad is None else grad
        params.append(Parameter(torch.ones(like.shape, dtype=like.dtype)))
        params[-1].grad = grad
    scaler, optimizer = scaler_at(4.0, scaler_class), ampopt.SGD(params, lr=1.0)
    for taken in (1, 2):  # the second step reuses the plan, unless a parameter is complex
        scaler.step(optimizer)
        scaler.update()
        for p, grad in zip(params, expected, strict=True):
            if grad is None:
                assert p.grad is None
            else:
                assert_equal(p.grad, grad)
                assert_equal(p.detach(), 1 - taken * grad)
                p.grad.mul_(4.0)


def test_gradients_of_a_closure():
    p: Any = Parameter(torch.ones(3))
    optimizer = ampopt.AdamW([p])
    scaler = GradScaler("cpu", init_scale=2.0**127)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = 8 * p.sum()
        scaler.scale(loss).backward()
        seen.append(p.grad.clone())
        return loss

    scaler.step(optimizer, closure)
    assert len(seen) > 1  # it overflowed
    assert p.grad.tolist() == torch.full_like(p, 8.0).tolist()


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.SGD])
def test_a_parameter_of_two_optimizers_is_not_unscaled_twice(cls):
    p = Parameter(torch.ones(2))
    p.grad = torch.full((2,), 8.0)
    first, second = cls([p]), cls([p])
    scaler = scaler_at(4.0, GradScaler)
    scaler.step(first)
    before = bits((p, p.grad))
    with pytest.raises(RuntimeError, match="belongs to another optimizer too"):
        scaler.step(second)
    assert bits((p, p.grad)) == before


@each_scaler
@pytest.mark.parametrize("cls", [ampopt.AdamW, Signed, Plain, torch.optim.AdamW])
def test_a_gradient_made_nan_after_unscaling_is_applied(scaler_class, cls):
    """Edits after ``unscale_`` are not tested, as with torch's scaler and optimizers."""
    optimizer, params = made(cls)
    first: Any = params[0]
    scaler = scaler_at(4.0, scaler_class)
    give(optimizer, 1.0, 4.0)
    scaler.unscale_(optimizer)
    first.grad[0, 0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    if cls is not Signed:  # to which NaN has no sign
        assert first[0, 0].isnan()
    assert scaler.get_scale() == 4.0
    # And one that was mended is not, for it was an overflow.
    give(optimizer, Step((1.0,) * 10, INF), 4.0)
    before = bits(params)
    scaler.unscale_(optimizer)
    first.grad[0, 0] = 1.0
    scaler.step(optimizer)
    scaler.update()
    assert bits(params) == before
    assert scaler.get_scale() == 2.0


@each_scaler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_synchronizes(backend, scaler_class, dtype):
    if backend != "triton":
        pytest.skip("on the CPU the host looks")
    p = Parameter(torch.ones(3, dtype=dtype))
    optimizer = ampopt.AdamW([p], master_weights=True)
    scaler = scaler_at(4.0, scaler_class)
    p.grad = torch.full((3,), 8.0, dtype=dtype)
    with assert_no_sync():
        scaler.step(optimizer)
    assert p.grad.tolist() == [2.0] * 3
