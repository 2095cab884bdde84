"""Sharded parameters: wherever an overflow is, all ranks skip.

Trap T4 (see loops/test_traps.py): torch's scaler reads the placements of the first gradient only.
If that one is replicated, there is no all-reduce for the others: a rank with an overflow in its
shard skips alone, and halves its scale. The tests run on two processes.
"""

import itertools
from typing import Any

import pytest
import torch
from support.two_rank_steps import CLASSES, FORMS, ORDERS, SPOILED, outcomes_of_all
from torch.nn import Parameter

import ampopt
from ampopt._step import ranks
from ampopt._step.sharding import dtensor


@pytest.fixture(scope="module")
def of_both(two_ranks: Any) -> Any:
    """The results of both ranks, by case."""
    return [dict(seen) for seen in two_ranks.run(outcomes_of_all)]


def nan_is_nan(case: Any) -> Any:
    """``case`` with numbers as text: a NaN that was pickled no longer equals itself."""
    return tuple(repr(x) if isinstance(x, float) else x for x in case)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("form", FORMS)
def test_t4_all_ranks_skip_or_none(of_both, name, form):
    first, second = (
        {nan_is_nan(case): outcome for case, outcome in rank.items()} for rank in of_both
    )
    for order, bad in itertools.product(ORDERS, SPOILED):
        case = nan_is_nan((name, form, order, bad))
        (scale, params), (other_scale, other_params) = first[case], second[case]
        alone_scale, alone = first[nan_is_nan((name, form, "not spread", bad))]
        for a, b, c in zip(params, other_params, alone, strict=True):
            assert torch.equal(a, b), (order, bad)
            if bad is None:
                torch.testing.assert_close(a, c)
            else:
                assert torch.equal(a, c), (order, bad)  # nothing has changed
        if "torch" not in form:  # whose scale is not ours to mend
            assert scale == other_scale == alone_scale == (4.0 if bad is None else 2.0)


def test_ordinary_tensors_make_no_all_reduce():
    assert ranks.agreement([ampopt.SGD([Parameter(torch.ones(2))])]) is None
    tensor = torch.ones(2)
    assert dtensor.local(tensor) is tensor


def under_torchs_scaler(name: str) -> list[Any]:
    """After steps of shards under torch's scaler: collectives, the scale, and the parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, rank, told = init_device_mesh("cpu", (2,)), torch.distributed.get_rank(), []
    params: list[Any] = [
        Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)])) for _ in range(2)
    ]
    cls: Any = (torch.optim if name == "torch" else ampopt).AdamW
    optimizer = cls(params, lr=0.5, **({"fused": True} if name == "torch" else {}))
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)  # pyright: ignore
    scaler.scale(torch.ones(()))
    for number, unscales in ((1.0, False), (1.0, True), (float("inf"), False), (2.0, True)):
        for param in params:
            param.grad = DTensor.from_local(torch.full((2,), 4.0 * number), mesh, [Shard(0)])
            if rank == 0:
                param.grad.to_local().fill_(2.0)
        with CommDebugMode() as mode:
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        parts = [param.detach().to_local().tolist() for param in params]
        told.append([mode.get_total_counts(), scaler.get_scale(), parts])
    if name != "torch":  # an unscale that overflows on one rank: torch applies it
        scaler.update(2.0**-10)
        for param in params:
            number = 1e37 if rank else 1.0
            param.grad = DTensor.from_local(torch.full((2,), number), mesh, [Shard(0)])
        scaler.step(optimizer)
        assert [param.detach().to_local().tolist() for param in params] == told[-1][-1]
    return told


def test_torchs_scaler_makes_the_one_all_reduce_of_shards(two_ranks):
    expected = two_ranks.run(under_torchs_scaler, "torch")
    for told, theirs in zip(two_ranks.run(under_torchs_scaler, "ampopt"), expected, strict=True):
        for (count, scale, parts), (their_count, their_scale, their_parts) in zip(
            told, theirs, strict=True
        ):
            assert (count, scale) == (their_count, their_scale) == (1, scale)
            torch.testing.assert_close(torch.tensor(parts), torch.tensor(their_parts))


def stepped_with_sums(name: str, scaled: bool) -> list[Any]:
    """Parameters after steps with ``Partial`` gradients, and with their sums.

    There are two parameters, each with an optimizer and with gradients in three of the four steps.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    grad, results = torch.tensor([1.0, -2.0, 4.0, 0.5]) * (4.0 if scaled else 1.0), []
    for summed in (True, False):
        placements = ([Replicate()], [Shard(0)])
        params: list[Any] = [
            Parameter(distribute_tensor(torch.ones(4), mesh, p)) for p in placements
        ]
        optimizers = [getattr(ampopt, name)([p], lr=0.5) for p in params]
        for absent in (None, 0, 1, None):
            for i, p in enumerate(params):
                part = DTensor.from_local(grad * (0.25 if rank else 0.75), mesh, [Partial()])
                p.grad = part if summed else distribute_tensor(grad, mesh, p.placements)
                if i == absent:
                    p.grad = None
            for optimizer in optimizers:
                if scaled:
                    optimizer.unscale_and_step(grads_scaled_by=4.0)
                else:
                    optimizer.step()
        results.append([p.detach().full_tensor() for p in params])
    return results


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adafactor"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_is_yet_to_be_summed_is_summed_first(two_ranks, name, scaled):
    alone = Parameter(torch.ones(4))
    optimizer = getattr(torch.optim, name)([alone], lr=0.5)
    for _ in range(3):
        alone.grad = torch.tensor([1.0, -2.0, 4.0, 0.5])
        optimizer.step()
    for summed, whole in two_ranks.run(stepped_with_sums, name, scaled):
        for a, b in zip(summed, whole, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, alone.detach())
