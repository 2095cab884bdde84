"""Correct optimizers as users write them, of every kind that the contract is for."""

from typing import Any

import torch
from torch import Tensor

import ampopt
from ampopt.testing import OptimizerContract
from ampopt_kernels import Codec, Rule, State, jit, sqrt_rn, tl
from support.contracts import OF_RULES
from support.optimizers import Plain, Signed

__all__ = ["CORRECT", "EVEN", "Coded", "Decayed", "OwnHooks", "Selecting", "contract_of"]


class Decayed(ampopt.Optimizer):
    """Adam with decoupled weight decay, with its step count in the state."""

    def __init__(self, params: Any, lr: float = 0.125, decay: float = 0.25) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, self.gradient(p, group), self.state_of(p), self.lr_of(group), group)
        return loss

    def gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad

    def state_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"] = torch.zeros_like(p)
            state["square"] = torch.zeros_like(p)
        return state

    def lr_of(self, group: dict[str, Any]) -> float:
        return group["lr"]

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float, group: Any) -> None:
        state["step"] += 1
        state["mean"].lerp_(g, 0.25)
        state["square"].mul_(0.5).addcmul_(g, g, value=0.5)
        correction = 1 - 0.75 ** state["step"]
        p.mul_(1 - lr * group["decay"])
        p.sub_(lr * state["mean"] / correction / (state["square"].sqrt() + 2.0**-20))


class Selecting(ampopt.Optimizer):
    """Momentum that reads ``found_inf`` and selects by it, as a fused kernel would."""

    skip_by = "step"

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flag = self.found_inf
        flag = torch.zeros(()) if flag is None else flag
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.skips(flag, p), group["lr"])
        return loss

    def skips(self, flag: Tensor, p: Tensor) -> Tensor:
        return flag > 0

    def state_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["buffer"] = torch.zeros_like(p)
        return state

    def one(self, p: Tensor, g: Tensor, skip: Tensor, lr: float) -> None:
        state = self.state_of(p)
        state["step"] += (~skip).to(torch.float32)
        new = state["buffer"] * 0.5 + g
        state["buffer"].copy_(torch.where(skip, state["buffer"], new))
        p.copy_(torch.where(skip, p, p - lr * new))


class OwnHooks(Plain):
    """Momentum that overrides ``unscale`` and ``unscale_and_step``, without synchronizing."""

    def unscale(self, grads_scaled_by: Any = None) -> Any:
        return super().unscale(grads_scaled_by)

    def unscale_and_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Any = None, grads_scaled_by: Any = None, **keywords: Any
    ) -> Any:
        if closure is not None or keywords or grads_scaled_by is None:
            return super().unscale_and_step(closure, grads_scaled_by, **keywords)
        self.unscale(grads_scaled_by)
        return self.step_after_unscale()


class Ratio(Decayed):
    """LAMB: scales the update to the length of the parameter."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float, group: Any) -> None:
        state["step"] += 1
        state["mean"].lerp_(g, 0.25)
        update = state["mean"] + group["decay"] * p
        size, length = p.double().norm(), update.double().norm()
        ratio = torch.where((size > 0) & (length > 0), size / length, 1.0).to(p.dtype)
        p.sub_(lr * ratio * update)


class Looking(Plain):
    """Lookahead: each second step moves half way back to slow weights. Counts steps on the host."""

    def update(self) -> None:
        super().update()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("slow", p.detach().clone())
                state["count"] = state.get("count", 0) + 1
                if state["count"] % 2 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


class Rounded(Plain):
    """Momentum with stochastically rounded parameters, as in low-precision training."""

    def update(self) -> None:
        super().update()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(torch.floor(p * 256 + torch.rand_like(p)) / 256)


class Wrapped(ampopt.Optimizer, torch.optim.NAdam):
    """torch's NAdam with ampopt's methods, by inheritance."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125)


class Theirs(torch.optim.Optimizer):
    """Adagrad as written without knowledge of ampopt: it counts steps on the host."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    total = state.setdefault("sum", torch.zeros_like(p))
                    total.addcmul_(p.grad, p.grad)
                    lr = group["lr"] / state["step"] ** 0.5
                    p.addcdiv_(p.grad, total.sqrt().add_(2.0**-10), value=-lr)
        return loss


Extended = ampopt.extend(Theirs)
RANDOM: dict[str, Any] = {"independent_parameters": False, "continuous": False}


@jit
def _encode(x, u):
    return tl.floor(x * 127.0 + u)


@jit
def _decode(code):
    return code * (1 / 127)


EVEN = Codec(_encode, _decode, torch.int8)


@jit
def _adam(p, g, state, h, flags):
    mean = state[0] + 0.25 * (g - state[0])
    square = state[1] + 0.5 * (g * g - state[1])
    return p - h[0] * mean / (sqrt_rn(square) + 2.0**-20), (mean, square)


class Coded(ampopt.ElementwiseOptimizer):
    """Adam by a rule, with a codec of its own for the mean."""

    rule = Rule(
        update=_adam,
        hyper=("lr",),
        state=(State("mean", codec=EVEN), State("square", positive=True)),
    )

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.125})


CORRECT: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "Plain": (Plain, {}),
    "Signed": (Signed, {**OF_RULES, "continuous": False}),
    "Decayed": (Decayed, {"sync_free": False}),
    "Selecting": (Selecting, {"sync_free": True}),
    "OwnHooks": (OwnHooks, {}),
    # If a gradient cancels to rounding noise, the step has full length in a random direction.
    "Ratio": (Ratio, {"layout_changes_no_bit": False, "continuous": False}),
    "Looking": (Looking, {}),
    "Coded": (Coded, {}),
    "Rounded": (
        Rounded,
        {**RANDOM, "zero_lr_is_still": False, "layout_changes_no_bit": False},
    ),
    "Wrapped": (Wrapped, {}),
    "Extended": (Extended, {"reference": lambda self, params: Theirs(params)}),
}
"""Correct optimizers, with the claims that differ from the defaults."""


def contract_of(
    cls: type[Any], claims: dict[str, Any], bases: tuple[type[Any], ...] = ()
) -> type[OptimizerContract]:
    """Make the contract of an optimizer that takes only ``params``."""

    def make(self: Any, params: Any) -> Any:
        return cls(params)

    return type(f"Test{cls.__name__}", (*bases, OptimizerContract), {"make": make, **claims})
