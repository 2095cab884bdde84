"""What has happened to a tensor since the last step is noticed: in kept plans, on every backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import assert_same, bits, everything

LARGE = 1 << 13  # the fewest elements of a parameter whose states and masters are small
BFLOAT16 = torch.bfloat16

OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "masters": (BFLOAT16, {"master_weights": True}),
    "masters of 24 bits": (BFLOAT16, {"master_weights": True, "master_bits": 24}),
    "states of 8 bits": (torch.float32, {"state_bits": 8}),
}


def stepped(optimizer: Any) -> bool:
    """Take a step with gradients of 1, and return whether it has made another plan."""
    plan = optimizer._ampopt.runner.plan
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    return optimizer._ampopt.runner.plan is not plan


def with_states(options: str) -> Any:
    """An optimizer of two parameters after two steps, the second on the plan of the first."""
    dtype, arguments = OPTIONS[options]
    params = [Parameter(torch.ones(LARGE, dtype=dtype)) for _ in range(2)]
    optimizer = ampopt.AdamW(params, **arguments)
    assert stepped(optimizer) and not stepped(optimizer)
    return optimizer


def back_with_half(tensor: Tensor) -> None:
    """Offload ``tensor``, and bring back half of it, to the same address."""
    storage: Any = tensor.untyped_storage()
    n = tensor.numel() // 2
    tensor.data = torch.empty(0, dtype=tensor.dtype)
    half: Any = torch.empty(0, dtype=tensor.dtype)
    tensor.data = half.set_(storage, 0, (n,))


CUT: dict[str, Callable[[Tensor], Any]] = {
    "offloaded and back with half": back_with_half,
    "resize_": lambda t: t.resize_(10),
    "data[:10]": lambda t: setattr(t, "data", t.data[:10]),
    "data seen in another dtype": lambda t: setattr(
        t, "data", t.data.view(torch.int8 if t.itemsize > 1 else torch.bool)
    ),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "storage cut": lambda t: t.untyped_storage().resize_(8),
}
NAMED = [
    ("float32", "exp_avg", "triton"),
    ("float32", "exp_avg", "compiled"),
    ("float32", "exp_avg", "eager"),
    ("float32", "exp_avg_sq", "eager"),
    ("masters", "master_param", "eager"),
    ("masters of 24 bits", "master_param", "eager"),
    ("states of 8 bits", "exp_avg", "eager"),
    ("states of 8 bits", "exp_avg_sq_scale", "eager"),
]
"""Tensors to cut, on the backend that steps them. What notices a cut knows nothing of backends."""


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize(("options", "name", "backend"), NAMED, indirect=["backend"])
def test_a_tensor_that_was_cut_is_refused(options, name, cut, backend, implementation):
    optimizer = with_states(options)
    param = optimizer.param_groups[0]["params"][1]
    tensor = optimizer.state[param][name]
    CUT[cut](tensor)
    before = bits(optimizer.param_groups[0]["params"])
    with pytest.raises((ValueError, TypeError, RuntimeError), match="group 0, parameter 1"):
        stepped(optimizer)
    assert_same(bits(optimizer.param_groups[0]["params"]), before, "after the refusal")


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_a_state_of_another_dtype_of_as_many_elements_is_stepped_as_such(backend, implementation):
    ours, other = with_states("float32"), with_states("float32")
    for optimizer, how in ((ours, "data"), (other, "state")):
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        average = state["exp_avg"].to(BFLOAT16)
        if how == "data":
            state["exp_avg"].data = average
        else:
            state["exp_avg"] = average
        assert stepped(optimizer)
    assert_same(everything(ours), everything(other), "after the step")


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_a_state_that_is_an_equal_tensor_now_is_the_one_that_is_stepped(name, implementation):
    optimizer = with_states("float32")
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    old = state[name]
    state[name] = old.clone()
    assert stepped(optimizer) and not stepped(optimizer)
    assert torch.equal(state["step"], torch.tensor(4.0))
    assert not torch.equal(old, state[name])


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_a_lazily_negated_state_is_read_with_its_sign(name, implementation):
    ours, other = with_states("float32"), with_states("float32")
    for optimizer, is_lazy in ((ours, True), (other, False)):
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        value = -state[name]
        state[name].data = torch._neg_view(state[name].data) if is_lazy else value  # pyright: ignore
        stepped(optimizer)
    assert_same(everything(ours), everything(other), "after the step")


def test_tensors_that_were_swapped_are_where_they_are_now(implementation):
    optimizer = with_states("float32")
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    with torch.no_grad():
        states[0]["exp_avg"].fill_(5.0)
    torch.utils.swap_tensors(states[0]["exp_avg"], states[1]["exp_avg"])
    assert stepped(optimizer)
    assert states[1]["exp_avg"][0] > 4 > states[0]["exp_avg"][0]


def test_a_parameter_that_moves_to_the_next_group_is_stepped_by_that_group(implementation):
    params = [Parameter(torch.ones(3)) for _ in range(3)]
    groups = [{"params": params[:2], "lr": 0.0}, {"params": params[2:], "lr": 1.0}]
    optimizer = ampopt.SGD(groups, lr=1.0)
    assert stepped(optimizer) and not stepped(optimizer)
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    assert stepped(optimizer)
    assert [p[0].item() for p in params] == [1.0, 0.5, -0.5]


def test_a_rate_that_is_an_equal_tensor_now_is_read_at_each_step(implementation):
    optimizer = ampopt.SGD([Parameter(torch.ones(3))], lr=0.5)
    for _ in range(3):
        stepped(optimizer)
    rate = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    stepped(optimizer)
    rate.fill_(0.0)
    before = everything(optimizer)["parameters"]
    stepped(optimizer)
    assert_same(everything(optimizer)["parameters"], before, "after a step of rate 0")


class OwnGrad(Parameter):
    """A parameter with an attribute of its own for the gradient."""

    own: Tensor | None = None
    grad: Any = property(lambda self: self.own, lambda self, grad: setattr(self, "own", grad))


def test_the_gradient_of_a_subclass_is_read_where_the_subclass_has_it(implementation):
    param = OwnGrad(torch.ones(3))
    optimizer = ampopt.SGD([param], lr=0.5)
    for _ in range(4):
        stepped(optimizer)
    assert param.tolist() == [0.0] * 3


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_an_empty_gradient_is_there(backend, implementation):
    params = [Parameter(torch.ones(0)), Parameter(torch.ones(3))]
    optimizer = ampopt.AdamW(params)
    for _ in range(3):
        stepped(optimizer)
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 3]


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("kept", [False, True], ids=["new plan", "kept plan"])
@pytest.mark.parametrize("start", [0, 3])
def test_a_gradient_whose_memory_was_freed_is_refused(start, kept, backend, implementation):
    weights, bias = Parameter(torch.ones(5)), Parameter(torch.ones(5))
    optimizer = ampopt.AdamW([weights, bias])
    if kept:
        assert stepped(optimizer) and not stepped(optimizer)
    before = everything(optimizer)
    for call in (
        lambda: optimizer.unscale_and_step(grads_scaled_by=2.0),
        lambda: optimizer.unscale(grads_scaled_by=2.0),
        lambda: optimizer.accumulate(grads_scaled_by=2.0),
        lambda: optimizer.step(),
    ):
        weights.grad, bias.grad = torch.ones(5), torch.ones(5 + start)[start:]
        bias.grad.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="gradient of group 0, parameter 1 was freed"):
            call()
        assert_same(everything(optimizer)["parameters"], before["parameters"], "after the error")
    assert stepped(optimizer) != kept
