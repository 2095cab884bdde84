"""Muon, a drop-in for ``torch.optim.Muon``."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt._step.descriptors import StrategyAttribute
from ampopt._step.ordinary import OrdinaryStep
from ampopt._step.sharding.dtensor import is_dtensor
from ampopt._step.step_hooks import beneath_hooks
from ampopt.optim._sharded_muon import step_whole_matrices
from ampopt.optimizer import Optimizer
from ampopt.options import OptimizerOptions

__all__ = ["Muon"]


def _make_state(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    state = optimizer.state[param]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)


_torchs_step: Any = beneath_hooks(torch.optim.Muon.step)


class Muon(Optimizer, torch.optim.Muon):
    """``torch.optim.Muon`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are those of torch, and so is ``step``: it orthogonalizes
    whole matrices in bfloat16, which no elementwise rule can. Neither the step nor the inherited
    methods synchronize, unless a closure is passed.

    ``DTensor``s become what one process makes of the whole matrices: each matrix is brought
    together on one rank, which orthogonalizes it, and goes back in parts. That takes three
    collectives for all matrices. All ranks have to have a gradient, or none.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn:
            as in ``torch.optim.Muon``.
        **options: see :class:`ampopt.options.OptimizerOptions`.
    """

    _ampopt = StrategyAttribute(OrdinaryStep, make_state=_make_state, step_has_collectives=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; see the class.

        Args:
            closure: evaluates the model again, and returns the loss.

        Raises:
            RuntimeError: some ranks have gradients of ``DTensor``s that others have not.
        """
        if not any(is_dtensor(p) for group in self.param_groups for p in group["params"]):
            return _torchs_step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not step_whole_matrices(self, _make_state):
            _torchs_step(self)
        return loss

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float = 1e-3,
            weight_decay: float = 0.1,
            momentum: float = 0.95,
            nesterov: bool = True,
            ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
            eps: float = 1e-7,
            ns_steps: int = 5,
            adjust_lr_fn: str | None = None,
            **options: Unpack[OptimizerOptions],
        ) -> None:
            """Make the optimizer; see the class."""
