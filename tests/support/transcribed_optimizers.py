"""Optimizers that torch lacks, line by line as their authors wrote them: other code than a rule.

Each parameter counts its own steps, and ``maximize`` turns gradients round; else as published.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["Adan", "Sophia", "transcribed"]


class Transcribed(torch.optim.Optimizer):
    """Goes through the parameters that have a gradient."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"maximize": False, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    self.one(p, -p.grad if group["maximize"] else p.grad, state, **group)

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], *args: Any, **group: Any) -> None:
        raise NotImplementedError


class Adan(Transcribed):
    """``_single_tensor_adan`` of sail-sg/Adan."""

    def one(self, p, g, state, lr, betas, eps, weight_decay, no_prox, **_):
        beta1, beta2, beta3 = betas
        step = state["step"]
        if step == 1:
            for name in ("exp_avg", "exp_avg_sq", "exp_avg_diff"):
                state[name] = torch.zeros_like(p)
            state["neg_pre_grad"] = -g
        diff = state["neg_pre_grad"] + g
        state["exp_avg"].mul_(beta1).add_(g, alpha=1 - beta1)
        state["exp_avg_diff"].mul_(beta2).add_(diff, alpha=1 - beta2)
        update = diff.mul(beta2).add(g)
        state["exp_avg_sq"].mul_(beta3).addcmul_(update, update, value=1 - beta3)
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta3**step) ** 0.5).add(eps)
        if no_prox:
            p.mul_(1 - lr * weight_decay)
        p.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1**step))
        p.addcdiv_(state["exp_avg_diff"], denominator, value=-lr * beta2 / (1 - beta2**step))
        if not no_prox:
            p.div_(1 + lr * weight_decay)
        state["neg_pre_grad"] = -g


class Sophia(Transcribed):
    """``SophiaG`` of Liuhong99/Sophia, whose step takes ``bs`` as an argument."""

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            _, beta2 = group["betas"]
            for p in group["params"]:
                hessian = self.state[p].setdefault("hessian", torch.zeros_like(p))
                hessian.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    def one(self, p, g, state, lr, betas, rho, bs, weight_decay, **_):
        exp_avg = state.setdefault("exp_avg", torch.zeros_like(p))
        hessian = state.setdefault("hessian", torch.zeros_like(p))
        p.mul_(1 - lr * weight_decay)
        exp_avg.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        ratio = (exp_avg.abs() / (rho * bs * hessian + 1e-15)).clamp(None, 1)
        p.addcmul_(exp_avg.sign(), ratio, value=-lr)


def transcribed(name: str) -> type[Transcribed]:
    """The one of that name."""
    return globals()[name]
