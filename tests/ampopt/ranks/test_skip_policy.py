"""A step on ``DTensor``s that is rolled back: the local shards are restored."""

import pytest
import torch
from support.optimizers import Plain
from torch.nn import Parameter

import ampopt
from ampopt.testing import as_on_a_device


def stepped_and_skipped(skip_by: str, foreach: bool) -> list[torch.Tensor]:
    """The parameter and its states after a finite step, and one that overflows on rank 1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    p = Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    if foreach:
        optimizer = ampopt.patch_optimizer(torch.optim.NAdam([p], foreach=True))
    else:
        optimizer = Plain([p])
    optimizer.skip_by = skip_by
    seen = []
    for last in (1.0, 1.0, float("inf")):
        p.grad = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, last]), mesh, [Shard(0)])
        with as_on_a_device():  # where there are transactions
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        tensors = [p, *(t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))]
        seen.append([getattr(t.detach(), "full_tensor", t.detach)().clone() for t in tensors])
    return seen


@pytest.mark.parametrize("skip_by", ["auto", "host", "transaction"])
@pytest.mark.parametrize("foreach", [True, False])
def test_a_skipped_step_leaves_every_part_as_it_was(two_ranks, skip_by, foreach):
    for _, good, skipped in two_ranks.run(stepped_and_skipped, skip_by, foreach):
        assert all(x.isfinite().all() for x in good)
        for before, after in zip(good, skipped, strict=True):
            assert torch.equal(before, after)
