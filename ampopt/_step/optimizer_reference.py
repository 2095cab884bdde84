"""The weak reference that parts of an optimizer have to the optimizer they belong to."""

import weakref
from typing import Any

import torch

__all__ = ["RefersToOptimizer"]


class RefersToOptimizer:
    """Base class of objects that belong to one optimizer and live as long as it does.

    They are attributes of the optimizer, or of its attributes. A strong reference back would be a
    cycle, which keeps parameters and states in memory until Python's garbage collector runs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store a weak reference to ``optimizer``."""
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer that this object belongs to."""
        return self._optimizer()
