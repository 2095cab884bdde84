"""LAMB, which torch does not have."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import checked
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["LAMB"]


class LAMB(ElementwiseOptimizer):
    """LAMB: Adam with a step in proportion to the norm of each parameter, for large batches.

    You et al., Large Batch Optimization for Deep Learning (1904.00962), algorithm 2. The update of
    a parameter is ``lr * |p| / |u| * u``, where ``u`` is Adam's direction plus ``weight_decay *
    p``. LAMB takes the same steps as ``fused_lamb.py`` in NVIDIA/apex with ``use_nvlamb=True``,
    with the same defaults. The device computes both norms, for which it reads parameter, gradient
    and averages once more. For a sharded parameter, the norms are those of the whole parameter.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: decay rates of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: multiplied by the parameter and added to the direction before its norm is
            computed.
        bias_correction: correct the bias of both averages.
        maximize: maximize the objective instead of minimizing it.
        **options: see :class:`ampopt.options.RuleOptions`.

    Raises:
        TypeError: a hyperparameter is not a number, or a flag is not a bool.
        ValueError: a hyperparameter is out of range.

    Differs from the original: the ratio of norms is always used, as with ``use_nvlamb=True``;
    ``max_grad_norm`` is ``max_norm`` of ``unscale_and_step``; updates of float16 and bfloat16
    parameters are computed in float32 and rounded once, and norms are summed up in float64.
    """

    rule = rules.lamb

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        *,
        maximize: bool = False,
        **options: Unpack[RuleOptions],
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, checked(LAMB, locals()), **options)
