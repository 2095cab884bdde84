"""Training loops of every form on a sharded model, in which one rank alone overflows.

Each rank also trains the whole model by itself, with the same batches and the same overflow.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support.optimizers import Plain

import ampopt
from ampopt.testing.bits import bits
from ampopt_kernels.cpu.table import KindTable
from ampopt_kernels.native.build import cpp_compiler

STEPS = 5
RANGE = 90.0
"""The largest gradient, for tests of a dtype of smaller range than float32."""


class Strangers(torch.optim.SGD):
    """A third-party optimizer, without any loss scaling."""


class Model(torch.nn.Module):
    """A model of two layers; on some ranks, gradients between the layers overflow sooner."""

    def __init__(self, overflows: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
        self.overflows = overflows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if self.overflows:
            hidden.register_hook(lambda g: torch.where(g.abs() > RANGE, float("inf"), g))
        return self.second(hidden)


def sharded(**options: Any) -> Model:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = Model(overflows=torch.distributed.get_rank() == 1)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    return model


def loss_of(model: Model, number: int) -> torch.Tensor:
    x = torch.arange(16.0).view(4, 4) / 16 + number
    return torch.nn.functional.mse_loss(model(x), torch.ones(4, 1))


def by_hand(model: Model, step: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the result of ``step(scale)`` after each backward pass."""
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0**9, growth_interval=2)
    for number in range(STEPS):
        model.zero_grad()
        ampopt.scale_outputs(loss_of(model, number), scale).backward()
        result = step(scale)
        scale = result.scale
        yield result


def joined(optimizer: Any) -> Callable[[Any], Any]:
    return lambda scale: optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=0.5)


def of_optimizer(name: str) -> Callable[[Model], Iterator[Any]]:
    def results(model: Model) -> Iterator[Any]:
        params = model.parameters()
        optimizer: Any = {
            "AdamW": lambda: ampopt.AdamW(params, lr=0.25),
            "Adafactor": lambda: ampopt.Adafactor(params, lr=0.25),
            "Plain": lambda: Plain(params, lr=0.25),
            "extended": lambda: ampopt.extend(Strangers)(params, lr=0.25),
            "patched": lambda: ampopt.patch_optimizer(torch.optim.NAdam(params, lr=0.25)),
        }[name]()
        for result in by_hand(model, joined(optimizer)):
            yield (*result[1:], optimizer.grad_norm)

    return results


def in_one_call(**options: Any) -> Callable[[Model], Iterator[Any]]:
    def results(model: Model) -> Iterator[Any]:
        optimizer = ampopt.AdamW(model.parameters(), lr=0.25)
        scale = ampopt.DynamicLossScale(init_scale=2.0**9, growth_interval=2)
        step = ampopt.TrainStep(
            lambda number: loss_of(model, int(number[0])),
            lambda loss, *_: loss,
            optimizer,
            scale,
            autocast=None,
            max_norm=0.5,
            **options,
        )
        for number in range(STEPS):
            loss, found_inf, scale = step(torch.full((2,), float(number)))
            yield found_inf, scale, optimizer.grad_norm, loss

    return results


def several(model: Model) -> Iterator[Any]:
    optimizers: Any = [
        ampopt.AdamW(model.first.parameters(), lr=0.25),
        Plain(model.second.parameters(), lr=0.25),
    ]

    def step(scale: Any) -> Any:
        return ampopt.unscale_and_step(optimizers, scale, max_norm=0.5)

    for result in by_hand(model, step):
        yield (*result[1:], *(optimizer.grad_norm for optimizer in optimizers))


