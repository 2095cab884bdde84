"""Blueprints: small immutable descriptions of tensors, loss scales and trainings.

Each call of a blueprint's method builds a fresh tensor, parameter or scale, so that a test can run
one example twice and compare. The ``repr`` of a blueprint is code that makes it again.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt._step.torch_private import uncoalesced_values

__all__ = ["Blueprint", "History", "Layout", "Scale", "elements", "number_of", "set_gradients"]

Layout = Literal[
    "contiguous", "transposed", "strided", "channels_last", "expanded", "sparse", "duplicated"
]


class _ReprIsCall:
    """Base of dataclasses whose ``repr`` is the call that makes them, without default arguments."""

    def _non_defaults(self) -> dict[str, Any]:
        """Name and value of each field that is not its default."""
        every = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        return {f.name: value for f, value in every if value != f.default}

    def __repr__(self) -> str:
        """The call of the constructor that makes an equal object."""
        arguments = (f"{name}={value!r}" for name, value in self._non_defaults().items())
        return f"{type(self).__name__}({', '.join(arguments)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print for Hypothesis, over several lines if needed."""
        printer.repr_call(type(self).__name__, (), self._non_defaults())


@dataclass(frozen=True, repr=False)
class Blueprint(_ReprIsCall):
    """Description of a tensor: every tensor built from it has the same bits and the same layout.

    Attributes:
        shape: shape of the tensor.
        numbers: elements in row-major order, repeated if there are fewer than the tensor has.
        dtype: dtype of the tensor.
        layout: memory layout. ``"strided"`` has a gap after each element. ``"expanded"`` has stride
            0 in the last dimension. ``"sparse"`` and ``"duplicated"`` are sparse COO gradients, one
            index for each row; with ``"duplicated"`` each index occurs twice with half of the row,
            so it is not coalesced.
        spots: ``(index, value)`` pairs that replace single elements of ``numbers``, by flat index.
    """

    shape: tuple[int, ...]
    numbers: tuple[float | complex, ...]
    dtype: torch.dtype = torch.float32
    layout: Layout = "contiguous"
    spots: tuple[tuple[int, float | complex], ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_finite(self) -> bool:
        """Whether every element is finite."""
        return bool(self._contiguous.isfinite().all())

    @functools.cached_property
    def _contiguous(self) -> Tensor:
        """The tensor in its dtype and shape, before its layout."""
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        few, n = torch.tensor(self.numbers, dtype=wide, device="cpu"), self.numel
        values = few if len(few) == n else few.repeat(n // max(len(few), 1) + 1)[:n]
        for index, value in self.spots:
            values[index] = torch.tensor(value, dtype=wide, device="cpu")
        return values.to(self.dtype).reshape(self.shape)

    def tensor(self, scale: float = 1.0) -> Tensor:
        """Build a tensor, multiplied by ``scale`` in its own dtype."""
        plain = self._contiguous.to(torch.get_default_device(), copy=True)
        if scale != 1:
            # Scale real and imaginary parts separately: complex times real loses signs of zeros.
            (torch.view_as_real(plain) if self.dtype.is_complex else plain).mul_(scale)
        return _laid_out(plain, self.layout)

    def parameter(self) -> Parameter:
        """Build a parameter."""
        return Parameter(self.tensor())


def _laid_out(plain: Tensor, layout: Layout) -> Tensor:
    """Return the values of ``plain`` in the memory layout that ``layout`` names."""
    if layout == "transposed":
        return plain.mT.contiguous().mT
    if layout == "strided":
        wide = plain.new_full((*plain.shape[:-1], 2 * plain.shape[-1]), 7.0)
        wide[..., ::2] = plain
        return wide[..., ::2]
    if layout == "channels_last":
        return plain.contiguous(memory_format=torch.channels_last)
    if layout == "expanded":
        return plain[..., :1].expand(plain.shape)
    if layout in ("sparse", "duplicated"):
        rows = torch.arange(plain.shape[0])[None]
        if layout == "duplicated":
            rows, plain = rows.repeat(1, 2), torch.cat((plain, plain)) / 2
        shape = (rows.unique().numel(), *plain.shape[1:])
        return torch.sparse_coo_tensor(rows, plain, shape, check_invariants=True)
    return plain


def set_gradients(
    params: Iterable[Parameter], step: Iterable[Blueprint | None], scale: float = 1.0
) -> None:
    """Set ``p.grad`` of each parameter to a new tensor, multiplied by ``scale``.

    Args:
        params: parameters.
        step: one blueprint for each parameter, or ``None`` for no gradient.
        scale: the loss scale that the gradients are multiplied by.
    """
    for p, grad in zip(params, step, strict=True):
        p.grad = None if grad is None else grad.tensor(scale)


def elements(tensor: Tensor | None) -> Tensor:
    """The elements of a dense tensor, or those that a sparse one stores, to be read or written."""
    assert tensor is not None
    return uncoalesced_values(tensor) if tensor.is_sparse else tensor


@dataclass(frozen=True, repr=False)
class Scale(_ReprIsCall):
    """Description of a loss scale.

    Attributes:
        kind: what ``grads_scaled_by`` gets: ``None``, a number, a 0-d tensor, a tensor of shape
            ``[1]``, a :class:`~ampopt.StaticLossScale` or a :class:`~ampopt.DynamicLossScale`.
        number: the value of the scale.
    """

    kind: Literal["none", "number", "tensor", "vector", "static", "dynamic"]
    number: float = 1.0

    def make(self) -> Any:
        """Build the scale, to be passed as ``grads_scaled_by``."""
        makers: dict[str, Any] = {
            "none": lambda: None,
            "number": lambda: self.number,
            "tensor": lambda: torch.tensor(self.number),
            "vector": lambda: torch.tensor([self.number]),
            "static": lambda: ampopt.StaticLossScale(self.number),
            "dynamic": lambda: ampopt.DynamicLossScale(init_scale=self.number, growth_interval=2),
        }
        return makers[self.kind]()


def number_of(n: int, what: str) -> str:
    """``"1 step"`` or ``"2 steps"``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


@dataclass(frozen=True, repr=False)
class History(_ReprIsCall):
    """Description of a training: its parameters, and their gradients in every step.

    Attributes:
        params: blueprints of the parameters.
        steps: for each step, a tuple with one gradient blueprint or ``None`` for each parameter.
        groups: indices of the parameters that begin a further param group.
    """

    params: tuple[Blueprint, ...]
    steps: tuple[tuple[Blueprint | None, ...], ...]
    groups: tuple[int, ...] = ()

    @functools.cached_property
    def overflows(self) -> tuple[bool, ...]:
        """For each step, whether one of its gradients is non-finite."""
        return tuple(any(grad and not grad.is_finite for grad in step) for step in self.steps)

    def build(self) -> list[Parameter]:
        """Build the parameters."""
        return [p.parameter() for p in self.params]

    def grouped(self, params: Sequence[Any]) -> list[Any]:
        """Return ``params`` as an optimizer's constructor takes them: a list, or param groups."""
        if not self.groups:
            return list(params)
        bounds = [0, *self.groups, len(params)]
        return [{"params": list(params[a:b])} for a, b in zip(bounds, bounds[1:], strict=False)]

    def without_overflows(self) -> "History":
        """A history of the steps that do not overflow."""
        steps = [step for step, bad in zip(self.steps, self.overflows, strict=True) if not bad]
        return replace(self, steps=tuple(steps))

    def of_params(self, order: Sequence[int]) -> "History":
        """A history of the parameters with the indices ``order``."""
        params, *steps = (tuple(each[i] for i in order) for each in (self.params, *self.steps))
        return replace(self, params=params, steps=tuple(steps))

    def with_tensors(self, change: Callable[[Blueprint], Blueprint]) -> "History":
        """A history with ``change(blueprint)`` in place of each parameter and gradient."""
        steps = (tuple(grad and change(grad) for grad in step) for step in self.steps)
        return replace(self, params=tuple(map(change, self.params)), steps=tuple(steps))

    @property
    def size(self) -> str:
        """The size of the example as text: ``"2 parameters, 3 elements, 1 step"``."""
        elements = sum(p.numel for p in self.params)
        return ", ".join(
            (
                number_of(len(self.params), "parameter"),
                number_of(elements, "element"),
                number_of(len(self.steps), "step"),
            )
        )
