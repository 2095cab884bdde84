"""The float64 model of a training, and how far rounding may take an optimizer from it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampopt.testing.beside import Plain
from ampopt.testing.blueprints import Blueprint, set_gradients
from ampopt.testing.rounding import Rounding

__all__ = ["Float64"]

_ROUNDED = 4
_ERROR, _MARGIN = 32, 8
"""A result is off by ``_ERROR * eps`` at most, and an optimizer by ``_MARGIN`` times as much as any
of the rounded models. Four of them may all be close to the model by chance, but not so close."""


class Float64:
    """A trusted optimizer in float64, and the same with rounding errors, a few times.

    The errors of a float32 step depend on what it computes. A gradient that weight decay cancels
    leaves nothing but rounding errors, which Adam divides by their own size: a float32 training may
    then be anywhere, and no tolerance made of ``eps`` and the size of the parameter is both safe
    and of use. So gradients and hyperparameters are any, and the tolerance is measured: it is how
    far the model itself goes when its operations are off by more than those of the parameter's
    dtype can be (see :class:`~ampopt.testing.rounding.Rounding`). To that comes ``eps`` of all that
    a parameter has moved in so many steps, for the additions to it. Where a rounded model is no
    longer finite, or a square would overflow, nothing can be said, and nothing is.
    """

    def __init__(self, reference: Any, params: Sequence[Blueprint], dtype: torch.dtype) -> None:
        """``reference`` makes the trusted optimizer; ``dtype`` is that of what is compared."""
        self.limits = torch.finfo(dtype)
        self.model, *self.rounded = (
            Plain(reference, (in_float64(p.parameter()) for p in params))
            for _ in range(1 + _ROUNDED)
        )
        self.modes = [Rounding(_ERROR * self.limits.eps, seed) for seed in range(_ROUNDED)]
        self.moved = [p.detach().abs() for p in self.model.params]
        self.spread = [torch.zeros_like(moved) for moved in self.moved]
        self.steps = 0

    def set_learning_rate(self, lr: float) -> None:
        """Of all groups."""
        for plain in (self.model, *self.rounded):
            plain.set_learning_rate(lr)

    def call(self, name: str, gradients: Any, *_: Tensor) -> None:
        """A call of the optimizer's own, by name, with these gradients if it takes some."""
        old = [p.detach().clone() for p in self.model.params]
        with torch.random.fork_rng(devices=[]):
            self.model.call(name, gradients)
            for plain, mode in zip(self.rounded, self.modes, strict=True):
                with mode:
                    plain.call(name, gradients)
        self.note_moves(old)

    def add(self, param: Blueprint, lr: float) -> None:
        """One more parameter, in a group of its own."""
        for plain in (self.model, *self.rounded):
            plain.add(in_float64(param.parameter()), lr)
        self.moved.append(self.model.params[-1].detach().abs())
        self.spread.append(torch.zeros_like(self.moved[-1]))

    def step(
        self, gradients: Sequence[Blueprint | None], max_norm: float | None, *_: Tensor
    ) -> None:
        """Step with ``gradients``, as they are in their own dtype."""
        old = [p.detach().clone() for p in self.model.params]
        with torch.random.fork_rng(devices=[]):
            for plain in (self.model, *self.rounded):
                set_gradients(plain.params, [None] * len(gradients))
                for p, given in zip(plain.params, gradients, strict=True):
                    p.grad = None if given is None else given.tensor().double()
            self.model.step(max_norm)
            for plain, mode in zip(self.rounded, self.modes, strict=True):
                # What a compiled step computes is out of the mode's sight, but not what it reads.
                for p in plain.params:
                    for tensor in (p.detach(), p.grad, *plain.optimizer.state[p].values()):
                        mode.disturb(tensor)
                with mode:
                    plain.step(max_norm)
        self.steps += 1
        self.note_moves(old)

    def note_moves(self, old: list[Tensor]) -> None:
        """Since parameters were ``old``."""
        for i, p in enumerate(self.model.params):
            self.moved[i] += (p.detach() - old[i]).abs()
            for plain in self.rounded:
                apart = (plain.params[i].detach() - p.detach()).abs()
                self.spread[i] = torch.maximum(self.spread[i], apart)  # NaN stays

    def allowed(self, i: int) -> Tensor:
        """By how much each element of parameter ``i`` may be off; NaN where nothing can be said."""
        allowed = _MARGIN * self.spread[i] + _MARGIN * self.limits.eps * self.steps * self.moved[i]
        return allowed.where(self.moved[i] < self.limits.max**0.5, torch.nan)

    def check(self, params: Sequence[Parameter], optimizer: Any) -> None:
        """Each parameter is where the model has it, but for rounding."""
        for i, (p, model) in enumerate(zip(params, self.model.params, strict=True)):
            allowed = self.allowed(i)
            off = (p.detach().double() - model.detach()).abs()
            # Said so that NaN is off where it is not allowed.
            places = (~(off <= allowed) & allowed.isfinite()).nonzero()
            if len(places):
                at = tuple(places[0].tolist())
                element = f"[{', '.join(map(str, at))}]" if at else ""
                of = f" (and {len(places)} of {p.numel()} elements are off)" * (p.numel() > 1)
                raise AssertionError(
                    f"parameter {i}{element} is {p[at].item()}, and in float64 {model[at].item()}: "
                    f"off by {off[at].item():.3g}, where rounding explains "
                    f"{allowed[at].item():.3g}{of}"
                )


def in_float64(param: Parameter) -> Parameter:
    """The same numbers."""
    return Parameter(param.detach().double())
