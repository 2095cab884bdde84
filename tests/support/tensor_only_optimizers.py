"""Optimizers that keep all state in tensors, and two parameters for them."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.invariants.training import seed

__all__ = [
    "TENSORS_ONLY",
    "Author",
    "Data",
    "Foreach",
    "Fussy",
    "Nested",
    "Odd",
    "OneBuffer",
    "PastTheDispatcher",
    "Scattered",
    "Slow",
    "Views",
    "made",
    "set_gradients",
]


class Author(ampopt.Optimizer):
    """A hand-written optimizer; a subclass defines the update of one parameter."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})
        self.begin()

    def begin(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        self.update(
            [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        )

    def update(self, params: list[Parameter]) -> None:
        for p in params:
            assert p.grad is not None
            self.one(p, p.grad, self.state[p])

    def one(self, p: Parameter, g: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def average(self) -> dict[Parameter, Tensor]:
        return {
            p: self.state[p].setdefault("average", torch.zeros_like(p))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }


class Foreach(Author):
    def update(self, params):
        grads, average = [p.grad for p in params], list(self.average.values())
        torch._foreach_lerp_(average, grads, 0.25)  # pyright: ignore
        torch._foreach_add_(params, average, alpha=-0.125)  # pyright: ignore


class Fused(ampopt.Optimizer, torch.optim.Adam):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, fused=True)


class Tensors(ampopt.Optimizer, torch.optim.NAdam):
    """Keeps step counts and products in tensors, and uses many kinds of operators."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, foreach=True, weight_decay=0.25)


class Views(Author):
    def one(self, p, g, state):
        average = self.average[p]
        p.view(-1)[::2].sub_(g.view(-1)[::2])
        average.view(-1).flip(0)  # a copy, not a view
        average.view(-1)[1:].unsqueeze(0).copy_(g.view(-1)[1:])
        p.detach().t().mul_(0.5)


class Data(Author):
    def one(self, p, g, state):
        p.data.add_(g, alpha=-0.125)
        p.data[0] = p.data.mean()
        self.average[p].data.copy_(g)


class Out(Author):
    def one(self, p, g, state):
        average = self.average[p]
        torch.add(average, g, out=average)
        torch.mul(average, 0.5, out=p.data)
        torch.linalg.qr(average, out=(torch.empty(0), average.new_empty(0)))


class Scattered(Author):
    def one(self, p, g, state):
        p[torch.tensor([0, 1])] = -g[:2]
        p.masked_fill_(g > 2, 1.0)
        p.index_add_(0, torch.tensor([0]), g[:1])
        torch.nn.init.constant_(self.average[p], 3.0)


class Nested(Author):
    def one(self, p, g, state):
        parts = state.setdefault("parts", [torch.zeros_like(p), {"deep": (torch.zeros_like(p),)}])
        parts[0].add_(g)
        parts[1]["deep"][0].add_(parts[0])
        p.sub_(parts[1]["deep"][0])


class OneBuffer(Author):
    """All averages are views of one flat tensor in an attribute."""

    def begin(self):
        params = self.param_groups[0]["params"]
        self.flat = torch.zeros(sum(p.numel() for p in params) + 3)
        parts = self.flat[:-3].split([p.numel() for p in params])
        self.parts = [part.view(p.shape) for p, part in zip(params, parts, strict=True)]

    def update(self, params):
        for p, part in zip(self.param_groups[0]["params"], self.parts, strict=True):
            if p.grad is not None:
                part.lerp_(p.grad, 0.5)
        self.flat[-3:] += 1
        for p, part in zip(self.param_groups[0]["params"], self.parts, strict=True):
            p.sub_(part)


class Slow(Author):
    """Lookahead without host state: slow weights change in every third step."""

    def update(self, params):
        for p in params:
            state = self.state[p]
            if not state:
                state.update(count=torch.zeros(()), slow=p.detach().clone())
            state["count"] += 1
            p.sub_(p.grad, alpha=0.125)  # pyright: ignore[reportArgumentType]
            third = state["count"] % 3 == 0
            state["slow"].copy_(torch.where(third, p, state["slow"]))


class LearningRate(Author):
    """The learning rate is a tensor, and the step changes it."""

    def begin(self):
        self.param_groups[0]["lr"] = torch.tensor(0.125)

    def one(self, p, g, state):
        p.sub_(g * self.param_groups[0]["lr"])
        self.param_groups[0]["lr"].mul_(0.75)


class Odd(Author):
    """States whose storages have odd numbers of bytes."""

    def one(self, p, g, state):
        if not state:
            for n, dtype in enumerate((torch.uint8, torch.int16, torch.bool, torch.float64)):
                state[str(n)] = torch.zeros(2 * n + 1, dtype=dtype)
        for value in state.values():
            value.add_(1) if value.dtype != torch.bool else value.logical_not_()
        p.sub_(g)


class PastTheDispatcher(Author):
    """Writes to memory past torch's dispatcher, as a custom kernel does."""

    def one(self, p, g, state):
        p.detach().numpy()[...] -= g.numpy()
        self.average[p].add_(g)


TENSORS_ONLY = (
    Foreach, Fused, Tensors, Views, Data, Out, Scattered, Nested, OneBuffer, Slow, LearningRate,
    Odd, PastTheDispatcher,
)  # fmt: skip


class Fussy(Foreach):
    """Raises in the middle of a step if a gradient is non-finite."""

    def update(self, params):
        for p in params:
            p.add_(1.0)
            self.state[p].setdefault("seen", torch.zeros_like(p)).add_(1)
        for p in params:
            if not p.grad.isfinite().all():
                raise FloatingPointError("not finite")
        super().update(params)


def made(cls: type[ampopt.Optimizer]) -> tuple[Any, list[Parameter]]:
    """Make an optimizer of two parameters, 2x2 and 3x3, and seed all random generators."""
    seed()
    random.seed(0)
    np.random.seed(0)
    numbers = torch.arange(13.0) / 8
    params = [Parameter(numbers[:4].clone().view(2, 2)), Parameter(numbers[4:].clone().view(3, 3))]
    return cls(params), params  # pyright: ignore[reportCallIssue]


def set_gradients(params: list[Parameter], step: tuple[float | None, ...]) -> None:
    """Set gradients from one number for each parameter, or ``None`` for no gradient."""
    for p, x in zip(params, step, strict=True):
        p.grad = None if x is None else torch.linspace(0.25, 1.0, p.numel()).view(p.shape) + x
