"""Sophia."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import (
    check_betas,
    check_flags,
    check_lr,
    check_not_negative,
    check_positive,
)
from ampopt.results import Unscaled
from ampopt_kernels import rules

__all__ = ["Sophia"]


class Sophia(ElementwiseOptimizer):
    """Sophia-G: momentum over an estimate of the Hessian's diagonal, clipped for each element.

    Liu et al., Sophia: A Scalable Stochastic Second-order Optimizer (2305.14342), algorithm 3, with
    the Gauss-Newton-Bartlett estimator. Steps are those of ``SophiaG`` in Liuhong99/Sophia, with
    its defaults and the names of its state. Every ten steps or so, call :meth:`update_hessian`
    with the gradients of a loss whose labels are drawn from the model's own output::

        scale_outputs(cross_entropy(logits, Categorical(logits=logits).sample()), scale).backward()
        _, scale = optimizer.update_hessian(grads_scaled_by=scale)
        optimizer.zero_grad()

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: of the momentum, and of the average of estimates.
        rho: what the estimate is multiplied by. An element moves by ``lr`` where the momentum is
            more than the product of ``rho``, ``bs`` and the estimate, as it does before the first
            estimate.
        weight_decay: decoupled, and multiplied by ``lr``.
        bs: over how many labels the loss is a mean, such as the tokens of a batch.
        maximize: go up.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        param_rounding: ``"stochastic"`` rounds bfloat16 parameters without masters so, as
            :class:`ampopt.ElementwiseOptimizer` says. Also an option of a param group.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Raises:
        TypeError: a hyperparameter is no number, or no bool.
        ValueError: one is out of range.

    Differs from there: ``bs`` is a hyperparameter, where it is an argument of ``step``; arithmetic
    on float16 and bfloat16 parameters is float32, rounded once at the end.
    """

    rule = rules.sophia

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.965, 0.99),
        rho: float = 0.04,
        weight_decay: float = 0.1,
        *,
        bs: int = 5120,
        maximize: bool = False,
        master_weights: bool = False,
        param_rounding: str = "nearest",
        process_group: Any = None,
    ) -> None:
        """Make the optimizer; see the class."""
        check_lr(lr)
        check_betas(betas)
        check_not_negative(rho=rho, weight_decay=weight_decay)
        check_positive(bs=bs)
        check_flags(maximize=maximize)
        defaults = {
            "lr": lr,
            "betas": betas,
            "rho": rho,
            "weight_decay": weight_decay,
            "bs": bs,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            param_rounding=param_rounding,
            process_group=process_group,
        )

    def update_hessian(self, grads_scaled_by: Any = None) -> Unscaled:
        """Take the gradients that there are into the estimate; parameters stay.

        Where one of them is not finite, nothing changes. Does not synchronize.

        Args:
            grads_scaled_by: the scale of the loss that the gradients come from.

        Returns:
            As :meth:`ampopt.Optimizer.unscale`: the flag, and the scale to use next.
        """
        return self.run_rule(rules.sophia_hessian, grads_scaled_by)
