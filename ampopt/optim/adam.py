"""Adam."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["Adam"]


class Adam(ElementwiseOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with mixed-precision control points.

    Constructor, defaults and results are torch's.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in
            ``torch.optim.Adam``.
        foreach, fused, capturable: taken, and change nothing: the backend decides how a step runs
            (see :func:`ampopt.set_backend`). Parameters that torch's fused step refuses are
            refused.
        differentiable: take torch's own step.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Differs from torch: the step count is a 0-d tensor on the parameter's device, whatever
    ``capturable`` says, which does not refuse parameters on a CPU. Arithmetic on float16 and
    bfloat16 parameters is float32, rounded once at the end.
    """

    rule = rules.adam

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.001,
            betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 0,
            amsgrad: bool = False,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            capturable: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            decoupled_weight_decay: bool = False,
            master_weights: bool = False,
            param_rounding: str = "nearest",
            process_group: Any = None,
        ) -> None:
            """Make the optimizer; see the class."""
