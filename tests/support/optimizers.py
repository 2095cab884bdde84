"""The optimizers under test: the built-in ones, and three as users write them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

import ampopt
from ampopt_kernels import Rule, State, jit, tl

__all__ = [
    "BEYOND_TORCH",
    "BUILT_IN",
    "BY_RULE",
    "BY_TORCHS_STEP",
    "CLOSURE_FREE",
    "EVERY_RULE",
    "OF_EACH_KIND",
    "ORDINARY",
    "OWN",
    "SOME_RULES",
    "HostCounted",
    "Plain",
    "Signed",
    "sgd",
    "torch_twin",
]


class Plain(ampopt.Optimizer):
    """Momentum with a hand-written ``step`` that knows nothing of scaling."""

    def __init__(self, params: Iterable[Any], lr: Any = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buffer"] = torch.zeros_like(p)
                state["buffer"].mul_(group["momentum"]).add_(p.grad)
                p.sub_(group["lr"] * state["buffer"])


class HostCounted(Plain):
    """:class:`Plain` that also counts steps on the host and draws random numbers."""

    def update(self) -> None:
        super().update()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.add_(torch.rand(()).to(p.dtype) * 2.0**-10)


@jit
def _signed_update(p, g, state, h, flags):
    (lr, decay) = h
    average = state[0] + decay * (g - state[0])
    sign = tl.where(average > 0, 1.0, tl.where(average < 0, -1.0, 0.0))
    return p - lr * sign, (average,)


class Signed(ampopt.ElementwiseOptimizer):
    """A custom update rule without a counterpart in torch."""

    rule = Rule(update=_signed_update, hyper=("lr", "decay"), state=(State("average"),))

    def __init__(self, params: Iterable[Any], lr: Any = 0.125, decay: float = 0.25) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})


BUILT_IN: tuple[type[Any], ...] = tuple(
    getattr(ampopt, name)
    for name in ampopt.__all__
    if name != "Optimizer" and hasattr(torch.optim, name)
)
"""The drop-ins: every optimizer that torch has too."""
CLOSURE_FREE = tuple(cls for cls in BUILT_IN if cls is not ampopt.LBFGS)
"""Drop-ins that step without a closure."""
BY_RULE: tuple[type[ampopt.ElementwiseOptimizer], ...] = tuple(
    cls for cls in BUILT_IN if issubclass(cls, ampopt.ElementwiseOptimizer)
)
"""Drop-ins with an update rule."""
BY_TORCHS_STEP = tuple(cls for cls in CLOSURE_FREE if cls not in BY_RULE)
"""Drop-ins that use torch's own ``step``, except for LBFGS."""

BEYOND_TORCH: tuple[type[ampopt.ElementwiseOptimizer], ...] = tuple(
    cls
    for cls in (getattr(ampopt, name) for name in ampopt.__all__)
    if hasattr(cls, "rule") and cls not in BY_RULE
)
"""Optimizers that torch lacks; each has an update rule."""

EVERY_RULE = (*BY_RULE, *BEYOND_TORCH, Signed)
SOME_RULES: tuple[type[ampopt.ElementwiseOptimizer], ...] = (
    ampopt.SGD,
    ampopt.AdamW,
    Signed,
)
"""For tests that do not depend on the formula; :func:`support.strategies.cases` sets options."""
ORDINARY = (Plain, HostCounted)
OF_EACH_KIND = (*SOME_RULES, *ORDINARY)
OWN: tuple[type[ampopt.Optimizer], ...] = (*ORDINARY, Signed)


def sgd(param: Parameter, **options: Any) -> ampopt.SGD:
    """SGD with a learning rate of 0.5, whose steps are exact."""
    return ampopt.SGD([param], lr=0.5, **options)


def torch_twin(cls: type[ampopt.Optimizer]) -> type[torch.optim.Optimizer]:
    """The torch class that ``cls`` is a drop-in for."""
    return getattr(torch.optim, cls.__name__)
