"""A float64 reference training, and the tolerance that rounding errors explain."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampopt.testing.bits import element_at
from ampopt.testing.blueprints import Blueprint
from ampopt.testing.state_machine.reference_training import Plain
from ampopt.testing.state_machine.rounding import Rounding

__all__ = ["Float64"]

_ROUNDED = 4
"""Number of disturbed copies of the reference."""
_COMPARED = 12
"""How many elements of a parameter are compared. Where a step divides by a number near zero, all
copies of an element may stay close by chance, which among thousands of elements happens."""
_ERROR, _MARGIN = 32, 8
"""Each result in a disturbed copy has a relative error of up to ``_ERROR * eps``. The optimizer may
be off by ``_MARGIN`` times the largest deviation of a copy: all four copies may happen to stay
close to the reference, but not that close."""


class Float64:
    """A trusted optimizer in float64, and disturbed copies of it that measure the tolerance.

    The rounding error of a float32 step depends on what it computes. Where weight decay cancels a
    gradient, only rounding errors are left, and Adam divides them by their own size: a float32
    training may then end anywhere, so no tolerance made of ``eps`` and the parameter's size is both
    safe and useful. So the tolerance is measured, for any gradients and hyperparameters: it is how
    far the reference moves when each of its operations has an error larger than the parameter's
    dtype would give (see :class:`~ampopt.testing.state_machine.rounding.Rounding`), plus ``eps``
    times the distance that the parameter has moved, per step, for the additions to the parameter.
    Where a disturbed copy is no longer finite, or a square would overflow, nothing is compared. Of
    a large parameter, only the first 12 elements are compared.
    """

    def __init__(self, reference: Any, params: Sequence[Blueprint], dtype: torch.dtype) -> None:
        """Make the reference and its copies.

        Args:
            reference: function from parameters to the trusted optimizer.
            params: blueprints of the parameters.
            dtype: dtype of the tested parameters, which sets the tolerance.
        """
        self.limits = torch.finfo(dtype)
        self.all_models = [Plain(reference, params, torch.float64) for _ in range(1 + _ROUNDED)]
        self.model, *self.rounded_models = self.all_models
        self.modes = [Rounding(_ERROR * self.limits.eps, seed) for seed in range(_ROUNDED)]
        self.distances = [p.detach().abs() for p in self.model.params]
        self.spread = [torch.zeros_like(distance) for distance in self.distances]
        self.steps = 0

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for plain in self.all_models:
            plain.set_learning_rate(lr)

    def add(self, param: Blueprint, lr: float) -> None:
        """Add a parameter in a group of its own, with learning rate ``lr``."""
        for plain in self.all_models:
            plain.add(param, lr)
        self.distances.append(self.model.params[-1].detach().abs())
        self.spread.append(torch.zeros_like(self.distances[-1]))

    def call(
        self,
        name: str,
        gradients: Sequence[Blueprint | None] | None = None,
        max_norm: float | None = None,
    ) -> None:
        """Call the method ``name`` of every model, and update distances and deviations."""
        old = [p.detach().clone() for p in self.model.params]
        self.model.call(name, gradients, max_norm)
        for plain, mode in zip(self.rounded_models, self.modes, strict=True):
            plain.set_gradients(gradients)
            # The dispatch mode does not see inside compiled code, so disturb what it reads.
            for p in plain.params if gradients is not None else ():
                for tensor in (p.detach(), p.grad, *plain.optimizer.state[p].values()):
                    mode.disturb(tensor)
            with mode:
                plain.call(name, max_norm=max_norm)
        self.steps += name == "step"
        for i, p in enumerate(self.model.params):
            self.distances[i] += (p.detach() - old[i]).abs()
            for plain in self.rounded_models:
                apart = (plain.params[i].detach() - p.detach()).abs()
                self.spread[i] = torch.maximum(self.spread[i], apart)  # keeps NaN

    def tolerance(self, i: int) -> Tensor:
        """Tolerance of each element of parameter ``i``; NaN where nothing can be compared."""
        tolerance = (
            _MARGIN * self.spread[i] + _MARGIN * self.limits.eps * self.steps * self.distances[i]
        )
        return tolerance.where(self.distances[i] < self.limits.max**0.5, torch.nan)

    def check(self, params: Sequence[Parameter], optimizer: Any) -> None:
        """Check that each parameter is as near to the reference as rounding explains."""
        for i, (p, model) in enumerate(zip(params, self.model.params, strict=True)):
            tolerance = self.tolerance(i)
            off = (p.detach().double() - model.detach()).abs()
            # Not `off > tolerance`: that is false for a parameter that is NaN.
            wrong = ~(off <= tolerance) & tolerance.isfinite()
            if wrong.flatten()[:_COMPARED].any():
                at = tuple(wrong.nonzero()[0].tolist())
                of = f" (and {wrong.sum()} of {p.numel()} elements are off)" * (p.numel() > 1)
                raise AssertionError(
                    f"parameter {i}{element_at(at)} is {p[at].item()}, and in float64 "
                    f"{model[at].item()}: off by {off[at].item():.3g}, where rounding explains "
                    f"{tolerance[at].item():.3g}{of}"
                )
