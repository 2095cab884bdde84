"""ampopt's optimizers with torch's compiled models, averages, clipping and checkpoints."""

import copy
from typing import Any

import pytest
import torch
from support.optimizers import HostCounted, Plain
from support.training_loops import INF, made
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import ampopt
from ampopt import DynamicLossScale, scale_outputs
from ampopt.testing.bits import bits

PAIRS = [
    (getattr(ampopt, name), getattr(torch.optim, name))
    for name in ("AdamW", "SGD", "RMSprop", "Adafactor")
]
OVERFLOWS = 2.0**24


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    )


def batches(count: int = 10) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 16, 4, generator=generator)
    labels = torch.randint(2, (count, 16), generator=generator)
    return list(zip(inputs, labels, strict=True))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    with torch.autocast("cpu", torch.float16):
        return torch.nn.functional.cross_entropy(model(inputs), labels)


# --- a compiled model, and a step that is not ----------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_compiled_model(ours, theirs, fresh_dynamo):
    """With Dynamo and AOTAutograd. Inductor's code generation would take a minute."""
    results = []
    for cls in (ours, theirs):
        net = network()
        model: Any = torch.compile(net, backend="aot_eager")
        optimizer = cls(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=OVERFLOWS)
        for batch in batches():
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((list(net.parameters()), scaler.get_scale()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)
    assert results[0][1] == results[1][1] < OVERFLOWS


def test_a_compiled_forward_and_loss_in_a_replayed_closure(fresh_dynamo):
    net = network()

    @torch.compile(backend="aot_eager")
    def loss(inputs: Any, labels: Any) -> Any:
        return loss_of(net, (inputs, labels))

    optimizer = ampopt.LBFGS(net.parameters(), max_iter=2)
    scale: Any = DynamicLossScale(init_scale=OVERFLOWS)
    (batch,) = batches(1)

    def closure(scale: Any) -> Any:
        optimizer.zero_grad()
        value = loss(*batch)
        scale_outputs(value, scale).backward()
        return value.detach()

    before = loss_of(net, batch)
    for _ in range(3):
        _, _, scale = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
    assert loss_of(net, batch) < before
    assert scale.item() < OVERFLOWS


# --- torch.optim.swa_utils -----------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
def test_averaged_models_and_batch_norm_are_those_of_torchs_optimizer(ours, theirs, average):
    """Averages, their learning rates and batch norm are those of a run with torch's optimizer."""
    results = []
    for cls in (ours, theirs):
        net = network()
        optimizer = cls(net.parameters(), lr=0.01)
        averaged = AveragedModel(net, multi_avg_fn=average)
        scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for batch in batches():
            optimizer.zero_grad()
            scaler.scale(loss_of(net, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            averaged.update_parameters(net)
            scheduler.step()
        update_bn(batches(), averaged)
        results.append((averaged.state_dict(), optimizer.param_groups[0]["lr"]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)
    assert results[0][1] == results[1][1] == 0.05


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
def test_a_skipped_step_averages_what_there_was(cls):
    net = network()
    optimizer = cls(net.parameters(), lr=0.5)
    averaged = AveragedModel(net)
    scheduler = ampopt.lr_scheduler_gate(SWALR(optimizer, swa_lr=0.05, anneal_epochs=2))
    for _ in range(3):
        (loss_of(net, batches(1)[0]) * INF).backward()
        optimizer.unscale_and_step(grads_scaled_by=2.0)
        averaged.update_parameters(net)
        scheduler.step()
    assert bits(list(averaged.module.parameters())) == bits(list(net.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- clipping between unscaling and the step -----------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("how", ["norm", "value", "inside"])
def test_clipping(ours, theirs, how):
    """Clipping by ``torch.nn.utils``, and by ``max_norm``, gives the results of torch's scaler."""

    def clip(net: Any) -> None:
        if how == "value":
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)
        else:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)

    reference, net = network(), network()
    optimizer = theirs(reference.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=OVERFLOWS)
    for batch in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(reference, batch)).backward()
        scaler.unscale_(optimizer)
        clip(reference)
        scaler.step(optimizer)
        scaler.update()
    optimizer = ours(net.parameters(), lr=0.01)
    scale: Any = DynamicLossScale(init_scale=OVERFLOWS)
    for batch in batches():
        optimizer.zero_grad()
        scale_outputs(loss_of(net, batch), scale).backward()
        if how == "inside":
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=0.05).scale
        else:
            scale = optimizer.unscale(grads_scaled_by=scale).scale
            clip(net)
            optimizer.step_after_unscale()
    torch.testing.assert_close(
        list(net.parameters()), list(reference.parameters()), rtol=1e-3, atol=1e-4
    )
    assert scale.item() == scaler.get_scale() < OVERFLOWS


# --- gradients by torch.func ---------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*(ours for ours, _ in PAIRS), Plain, HostCounted])
@pytest.mark.parametrize("overflowed", [False, True])
def test_gradients_of_functions(cls, overflowed):
    """``functional_call`` and ``grad`` compute gradients without a backward pass or hooks."""
    results = []
    for functional in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        optimizer = cls(net.parameters(), lr=0.25)
        inputs, labels = batches(1)[0]
        scale: Any = DynamicLossScale(init_scale=2.0**10)

        def scaled_loss(
            params: Any, net: Any = net, inputs: Any = inputs, labels: Any = labels, S: Any = scale
        ) -> Any:
            outputs = torch.func.functional_call(net, params, (inputs,))
            loss = torch.nn.functional.cross_entropy(outputs, labels)
            return scale_outputs(loss * (INF if overflowed else 1.0), S)

        params = dict(net.named_parameters())
        if functional:
            grads = torch.func.grad(scaled_loss)(params)
            for name, p in params.items():
                p.grad = grads[name]
        else:
            scaled_loss(params).backward()
        torch.manual_seed(0)
        before = bits(params)
        result = optimizer.unscale_and_step(grads_scaled_by=scale)
        assert result.skipped is overflowed
        assert (bits(params) == before) is overflowed
        results.append(bits(params))
    assert results[0] == results[1]


def test_gradients_for_each_sample_that_overflow():
    """By ``vmap`` of ``grad``: one bad sample in the mean skips the step."""
    optimizer, params = made(ampopt.SGD, lr=1.0)
    samples = torch.tensor([1.0, INF, 2.0])
    grads = torch.vmap(torch.func.grad(lambda p, x: (p * x).sum()), (None, 0))
    each = [grads(p.detach(), samples) for p in params]
    for use, skipped in ((samples > 0, True), (samples.isfinite(), False)):
        for p, grad in zip(params, each, strict=True):
            p.grad = 4.0 * grad[use].mean(0)
        assert optimizer.unscale_and_step(grads_scaled_by=4.0).skipped is skipped
    start = made(ampopt.SGD)[1]
    assert bits([p + 1.5 for p in params]) == bits(start)


# --- a model that is moved ------------------------------------------------------------------------


@pytest.fixture
def moves_by_swapping() -> Any:
    """Make ``Module.to`` swap tensors, as it does for the DTensors of FSDP2."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.Muon, ampopt.extend(Plain)])
@pytest.mark.usefixtures("moves_by_swapping")
def test_a_model_is_moved_between_steps_and_within_an_accumulation(cls, accumulates, backend):
    """Torch refuses to swap a parameter that has a weak reference."""
    results = []
    for moved in (False, True):
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.eye_(model.weight)
        optimizer = cls(model.parameters(), lr=0.125)
        for step in range(3):
            for last in (False, True)[not accumulates :]:
                model.weight.grad = torch.full((4, 4), 2.0 + step + last)
                if not last:
                    optimizer.accumulate(grads_scaled_by=2.0)
                else:
                    optimizer.unscale_and_step(grads_scaled_by=2.0)
                    optimizer.zero_grad()
                if moved:
                    model._apply(torch.clone)
        results.append(bits([model.weight]))
    assert results[0] == results[1]


# --- torch.distributed.checkpoint, in one process -------------------------------------------------


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without it")
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("saved_by", ["ours", "torch", "ours with masters"])
def test_states_by_the_names_of_parameters(ours, theirs, flat, saved_by):
    """``get_state_dict`` takes a step to make states, and then undoes it."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    masters: dict[str, Any] = {}
    if saved_by == "ours with masters":
        if not issubclass(ours, ampopt.ElementwiseOptimizer):
            pytest.skip("it keeps no masters")
        masters = {"master_weights": True}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def train(net: Any, optimizer: Any, steps: int) -> None:
        for batch in batches(steps):
            optimizer.zero_grad()
            inputs, labels = batch
            outputs = net(inputs.to(net[0].weight.dtype)).float()
            torch.nn.functional.cross_entropy(outputs, labels).backward()
            optimizer.step()

    def both(cls: Any) -> Any:
        net = torch.nn.Sequential(*[network()[layer] for layer in (0, 2, 3)])
        net = net.bfloat16() if masters else net
        return net, cls(net.parameters(), lr=0.01, **masters)

    saves, loads = (theirs, ours) if saved_by == "torch" else (ours, ours if masters else theirs)
    net, optimizer = both(saves)
    train(net, optimizer, 3)
    saved = copy.deepcopy(get_state_dict(net, optimizer, options=options))
    net2, optimizer2 = both(loads)
    before = bits(list(net2.parameters()))
    get_state_dict(net2, optimizer2, options=options)
    assert bits(list(net2.parameters())) == before
    set_state_dict(
        net2, optimizer2, model_state_dict=saved[0], optim_state_dict=saved[1], options=options
    )
    train(net, optimizer, 2)
    train(net2, optimizer2, 2)
    if masters:
        assert bits(list(net2.parameters())) == bits(list(net.parameters()))
    torch.testing.assert_close(
        list(net2.parameters()), list(net.parameters()), rtol=1e-4, atol=1e-5
    )
