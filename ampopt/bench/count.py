"""The bytes that a step of a rule has to move, which is what its time is held against."""

from collections.abc import Iterable

from torch import Tensor

import ampopt

__all__ = ["bytes_moved"]


def bytes_moved(optimizer: ampopt.ElementwiseOptimizer) -> int:
    """Bytes read and written by one ``unscale_and_step``, as the rule says.

    Detect reads the gradients. Update reads them again, reads parameters and states, and writes
    parameters and states. The scalars, some bytes for each tensor, are left out.

    Args:
        optimizer: after its first step, so that its states exist; all of its parameters with
            gradients are counted.
    """
    total = 0
    for group in optimizer.param_groups:
        flags = optimizer.rule.flag_values(group)
        names = [part.name for part in optimizer.rule.state_for(flags)]
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state[param]
            changed = _nbytes([param, *(state[name] for name in names)])
            total += 2 * _nbytes([param.grad]) + 2 * changed
    return total


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
