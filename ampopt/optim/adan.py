"""Adan, which torch does not have."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import checked
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["Adan"]


class Adan(ElementwiseOptimizer):
    """Adan: Nesterov momentum by averages of gradients and of their differences.

    Xie et al., Adan: Adaptive Nesterov Momentum Algorithm (2208.06677), algorithm 1. Adan takes the
    same steps as ``adan.py`` in sail-sg/Adan, with the same defaults and state names.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: decay rates of the averages of gradients, of their differences, and of the squares
            of both.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, multiplied by ``lr``.
        no_prox: apply weight decay before the update, as AdamW does; ``False`` applies it after the
            update, as a proximal step.
        maximize: maximize the objective instead of minimizing it.
        **options: see :class:`ampopt.options.RuleOptions`.

    Raises:
        TypeError: a hyperparameter is not a number, or a flag is not a bool.
        ValueError: a hyperparameter is out of range.

    Differs from the original: each parameter counts its own steps, in its state, so a parameter
    whose gradients come late starts at step 1; ``max_norm`` of ``unscale_and_step`` takes the place
    of ``max_grad_norm``; ``maximize`` is new; updates of float16 and bfloat16 parameters are
    computed in float32 and rounded once.
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
        **options: Unpack[RuleOptions],
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, checked(Adan, locals()), **options)
