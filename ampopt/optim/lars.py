"""LARS, which torch does not have."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import checked
from ampopt.options import RuleOptions
from ampopt_kernels import rules

__all__ = ["LARS"]


class LARS(ElementwiseOptimizer):
    """LARS: SGD with a learning rate for each parameter, from its norm and that of its gradient.

    You et al., Large Batch Training of Convolutional Networks (1708.03888). A parameter's gradient
    is multiplied by ``trust_coefficient * |p| / (|g| + weight_decay * |p|)`` before momentum. LARS
    takes the same steps as ``lars.py`` in kozistr/pytorch_optimizer, with the same defaults. Both
    norms are computed on the device. For a sharded parameter, they are those of the whole
    parameter.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        momentum: decay rate of the momentum buffer; 0 for no buffer.
        dampening: the gradient is multiplied by ``1 - dampening`` as it is added to the buffer.
        weight_decay: multiplied by the parameter and added to the gradient.
        trust_coefficient: the factor in the formula above. The norm of the multiplied gradient,
            weight decay included, is at most this share of the parameter's norm, before momentum
            and ``lr``.
        nesterov: use Nesterov momentum.
        adapt: multiply by the ratio of norms. The authors set ``False``, and a ``weight_decay`` of
            0, for biases and the weights of normalization.
        maximize: maximize the objective instead of minimizing it.
        **options: see :class:`ampopt.options.RuleOptions`.

    Raises:
        TypeError: a hyperparameter is not a number, or a flag is not a bool.
        ValueError: a hyperparameter is out of range.

    Differs from the original: ``adapt`` decides which parameters have a ratio; in the original,
    parameters of fewer than two dimensions have neither ratio nor weight decay. Updates of float16
    and bfloat16 parameters are computed in float32 and rounded once, and norms are summed up in
    float64.
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
        **options: Unpack[RuleOptions],
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, checked(LARS, locals()), **options)
