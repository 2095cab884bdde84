"""What examples are made of: small immutable descriptions of tensors, scales and trainings.

A blueprint builds a fresh tensor, or a fresh scale, each time it is asked, so that one example can
run the same training twice and compare. Its ``repr`` is code that makes it again.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

import ampopt

__all__ = ["Blueprint", "History", "Layout", "Scale", "set_gradients"]

Layout = Literal[
    "contiguous", "transposed", "strided", "channels_last", "expanded", "sparse", "duplicated"
]


class _Code:
    """A dataclass that is shown as the code that makes it, without what has its default."""

    def _given(self) -> list[tuple[str, Any]]:
        every = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        return [(f.name, value) for f, value in every if value != f.default]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._given())
        return f"{type(self).__name__}({shown})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis shows."""
        name = type(self).__name__
        with printer.group(len(name) + 1, f"{name}(", ")"):
            for index, (key, value) in enumerate(self._given()):
                if index:
                    printer.text(",")
                    printer.breakable()
                printer.text(f"{key}=")
                printer.pretty(value)


@dataclass(frozen=True, repr=False)
class Blueprint(_Code):
    """A tensor to build: as often as wanted, the same bits in the same layout each time.

    Attributes:
        shape: of the tensor.
        numbers: its elements in order, over and over if there are fewer than elements.
        dtype: of the tensor.
        layout: how it lies in memory. ``"expanded"``: the last dimension is one element, seen
            often. ``"sparse"`` and ``"duplicated"``: a sparse COO tensor of rows, for gradients;
            with ``"duplicated"`` each row comes twice, as two halves to be added up.
        spots: ``(index, value)`` of elements that differ from ``numbers``.
    """

    shape: tuple[int, ...]
    numbers: tuple[float | complex, ...]
    dtype: torch.dtype = torch.float32
    layout: Layout = "contiguous"
    spots: tuple[tuple[int, float | complex], ...] = ()

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @functools.cached_property
    def _contiguous(self) -> Tensor:
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        few, n = torch.tensor(self.numbers, dtype=wide, device="cpu"), self.numel
        values = few if len(few) == n else few.repeat(n // max(len(few), 1) + 1)[:n]
        for index, value in self.spots:
            values[index] = torch.tensor(value, dtype=wide, device="cpu")
        return values.to(self.dtype).reshape(self.shape)

    def tensor(self, scale: float = 1.0) -> Tensor:
        """A fresh tensor, times ``scale`` in its own dtype."""
        plain = self._contiguous.to(torch.get_default_device(), copy=True)
        if scale != 1:
            # Part by part, as the product of a complex number and a real one loses signs of zeros.
            (torch.view_as_real(plain) if self.dtype.is_complex else plain).mul_(scale)
        return _laid_out(plain, self.layout)

    def parameter(self) -> Parameter:
        """A fresh parameter."""
        return Parameter(self.tensor())


def _laid_out(plain: Tensor, layout: Layout) -> Tensor:
    """The values of ``plain``, in memory as ``layout`` says."""
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
    """Give each parameter its gradient times ``scale``, fresh, in the gradient's own layout.

    Args:
        params: the parameters.
        step: for each of them the gradient's blueprint, or ``None``.
        scale: a factor.
    """
    for p, grad in zip(params, step, strict=True):
        p.grad = None if grad is None else grad.tensor(scale)


@dataclass(frozen=True, repr=False)
class Scale(_Code):
    """A loss scale to build, of the ``kind`` that is named, and the ``number`` it stands for."""

    kind: Literal["none", "number", "tensor", "vector", "static", "dynamic"]
    number: float = 1.0

    def make(self) -> Any:
        """What to pass as ``grads_scaled_by``."""
        made: dict[str, Any] = {
            "none": lambda: None,
            "number": lambda: self.number,
            "tensor": lambda: torch.tensor(self.number),
            "vector": lambda: torch.tensor([self.number]),
            "static": lambda: ampopt.StaticLossScale(self.number),
            "dynamic": lambda: ampopt.DynamicLossScale(init_scale=self.number, growth_interval=2),
        }
        return made[self.kind]()


@dataclass(frozen=True, repr=False)
class History(_Code):
    """Parameters and the gradients of several steps, some of them spoiled.

    Attributes:
        params: blueprints.
        steps: for each step, a gradient or ``None`` for each parameter.
        overflows: for each step, whether it has a non-finite gradient.
        groups: positions at which another group of parameters begins.
    """

    params: tuple[Blueprint, ...]
    steps: tuple[tuple[Blueprint | None, ...], ...]
    overflows: tuple[bool, ...]
    groups: tuple[int, ...] = ()

    def build(self) -> list[Parameter]:
        """Fresh parameters."""
        return [p.parameter() for p in self.params]

    def grouped(self, params: Sequence[Any]) -> list[Any]:
        """``params`` as they are given to an optimizer: a list, or groups."""
        if not self.groups:
            return list(params)
        bounds = [0, *self.groups, len(params)]
        return [{"params": list(params[a:b])} for a, b in zip(bounds, bounds[1:], strict=False)]

    def without_overflows(self) -> "History":
        """The same training without the steps that overflow."""
        kept = [step for step, bad in zip(self.steps, self.overflows, strict=True) if not bad]
        return History(self.params, tuple(kept), (False,) * len(kept), self.groups)

    @property
    def size(self) -> str:
        """How large an example this is, in words."""

        def counted(n: int, what: str) -> str:
            return f"{n} {what}{'' if n == 1 else 's'}"

        elements = sum(p.numel for p in self.params)
        return ", ".join(
            (
                counted(len(self.params), "parameter"),
                counted(elements, "element"),
                counted(len(self.steps), "step"),
            )
        )
