"""Muon, a drop-in for ``torch.optim.Muon``."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt._step.descriptors import StrategyAttribute
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.sharding.dtensor import is_dtensor
from ampopt._step.step_hooks import beneath_hooks
from ampopt.optim._sharded_muon import step_whole_matrices
from ampopt.optimizer import Optimizer
from ampopt.options import OptimizerOptions

__all__ = ["Muon"]


def _make_state(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    """Make the momentum buffer of ``param``, zeros, if it is missing."""
    state, grad = optimizer.state[param], param.grad
    if "momentum_buffer" not in state:
        # As torch's step makes it. -0.0 becomes 0.0 in a buffer that has other strides.
        like = param if grad is None or is_dtensor(param) else grad
        state["momentum_buffer"] = torch.zeros_like(like, memory_format=torch.preserve_format)


_torchs_step: Any = beneath_hooks(torch.optim.Muon.step)


class Muon(Optimizer, torch.optim.Muon):
    """``torch.optim.Muon`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults, results and ``step`` are torch's: the step orthogonalizes whole matrices
    in bfloat16, which no elementwise rule can do. Neither the step nor the inherited methods
    synchronize, unless a closure is passed.

    On ``DTensor`` parameters, results are those of one process that has the whole matrices: each
    matrix is gathered on one rank, which orthogonalizes it and sends the shards of the update back.
    That takes three collectives for all matrices together. If one rank has the gradient of a
    parameter, all ranks must have it.

    Trap: with ``nesterov=False``, torch's step divides a bfloat16 momentum buffer by its norm, in
    place, until pytorch/pytorch#194664 mends it. With ``DTensor`` parameters, no buffer is divided.

    Args:
        params, lr, weight_decay, momentum, nesterov: as in ``torch.optim.Muon``.
        ns_coefficients, eps, ns_steps, adjust_lr_fn: likewise.
        **options: see :class:`ampopt.options.OptimizerOptions`.
    """

    _ampopt = StrategyAttribute(
        HandwrittenStep,
        make_state=_make_state,
        most_copied=math.inf,  # its step takes much longer than any copies
    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; see the class.

        Args:
            closure: evaluates the model again, and returns the loss.

        Raises:
            RuntimeError: some ranks have gradients of ``DTensor``s that others lack.
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

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

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
