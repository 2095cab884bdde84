"""LAMB."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import check_betas, check_flags, check_lr, check_not_negative
from ampopt_kernels import rules

__all__ = ["LAMB"]


class LAMB(ElementwiseOptimizer):
    """LAMB: Adam whose steps are as long as the parameters, for large batches.

    You et al., Large Batch Optimization for Deep Learning (1904.00962), algorithm 2. Of each
    parameter the step is ``lr * |p| / |u| * u``, where ``u`` is AdamW's direction with the decay
    of weights in it. Steps are those of ``fused_lamb.py`` in NVIDIA/apex with ``use_nvlamb=True``,
    with its defaults. Both norms are taken on the device, by one more read of what ``u`` is made
    of, and of a parameter that is spread over ranks they are those of the whole.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: of the parameter, added to the direction before its norm is taken.
        bias_correction: of both averages.
        maximize: go up.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Raises:
        TypeError: a hyperparameter is no number, or no bool.
        ValueError: one is out of range.

    Differs from there: a parameter without ``weight_decay`` has its ratio of norms, too;
    ``max_grad_norm`` is ``max_norm`` of ``unscale_and_step``; arithmetic on float16 and bfloat16
    parameters is float32, rounded once at the end, and norms are summed up in float64.
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
        master_weights: bool = False,
        param_rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        """Make the optimizer; see the class."""
        check_lr(lr)
        check_betas(betas)
        check_not_negative(eps=eps, weight_decay=weight_decay)
        check_flags(bias_correction=bias_correction, maximize=maximize)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            param_rounding=param_rounding,
            process_group=process_group,
        )
