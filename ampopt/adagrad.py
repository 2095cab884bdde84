"""Adagrad."""

from typing import Any

import torch

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.masters import needs_master
from ampopt_kernels import rules

__all__ = ["Adagrad"]


class Adagrad(ElementwiseOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``fused`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`), and the step count moves
    to the parameter's device at the first step. Sparse gradients and ``differentiable=True`` take
    torch's own step.
    """

    rule = rules.adagrad
    sparse_gradients = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the optimizer; see the class."""
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            for param in group["params"]:
                if needs_master(group, param):
                    # torch has made it in the parameter's dtype, rounding its initial value.
                    state, initial = self.state[param], self.defaults["initial_accumulator_value"]
                    state["sum"] = torch.full_like(state["sum"], initial, dtype=torch.float32)
