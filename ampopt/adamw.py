"""AdamW."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["AdamW"]


class AdamW(ElementwiseOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach``, ``fused`` and ``capturable`` are
    accepted and change nothing: the backend decides (see :func:`ampopt.set_backend`), and the step
    count always lives on the parameter's device. ``differentiable=True`` takes torch's own step.
    """

    rule = rules.adam

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.001,
            betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 0.01,
            amsgrad: bool = False,
            *,
            maximize: bool = False,
            foreach: bool | None = None,
            capturable: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            master_weights: bool = False,
        ) -> None:
            """Make the optimizer; see the class."""
