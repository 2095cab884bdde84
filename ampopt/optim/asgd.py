"""ASGD, a drop-in for ``torch.optim.ASGD``."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["ASGD"]


class ASGD(ElementwiseOptimizer, torch.optim.ASGD):
    """``torch.optim.ASGD`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. The methods for loss scaling are those of
    :class:`ampopt.Optimizer`::

        optimizer = ampopt.ASGD(model.parameters())
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    Args:
        params, lr, lambd, alpha, t0, weight_decay, maximize: as in ``torch.optim.ASGD``.
        foreach, capturable: accepted and ignored; :func:`ampopt.set_backend` decides how a step
            runs.
        differentiable: run torch's own step.
        **options: see :class:`ampopt.options.RuleOptions`.

    Differs from torch: the step count, ``eta`` and ``mu`` are 0-d tensors on the parameter's
    device, with and without ``capturable``, and ``capturable=True`` with parameters on a CPU is no
    error. Updates of float16 and bfloat16 parameters are computed in float32 and rounded once.
    """

    rule = rules.asgd

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

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
            **options: Unpack[RuleOptions],
        ) -> None:
            """Make the optimizer; see the class."""
