"""Adan."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import check_betas, check_flags, check_lr, check_not_negative
from ampopt_kernels import rules

__all__ = ["Adan"]


class Adan(ElementwiseOptimizer):
    """Adan: Nesterov momentum by averages of gradients and of their differences.

    Xie et al., Adan: Adaptive Nesterov Momentum Algorithm (2208.06677), algorithm 1. Steps are
    those of ``adan.py`` in sail-sg/Adan, with its defaults and the names of its state.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: of the averages of gradients, of their differences, and of the squares of both.
        eps: added to the denominator.
        weight_decay: of parameters, multiplied by ``lr``.
        no_prox: decay before the step, as AdamW does; else after it, as a proximal step.
        maximize: go up.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Raises:
        TypeError: a hyperparameter is no number, or no bool.
        ValueError: one is out of range.

    Differs from there: each parameter counts its own steps, in its state, so one whose gradients
    come late starts as if new; ``max_norm`` of ``unscale_and_step`` takes the place of
    ``max_grad_norm``; ``maximize``; arithmetic on float16 and bfloat16 parameters is float32,
    rounded once at the end.
    """

    rule = rules.adan

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        no_prox: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        param_rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        """Make the optimizer; see the class."""
        check_lr(lr)
        check_betas(betas, 3)
        check_not_negative(eps=eps, weight_decay=weight_decay)
        check_flags(no_prox=no_prox, maximize=maximize)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "no_prox": no_prox,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            param_rounding=param_rounding,
            process_group=process_group,
        )
