"""The bytes that a step of a rule has to move, which is what its time is held against."""

from collections.abc import Iterable

from torch import Tensor

import ampopt

__all__ = ["bytes_by_kernel", "bytes_moved"]


def bytes_moved(optimizer: ampopt.ElementwiseOptimizer) -> int:
    """Bytes read and written by one ``unscale_and_step``; see :func:`bytes_by_kernel`."""
    return sum(bytes_by_kernel(optimizer).values())


def bytes_by_kernel(optimizer: ampopt.ElementwiseOptimizer) -> dict[str, int]:
    """Bytes read and written by each kernel of one ``unscale_and_step``, as the rule says.

    Detect reads the gradients. Update reads them again, reads parameters and states, and writes
    parameters and states; of parameters that have masters it writes those and the copies. The
    scalars, some bytes for each tensor, are left out.

    Args:
        optimizer: after its first step, so that its states exist; all of its parameters with
            gradients are counted.
    """
    detect = update = 0
    for group in optimizer.param_groups:
        flags = optimizer.rule.flag_values(group)
        names = [part.name for part in optimizer.rule.state_for(flags)]
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state[param]
            master = optimizer._ampopt.masters.of(group, param)
            stored, copies = (param, []) if master is None else (master, [param])
            changed = _nbytes([stored, *(state[name] for name in names)])
            detect += _nbytes([param.grad])
            update += _nbytes([param.grad, *copies]) + 2 * changed
    return {"detect_kernel": detect, "control_kernel": 0, "update_kernel": update}


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
