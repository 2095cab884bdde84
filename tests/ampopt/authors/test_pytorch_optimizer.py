"""The optimizers of another package, made to skip by ``extend``.

The package is pytorch_optimizer, with over a hundred of them: for-loops, foreach, wrappers around
other optimizers, step counts in Python, random numbers, preconditioners, closures.
"""

import copy
import functools
import inspect
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits
from ampopt.testing.invariants.training import seed

INF = float("inf")

EVERY: dict[str, type[torch.optim.Optimizer]] = {
    name: cls
    for name, cls in sorted(vars(pytorch_optimizer).items())
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls.__module__.startswith("pytorch_optimizer.")
}


def around_sgd(cls: Any, params: list[Parameter]) -> Any:
    return cls(torch.optim.SGD(params, lr=0.125, momentum=0.5))


def in_training(cls: Any, params: list[Parameter]) -> Any:
    optimizer = around_sgd(cls, params)
    optimizer.train()
    return optimizer


def with_groups(cls: Any, params: list[Parameter]) -> Any:
    matrix, vector = params
    return cls([{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}])


def of_a_model(cls: Any, params: list[Parameter]) -> Any:
    model = nn.Module()
    model.weight, model.bias = params
    return cls(model)


MADE_OTHERWISE: dict[str, Callable[[Any, list[Parameter]], Any]] = {
    **dict.fromkeys(["Lookahead", "OrthoGrad", "PCGrad"], around_sgd),
    "TRAC": lambda cls, params: cls(torch.optim.Adam(params)),
    **dict.fromkeys(["AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"], with_groups),
    "AdamMini": of_a_model,
    "LoRARite": lambda cls, params: cls([params[0], Parameter(params[0].detach().t().clone())]),
    "Ranger21": lambda cls, params: cls(params, num_iterations=20),
    "ScheduleFreeWrapper": in_training,
    "SpectralSphere": lambda cls, params: cls(params[:1], solver_max_iterations=3),
}


def sharpness_aware(cls: Any, params: list[Parameter]) -> Any:
    return cls(params, base_optimizer=torch.optim.SGD, lr=0.125, momentum=0.5)


CLOSURES: dict[str, Callable[[Any, list[Parameter]], Any]] = {
    "AliG": lambda cls, params: cls(params),
    "BSAM": lambda cls, params: cls(params, num_data=8),
    **dict.fromkeys(["FriendlySAM", "LookSAM", "SAM"], sharpness_aware),
    "WSAM": lambda cls, params: sharpness_aware(functools.partial(cls, nn.Identity()), params),
}
"""How to make the optimizers whose step needs a closure."""

CANNOT = {
    "AdaHessian": "differentiates p.grad once more, which is then still scaled",
    "AdaLOMO": "updates parameters in the backward pass, so that no step is left to skip",
    "DeMo": "needs einops, and several processes",
    "DistributedMuon": "needs several processes",
    "GSAM": "its closure returns (outputs, loss), and it has a grad_norm() of its own",
    "LOMO": "updates parameters in the backward pass, so that no step is left to skip",
    "SafeFP16Optimizer": "has a loss scale of its own, and no param_groups",
    "SophiaH": "differentiates p.grad once more, which is then still scaled",
}
"""Classes that can be extended, but not used under a loss scale, and the reason."""

WORK = sorted(EVERY.keys() - CANNOT.keys() - CLOSURES.keys())


NO_STATE = ("_ampopt", "_opt_called", "skip_by")
"""Attributes that are no state: they differ between ways to skip."""


def made(cls: Any, name: str) -> Any:
    for begin in (seed, random.seed, np.random.seed):
        begin(0)
    params = [Parameter(torch.randn(4, 3)), Parameter(torch.randn(3))]
    make = {**MADE_OTHERWISE, **CLOSURES}.get(name, lambda cls, params: cls(params))
    return make(cls, params)


def params_of(optimizer: Any) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give(optimizer: Any, step: int, scale: float = 1.0, bad: bool = False) -> None:
    numbers = torch.Generator().manual_seed(step)
    for p in params_of(optimizer):
        p.grad = torch.randn(p.shape, generator=numbers) * scale
        if bad:
            p.grad.view(-1)[-1] = INF


