"""AdamW, a drop-in for ``torch.optim.AdamW``."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["AdamW"]


class AdamW(ElementwiseOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. The methods for loss scaling are those of
    :class:`ampopt.Optimizer`::

        optimizer = ampopt.AdamW(model.parameters())
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``.
        foreach, fused, capturable: accepted and ignored; :func:`ampopt.set_backend` decides how a
            step runs. Exception: with ``fused=True``, parameters that torch's fused kernel does not
            support, such as complex ones, raise at the first step.
        differentiable: run torch's own step.
        **options: see :class:`ampopt.options.RuleOptions`.

    Differs from torch: the step count is a 0-d tensor on the parameter's device, with and without
    ``capturable``, and ``capturable=True`` with parameters on a CPU is no error. Updates of float16
    and bfloat16 parameters are computed in float32 and rounded once.
    """

    rule = rules.adam

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

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
            **options: Unpack[RuleOptions],
        ) -> None:
            """Make the optimizer; see the class."""
