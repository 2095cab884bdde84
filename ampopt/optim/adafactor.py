"""Adafactor."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt._step import gradients
from ampopt._step.closures import evaluated
from ampopt._step.dtensor import is_spread, placed_as
from ampopt._step.ordinary import Ordinary
from ampopt._step.stepping import Attached
from ampopt.optimizer import Optimizer
from ampopt_kernels.transfers import carried

__all__ = ["Adafactor"]


def _state_of(optimizer: Any, param: Tensor) -> dict[str, Any]:
    state, shape = optimizer.state[param], list(param.shape)
    if "step" not in state:
        if param.ndim > 1:
            state["row_var"] = param.new_zeros([*shape[:-1], 1])
            state["col_var"] = param.new_zeros([*shape[:-2], 1, shape[-1]])
        else:
            state["variance"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    step = state.get("step", 0.0)
    if not isinstance(step, Tensor):  # new, or from an old checkpoint
        step = torch.full((), step, device=param.device)
    state["step"] = carried(step, param.device, torch.float32)
    return state


class Adafactor(Optimizer, torch.optim.Adafactor):
    """``torch.optim.Adafactor`` with mixed-precision control points.

    Constructor, defaults and results are torch's.

    Args:
        params, lr, beta2_decay, eps, d, weight_decay, maximize: as in ``torch.optim.Adafactor``.
        foreach: taken, and changes nothing.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Differs from torch: the step count and every norm stay on the parameter's device, where torch
    waits for each of them. Means are taken in fewer passes, and so rounded otherwise. Arithmetic on
    float16 and bfloat16 parameters is float32. A parameter without elements is left alone, where
    torch divides by zero; ``eps[0]=None`` means the epsilon of each parameter's dtype, where torch
    takes the first one's for all of a group. On a ``DTensor`` it does what it does on a whole
    tensor, where torch fails, or for vectors does not; all ranks have to have its gradient, or
    none.
    """

    _ampopt = Attached(Ordinary, make_state=_state_of, meets=True)

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 1e-2,
            beta2_decay: float = -0.8,
            eps: tuple[float | None, float] = (None, 1e-3),
            d: float = 1.0,
            weight_decay: float = 0.0,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            process_group: Any = None,
        ) -> None:
            """Make the optimizer; see the class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Perform one step, as torch's ``step`` does. Does not synchronize.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            What the closure returned, or ``None``.

        Raises:
            RuntimeError: a parameter is complex or a gradient sparse; nothing has changed then.
        """
        loss = evaluated(closure)
        present = gradients.with_groups(self.param_groups)
        for _, param, grad in present:
            if param.is_complex():
                raise RuntimeError("Adafactor does not support complex parameters")
            if grad.is_sparse:
                raise RuntimeError("Adafactor does not support sparse gradients")
        for group, param, grad in present:
            state = _state_of(self, param)
            if param.numel():
                _step(param, grad, state, group)
        return loss


def _step(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Adafactor as in ``torch/optim/_adafactor.py`` (Shazeer and Stern, 1804.04235).

    Writes ``param`` and ``state``. Scalars are 0-d tensors of float64.
    """
    lr, weight_decay, d, (eps1, eps2) = (group[k] for k in ("lr", "weight_decay", "d", "eps"))
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
    dtype = torch.promote_types(param.dtype, torch.float32)
    p, g = param.to(dtype), grad.to(dtype)
    g = -g if group["maximize"] else g

    state["step"] += 1
    step = state["step"].double()
    new = (step ** group["beta2_decay"]).to(dtype)
    largest = (1 / step.sqrt()).clamp_max(lr)
    alpha = (p.norm(2).double() / p.numel() ** 0.5).clamp_min(eps2) * largest

    def average(name: str, value: Tensor) -> Tensor:
        mean = torch.lerp(state[name].to(dtype), value, new)
        state[name].copy_(placed_as(mean, state[name]))
        return state[name].to(dtype)

    squares = g * g
    if g.ndim > 1:
        row_var = average("row_var", squares.mean(-1, keepdim=True))
        col_var = average("col_var", squares.mean(-2, keepdim=True))
        mean = row_var.mean(dim=-2, keepdim=True).clamp_(min=eps1)
        # Into memory that is there: to be given new pages may take longer than to fill them.
        out = None if is_spread(g) else squares
        update = torch.mul(row_var.rsqrt(), (col_var / mean).rsqrt(), out=out)
    else:
        update = average("variance", squares).rsqrt()
    # The variance, whose root was taken before it was as large as a matrix, is at least eps1 ** 2.
    update = update.clamp_(max=1 / eps1 if eps1 else math.inf).mul_(g)
    denominator = (update.norm(2).double() / (update.numel() ** 0.5 * d)).clamp_min(1.0)

    if weight_decay != 0:
        p.mul_(1 - lr * weight_decay)
    update.mul_((alpha / denominator).to(dtype))
    p.sub_(placed_as(update, p))
    if p.dtype != param.dtype:
        param.copy_(p)
