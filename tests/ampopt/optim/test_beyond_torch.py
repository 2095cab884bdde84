"""Optimizers give the results of other implementations, over hundreds of steps.

Those are the ones that torch lacks, and Adafactor, whose rule has other operations than torch's.
"""

import copy
import inspect
import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytorch_optimizer
import torch
from support import transcribed_optimizers
from support.optimizers import BEYOND_TORCH
from support.short_rules import signum
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import assert_bitwise_unchanged, bits
from ampopt_kernels import State
from ampopt_kernels.rules import sophia_hessian

STEPS = 300
SHAPES = ((3, 5), ())


class Peer(NamedTuple):
    """Another implementation of an optimizer.

    Attributes:
        cls: the optimizer under test.
        options: the arguments of ``cls`` besides the parameters.
        theirs: makes the other implementation, from parameters.
    """

    cls: type[Any]
    options: dict[str, Any]
    theirs: Any


PEERS = [
    Peer(
        ampopt.Lion,
        {"lr": 0.01, "weight_decay": 0.1},
        lambda params: pytorch_optimizer.Lion(params, lr=0.01, weight_decay=0.1),
    ),
    Peer(
        ampopt.Adan,
        {"lr": 0.01, "weight_decay": 0.1},
        lambda params: pytorch_optimizer.Adan(params, lr=0.01, weight_decay=0.1),
    ),
    Peer(
        ampopt.Adan,
        {"lr": 0.01, "weight_decay": 0.1, "no_prox": True, "betas": (0.5, 0.25, 0.75)},
        lambda params: pytorch_optimizer.Adan(
            params, lr=0.01, weight_decay=0.1, weight_decouple=True, betas=(0.5, 0.25, 0.75)
        ),
    ),
    Peer(
        ampopt.LAMB,
        {"lr": 0.01, "weight_decay": 0.1},
        lambda params: transcribed_optimizers.LAMB(
            params, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, bias_correction=True
        ),
    ),
    Peer(
        ampopt.LARS,
        {"lr": 0.1, "weight_decay": 0.1, "nesterov": True, "trust_coefficient": 0.01},
        lambda params: transcribed_optimizers.LARS(
            params,
            lr=0.1,
            momentum=0.9,
            dampening=0.0,
            weight_decay=0.1,
            trust_coefficient=0.01,
            nesterov=True,
            adapt=True,
        ),
    ),
    Peer(
        ampopt.NovoGrad,
        {"lr": 0.01, "weight_decay": 0.1, "grad_averaging": True},
        lambda params: pytorch_optimizer.NovoGrad(
            params, lr=0.01, weight_decay=0.1, grad_averaging=True
        ),
    ),
    Peer(
        ampopt.ScheduleFreeAdamW,
        {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 100, "r": 1.0},
        lambda params: pytorch_optimizer.ScheduleFreeAdamW(
            params, lr=0.01, weight_decay=0.1, warmup_steps=100, r=1.0
        ),
    ),
    Peer(
        ampopt.Sophia,
        {"lr": 0.01, "bs": 32},
        lambda params: transcribed_optimizers.Sophia(
            params, lr=0.01, betas=(0.965, 0.99), rho=0.04, weight_decay=0.1, bs=32
        ),
    ),
    Peer(
        ampopt.Adafactor,
        {"lr": 0.01, "weight_decay": 0.1},
        lambda params: torch.optim.Adafactor(params, lr=0.01, weight_decay=0.1),
    ),
]
each_peer = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.cls.__name__)


def gradients(steps: int) -> list[list[Tensor]]:
    """Gradients of many magnitudes: noise around means that change slowly."""
    random = np.random.default_rng(0)
    columns = []
    for shape in SHAPES:
        turning = np.sin(np.arange(steps) / 200).reshape(-1, *[1] * len(shape))
        noise = random.standard_normal((steps, *shape))
        columns.append(torch.tensor((turning + noise) * 10.0 ** random.uniform(-3, 1, shape)))
    return [list(step) for step in zip(*columns, strict=True)]


def train(optimizer: Any, params: list[Parameter], steps: int, step: Any, scale: float) -> None:
    """Take ``steps`` steps; call ``update_hessian`` and ``eval`` of optimizers that have them."""
    for index, grads in enumerate(gradients(steps)):
        if index % 10 == 5 and hasattr(optimizer, "update_hessian"):
            for p, g in zip(params, grads, strict=True):
                p.grad = (g * scale).to(p.dtype)
            optimizer.update_hessian(*[scale] * (scale != 1.0))
        for p, g in zip(params, grads, strict=True):
            p.grad = (g * scale).to(p.dtype)
        step()
        if index % 100 == 5 and hasattr(optimizer, "eval"):
            optimizer.eval()
            optimizer.train()
    if hasattr(optimizer, "eval"):
        optimizer.eval()


