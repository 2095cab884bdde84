"""Rules that sum over parameters, on shards: results are those of one process."""

from typing import Any

import pytest
import torch
from support.summing_rule import Ratio
from torch.nn import Parameter

import ampopt

SHAPES = [(8, 3), (3,), (2,), (5,)]


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apart(plain: bool) -> tuple[list[float], list[int]]:
    """The differences between ranks and one process, and the number of all-reduces of each step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ampopt.set_backend("eager")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    places = [Shard(0), Shard(0), Replicate(), None]

    def placed(value: torch.Tensor, place: Any) -> Any:
        return value.clone() if place is None else distribute_tensor(value.clone(), mesh, [place])

    start = [values(shape, i) for i, shape in enumerate(SHAPES)]
    parts = [Parameter(placed(v, place)) for v, place in zip(start, places, strict=True)]
    alone = [Parameter(v.clone()) for v in start]
    optimizers = [Ratio(parts, lr=0.25), Ratio(alone, lr=0.25)]
    calls: list[Any] = []
    all_reduce = torch.distributed.all_reduce
    counts = []
    torch.distributed.all_reduce = lambda *given: (calls.append(given), all_reduce(*given))[1]
    try:
        for step in range(4):
            for i, (part, one) in enumerate(zip(parts, alone, strict=True)):
                grad = values(SHAPES[i], 10 * step + i)
                if step == 1 and i == 0 and not plain:
                    grad[-1] = float("nan")  # on one rank
                part.grad, one.grad = placed(grad, places[i]), grad
            if step == 2:
                for group in (parts, alone):
                    group[0].grad = None
            calls.clear()
            for optimizer in optimizers:
                if plain:
                    optimizer.step()
                else:
                    optimizer.unscale_and_step(grads_scaled_by=0.5, max_norm=3.0)
            counts.append(len(calls))
    finally:
        torch.distributed.all_reduce = all_reduce
        ampopt.set_backend("auto")
    pairs = list(zip(parts, alone, strict=True))
    pairs += [(optimizers[0].state[p]["total"], optimizers[1].state[q]["total"]) for p, q in pairs]
    return [(whole(p) - whole(q)).abs().max().item() for p, q in pairs], counts


@pytest.mark.parametrize("plain", [False, True])
def test_sums_are_over_whole_parameters(two_ranks, plain):
    """Totals count each parameter once. The sums take one all-reduce more than the flag."""
    for far, counts in two_ranks.run(apart, plain):
        assert max(far) < 1e-6
        assert counts == [1 if plain else 2] * 4


def without_gradients(rank_without: int) -> list[float]:
    """The scalar states after a step in which rank ``rank_without`` has no gradient."""
    ampopt.set_backend("eager")
    rank = torch.distributed.get_rank()
    params = [Parameter(values((4,), rank))]
    optimizer = Ratio(params, process_group=torch.distributed.group.WORLD)
    if rank != rank_without:
        params[0].grad = torch.ones(4)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    ampopt.set_backend("auto")
    return [t.item() for t in optimizer.state.get(params[0], {}).values() if t.ndim == 0]


def test_a_rank_without_gradients_takes_part(two_ranks):
    """The step does not hang, and totals are those of the other rank."""
    with_gradients, without = two_ranks.run(without_gradients, 1)
    assert with_gradients[0] == 1.0 and with_gradients[1] > 0 and without == []
