"""The model of one weight, with its optimizer, that every cell of the matrix trains."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.results import StepResult

__all__ = ["LR", "OVERFLOWS", "Subject", "whole"]

LR = 0.125

OVERFLOWS = {torch.float16: 2.0**30}
"""For some dtypes, a scale that makes gradients overflow; ``2**127`` does for all others."""


class Subject:
    """A linear layer, or an embedding if the optimizer takes only sparse gradients, in training.

    Two subjects of one class start with equal weights, and stay equal under any power of two as the
    scale, unless a cell treats them differently.

    Attributes:
        optimizer: the optimizer of the weight, a square matrix.
        needs_closure: whether the optimizer cannot step without a closure.
    """

    def __init__(
        self,
        cls: type[Any],
        *,
        dtype: torch.dtype = torch.float32,
        side: int = 4,
        spread: Callable[[Module], Any] | None = None,
        **options: Any,
    ) -> None:
        """Make the model, then its optimizer.

        Args:
            cls: the optimizer's class, torch's or ampopt's.
            dtype: dtype of the weight.
            side: number of rows and of columns of the weight.
            spread: function that distributes the model over ranks, and returns the module to call.
            options: arguments of the optimizer, besides the learning rate.
        """
        sparse = _takes_sparse_alone(cls)
        model: Module = (
            torch.nn.Embedding(side, side, sparse=True)
            if sparse
            else torch.nn.Linear(side, side, bias=False)
        )
        numbers = torch.linspace(-1.0, 1.0, side * side).reshape(side, side)
        self._inputs = torch.tensor([0, 2, 2]) if sparse else (numbers.T + 0.25).to(dtype)
        self._model = model
        self.set_weight(numbers)
        model.to(dtype)
        self._model = model if spread is None else spread(model)
        self.optimizer: Any = cls(self._model.parameters(), lr=LR, **options)
        self.needs_closure = isinstance(self.optimizer, torch.optim.LBFGS)
        self._overflows = OVERFLOWS.get(dtype, 2.0**127)

    def loss(self) -> Tensor:
        """Compute the loss. Loss and gradients are in the tens."""
        return (self._model(self._inputs) - 2.0).square().mean() * 8

    def evaluate(self, scale: Any = None) -> Tensor:
        """Zero the gradients, run forward and backward, and return the loss: the closure."""
        self.optimizer.zero_grad()
        loss = self.loss()
        scale_outputs(loss, scale).backward()
        return loss.detach()

    def step(self, scale: Any = 8.0, *, closure: bool = False, **options: Any) -> StepResult:
        """Take a step under ``scale``, with a closure if requested or needed."""
        if closure or self.needs_closure:
            return self.optimizer.unscale_and_step(self.evaluate, scale, **options)
        self.evaluate(scale)
        return self.optimizer.unscale_and_step(grads_scaled_by=scale, **options)

    def overflow(self, *, closure: bool = False) -> StepResult:
        """Take a step whose gradients overflow; with a closure, only at its first call."""
        return self.step(DynamicLossScale(init_scale=self._overflows), closure=closure)

    def plain_step(self, change: Callable[[], None] = lambda: None) -> None:
        """Take a plain ``step()``, of torch's optimizers too, after ``change`` of the gradients."""

        def evaluate() -> Tensor:
            loss = self.evaluate()
            change()
            return loss

        if self.needs_closure:
            self.optimizer.step(evaluate)
        else:
            evaluate()
            self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        """The gradient of the weight, or its coalesced values if sparse; empty if there is none."""
        (weight,) = self._model.parameters()
        if weight.grad is None:
            return []
        if weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
            return [weight.grad.values()]
        return [weight.grad]

    def weight(self) -> Tensor:
        """A copy of the weight."""
        (weight,) = self._model.parameters()
        return whole(weight)

    @torch.no_grad()
    def set_weight(self, numbers: Tensor) -> None:
        """Overwrite the weight."""
        next(self._model.parameters()).copy_(numbers)

    def everything(self) -> list[Tensor]:
        """Copies of the weight and of the optimizer's state tensors."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [self.weight(), *(whole(value) for value in states if isinstance(value, Tensor))]


def whole(tensor: Any) -> Tensor:
    """Return a copy of ``tensor``, gathered if it is a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@functools.cache
def _takes_sparse_alone(cls: type[Any]) -> bool:
    """Whether an optimizer of this class refuses ordinary gradients, as ``SparseAdam`` does."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    try:
        cls([weight]).step()
    except TypeError:  # the class requires a closure
        return False
    except RuntimeError:
        return True
    return False
