"""Adadelta, a drop-in for ``torch.optim.Adadelta``."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["Adadelta"]


class Adadelta(ElementwiseOptimizer, torch.optim.Adadelta):
    """``torch.optim.Adadelta`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. The methods for loss scaling are those of
    :class:`ampopt.Optimizer`::

        optimizer = ampopt.Adadelta(model.parameters())
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    Args:
        params, lr, rho, eps, weight_decay, maximize: as in ``torch.optim.Adadelta``.
        foreach, capturable: accepted and ignored; :func:`ampopt.set_backend` decides how a step
            runs.
        differentiable: run torch's own step.
        **options: see :class:`ampopt.options.RuleOptions`.

    Differs from torch: the step count is a 0-d tensor on the parameter's device, with and without
    ``capturable``, and ``capturable=True`` with parameters on a CPU is no error. Updates of float16
    and bfloat16 parameters are computed in float32 and rounded once.
    """

    rule = rules.adadelta

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

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
            **options: Unpack[RuleOptions],
        ) -> None:
            """Make the optimizer; see the class."""
