"""The step of Muon for matrices that are sharded over ranks (``DTensor``)."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ampopt._step.rank_sums import SameGradients
from ampopt._step.sharding import dtensor
from ampopt._step.sharding.meshes import group_of
from ampopt._step.sharding.whole_matrices import WholeMatrices
from ampopt._step.torch_private import adjusted_lr, orthogonalize

__all__ = ["step_whole_matrices"]


def step_whole_matrices(optimizer: Any, make_state: Callable[[Any, Tensor], None]) -> bool:
    """Run the step of ``torch.optim.Muon``, each sharded matrix gathered on one rank.

    The rank orthogonalizes the matrix and sends the shards of the update back.

    Args:
        optimizer: an optimizer of matrices, some of them sharded.
        make_state: makes the state of a parameter if it is missing.

    Returns:
        Whether the step was run. ``False`` if no single process group contains all ranks of the
        matrices, or a parameter is complex or a gradient sparse, which torch's step refuses.

    Raises:
        RuntimeError: the ranks have gradients of different parameters; see
            :meth:`SameGradients.check`. Nothing has changed then.
    """
    params = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    with_grads = [(group, p) for group, p in params if p.grad is not None]
    shards = _ShardedMatrices.of(optimizer, [p for _, p in params if dtensor.is_dtensor(p)])
    if shards is None or any(p.is_complex() or p.grad.is_sparse for _, p in with_grads):
        return False
    device = params[0][1].device
    matrices = shards.matrices([p for _, p in with_grads if dtensor.is_dtensor(p)], device)
    updates = {p: _update(optimizer, group, p, make_state) for group, p in with_grads}
    groups = {p: group for group, p in with_grads}
    whole: dict[Any, Tensor] = {p: u for p, u in updates.items() if not dtensor.is_dtensor(p)}
    if matrices.params:
        gathered_updates = matrices.gather([updates[p] for p in matrices.params])
        whole |= {matrices.params[number]: update for number, update in gathered_updates.items()}
    for param, update in whole.items():
        group = groups[param]
        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        whole[param] = orthogonalize(update, *how)
    if matrices.params:
        own_updates = {number: whole[matrices.params[number]] for number in matrices.owned_matrices}
        parts = matrices.scatter(own_updates, updates[matrices.params[0]])
        whole |= dict(zip(matrices.params, parts, strict=True))
    for group, param in with_grads:
        lr, p = group["lr"], dtensor.local(param.detach())
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(whole[param], alpha=-adjusted_lr(lr, group["adjust_lr_fn"], param.shape))
    return True


def _update(
    optimizer: Any, group: dict[str, Any], param: Any, make_state: Callable[[Any, Tensor], None]
) -> Tensor:
    """This rank's shard of the momentum to orthogonalize, in bfloat16, as torch computes it."""
    dtensor.redistribute_gradient(param)
    make_state(optimizer, param)
    buffer = dtensor.local(optimizer.state[param]["momentum_buffer"])
    grad, momentum = dtensor.local(param.grad), group["momentum"]
    buffer.lerp_(grad, 1 - momentum)
    return (grad.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16()


class _ShardedMatrices:
    """The process group of the sharded matrices of one optimizer, cached between steps."""

    def __init__(self, params: list[Any], group: Any) -> None:
        """Store the parameters and their process group.

        Args:
            params: the sharded parameters, with gradients or without.
            group: a process group that contains all of their ranks.
        """
        self._params, self._group = params, group
        self._same = SameGradients(params)
        self._matrices = WholeMatrices([], group)

    @staticmethod
    def of(optimizer: Any, params: list[Any]) -> "_ShardedMatrices | None":
        """The cached object for these parameters, or a new one.

        ``None`` if no single process group contains all of their ranks.
        """
        last = _LAST.get(optimizer)
        if last is None or not _are_same(last._params, params):
            group = group_of([param.device_mesh for param in params])
            if group is None:
                return None
            last = _LAST[optimizer] = _ShardedMatrices(params, group)
        return last

    def matrices(self, present: list[Any], device: torch.device) -> WholeMatrices:
        """Assign matrices to ranks, after a check that all ranks have the same gradients.

        Args:
            present: the sharded parameters with gradients.
            device: the device of the collective.

        Raises:
            RuntimeError: the ranks have gradients of different parameters; see
                :meth:`SameGradients.check`.
        """
        if torch.distributed.get_world_size(self._group) > 1:
            counts, keys = torch.zeros(self._same.size, device=device), list(map(id, present))
            self._same.write_counts(counts, keys)
            torch.distributed.all_reduce(counts, group=self._group)
            self._same.check(counts, keys)
        if not _are_same(self._matrices.params, present):
            self._matrices = WholeMatrices(present, self._group)
        return self._matrices


_LAST: WeakKeyDictionary[Any, _ShardedMatrices] = WeakKeyDictionary()


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether both lists have the same objects in the same order."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