def gated(model: Model) -> Iterator[Any]:
    optimizer = ampopt.AdamW(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    gate = ampopt.lr_scheduler_gate(schedule)
    for result in by_hand(model, joined(optimizer)):
        gate.step()
        yield (*result[1:], torch.tensor(optimizer.param_groups[0]["lr"]))


def profiled(model: Model) -> Iterator[Any]:
    optimizer = ampopt.AdamW(model.parameters(), lr=0.25)
    results = by_hand(model, joined(optimizer))
    yield next(results)[1:]
    with ampopt.profile(optimizer) as report:
        result = next(results)
    yield result[1:]
    yield from (result[1:] for result in results)
    (paths,) = report.paths.values()
    assert report.steps == {"AdamW": 1}
    assert len(paths) == 4 and all("by the rule" in path for path in paths.values())
    assert not report.looks


def under_scaler(model: Model) -> Iterator[Any]:
    optimizer = ampopt.AdamW(model.parameters(), lr=0.25)
    scaler = ampopt.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        yield torch.tensor(float(scaler.skipped)), scaler.get_scale()


LOOPS: dict[str, Callable[[Model], Iterator[Any]]] = {
    **{name: of_optimizer(name) for name in ("AdamW", "Adafactor", "Plain")},
    **{name: of_optimizer(name) for name in ("extended", "patched")},
    "TrainStep": in_one_call(),
    "TrainStep, in parts": in_one_call(micro_batches=2),
    "TrainStep, with replays": in_one_call(max_replays=12),
    "several optimizers": several,
    "lr_scheduler_gate": gated,
    "profile": profiled,
    "GradScaler": under_scaler,
}


def trained(name: str) -> Any:
    """Results of each step, and parameters in the end: of a sharded model, and of a whole one."""
    reached = []
    for model in (sharded(), Model(overflows=True)):
        told = [[float(getattr(x, "item", lambda x=x: x)()) for x in r] for r in LOOPS[name](model)]
        params = [getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters()]
        reached.append((told, params))
    return reached


@pytest.mark.parametrize("name", LOOPS)
def test_a_sharded_model_is_trained_as_a_whole_one(two_ranks, name):
    seen = two_ranks.run(trained, name)
    for (told, params), (expected, wholes) in seen:
        assert repr(told) == repr(seen[0][0][0])  # by every rank
        torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), equal_nan=True)
        torch.testing.assert_close(params, wholes)
        skipped, scales = ({step[i] for step in told} for i in range(2))
        assert skipped == ({0.0} if "replays" in name else {0.0, 1.0})
        assert len(scales) > 1


def offloaded() -> tuple[Any, Any, int]:
    """Bits with and without offloading, and the number of calls of compiled updates with it."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    def train(**options: Any) -> Any:
        model: Any = sharded(**options)
        told = [(flag, scale.item(), norm) for flag, scale, norm in of_optimizer("AdamW")(model)]
        return bits((told, [p.to_local() for p in model.parameters()]))

    ampopt.set_backend("compiled")
    try:
        plain = train()
        update = KindTable.update
        with mock.patch.object(KindTable, "update", autospec=True, side_effect=update) as run:
            return plain, train(offload_policy=CPUOffloadPolicy(pin_memory=False)), run.call_count
    finally:
        ampopt.set_backend("auto")


@pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")
def test_an_offloaded_model_is_stepped_by_the_compiled_loops_to_the_same_bits(two_ranks):
    for plain, reached, updates in two_ranks.run(offloaded):
        assert reached == plain
        assert 0 < updates < STEPS  # one for each step that is not skipped


class OnTheirRanks(torch.optim.SGD):
    """A third-party optimizer with an argument ``process_group`` of its own."""

    def __init__(self, params: Any, process_group: Any = None) -> None:
        super().__init__(params, lr=0.5)
        self.process_group = process_group


class OnSomeRanks(torch.optim.SGD):
    """A third-party optimizer with an attribute ``process_group`` of its own, and no argument."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)
        self.process_group = torch.distributed.group.WORLD


def overflowing_on_one_rank(theirs: str) -> tuple[float, float]:
    """The next scales: of the optimizer alone, and under a scaler with a process group."""
    world, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    p = torch.nn.Parameter(torch.ones(1))
    optimizer: Any = {
        "none, ours given": lambda: ampopt.extend(Strangers)([p], process_group=world),
        "an attribute": lambda: ampopt.extend(OnSomeRanks)([p]),
        "an attribute, patched": lambda: ampopt.patch_optimizer(OnSomeRanks([p])),
        "an attribute, ours given": lambda: ampopt.extend(OnSomeRanks)([p], process_group=world),
        "an argument": lambda: ampopt.extend(OnTheirRanks)([p], process_group="theirs"),
    }[theirs]()
    kept = optimizer.__getstate__().get("process_group")  # as copies have it
    assert (kept is not None) == ("ours" in theirs)
    p.grad = torch.full((1,), float("inf") if rank else 4.0)
    by_itself = optimizer.unscale_and_step(grads_scaled_by=4.0).scale.item()
    scaler = ampopt.GradScaler("cpu", init_scale=4.0, process_group=world)
    scaler.scale(torch.ones(()))
    p.grad = torch.full((1,), float("inf") if rank else 4.0)
    scaler.step(optimizer)
    scaler.update()
    return by_itself, scaler.get_scale()


@pytest.mark.parametrize(
    ("theirs", "together"),
    [
        ("none, ours given", True),
        ("an attribute", False),
        ("an attribute, patched", False),
        ("an attribute, ours given", True),
        ("an argument", False),
    ],
)
def test_a_process_group_attribute_of_another_class_is_not_used(two_ranks, theirs, together):
    first, second = two_ranks.run(overflowing_on_one_rank, theirs)
    assert first == (2.0 if together else 4.0, 2.0)
    assert second == (2.0, 2.0)
