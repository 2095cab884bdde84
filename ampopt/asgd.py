"""ASGD."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["ASGD"]


class ASGD(ElementwiseOptimizer, torch.optim.ASGD):
    """``torch.optim.ASGD`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``capturable`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`), and step, ``eta`` and
    ``mu`` always live on the parameter's device. ``differentiable=True`` takes torch's own step.
    """

    rule = rules.asgd

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.01,
            lambd: float = 0.0001,
            alpha: float = 0.75,
            t0: float = 1000000.0,
            weight_decay: float = 0,
            foreach: bool | None = None,
            maximize: bool = False,
            differentiable: bool = False,
            capturable: bool = False,
            *,
            master_weights: bool = False,
        ) -> None:
            """Make the optimizer; see the class."""
