"""NovoGrad."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import check_betas, check_flags, check_lr, check_not_negative
from ampopt_kernels import rules

__all__ = ["NovoGrad"]


class NovoGrad(ElementwiseOptimizer):
    """NovoGrad, whose gradients are divided by an average norm, one number for each parameter.

    Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments (1905.11286).
    Steps are those of ``novograd.py`` in kozistr/pytorch_optimizer, with its defaults. The norm is
    taken on the device, and of a parameter that is spread over ranks it is that of the whole.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: of the average of normalized gradients, and of the squared norm.
        eps: added to the denominator.
        weight_decay: added to the normalized gradient.
        grad_averaging: weigh what is added to the average by ``1 - betas[0]``, but at first.
        maximize: go up.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Raises:
        TypeError: a hyperparameter is no number, or no bool.
        ValueError: one is out of range.

    Differs from there: the squared norm is float64, and named ``exp_avg_sq``, the average
    ``exp_avg``; no decoupled decay; arithmetic on float16 and bfloat16 parameters is float32,
    rounded once at the end.
    """

    rule = rules.novograd

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        param_rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        """Make the optimizer; see the class."""
        check_lr(lr)
        check_betas(betas)
        check_not_negative(eps=eps, weight_decay=weight_decay)
        check_flags(grad_averaging=grad_averaging, maximize=maximize)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            param_rounding=param_rounding,
            process_group=process_group,
        )
