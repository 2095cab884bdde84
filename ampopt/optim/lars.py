"""LARS."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import check_flags, check_lr, check_not_negative
from ampopt_kernels import rules

__all__ = ["LARS"]


class LARS(ElementwiseOptimizer):
    """LARS: SGD whose learning rate for each parameter follows from its norm and its gradient's.

    You et al., Large Batch Training of Convolutional Networks (1708.03888). A parameter's gradient
    is multiplied by ``trust_coefficient * |p| / (|g| + weight_decay * |p|)`` before momentum. Steps
    are those of ``lars.py`` in kozistr/pytorch_optimizer, with its defaults. Both norms are taken
    on the device, and of a parameter that is spread over ranks they are those of the whole.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        momentum: of the buffer of gradients; 0 for none.
        dampening: of what is added to the buffer.
        weight_decay: added to the gradient.
        trust_coefficient: how far a step may go, as a share of the parameter's norm.
        nesterov: momentum is looked ahead.
        adapt: take the ratio of norms. ``False`` in the param group of biases and scales of
            normalization, with a ``weight_decay`` of 0 there, as the authors do.
        maximize: go up.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Raises:
        TypeError: a hyperparameter is no number, or no bool.
        ValueError: one is out of range.

    Differs from there: ``adapt`` says which parameters have a ratio, where all of fewer than two
    dimensions have none there, nor a decay; arithmetic on float16 and bfloat16 parameters is
    float32, rounded once at the end, and norms are summed up in float64.
    """

    rule = rules.lars

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        nesterov: bool = False,
        adapt: bool = True,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        param_rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        """Make the optimizer; see the class."""
        check_lr(lr)
        check_not_negative(
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
        )
        check_flags(nesterov=nesterov, adapt=adapt, maximize=maximize)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "adapt": adapt,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            param_rounding=param_rounding,
            process_group=process_group,
        )
