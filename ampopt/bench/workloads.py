"""The workloads: sizes of the tensors, and their gradients."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "ASKED_FOR",
    "SCALE",
    "WORKLOADS",
    "Gradients",
    "Workload",
    "make",
    "of",
    "powers_of_two",
]

SCALE = 2.0**16
"""The loss scale in the gradients: the initial value of torch's scaler and of ampopt's."""
_TYPICAL = 1e-3
"""Standard deviation of the unscaled gradients: far from overflow, underflow and subnormals."""


@dataclass(frozen=True)
class Workload:
    """A list of tensors, given by their shapes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def parameters(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Make the parameters, with random values."""
        generator = torch.Generator(device).manual_seed(0)
        return [
            torch.nn.Parameter(
                torch.randn(shape, generator=generator, device=device).mul_(0.02).to(dtype)
            )
            for shape in self.shapes
        ]


def make(name: str, device: torch.device, room: int | None = None) -> Workload:
    """Return a workload of :data:`WORKLOADS` or :data:`ASKED_FOR`, in a size for ``device``.

    Args:
        name: key of the workload.
        device: the CPU gets a size that takes milliseconds per step, an accelerator one that fills
            it.
        room: maximum number of elements of ``large`` and ``mix``; ``None`` for no limit.
    """
    return Workload(name, {**WORKLOADS, **ASKED_FOR}[name](device.type == "cpu", room))


def of(elements: int) -> Workload:
    """16 tensors of equal size, with ``elements`` elements in total."""
    return Workload(f"{elements} elements", ((max(1, elements // 16),),) * 16)


def powers_of_two() -> list[Workload]:
    """Tensors of 64, 128, ... to 16 Mi elements: 300, or as many as 16 Mi elements in total are."""
    sizes = [1 << power for power in range(6, 25)]
    counts = [min(300, sizes[-1] // size) for size in sizes]
    return [
        Workload(f"{count} x {size}", ((size,),) * count)
        for count, size in zip(counts, sizes, strict=True)
    ]


def _large(on_cpu: bool, room: int | None) -> tuple[tuple[int, ...], ...]:
    """A few tensors whose states no cache can hold: 16 Mi elements in 8; on a GPU 1e9 in 16."""
    elements, tensors = (16 << 20, 8) if on_cpu else (10**9, 16)
    if room is not None:
        elements = min(elements, room)
    width = 2048
    return ((max(1, elements // tensors // width), width),) * tensors


def _small(on_cpu: bool, room: int | None) -> tuple[tuple[int, ...], ...]:
    """The 300 tensors, of 64 elements, of a small network: the host's cost per call dominates."""
    return ((64,),) * 300


def _mix(on_cpu: bool, room: int | None) -> tuple[tuple[int, ...], ...]:
    """The few hundred float32 tensors of a transformer: 1 KB to 4 MB; on a GPU up to 100 MB."""
    width, vocabulary, blocks = (256, 4096, 20) if on_cpu else (1024, 25_600, 24)
    block = (
        *((width,), (width,)),  # normalization
        *((3 * width, width), (3 * width,), (256,)),  # attention, and the norm of its keys
        *((width, width), (width,)),
        *((width,), (width,)),  # normalization
        *((4 * width, width), (4 * width,)),
        *((width, 4 * width), (width,)),
    )
    if room is not None:
        each = sum(map(math.prod, block))
        blocks = max(1, min(blocks, (room - vocabulary * width) // each))
    return ((vocabulary, width), *block * blocks, (width,), (width,))


def _matrices(on_cpu: bool, room: int | None) -> tuple[tuple[int, ...], ...]:
    """The matrices of a small transformer, of two shapes, for optimizers that need matrices."""
    return ((256, 256),) * 24 + ((1024, 256),) * 12


WORKLOADS = {"large": _large, "small": _small, "mix": _mix}
CHANGING = 0.25
"""The share of parameters without a gradient in each step of ``--changing``."""
ASKED_FOR = {"matrices": _matrices}
"""Workloads that are measured only if named."""


class Gradients:
    """Scaled gradients, restored before every step.

    Steps change gradients: ``GradScaler`` unscales them in place, and after a few steps they would
    be subnormal, which is slow. Each step gets what a backward pass leaves: new tensor objects in
    memory that was just written.
    """

    def __init__(self, params: Sequence[Tensor], absent: float = 0.0) -> None:
        """Draw a gradient for each of ``params``.

        Args:
            params: the parameters.
            absent: the share of them that has no gradient; drawn for each step.
        """
        self._params, self._random = params, random.Random(1)
        self._n_absent = round(absent * len(params))
        self._values = []
        for param in params:
            generator = torch.Generator(param.device).manual_seed(1)
            value = torch.randn(param.shape, generator=generator, device=param.device)
            self._values.append(value.mul_(_TYPICAL * SCALE).to(param.dtype))
        self._gradients = [torch.empty_like(value) for value in self._values]

    def restore(self) -> None:
        """Give every parameter its gradient back."""
        copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy(self._gradients, self._values)
        for param, gradient in zip(self._params, self._gradients, strict=True):
            param.grad = gradient.detach()
        for place in self._random.sample(range(len(self._params)), self._n_absent):
            self._params[place].grad = None
