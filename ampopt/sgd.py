"""Stochastic gradient descent."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["SGD"]


class SGD(ElementwiseOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``fused`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`). Sparse gradients and
    ``differentiable=True`` take torch's own step.

    Differs from torch: with momentum, the state has a ``step`` beside ``momentum_buffer``, which
    tells the first step from later ones where the host may not look; torch ignores it. A
    parameter whose steps were all skipped is left out of ``state_dict()``, as if it had never been
    stepped; finding out synchronizes.
    """

    rule = rules.sgd
    sparse_gradients = True

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 0.001,
            momentum: float = 0,
            dampening: float = 0,
            weight_decay: float | Tensor = 0,
            nesterov: bool = False,
            *,
            maximize: bool = False,
            foreach: bool | None = None,
            differentiable: bool = False,
            fused: bool | None = None,
            master_weights: bool = False,
        ) -> None:
            """Make the optimizer; see the class."""

    def _state_of(self, param: Tensor, flags: tuple[bool, ...]) -> dict[str, Any]:
        state = self.state.get(param, {})
        if state.get("momentum_buffer") is not None:
            state.setdefault("step", 1.0)  # from torch, which makes a buffer by stepping
        return super()._state_of(param, flags)

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's. Synchronizes if there is momentum."""
        state_dict = super().state_dict()
        state_dict["state"] = {
            key: state
            for key, state in state_dict["state"].items()
            if "step" not in state or bool(state["step"] > 0)
        }
        return state_dict
