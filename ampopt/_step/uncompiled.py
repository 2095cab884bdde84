"""What ``torch.compile`` leaves to Python when it compiles a training step around it."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ampopt._step.torch_private import without_dynamo

__all__ = ["uncompiled"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, at which a compiled graph of the caller's ends, and goes on behind.

    A step plans in Python what it has compiled already, or launches as few kernels as can be:
    tracing it once more gains nothing, and a trace holds what a plan is to look at in each step
    for constant. What ``function`` calls that is compiled for itself, as a closure's model may be,
    stays so.

    This is what torch puts around its own optimizers' Python.
    """
    return without_dynamo(function)
