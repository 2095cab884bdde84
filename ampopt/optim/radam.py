"""RAdam, a drop-in for ``torch.optim.RAdam``."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["RAdam"]


class RAdam(ElementwiseOptimizer, torch.optim.RAdam):
    """``torch.optim.RAdam`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. The methods for loss scaling are those of
    :class:`ampopt.Optimizer`::

        optimizer = ampopt.RAdam(model.parameters())
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    Args:
        params, lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: as in
            ``torch.optim.RAdam``.
        foreach, capturable: accepted and ignored; :func:`ampopt.set_backend` decides how a step
            runs.
        differentiable: run torch's own step.
        **options: see :class:`ampopt.options.RuleOptions`.

    Differs from torch: the step count is a 0-d tensor on the parameter's device, with and without
    ``capturable``, and ``capturable=True`` with parameters on a CPU is no error. Updates of float16
    and bfloat16 parameters are computed in float32 and rounded once.
    """

    rule = rules.radam

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.001,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 0,
            decoupled_weight_decay: bool = False,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            capturable: bool = False,
            differentiable: bool = False,
            **options: Unpack[RuleOptions],
        ) -> None:
            """Make the optimizer; see the class."""
