"""The result of ``first_nonfinite``: the first tensor with inf or NaN, in words and numbers."""

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["FiniteOutput", "FirstNonFinite", "NonFiniteOutput"]

_SMALL_RANGE = 1e30
"""Dtypes whose largest number is below this overflow where float32 does not: float16, float8."""


@dataclass(frozen=True)
class FiniteOutput:
    """The output of a module, all of whose elements are finite.

    Attributes:
        name: the name of the module, as in ``model.named_modules()``.
        kind: the name of the module's class.
        dtype: the dtype of the output; of several tensors, that of the one with the largest
            magnitude.
        largest: the largest magnitude in it.
    """

    name: str
    kind: str
    dtype: torch.dtype
    largest: float

    def __str__(self) -> str:
        """The module, and how large its output was."""
        limit = torch.finfo(self.dtype).max
        return (
            f"{_module(self.name, self.kind)}, {_short(self.dtype)}, whose largest magnitude was "
            f"{self.largest:.4g} (the dtype's limit is {limit:.4g})"
        )


@dataclass(frozen=True)
class NonFiniteOutput:
    """A tensor that is not finite, and the module that made it, forward or backward.

    Attributes:
        name: the name of the module, as in ``model.named_modules()``; ``""`` for the model itself.
        kind: the name of the module's class.
        direction: ``"forward"`` for an output, ``"backward"`` for a gradient.
        dtype: the dtype of the tensor that is not finite.
        shape: the shape of that tensor; of a nested tensor, that of its ``values()``.
        largest: the largest finite magnitude in that tensor; ``None`` if no element is finite.
        given_finite: whether the module's inputs (for a gradient, its incoming gradients) were
            finite. If they were, the module itself is the cause.
        operation: for a gradient, the node of the autograd graph that made it, such as
            ``"AddmmBackward0"``; ``None`` for an output, and for a gradient that was made outside
            of modules.
        parameter: for an output, the name of a parameter of the module that is not finite, or of a
            buffer that has NaN; ``None`` if there is none. For a gradient that was made outside of
            modules, the name of its parameter; else ``None``.
        given_to: the name of the submodule that the tensor was passed to, if the ``forward`` of the
            module computed it between calls of submodules; else ``None``.
        last_finite: for an output, the last finite output of a module before it; ``None`` if there
            was none.
    """

    name: str
    kind: str
    direction: Literal["forward", "backward"]
    dtype: torch.dtype
    shape: tuple[int, ...]
    largest: float | None
    given_finite: bool
    operation: str | None = None
    parameter: str | None = None
    given_to: str | None = None
    last_finite: FiniteOutput | None = None

    @property
    def subject(self) -> str:
        """The tensor that is not finite, in words."""
        module = _module(self.name, self.kind)
        if self.given_to is not None:
            return f"what the forward of {module} computed and passed to {self.given_to!r}"
        if self.direction == "forward":
            return f"the output of {module}"
        if self.parameter is not None:
            return f"the gradient of {self.parameter!r}, made outside of modules,"
        return f"the gradient that {module} made backward, in {self.operation},"

    @property
    def advice(self) -> str:
        """Sentences that say where to search next."""
        if self.direction == "backward" and self.parameter is not None:
            return (
                "All gradients that modules made were finite: check the operations that use this "
                "parameter outside of its module, such as a penalty in the loss, and sums of "
                "gradients: over several uses, micro-batches or ranks."
            )
        is_narrow = torch.finfo(self.dtype).max < _SMALL_RANGE
        if self.direction == "backward" and not self.given_finite:
            return (
                "Its incoming gradient already had inf or NaN: check the loss, whose scale may be "
                "too large, and tensors used several times, whose gradients are added up."
            )
        if self.direction == "backward" and is_narrow:
            return "Its incoming gradient was finite: a smaller loss scale may help."
        if self.direction == "backward":
            return (
                f"Its incoming gradient was finite. In {_short(self.dtype)} a smaller loss scale "
                "rarely helps: check for an infinite derivative, such as that of a root at 0."
            )
        if self.parameter is not None:
            return (
                f"{self.parameter!r} is not finite itself, so neither a loss scale nor another "
                "dtype helps: go back to a checkpoint in which it is finite."
            )
        if not self.given_finite:
            return (
                "Its inputs already had inf or NaN: check the batch, and operations outside of "
                "modules."
            )
        what = "the operations between modules" if self.given_to is not None else "the module"
        if is_narrow:
            return (
                f"Its inputs were finite. A loss scale does not help: run {what} in float32, or "
                "scale down its inputs."
            )
        return (
            f"Its inputs were finite. Neither a loss scale nor float32 helps: check {what} for a "
            "division by 0, for a root or logarithm of what is not positive, and for large inputs."
        )

    def __str__(self) -> str:
        """The result in words, and where to search next."""
        limit = torch.finfo(self.dtype).max
        values = (
            "without a finite element"
            if self.largest is None
            else f"largest finite magnitude {self.largest:.4g} (the dtype's limit is {limit:.4g})"
        )
        before = ""
        if self.last_finite is not None and self.parameter is None:
            before = f" The last finite output before was that of {self.last_finite}."
        return (
            f"{self.subject} is not finite: {_short(self.dtype)} of shape {self.shape}, {values}. "
            f"{self.advice}{before}"
        )


class FirstNonFinite:
    """The result of :func:`first_nonfinite`: print it, or read :attr:`first`.

    Attributes:
        first: what was found; ``None`` while everything was finite.
        calls: the number of module calls that were checked.
    """

    def __init__(self) -> None:
        """Start with nothing found."""
        self.first: NonFiniteOutput | None = None
        self.calls = 0

    def __bool__(self) -> bool:
        """Whether something was found."""
        return self.first is not None

    def __str__(self) -> str:
        """The result in words."""
        if self.first is not None:
            return str(self.first)
        if not self.calls:
            return (
                "no module of the model was called: run the step within the context. A CUDA graph "
                "that is replayed calls none, nor does model.forward(x) where model(x) is meant"
            )
        return f"everything that {self.calls} calls of modules made was finite"

    __repr__ = __str__


def _module(name: str, kind: str) -> str:
    """Name and class of a module, in words."""
    return f"{name!r} ({kind})" if name else f"the model itself ({kind})"


def _short(dtype: torch.dtype) -> str:
    """The name of ``dtype`` without ``torch.``."""
    return str(dtype).removeprefix("torch.")