def initial(dtype: torch.dtype) -> list[Parameter]:
    return [
        Parameter(torch.linspace(-2.0, 2.0, 15, dtype=dtype)[:n].reshape(shape))
        for n, shape in ((15, SHAPES[0]), (1, SHAPES[1]))
    ]


def test_every_optimizer_that_torch_lacks_is_compared_with_another_implementation():
    assert {peer.cls for peer in PEERS} >= set(BEYOND_TORCH)


@pytest.mark.parametrize("backend", ["compiled"], indirect=True)  # of eager's bits, sooner
@each_peer
def test_results_are_those_of_another_implementation(peer, backend):
    ours, theirs = initial(torch.float64), initial(torch.float64)
    optimizer, other = peer.cls(ours, **peer.options), peer.theirs(theirs)
    train(optimizer, ours, STEPS, lambda: optimizer.unscale_and_step(grads_scaled_by=4.0), 4.0)
    train(other, theirs, STEPS, other.step, 1.0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "triton", "compiled"], indirect=True)
@each_peer
def test_every_backend_takes_its_steps(peer, backend):
    ours, theirs = initial(torch.float32), initial(torch.float64)
    optimizer, other = peer.cls(ours, **peer.options), peer.theirs(theirs)
    train(optimizer, ours, 12, lambda: optimizer.unscale_and_step(grads_scaled_by=4.0), 4.0)
    train(other, theirs, 12, other.step, 1.0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=1e-5, atol=1e-6)


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("lr", -0.5),
    ("lr", float("nan")),
    ("lr", torch.ones(2)),
    ("betas", (0.9, 1.0, 0.9)),
    ("betas", (0.9,)),
    ("eps", -1.0),
    ("weight_decay", -0.5),
    ("rho", -1.0),
    ("bs", 0),
    ("momentum", -0.5),
    ("dampening", -0.5),
    ("trust_coefficient", -1.0),
    ("warmup_steps", -1),
    ("weight_lr_power", -1.0),
    ("r", -1.0),
]
WORDS = {"lr": "Invalid learning rate: |lr must", "betas": "Invalid beta parameter|betas must"}


@pytest.mark.parametrize("cls", BEYOND_TORCH)
def test_hyperparameters_out_of_range_are_refused(cls):
    taken = inspect.signature(cls).parameters
    for name, value in OUT_OF_RANGE:
        if name not in taken:
            continue
        if name == "betas":
            value = value[: len(taken[name].default)]
        with pytest.raises(ValueError, match=WORDS.get(name, f"Invalid {name} value: .*; ")):
            cls([Parameter(torch.ones(1))], **{name: value})
        wrong = re.escape(f"{name} must be a") + ".*number.*, got '0.1'"
        with pytest.raises(TypeError, match=wrong):
            cls([Parameter(torch.ones(1))], **{name: "0.1"})


@pytest.mark.parametrize("cls", BEYOND_TORCH)
def test_its_docstring_names_every_argument_the_paper_and_the_differences(cls):
    doc = inspect.getdoc(cls) or ""
    _, arguments = doc.split("Args:\n")
    entries = re.findall(r"^    (\w+): ", arguments.split("\n\n")[0], re.M)
    assert entries == list(inspect.signature(cls).parameters)
    assert re.search(r"\(\d{4}\.\d{5}\)", doc)
    assert "Differs from the original: " in doc


@pytest.mark.parametrize("backend", ["eager", "eager on a device", "triton"], indirect=True)
def test_an_estimate_of_the_hessian_is_skipped_as_a_step_is(backend):
    param = Parameter(torch.ones(3))
    optimizer = ampopt.Sophia([param])
    scale = ampopt.DynamicLossScale(init_scale=4.0)
    param.grad = torch.tensor([float("inf"), 4.0, 8.0])
    before = bits(param)
    found_inf, scale = optimizer.update_hessian(scale)
    assert found_inf > 0 and float(scale) == 2.0
    assert bits(param) == before
    assert not optimizer.state[param]["hessian"].any()
    param.grad = torch.tensor([2.0, 4.0, 8.0])
    found_inf, scale = optimizer.update_hessian(scale)
    assert not found_inf > 0
    expected = torch.tensor([1.0, 4.0, 16.0]) * 0.01
    torch.testing.assert_close(optimizer.state[param]["hessian"], expected)
    assert bits(param) == before


