"""Adam for sparse gradients: only the elements that a gradient has are updated."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt._step.closures import call_closure
from ampopt._step.descriptors import StrategyAttribute
from ampopt._step.gradients import params_of
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.torch_private import uncompiled
from ampopt.optimizer import Optimizer
from ampopt.options import OptimizerOptions

__all__ = ["SparseAdam"]


def _state_of(optimizer: Any, param: Tensor) -> dict[str, Any]:
    """The state of ``param``, its missing entries made and its step count a 0-d tensor."""
    state = optimizer.state[param]
    step = state.get("step", 0)
    if not isinstance(step, Tensor):  # missing, or a Python number from a checkpoint
        state["step"] = torch.full((), step, dtype=torch.float32, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return state


class SparseAdam(Optimizer, torch.optim.SparseAdam):
    """``torch.optim.SparseAdam`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. ``state_dict()`` has the step count as a
    Python number, as torch's has, and synchronizes to read it.

    Args:
        params, lr, betas, eps, maximize: as in ``torch.optim.SparseAdam``.
        **options: see :class:`ampopt.options.OptimizerOptions`.

    Differs from torch: the step count is a float32 0-d tensor on the parameter's device, and bias
    corrections are made there. An accelerator still makes the host wait where a gradient is
    coalesced, because the number of its elements is known only then. Arithmetic on float16 and
    bfloat16 parameters is float32.
    """

    _ampopt = StrategyAttribute(HandwrittenStep, make_state=_state_of)

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            maximize: bool = False,
            **options: Unpack[OptimizerOptions],
        ) -> None:
            """Make the optimizer; see the class."""

    @uncompiled  # torch.compile does not trace sparse gradients
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Perform one step, as torch's ``step`` does.

        Args:
            closure: a function that reevaluates the model and returns the loss; or ``None``.

        Returns:
            What the closure returned, or ``None``.

        Raises:
            RuntimeError: a gradient is dense. Nothing has changed then.
        """
        loss = call_closure(closure)
        present = [
            (group, param, param.grad)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if not all(grad.is_sparse for _, _, grad in present):
            raise RuntimeError(
                "SparseAdam does not support dense gradients, please consider Adam instead"
            )
        for group, param, grad in present:
            _step(param, -grad if group.get("maximize") else grad, _state_of(self, param), group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's. Synchronizes."""
        state_dict = super().state_dict()
        states = state_dict["state"]
        for key in params_of(state_dict["param_groups"]):
            if "step" in states.get(key, {}):
                states[key] = {**states[key], "step": int(states[key]["step"])}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as torch does, and move step counts to the devices of their parameters."""
        super().load_state_dict(state_dict)
        for param in params_of(self.param_groups):
            if "step" in self.state.get(param, {}):
                _state_of(self, param)


def _step(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Adam on the elements of the sparse ``grad``, as in ``torch/optim/_functional.py``.

    Writes ``param`` and ``state``. Bias corrections are made in float64.
    """
    lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    state["step"] += 1
    step = state["step"].double()
    step_size = lr * (1 - beta2**step).sqrt() / (1 - beta1**step)

    grad = grad.coalesce()  # the update is not linear, so duplicates must be summed first
    at = grad.indices().unbind()
    dtype = torch.promote_types(param.dtype, torch.float32)
    g = grad.values().to(dtype)
    exp_avg, exp_avg_sq = state["exp_avg"][at].to(dtype), state["exp_avg_sq"][at].to(dtype)
    exp_avg = exp_avg + (g - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * (1 - beta2)
    change = step_size.to(dtype) * (exp_avg / (exp_avg_sq.sqrt() + eps))
    for tensor, value in (
        (state["exp_avg"], exp_avg),
        (state["exp_avg_sq"], exp_avg_sq),
        (param, param[at].to(dtype) - change),
    ):
        tensor[at] = value.to(tensor.dtype)
