"""NovoGrad, which torch does not have."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import checked
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["NovoGrad"]


class NovoGrad(ElementwiseOptimizer):
    """NovoGrad: gradients divided by an average of their norm, one number for each parameter.

    Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments (1905.11286).
    NovoGrad takes the same steps as ``novograd.py`` in kozistr/pytorch_optimizer, with the same
    defaults. The norm is computed on the device. For a sharded parameter, it is that of the whole
    parameter.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: decay rates of the averages of normalized gradients and of the squared norm.
        eps: added to the denominator.
        weight_decay: added to the normalized gradient.
        grad_averaging: multiply what is added to the average by ``1 - betas[0]``, except at the
            first step.
        maximize: maximize the objective instead of minimizing it.
        **options: see :class:`ampopt.options.RuleOptions`.

    Raises:
        TypeError: a hyperparameter is not a number, or a flag is not a bool.
        ValueError: a hyperparameter is out of range.

    Differs from the original: the states are named ``exp_avg_sq`` (of the squared norm, float64)
    and ``exp_avg``; there is no decoupled weight decay; updates of float16 and bfloat16 parameters
    are computed in float32 and rounded once.
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
        **options: Unpack[RuleOptions],
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, checked(NovoGrad, locals()), **options)
