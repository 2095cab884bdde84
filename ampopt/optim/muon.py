"""Muon."""

import torch
from torch import Tensor

from ampopt._step.ordinary import Ordinary
from ampopt._step.stepping import Attached
from ampopt.optimizer import Optimizer

__all__ = ["Muon"]


def _make_state(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    state = optimizer.state[param]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)


class Muon(Optimizer, torch.optim.Muon):
    """``torch.optim.Muon`` with mixed-precision control points.

    Constructor, defaults and results are torch's, and so is the step: it orthogonalizes whole
    matrices, in bfloat16, which no elementwise rule can. It does not synchronize, nor do control
    points without a closure.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn:
            as in ``torch.optim.Muon``.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.
    """

    _ampopt = Attached(Ordinary, make_state=_make_state)
