"""One decision of ranks over NCCL, with a single rank. Not yet run on any device.

One rank is enough to show that nothing synchronizes, that the all-reduce can be captured, and that
it runs after the backward pass and before the step, although NCCL has a stream of its own.
"""

import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support.gpus import DEVICE, needs_gpu, no_waiting
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits

INF = float("inf")
FORMS = ("alone", "a process group", "DTensors")


@pytest.fixture(scope="module", autouse=True)
def nccl() -> Iterator[None]:
    dist: Any = torch.distributed
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        pytest.skip("needs NCCL")
    device = torch.device(DEVICE, torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    # One rank alone would make no all-reduce.
    with mock.patch.object(dist, "get_world_size", lambda group=None: 2):
        yield
    gc.collect()  # graphs that hold on to the communicator go before it
    dist.destroy_process_group()


def made(form: str) -> tuple[Any, list[Tensor], list[Tensor]]:
    """An optimizer, the local shards of its parameters, and those of their gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    values = [torch.linspace(-1, 1, 300, device=DEVICE).view(20, 15), torch.ones(3, device=DEVICE)]
    grads: list[Any] = [torch.full_like(value, 0.5) for value in values]
    params: list[Any] = values
    if form == "DTensors":
        mesh = init_device_mesh(DEVICE, (1,))
        params = [DTensor.from_local(value, mesh, [Shard(0)]) for value in values]
        given: list[Any] = [DTensor.from_local(grad, mesh, [Shard(0)]) for grad in grads]
    else:
        given = grads
    params = [Parameter(p) for p in params]
    for p, grad in zip(params, given, strict=True):
        p.grad = grad
    group = torch.distributed.group.WORLD if form == "a process group" else None
    optimizer = ampopt.AdamW(params, lr=0.125, process_group=group)
    here = [p._local_tensor if form == "DTensors" else p.detach() for p in params]
    return optimizer, here, grads


def refill(grads: list[Tensor], last: float) -> None:
    for grad in grads:
        grad.fill_(0.5)
    grads[-1][-1] = last


@needs_gpu(with_real="streams and NCCL")
@pytest.mark.parametrize("form", FORMS)
def test_ranks_decide_without_synchronizing(form):
    optimizer, params, grads = made(form)
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    dist = torch.distributed
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        optimizer.unscale_and_step(grads_scaled_by=4.0)
    assert all_reduce.call_count == (form != "alone")
    for i, last in enumerate((1.0, 1.0, INF, 1.0)):
        refill(grads, last)
        before = bits(params)
        if i < 2:  # kernels are compiled, and ranks see once that they are asked for the same
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
            refill(grads, last)
            optimizer.unscale(grads_scaled_by=scale)
            scale = optimizer.step_after_unscale().scale
            continue
        with no_waiting():
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
            optimizer.unscale(grads_scaled_by=scale)
            scale = optimizer.step_after_unscale().scale
        assert (bits(params) == before) == (last == INF)
    assert scale.item() == 4.0 / 2**2


@needs_gpu(with_real="streams and NCCL")
@pytest.mark.parametrize("form", FORMS[1:])
def test_a_decision_of_ranks_is_captured_and_replayed(form):
    runs = []
    for capture, whose in ((False, "alone"), (False, form), (True, form)):
        optimizer, params, grads = made(whose)
        first: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=2, device=DEVICE)
        value, counters = first._value.clone(), first._counters.clone()

        def step(optimizer: Any = optimizer, scale: Any = first, kept: Any = (value, counters)):
            now = scale._with(*kept)
            result = optimizer.unscale_and_step(grads_scaled_by=now, max_norm=1.0)
            kept[0].copy_(result.scale._value)
            kept[1].copy_(result.scale._counters)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # where NCCL makes its communicator, too
        torch.cuda.current_stream().wait_stream(side)
        again: Any = step
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                step()
            again = graph.replay
        seen: list[Tensor] = []
        for last in (1.0, INF, 1.0, 1.0, INF, 1.0):
            refill(grads, last)
            again()
            seen += [value.clone(), counters.clone(), *(p.clone() for p in params)]
        runs.append(bits(seen))
    assert runs[0] == runs[1] == runs[2]


@needs_gpu(with_real="streams and NCCL")
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("split", [False, True])
def test_the_decision_comes_after_the_gradients_and_before_the_step(form, split):
    """The side stream is behind: NCCL must wait for the gradients, and the step for NCCL."""
    optimizer, params, grads = made(form)
    optimizer.unscale_and_step(grads_scaled_by=4.0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for last in (INF, 1.0, INF):
        before = bits(params)
        with torch.cuda.stream(side):
            refill(grads, 1.0)
            torch.cuda._sleep(200_000_000)  # a tenth of a second, for the host to run ahead
            refill(grads, last)
            if split:
                found_inf = optimizer.unscale(grads_scaled_by=4.0).found_inf
                optimizer.step_after_unscale()
            else:
                found_inf = optimizer.unscale_and_step(grads_scaled_by=4.0).found_inf
        side.synchronize()
        assert found_inf.item() == (last == INF)
        assert (bits(params) == before) == (last == INF)


@needs_gpu(with_real="streams and NCCL")
def test_a_whole_training_step_of_ranks_is_captured():
    reached = []
    for cuda_graph in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        model.to(DEVICE)
        group = torch.distributed.group.WORLD
        optimizer: Any = ampopt.AdamW(model.parameters(), lr=1e-2, process_group=group)
        scale = ampopt.DynamicLossScale(init_scale=2.0**30, growth_interval=4)
        step = ampopt.TrainStep(
            model,
            torch.nn.MSELoss(),
            optimizer,
            scale,
            autocast=torch.float16,
            max_norm=1.0,
            cuda_graph=cuda_graph,
        )
        told = []
        for number in range(30):
            x = torch.linspace(0, 1, 32, device=DEVICE).view(4, 8) + number / 30
            result = step(x, x.sum(1, keepdim=True))
            told.append((result.found_inf.item(), step.scale.item()))  # type: ignore[union-attr]
        reached.append((told, bits([p.detach() for p in model.parameters()])))
    assert reached[0] == reached[1]
    assert {skipped for skipped, _ in reached[0][0]} == {0.0, 1.0}
