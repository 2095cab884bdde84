"""Adafactor, a drop-in for ``torch.optim.Adafactor``."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["Adafactor"]


class Adafactor(ElementwiseOptimizer, torch.optim.Adafactor):
    """``torch.optim.Adafactor`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. The methods for loss scaling are those of
    :class:`ampopt.Optimizer`::

        optimizer = ampopt.Adafactor(model.parameters())
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    Args:
        params, lr, beta2_decay, eps, d, weight_decay, maximize: as in ``torch.optim.Adafactor``.
        foreach: accepted and ignored.
        **options: see :class:`ampopt.options.RuleOptions`.

    Differs from torch: the step count and every norm stay on the parameter's device, where torch
    synchronizes for each of them. Means are computed in fewer passes, so they are rounded
    differently. Arithmetic on float16 and bfloat16 parameters is float32. A parameter without
    elements stays as it is, where torch divides by zero. A NaN that is not skipped reaches the
    whole parameter, where in a vector torch keeps it to its element. ``eps[0]=None`` means the
    epsilon of each parameter's dtype, where torch uses that of the first parameter for the whole
    group. On a ``DTensor``, results are those of the whole tensor; torch raises an error there, or
    computes something else for vectors. If one rank has the gradient of a ``DTensor``, all ranks
    must have it.
    """

    rule = rules.adafactor

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

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
            **options: Unpack[RuleOptions],
        ) -> None:
            """Make the optimizer; see the class."""
