"""The optimizers under test: the built-in ones, and three that an author might write."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

import ampopt
from ampopt_kernels import Rule, State, jit, tl

__all__ = [
    "BUILT_IN",
    "EVERY_RULE",
    "ORDINARY",
    "OWN",
    "RULE_BASED",
    "WITHOUT_CLOSURE",
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


RULE_BASED: tuple[type[ampopt.ElementwiseOptimizer], ...] = (
    ampopt.SGD,
    ampopt.Adam,
    ampopt.AdamW,
    Signed,
)
ORDINARY = (Plain, HostCounted)
WITHOUT_CLOSURE = (*RULE_BASED, *ORDINARY)
OWN: tuple[type[ampopt.Optimizer], ...] = (*ORDINARY, Signed)
EVERY_RULE: tuple[type[ampopt.ElementwiseOptimizer], ...] = (
    *(
        cls
        for cls in vars(ampopt).values()
        if isinstance(cls, type)
        and issubclass(cls, ampopt.ElementwiseOptimizer)
        and cls is not ampopt.ElementwiseOptimizer
    ),
    Signed,
)
BUILT_IN: tuple[type[ampopt.Optimizer], ...] = (*RULE_BASED[:3], ampopt.LBFGS)


def sgd(param: Parameter, **options: Any) -> ampopt.SGD:
    """Steps that are exact, and easily worked out."""
    return ampopt.SGD([param], lr=0.5, **options)


def torch_twin(cls: type[ampopt.Optimizer]) -> type[torch.optim.Optimizer]:
    """The torch class that ``cls`` is a drop-in for."""
    return getattr(torch.optim, cls.__name__)
