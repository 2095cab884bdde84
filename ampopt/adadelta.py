"""Adadelta."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["Adadelta"]


class Adadelta(ElementwiseOptimizer, torch.optim.Adadelta):
    """``torch.optim.Adadelta`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``capturable`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`), and the step count always
    lives on the parameter's device. ``differentiable=True`` takes torch's own step.
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
        ) -> None:
            """Make the optimizer; see the class."""
