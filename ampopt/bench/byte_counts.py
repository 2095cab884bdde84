"""The bytes that a step has to read and write, and those that are allocated for an optimizer.

The bytes to read and write set a lower limit on the time of the step.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

import ampopt
from ampopt._step.gradients import params_of
from ampopt._step.hyperparameters import kind_of
from ampopt_kernels.rule import Rule

__all__ = ["bytes_allocated", "bytes_by_kernel"]


def bytes_allocated(params: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the storages of parameters, gradients, states and master weights.

    Args:
        params: parameters of the model.
        optimizer: their optimizer after its first step, or that of copies of them, which count too.
    """
    every = (*params, *params_of(optimizer.param_groups))
    tensors = [tensor for param in every for tensor in (param, param.grad)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_by_kernel(optimizer: ampopt.ElementwiseOptimizer) -> dict[str, int]:
    """Bytes that each kernel of one ``unscale_and_step`` reads and writes, by kernel name.

    Detect reads the gradients. Reduce, if the rule has it, reads the tensors that its terms use; so
    do sums over rows and columns, once for each sum. Update reads the gradients again, reads and
    writes states and parameters, and with master weights reads and writes those, and writes the
    low-precision copies. Not counted are scalars (some bytes per tensor), sums (some bytes per
    chunk), and row and column statistics.

    Args:
        optimizer: an optimizer after its first step, so that its states exist. Parameters without
            gradients are not counted.
    """
    detect = lines = reduce = update = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            flags = optimizer.rule.flag_values(group, kind_of(group, param))
            names = [part.name for part in optimizer.rule.state_for(flags)]
            n_hyper = len(optimizer.rule.hyper_values(group))
            reduce_reads = set().union(*_read(optimizer.rule, flags, n_hyper, "reduce"))
            average_reads = _read(optimizer.rule, flags, n_hyper, "averages")
            state = optimizer.state[param]
            master = optimizer._ampopt.masters.of(group, param)
            target, copies = (param, []) if master is None else (master, [param])
            states = [state[name] for name in names]
            updated_bytes = _nbytes([target, *states])
            detect += _nbytes([param.grad])
            read = [param.grad, target, *states]
            reduce += _nbytes(read[i] for i in reduce_reads)
            lines += sum(_nbytes(read[i] for i in term) for term in average_reads)
            update += _nbytes([param.grad, *copies]) + 2 * updated_bytes
    counts = {"detect_kernel": detect, "control_kernel": 0, "update_kernel": update}
    if optimizer.rule.reduces:
        counts |= {"reduce_kernel": reduce, "sum_kernel": 0}
    if optimizer.rule.averages is not None:
        counts["line_kernel"] = lines
    return counts


@functools.lru_cache(maxsize=64)  # hundreds of parameters share the same arguments
def _read(rule: Rule, flags: tuple[bool, ...], n_hyper: int, role: str) -> list[set[int]]:
    """For each term of ``reduce`` or ``averages``, the indices of the tensors that it reads.

    The tensors are gradient, parameter and states, in this order. Autograd finds those that are
    used.
    """
    if not (rule.reduces if role == "reduce" else rule.averages_for(flags)):
        return []
    n, h = 2 + len(rule.state_for(flags)), (1.0,) * rule.widths(n_hyper).reduce
    n_read = n + (len(rule.averages_for(flags)) if role == "reduce" else 0)
    with torch.enable_grad():
        grad, param, *state = tensors = [torch.ones(1, requires_grad=True) for _ in range(n_read)]
        indices = []
        for term in rule.on_tensors(role, torch.float32)(param, grad, tuple(state), h, flags):
            grads = [None] * n_read
            if term.requires_grad:
                grads = torch.autograd.grad(
                    term.sum(), tensors, retain_graph=True, allow_unused=True
                )
            indices.append({i for i, gradient in enumerate(grads[:n]) if gradient is not None})
    return indices


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of all elements of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)
