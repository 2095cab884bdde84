"""Lion, which torch does not have."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import checked
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["Lion"]


class Lion(ElementwiseOptimizer):
    """Lion: each element moves by plus or minus the learning rate; with decoupled weight decay.

    Chen et al., Symbolic Discovery of Optimization Algorithms (2302.06675), algorithm 2. Lion takes
    the same steps as ``lion_pytorch.py`` in google/automl, with the same defaults and states. The
    authors advise a learning rate 3 to 10 times smaller than AdamW's, and a ``weight_decay`` larger
    by the same factor.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: ``betas[0]`` is the weight of the momentum, and ``1 - betas[0]`` that of the
            gradient, in the sum whose sign is the direction; ``betas[1]`` is the decay rate of the
            momentum.
        weight_decay: decoupled weight decay, multiplied by ``lr``.
        maximize: maximize the objective instead of minimizing it.
        **options: see :class:`ampopt.options.RuleOptions`.

    Raises:
        TypeError: a hyperparameter is not a number, or a flag is not a bool.
        ValueError: a hyperparameter is out of range.

    Differs from the original: ``maximize`` is new; updates of float16 and bfloat16 parameters are
    computed in float32 and rounded once.
    """

    rule = rules.lion

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[RuleOptions],
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, checked(Lion, locals()), **options)
