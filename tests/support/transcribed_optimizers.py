"""Optimizers that torch lacks, transcribed from their authors' code: independent of the rules.

Each parameter counts its own steps, and ``maximize`` negates gradients; otherwise as published.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["LAMB", "LARS", "Adan", "NovoGrad", "ScheduleFreeAdamW", "Sophia", "transcribed"]


class Transcribed(torch.optim.Optimizer):
    """Base: calls ``one`` for each parameter that has a gradient."""

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


class LAMB(Transcribed):
    """``FusedLAMB`` of NVIDIA/apex with ``use_nvlamb=True`` and no clipping."""

    def one(self, p, g, state, lr, betas, eps, weight_decay, bias_correction, **_):
        beta1, beta2 = betas
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if bias_correction:
            m, v = m / (1 - beta1 ** state["step"]), v / (1 - beta2 ** state["step"])
        update = m / (v.sqrt() + eps) + weight_decay * p
        size, length = p.double().norm(), update.double().norm()
        ratio = size / length if size > 0 and length > 0 else 1.0
        p.sub_(lr * ratio * update)


class LARS(Transcribed):
    """``LARS`` of kozistr/pytorch_optimizer, with its adaptive rate switched by ``adapt``."""

    def one(
        self, p, g, state, lr, momentum, dampening, weight_decay, trust_coefficient, nesterov,
        adapt, **_,
    ):  # fmt: skip
        size = p.double().norm()
        length = g.double().norm() + weight_decay * size
        ratio = trust_coefficient * size / length if size > 0 and length > 0 else 1.0
        g = (g + weight_decay * p) * (ratio if adapt else 1.0)
        if momentum:
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.mul_(momentum).add_(g, alpha=1 - dampening)
            g = g + momentum * buffer if nesterov else buffer
        p.sub_(lr * g)


class NovoGrad(Transcribed):
    """``NovoGrad`` of kozistr/pytorch_optimizer."""

    def one(self, p, g, state, lr, betas, eps, weight_decay, grad_averaging, **_):
        beta1, beta2 = betas
        squares = g.double().square().sum()
        first = state["step"] == 1
        v = squares if first else beta2 * state["exp_avg_sq"] + (1 - beta2) * squares
        g = g / (v.sqrt() + eps) + weight_decay * p
        g = g * (1 - beta1) if grad_averaging and not first else g
        state["exp_avg"] = g if first else beta1 * state["exp_avg"] + g
        state["exp_avg_sq"] = v
        p.sub_(lr * state["exp_avg"])


class ScheduleFreeAdamW(Transcribed):
    """``AdamWScheduleFree`` of facebookresearch/schedule_free."""

    trains = True

    @torch.no_grad()
    def _switch(self, trains: bool) -> None:
        for group in self.param_groups:
            beta1, _ = group["betas"]
            for p in group["params"]:
                if trains != self.trains and "z" in self.state[p]:
                    p.lerp_(end=self.state[p]["z"], weight=1 - (beta1 if trains else 1 / beta1))
        self.trains = trains

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    def one(self, p, g, state, lr, betas, eps, weight_decay, warmup_steps, r, weight_lr_power, **_):
        beta1, beta2 = betas
        k = state["step"] - 1
        if k == 0:
            state["z"] = p.clone()
            state["exp_avg_sq"] = torch.zeros_like(p)
            state["lr_max"] = state["weight_sum"] = 0.0
        lr = lr * ((k + 1) / warmup_steps if k < warmup_steps else 1.0)
        state["lr_max"] = max(lr, state["lr_max"])
        weight = (k + 1) ** r * state["lr_max"] ** weight_lr_power
        state["weight_sum"] += weight
        ckp1 = weight / state["weight_sum"] if state["weight_sum"] else 0.0
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = state["exp_avg_sq"].div(1 - beta2 ** (k + 1)).sqrt_().add_(eps)
        direction = (g / denominator).add_(p, alpha=weight_decay)
        p.lerp_(end=state["z"], weight=ckp1)
        p.add_(direction, alpha=lr * (beta1 * (1 - ckp1) - 1))
        state["z"].sub_(direction, alpha=lr)


class Sophia(Transcribed):
    """``SophiaG`` of Liuhong99/Sophia, with ``bs`` in the group, not an argument of ``step``."""

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
    """The transcription of the optimizer ``name``, which torch lacks."""
    if name not in globals():
        raise LookupError(
            f"the contract of {name} compares it with a transcription, and this file has none: add "
            "one, or set continuous = False, for an optimizer that steps by signs"
        )
    return globals()[name]
