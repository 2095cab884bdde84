"""Sophia, which torch does not have."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt.elementwise import ElementwiseOptimizer
from ampopt.optim._hyperparameters import checked
from ampopt.options import RuleOptions
from ampopt.results import Unscaled
from ampopt_kernels import rules

__all__ = ["Sophia"]


class Sophia(ElementwiseOptimizer):
    """Sophia-G: momentum divided by an estimate of the Hessian's diagonal, clipped elementwise.

    Liu et al., Sophia: A Scalable Stochastic Second-order Optimizer (2305.14342), algorithm 3, with
    the Gauss-Newton-Bartlett estimator. Sophia takes the same steps as ``SophiaG`` in
    Liuhong99/Sophia, with the same defaults and state names. Every ten steps or so, call
    :meth:`update_hessian` with the gradients of a loss whose labels are drawn from the model's own
    output::

        scale_outputs(cross_entropy(logits, Categorical(logits=logits).sample()), scale).backward()
        _, scale = optimizer.update_hessian(grads_scaled_by=scale)
        optimizer.zero_grad()

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate, which may be a one-element tensor.
        betas: decay rates of the momentum and of the average of estimates.
        rho: the factor of the estimate. An element moves by ``lr`` if its momentum is larger than
            the product of ``rho``, ``bs`` and its estimate; so does every element before the first
            estimate.
        weight_decay: decoupled weight decay, multiplied by ``lr``.
        bs: the number of labels that the loss is a mean of, such as the tokens of a batch.
        maximize: maximize the objective instead of minimizing it.
        **options: see :class:`ampopt.options.RuleOptions`.

    Raises:
        TypeError: a hyperparameter is not a number, or a flag is not a bool.
        ValueError: a hyperparameter is out of range.

    Differs from the original: ``bs`` is a hyperparameter, not an argument of ``step``;
    updates of float16 and bfloat16 parameters are computed in float32 and rounded once.
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
        **options: Unpack[RuleOptions],
    ) -> None:
        """Make the optimizer; see the class."""
        defaults = checked(Sophia, locals())
        if not bs > 0:
            raise ValueError(f"Invalid bs value: {bs}; it must be above 0")
        super().__init__(params, defaults, **options)

    def update_hessian(self, grads_scaled_by: Any = None) -> Unscaled:
        """Update the estimate of the Hessian from the current gradients; parameters do not change.

        If a gradient is not finite, nothing changes. Does not synchronize.

        Args:
            grads_scaled_by: the scale that the loss of these gradients was multiplied by.

        Returns:
            As :meth:`ampopt.Optimizer.unscale`: the flag, and the scale to use next.
        """
        return self.run_rule(rules.sophia_hessian, grads_scaled_by)
