"""Adadelta."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["Adadelta"]


class Adadelta(ElementwiseOptimizer, torch.optim.Adadelta):
    """``torch.optim.Adadelta`` with mixed-precision control points.

    Constructor, defaults and results are torch's.

    Args:
        params, lr, rho, eps, weight_decay, maximize: as in ``torch.optim.Adadelta``.
        foreach, capturable: taken, and change nothing: the backend decides how a step runs (see
            :func:`ampopt.set_backend`).
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

    rule = rules.adadelta

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 1.0,
            rho: float = 0.9,
            eps: float = 1e-6,
            weight_decay: float = 0,
            foreach: bool | None = None,
            *,
            capturable: bool = False,
            maximize: bool = False,
            differentiable: bool = False,
            master_weights: bool = False,
            param_rounding: str = "nearest",
            process_group: Any = None,
        ) -> None:
            """Make the optimizer; see the class."""
