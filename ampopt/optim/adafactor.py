"""Adafactor."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["Adafactor"]


class Adafactor(ElementwiseOptimizer, torch.optim.Adafactor):
    """``torch.optim.Adafactor`` with mixed-precision control points.

    Constructor, defaults and results are torch's.

    Args:
        params, lr, beta2_decay, eps, d, weight_decay, maximize: as in ``torch.optim.Adafactor``.
        foreach: taken, and changes nothing.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Differs from torch: the step count and every norm stay on the parameter's device, where torch
    waits for each of them. Means are taken in fewer passes, and so rounded otherwise. Arithmetic on
    float16 and bfloat16 parameters is float32. A parameter without elements is left alone, where
    torch divides by zero; ``eps[0]=None`` means the epsilon of each parameter's dtype, where torch
    takes the first one's for all of a group. On a ``DTensor`` it does what it does on a whole
    tensor, where torch fails, or for vectors does not; all ranks have to have its gradient, or
    none.
    """

    rule = rules.adafactor

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 1e-2,
            beta2_decay: float = -0.8,
            eps: tuple[float | None, float] = (None, 1e-3),
            d: float = 1.0,
            weight_decay: float = 0.0,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            master_weights: bool = False,
            param_rounding: str = "nearest",
            process_group: Any = None,
        ) -> None:
            """Make the optimizer; see the class."""
