"""How far steps with small states are from the steps of float32 states."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ampopt

__all__ = ["KINDS", "Fidelity", "compare", "gradients", "maker", "table"]

ELEMENTS = 8192
LR = 1e-3

Make = Callable[[list[Tensor]], Any]
"""Makes an optimizer of parameters, with learning rate :data:`LR` and no weight decay."""

KINDS = {
    "noise 1e-2": ("noise", 1e-2),
    "noise 1e-5": ("noise", 1e-5),
    "noise 1e-7": ("noise", 1e-7),
    "mean 1e-3": ("mean", 1e-3),
    "uneven 1e-3": ("uneven", 1e-3),
}
"""Kinds of gradients and their sizes; see :func:`gradients`."""


@dataclass(frozen=True)
class Fidelity:
    """Steps of one optimizer compared with those of another on the same gradients.

    Attributes:
        length: the length of the last step, in units of the other's.
        error: the norm of the difference of the sums of all updates, in units of the other's sum.
        largest: the largest update of an element, in units of the learning rate.
        largest_exact: that of the other optimizer.
    """

    length: float
    error: float
    largest: float
    largest_exact: float


def gradients(kind: str, size: float, steps: int, n: int = ELEMENTS) -> Iterator[Tensor]:
    """Gradients of ``n`` elements, the same in each call.

    Args:
        kind: ``"noise"``, normal numbers; ``"mean"``, a mean of 1 with noise of 0.3; ``"uneven"``,
            normal numbers whose sizes spread log-normally (sigma 1.5) over the elements.
        size: a factor.
        steps: how many gradients.
        n: the number of elements.
    """
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(n, generator=generator) for _ in range(steps + 1))
    spread = torch.exp(1.5 * next(noise)) if kind == "uneven" else torch.ones(n)
    for x in noise:
        yield size * spread * (1 + 0.3 * x if kind == "mean" else x)


def compare(small: Make, exact: Make, kind: str, size: float, steps: int) -> Fidelity:
    """Run both optimizers on the same gradients, with parameters that are 0 before each step."""
    both = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(2)]
    optimizers = [make([param]) for make, param in zip((small, exact), both, strict=True)]
    totals = [torch.zeros(ELEMENTS, dtype=torch.float64) for _ in both]
    largest, lengths = [0.0, 0.0], [math.nan, math.nan]
    for grad in gradients(kind, size, steps):
        for i, (param, optimizer) in enumerate(zip(both, optimizers, strict=True)):
            param.grad = grad.clone()
            optimizer.step()
            with torch.no_grad():
                update = param.double() / -LR
                param.zero_()
            totals[i] += update
            lengths[i] = update.norm().item()
            largest[i] = max(largest[i], update.abs().max().item())
    error = (totals[0] - totals[1]).norm() / totals[1].norm()
    return Fidelity(lengths[0] / lengths[1], error.item(), *largest)


def table(names: Sequence[str], steps: int) -> Iterator[str]:
    """Lines of a Markdown table: a row for each optimizer, number of bits and kind of gradients.

    Args:
        names: names of optimizers of ``ampopt``.
        steps: the number of steps.
    """
    yield f"| {steps} steps | state bits | gradients | length | error | largest | float32's |"
    yield "|---|---|---|---|---|---|---|"
    for name, bits, (label, kind) in itertools.product(names, (16, 8), KINDS.items()):
        found = compare(maker(name, bits), maker(name, 32), *kind, steps)
        yield (
            f"| {name} | {bits} | {label} | {found.length:.3f} | {found.error:.3f} | "
            f"{found.largest:.2f} | {found.largest_exact:.2f} |"
        )


def maker(name: str, state_bits: int) -> Make:
    """A function that makes the optimizer ``name`` of ``ampopt``, without weight decay.

    With a momentum, which is a state, if it takes one.
    """
    cls = getattr(ampopt, name)
    takes = inspect.signature(cls).parameters
    options = {"weight_decay": 0.0, "momentum": 0.9}
    options = {key: value for key, value in options.items() if key in takes}
    return lambda params: cls(params, lr=LR, state_bits=state_bits, **options)
