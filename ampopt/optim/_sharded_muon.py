"""The step of Muon for matrices that are sharded over ranks (``DTensor``)."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ampopt._step.rank_sums import SameGradients
from ampopt._step.sharding import dtensor
from ampopt._step.sharding.meshes import covering, group_of
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
    groups = {p: group for group, p in params if p.grad is not None}
    sharded = [p for _, p in params if dtensor.is_dtensor(p) and (p.requires_grad or p in groups)]
    matrices = _matrices_of(optimizer, sharded)
    if matrices is None or any(p.is_complex() or p.grad.is_sparse for p in groups):
        return False
    updates = {p: _update(optimizer, group, p, make_state) for p, group in groups.items()}
    whole = {p: update for p, update in updates.items() if not dtensor.is_dtensor(p)}
    whole |= matrices.gather(updates)
    for param in filter(groups.__contains__, tuple(whole)):
        group = groups[param]
        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        whole[param] = orthogonalize(whole[param], *how)
    whole |= matrices.scatter(whole)
    for param, group in groups.items():
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
    update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
    # A copy of the buffer, as torch divides what it orthogonalizes by its norm, in place.
    return update.to(torch.bfloat16, copy=update is buffer)


def _matrices_of(optimizer: Any, params: list[Any]) -> WholeMatrices | None:
    """Assign the sharded matrices ``params`` to ranks; check that ranks have the same gradients.

    Returns:
        ``None`` if no single process group contains all ranks of the matrices.

    Raises:
        RuntimeError: see :meth:`SameGradients.check`.
    """
    known = _KNOWN.get(optimizer)
    if known is None or list(map(id, known[0])) != list(map(id, params)):
        mesh = covering(list(dict.fromkeys(param.device_mesh for param in params)))
        group = None if mesh is None else group_of(mesh)
        matrices = None if group is None else WholeMatrices(params, group, torch.bfloat16)
        same = SameGradients(params, optimizer.param_groups)
        known = _KNOWN[optimizer] = params, matrices, same
    _, matrices, same = known
    if matrices is not None and matrices.n_ranks > 1:
        counts = torch.zeros(same.size, device=params[0].device)
        same.write_counts(counts, (id(param) for param in params if param.grad is not None))
        torch.distributed.all_reduce(counts, group=matrices.group)
        same.check(counts)
    return matrices


_KNOWN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By optimizer: its sharded matrices, and the two objects that :func:`_matrices_of` makes."""
