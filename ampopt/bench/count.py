"""The bytes that a step of a rule has to move, which is what its time is held against."""

import functools
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

import ampopt
from ampopt._step.variants import kind_of
from ampopt_kernels.rule import Rule

__all__ = ["bytes_by_kernel", "bytes_moved"]


def bytes_moved(optimizer: ampopt.ElementwiseOptimizer) -> int:
    """Bytes read and written by one ``unscale_and_step``; see :func:`bytes_by_kernel`."""
    return sum(bytes_by_kernel(optimizer).values())


def bytes_by_kernel(optimizer: ampopt.ElementwiseOptimizer) -> dict[str, int]:
    """Bytes read and written by each kernel of one ``unscale_and_step``, as the rule says.

    Detect reads the gradients. Reduce, of a rule that has it, reads what its terms are made of.
    Update reads the gradients again, reads parameters and states, and writes parameters and states;
    of parameters that have masters it writes those and the copies. The scalars, some bytes for each
    tensor, sums, some for each chunk, and states of rows and columns are left out.

    Args:
        optimizer: after its first step, so that its states exist; all of its parameters with
            gradients are counted.
    """
    detect = reduce = update = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            flags = optimizer.rule.flag_values(group, kind_of(group, param))
            names = [part.name for part in optimizer.rule.state_for(flags)]
            reduced = _reduced(optimizer.rule, flags, len(optimizer.rule.hyper_values(group)))
            state = optimizer.state[param]
            master = optimizer._ampopt.masters.of(group, param)
            stored, copies = (param, []) if master is None else (master, [param])
            states = [state[name] for name in names]
            changed = _nbytes([stored, *states])
            detect += _nbytes([param.grad])
            reduce += _nbytes(itertools.compress([param.grad, stored, *states], reduced))
            update += _nbytes([param.grad, *copies]) + 2 * changed
    moved = {"detect_kernel": detect, "control_kernel": 0, "update_kernel": update}
    if optimizer.rule.reduces:
        moved |= {"reduce_kernel": reduce, "sum_kernel": 0}
    return moved


@functools.lru_cache(maxsize=64)  # hundreds of parameters have the same
def _reduced(rule: Rule, flags: tuple[bool, ...], n_hyper: int) -> list[bool]:
    """Which of gradient, parameter and states the terms of the rule are made of."""
    n = 2 + len(rule.state_for(flags))
    if not rule.reduces:
        return [False] * n
    with torch.enable_grad():
        n_read = 2 + len(rule.tensor_state_for(flags))
        grad, param, *state = given = [torch.ones(1, requires_grad=True) for _ in range(n_read)]
        h = (1.0,) * rule.widths(n_hyper).reduce
        terms = rule.torch_reduce_in(torch.float32)(param, grad, tuple(state), h, flags)
        used = torch.autograd.grad(torch.stack(terms).sum(), given, allow_unused=True)
    return [gradient is not None for gradient in used[:n]]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
