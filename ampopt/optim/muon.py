"""Muon."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt._step.ordinary import Ordinary
from ampopt._step.stepping import Attached
from ampopt.optimizer import Optimizer

__all__ = ["Muon"]


def _make_state(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    state = optimizer.state[param]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)


class Muon(Optimizer, torch.optim.Muon):
    """``torch.optim.Muon`` with mixed-precision control points.

    Constructor, defaults and results are torch's, and so is the step: it orthogonalizes whole
    matrices, in bfloat16, which no elementwise rule can. The products that this takes are nearly
    all of the time on a CPU, and no faster in batches of equal shapes. It does not synchronize, nor
    do control points without a closure. On ``DTensor``s all ranks have to have a gradient, or none.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn:
            as in ``torch.optim.Muon``.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.
    """

    _ampopt = Attached(Ordinary, make_state=_make_state, meets=True)

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
            *,
            process_group: Any = None,
        ) -> None:
            """Make the optimizer; see the class."""
