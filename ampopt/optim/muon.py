"""Muon."""

import torch

from ampopt._step import gradients
from ampopt.optimizer import Optimizer

__all__ = ["Muon"]


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

    _transacts = True

    def _make_state(self) -> None:
        for _, param in gradients.present(self.param_groups):
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(
                    param, memory_format=torch.preserve_format
                )
