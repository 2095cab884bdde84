"""Lion."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import check_betas, check_flags, check_lr, check_not_negative
from ampopt_kernels import rules

__all__ = ["Lion"]


class Lion(ElementwiseOptimizer):
    """Lion, which moves each element by the learning rate, up or down, with a decay of weights.

    Chen et al., Symbolic Discovery of Optimization Algorithms (2302.06675), algorithm 2. Steps are
    those of ``lion_pytorch.py`` in google/automl, with its defaults and the names of its state.
    They are 3 to 10 times as long as AdamW's of the same learning rate: the authors advise to take
    it so much smaller, and ``weight_decay`` so much larger.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: of the mean of gradient and momentum whose sign is taken, and of the momentum.
        weight_decay: decoupled, and multiplied by ``lr``.
        maximize: go up.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Raises:
        TypeError: a hyperparameter is no number, or no bool.
        ValueError: one is out of range.

    Differs from there: ``maximize``; arithmetic on float16 and bfloat16 parameters is float32,
    rounded once at the end.
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
        master_weights: bool = False,
        param_rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        """Make the optimizer; see the class."""
        check_lr(lr)
        check_betas(betas)
        check_not_negative(weight_decay=weight_decay)
        check_flags(maximize=maximize)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            param_rounding=param_rounding,
            process_group=process_group,
        )