def test_a_second_rule_is_refused_between_an_unscale_and_its_step_and_uses_its_scale_up():
    param = Parameter(torch.ones(3))
    optimizer = ampopt.Sophia([param])
    param.grad = torch.ones(3)
    scale = ampopt.DynamicLossScale(init_scale=4.0)
    optimizer.unscale(scale)
    with assert_bitwise_unchanged(optimizer), pytest.raises(RuntimeError, match="pending"):
        optimizer.update_hessian(1.0)
    optimizer.step_after_unscale()
    with (
        assert_bitwise_unchanged(optimizer),
        pytest.raises(RuntimeError, match="used by an earlier step"),
    ):
        optimizer.update_hessian(scale)
    with pytest.raises(TypeError, match="takes an ampopt_kernels.Rule"):
        optimizer.run_rule(print)  # type: ignore


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_second_rule_is_refused_where_torchs_own_step_would_run(differentiable):
    param = Parameter(torch.ones(3))
    optimizer = ampopt.SGD([param], differentiable=differentiable)
    param.grad = torch.ones(3) if differentiable else torch.ones(3).to_sparse()
    with assert_bitwise_unchanged(optimizer), pytest.raises(RuntimeError, match="make gradients d"):
        optimizer.run_rule(sophia_hessian, 2.0)


def test_a_second_rule_works_on_masters():
    param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = ampopt.Sophia([param], master_weights=True)
    param.grad = torch.full((3,), 2.0, dtype=torch.bfloat16)
    optimizer.update_hessian(2.0)
    state = optimizer.state[param]
    assert state["hessian"].dtype == state["master_param"].dtype == torch.float32
    torch.testing.assert_close(state["hessian"], torch.full((3,), 0.01))
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.Sophia])
def test_states_of_a_second_rule_are_saved_and_copied_before_the_first_step(cls):
    optimizer, loaded = (cls([Parameter(torch.ones(3))]) for _ in range(2))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.full((3,), 2.0)
    optimizer.run_rule(sophia_hessian)
    loaded.load_state_dict(optimizer.state_dict())
    after = []
    for each in (optimizer, loaded, copy.deepcopy(optimizer)):
        (param,) = each.param_groups[0]["params"]
        param.grad = torch.ones(3)
        each.step()
        assert each.state[param]["hessian"].all()
        after.append((bits(param), bits(dict(each.state[param]))))
    assert after[0] == after[1] == after[2]


def test_a_schedule_free_optimizer_does_not_step_with_gradients_of_an_average():
    param = Parameter(torch.ones(3))
    optimizer = ampopt.ScheduleFreeAdamW([param], lr=0.5)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    optimizer.eval()
    optimizer.add_param_group({"params": [Parameter(torch.ones(1))]})
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match="Invalid beta parameter at index 0: 0.0"):
        ampopt.ScheduleFreeAdamW([param], betas=(0.0, 0.9))
    with assert_bitwise_unchanged(optimizer), pytest.raises(RuntimeError, match=r"call train\(\)"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    loaded = ampopt.ScheduleFreeAdamW([{"params": [p]} for p in (param, Parameter(torch.ones(1)))])
    loaded.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"call train\(\)"):
        loaded.step()
    loaded.train()
    loaded.step()


@pytest.mark.parametrize("masters", [False, True])
def test_modes_of_a_schedule_free_optimizer_are_the_line_through_z(masters):
    dtype = torch.bfloat16 if masters else torch.float64
    param = Parameter(torch.ones(3, dtype=dtype))
    optimizer = ampopt.ScheduleFreeAdamW([param], lr=0.5, master_weights=masters)
    for number in (float("inf"), 1.0, -1.0, 2.0):
        param.grad = torch.full((3,), number, dtype=dtype)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        if number == float("inf"):  # z is there, and is the parameter
            optimizer.eval()
            assert param.tolist() == [1.0] * 3
            optimizer.train()
    ((_, full),) = optimizer.params_and_masters()
    y, z = full.detach().clone(), optimizer.state[param]["z"]
    for _ in range(2):  # twice is as once
        optimizer.eval()
    torch.testing.assert_close(full.detach() * 0.9 + z * 0.1, y)
    assert bits(param) == bits(full.to(dtype))
    optimizer.train()
    torch.testing.assert_close(full.detach(), y)
    assert bits(param) == bits(full.to(dtype))


def test_modes_of_a_schedule_free_optimizer_whose_parameters_are_rounded_at_random():
    param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = ampopt.ScheduleFreeAdamW([param], lr=0.5, param_rounding="stochastic")
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.step()
    y, z = param.detach().float(), optimizer.state[param]["z"]
    assert z.dtype == torch.float32
    optimizer.eval()
    assert bits(param) == bits(torch.lerp(y, z, 1 - 1 / 0.9).to(torch.bfloat16))
    x = param.detach().float()
    optimizer.train()
    assert bits(param) == bits(torch.lerp(x, z, 1 - 0.9).to(torch.bfloat16))


def test_rules_that_are_new_at_each_call_are_not_kept():
    param = Parameter(torch.ones(3))
    optimizer = ampopt.SGD([param], lr=0.5)
    param.grad = torch.ones(3)
    for turn in range(20):
        rule = replace(signum, state=(State(f"average {turn}"),))
        optimizer.run_rule(rule)
    assert param.tolist() == [-9.0] * 3
    assert set(optimizer.state[param]) == {f"average {turn}" for turn in range(20)}
    assert len(optimizer._ampopt.runner._second_runners) < 10
