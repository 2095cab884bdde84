"""The optimizers under test: the built-in ones, and three that an author might write."""

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
    """Momentum with an ordinary ``step`` that knows nothing of scaling."""

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
    """As :class:`Plain`, and counts steps on the host and draws random numbers."""

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
    """A rule of an author's own, without a twin in torch."""

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
"""Those that step without a closure."""
BY_RULE: tuple[type[ampopt.ElementwiseOptimizer], ...] = tuple(
    cls for cls in BUILT_IN if issubclass(cls, ampopt.ElementwiseOptimizer)
)
"""Those that are a rule."""
BY_TORCHS_STEP = tuple(cls for cls in CLOSURE_FREE if cls not in BY_RULE)
"""Those that take torch's own step, but for the one that needs a closure."""

BEYOND_TORCH: tuple[type[ampopt.ElementwiseOptimizer], ...] = tuple(
    cls
    for cls in (getattr(ampopt, name) for name in ampopt.__all__)
    if hasattr(cls, "rule") and cls not in BY_RULE
)
"""Those that torch lacks; each is a rule."""

EVERY_RULE = (*BY_RULE, *BEYOND_TORCH, Signed)
SOME_RULES: tuple[type[ampopt.ElementwiseOptimizer], ...] = (
    ampopt.SGD,
    ampopt.Adam,
    ampopt.AdamW,
    Signed,
)
"""For what does not depend on the formula; :func:`support.strategies.cases` knows their options."""
ORDINARY = (Plain, HostCounted)
OF_EACH_KIND = (*SOME_RULES, *ORDINARY)
OWN: tuple[type[ampopt.Optimizer], ...] = (*ORDINARY, Signed)


def sgd(param: Parameter, **options: Any) -> ampopt.SGD:
    """Steps that are exact, and easily worked out."""
    return ampopt.SGD([param], lr=0.5, **options)


def torch_twin(cls: type[ampopt.Optimizer]) -> type[torch.optim.Optimizer]:
    """The torch class that ``cls`` is a drop-in for."""
    return getattr(torch.optim, cls.__name__)
