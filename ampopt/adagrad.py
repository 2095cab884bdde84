"""Adagrad."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt import gradients
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.masters import needs_master
from ampopt_kernels import rules
from ampopt_kernels.work import Decision, Request

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

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.01,
            lr_decay: float = 0,
            weight_decay: float = 0,
            initial_accumulator_value: float = 0,
            eps: float = 1e-10,
            foreach: bool | None = None,
            *,
            maximize: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            master_weights: bool = False,
        ) -> None:
            """Make the optimizer; see the class."""

    else:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Make the optimizer; see the class."""
            super().__init__(*args, **kwargs)
            initial = self.defaults["initial_accumulator_value"]
            for group in self.param_groups:
                for param in group["params"]:
                    if needs_master(group, param):
                        # torch has made it in the parameter's dtype, rounding its initial value.
                        state = self.state[param]
                        state["sum"] = torch.full_like(state["sum"], initial, dtype=torch.float32)

    def _step_as_torch(self, request: Request) -> Decision | None:
        # Torch 2.11's makes no state for a group that is added later, and misses it.
        for group, param in gradients.present(self.param_groups):
            if not self.state.get(param):
                self._state_of(param, self.rule.flag_values(self.param_groups[group]))
        return super()._step_as_torch(request)
