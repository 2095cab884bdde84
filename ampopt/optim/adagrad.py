"""Adagrad."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt._step.masters import needs_master
from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["Adagrad"]


class Adagrad(ElementwiseOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with mixed-precision control points.

    Constructor, defaults and results are torch's. Sparse gradients take torch's own step.

    Args:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in
            ``torch.optim.Adagrad``.
        foreach, fused: taken, and change nothing: the backend decides how a step runs (see
            :func:`ampopt.set_backend`). Parameters that torch's fused step refuses are refused.
        differentiable: take torch's own step.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Differs from torch: the step count moves to the parameter's device at the first step. Arithmetic
    on float16 and bfloat16 parameters is float32, rounded once at the end.
    """

    rule = rules.adagrad
    sparse_gradients = True
    # Torch 2.11's makes no state for a group that is added later, and misses it.
    _ampopt = ElementwiseOptimizer._ampopt.knowing(torch_needs_state=True)

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
            param_rounding: str = "nearest",
            process_group: Any = None,
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