def seen(optimizer: Any, of_tensors: Callable[[Tensor], Any] = bits) -> Any:
    """All that an optimizer refers to, and the states of the random-number generators."""
    known: set[int] = set()

    def values(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return of_tensors(thing)
        if isinstance(thing, np.ndarray):
            return thing.tobytes()
        if isinstance(thing, (torch.optim.Optimizer, nn.Module)):
            if id(thing) in known:
                return None
            known.add(id(thing))
            return {
                name: values(value)
                for name, value in vars(thing).items()
                if not name.startswith("_optimizer_") and name not in NO_STATE
            }
        if isinstance(thing, dict):  # of names, or of parameters
            names = (k if isinstance(k, str) else place for place, k in enumerate(thing))
            return [(k, values(item)) for k, item in zip(names, thing.values(), strict=True)]
        if isinstance(thing, (list, tuple)):
            return [values(item) for item in thing]
        return repr(thing) if isinstance(thing, (bool, int, float, str)) else None

    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return values(optimizer), [bits(generators[0]), pickle.dumps(generators[1:])]


def steps(optimizer: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        give(optimizer, number)
        optimizer.step()


def test_every_class_is_accounted_for():
    assert len(EVERY) > 120
    assert EVERY.keys() >= {*MADE_OTHERWISE, *CLOSURES, *CANNOT}


def on_the_host(optimizer: Any) -> Any:
    return seen(optimizer, lambda tensor: (tensor.data_ptr(), tensor.shape))


# Where the host may read the flag, as it may below, a skipped step does not run at all.
@pytest.mark.parametrize("skip_by", ["auto", "transaction"])
@pytest.mark.parametrize("name", WORK)
@pytest.mark.usefixtures("as_on_a_device")
def test_a_skip_on_the_device_changes_nothing_and_a_step_is_that_of_the_package(name, skip_by):
    """By ``"auto"``, only steps that change tensors alone are rolled back."""
    original = made(EVERY[name], name)
    steps(original, (1, 2, 4, 5))
    before = on_the_host(original)
    steps(original, (6, 7, 8))
    changed = on_the_host(original) != before
    expected = seen(original)

    optimizer = made(ampopt.extend(EVERY[name]), name)
    assert isinstance(optimizer, EVERY[name]) and isinstance(optimizer, ampopt.Optimizer)
    optimizer.skip_by = skip_by
    for step in range(9):
        bad = step in (0, 3)
        give(optimizer, step, 2.0**-4, bad)
        before = seen(optimizer)
        assert optimizer.unscale_and_step(grads_scaled_by=2.0**-4).skipped is bad
        if bad:
            assert seen(optimizer) == before
    assert seen(optimizer) == expected
    if skip_by == "auto":
        skip_policy = optimizer._ampopt.skip_policy
        assert skip_policy.mode == ("host" if changed else "transaction")
        assert (skip_policy.reason is None) is (not changed)


@pytest.mark.parametrize("name", WORK)
def test_an_optimizer_can_be_patched_in_mid_training(name):
    original = made(EVERY[name], name)
    steps(original, range(5))
    expected = seen(original)

    optimizer = made(EVERY[name], name)
    steps(optimizer, range(2))
    assert ampopt.patch_optimizer(optimizer) is optimizer
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in (2, 3, 4):
        for bad in (True, False):
            give(optimizer, step, 2.0**-4, bad)
            before = seen(optimizer)
            assert optimizer.unscale_and_step(grads_scaled_by=2.0**-4).skipped is bad
            assert (seen(optimizer) == before) is bad
    assert len(calls) == 6 or name == "MuonClip"  # whose own step has hooks around a second one
    assert seen(optimizer) == expected


@pytest.mark.parametrize("name", WORK)
def test_checkpoints_are_exchanged_with_their_class(name):
    cls = ampopt.extend(EVERY[name])
    for saves, loads in ((EVERY[name], cls), (cls, EVERY[name])):
        saved, loaded, theirs = made(saves, name), made(loads, name), made(EVERY[name], name)
        steps(saved, range(3))
        checkpoint = saved.state_dict()
        for optimizer in (loaded, theirs):
            optimizer.load_state_dict(copy.deepcopy(checkpoint))
            seed(1)
            steps(optimizer, range(3, 5))
        assert bits(params_of(loaded)) == bits(params_of(theirs))


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_class_can_be_extended_and_pickled(name):
    cls = ampopt.extend(EVERY[name])
    assert cls is ampopt.extend(EVERY[name]) is ampopt.extend(cls)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert inspect.signature(cls) == inspect.signature(EVERY[name])


# --- closures ------------------------------------------------------------------------------------


def with_first_gradients(cls: Any, name: str) -> Any:
    """``cls`` with a step that first computes gradients, which some optimizers expect."""
    if name not in ("BSAM", "FriendlySAM", "LookSAM", "SAM"):
        return cls

    class WithFirstGradients(cls):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            super().step(closure)
            return loss

    return WithFirstGradients


def closure_of(optimizer: Any, scales: list[float] | None = None) -> Callable[..., Any]:
    def closure(scale: Any = None) -> Any:
        optimizer.zero_grad()
        loss = torch.stack([(p - 0.5).square().sum() for p in params_of(optimizer)]).sum()
        ampopt.scale_outputs(loss, scale).backward()
        if scales is not None:
            scales.append(scale.item())
        return loss

    return torch.enable_grad()(closure)  # which AliG leaves to others


@pytest.mark.parametrize("name", CLOSURES)
def test_a_closure_is_replayed_until_it_is_finite(name):
    original = made(with_first_gradients(EVERY[name], name), name)
    optimizer = made(with_first_gradients(ampopt.extend(EVERY[name]), name), name)
    random_state = torch.get_rng_state()
    expected = [original.step(closure_of(original)) for _ in range(3)]
    torch.set_rng_state(random_state)
    scale, scales, losses = ampopt.DynamicLossScale(init_scale=2.0**127), [], []
    for _ in range(3):
        loss, _, scale = optimizer.unscale_and_step(closure_of(optimizer, scales), scale)
        losses.append(loss)
    assert bits(params_of(optimizer)) == bits(params_of(original))
    assert bits(losses) == bits(expected)
    assert scales[:2] == [2.0**127, 2.0**126]  # the first gradients are above 2


@pytest.mark.parametrize("name", CLOSURES)
def test_a_closure_that_cannot_be_finite_changes_nothing(name):
    optimizer = made(with_first_gradients(ampopt.extend(EVERY[name]), name), name)
    finite, calls = closure_of(optimizer), 0

    def closure(scale: Any) -> Any:
        nonlocal calls
        calls += 1
        return finite(scale) * (INF if calls > 1 else 1.0)

    for _ in range(2):  # the first without state
        before, calls = bits(params_of(optimizer)), 1
        state = {key: bits(value) for key, value in optimizer.state.items() if value != {}}
        with pytest.raises(ampopt.NonFiniteGradientError, match="the loss is"):
            optimizer.unscale_and_step(closure, grads_scaled_by=2.0)
        assert bits(params_of(optimizer)) == before
        now = {key: bits(value) for key, value in optimizer.state.items() if value != {}}
        assert now == state
        optimizer.unscale_and_step(finite, grads_scaled_by=2.0)


@pytest.mark.parametrize("name", CLOSURES)
def test_a_missing_closure_is_an_error(name):
    optimizer = made(ampopt.extend(EVERY[name]), name)
    give(optimizer, 0)
    before = seen(optimizer)
    with pytest.raises(Exception, match="closure"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert seen(optimizer)[1] == before[1]


def test_state_that_is_no_parameters_is_restored_too():
    optimizer = made(ampopt.extend(pytorch_optimizer.SPAM), "SPAM")
    steps(optimizer, range(2))
    before = seen(optimizer)

    def closure(scale: Any) -> Any:
        raise KeyError("no loss")

    with pytest.raises(KeyError, match="no loss"):
        optimizer.unscale_and_step(closure, grads_scaled_by=1.0)
    assert seen(optimizer) == before


# --- what cannot work ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdaHessian", "SophiaH"])
def test_a_hessian_from_scaled_gradients_is_scaled(name):
    """Their steps depend on the scale, so they cannot be used under one, although they skip."""
    results = []
    for scale in (1.0, 1.0, 4.0):
        optimizer = made(ampopt.extend(EVERY[name]), name)
        random_state = torch.get_rng_state()
        for bad in (False, True):
            loss = torch.stack([(p**4).sum() for p in params_of(optimizer)]).sum() * scale
            grads = torch.autograd.grad(loss, params_of(optimizer), create_graph=True)
            for p, grad in zip(params_of(optimizer), grads, strict=True):
                p.grad = grad
            if bad:
                with torch.no_grad():
                    grads[0].fill_(INF)
            before = seen(optimizer)
            assert optimizer.unscale_and_step(grads_scaled_by=scale).skipped is bad
            if bad:
                assert seen(optimizer) == before
        results.append(bits([dict(optimizer.state[p]) for p in params_of(optimizer)]))
        torch.set_rng_state(random_state)
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize("name", sorted(CANNOT.keys() - {"AdaHessian", "SophiaH"}))
def test_classes_that_cannot_be_made_plainly_raise(name):
    with pytest.raises((AttributeError, ImportError, ImportWarning, RuntimeError, TypeError)):
        made(ampopt.extend(EVERY[name]), name)
