"""What is stepped: the sizes of the tensors, and their gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "ASKED_FOR",
    "SCALE",
    "WORKLOADS",
    "SHARDED",
    "Gradients",
    "Workload",
    "make",
    "of",
    "squares",
]

SCALE = 2.0**16
"""What the gradients carry, which is where torch's scaler and ours start."""
_TYPICAL = 1e-3
"""Standard deviation of the unscaled gradients: far from overflow, underflow and subnormals."""


@dataclass(frozen=True)
class Workload:
    """Tensors by their shapes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """How many numbers are optimized."""
        return sum(math.prod(shape) for shape in self.shapes)

    def parameters(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """New parameters, random so that nothing is special about them."""
        generator = torch.Generator(device).manual_seed(0)
        return [
            torch.nn.Parameter(
                torch.randn(shape, generator=generator, device=device).mul_(0.02).to(dtype)
            )
            for shape in self.shapes
        ]


def make(name: str, device: torch.device, room: int | None = None) -> Workload:
    """One of :data:`WORKLOADS` or :data:`ASKED_FOR`, of the size that suits ``device``.

    Args:
        name: which.
        device: the CPU gets what a few milliseconds can do, an accelerator what fills it.
        room: elements that fit the device, if that limits ``large`` and ``mix``.
    """
    return Workload(name, {**WORKLOADS, **ASKED_FOR}[name](device.type == "cpu", room))


def of(elements: int) -> Workload:
    """16 tensors of one size, of ``elements`` in all."""
    return Workload(f"{elements} elements", ((max(1, elements // 16),),) * 16)


def squares(width: int) -> Workload:
    """50 square matrices, of a model that is sharded."""
    return Workload(f"50 x {width}^2", ((width, width),) * 50)


def _large(on_cpu: bool, room: int | None) -> tuple[tuple[int, ...], ...]:
    """A few tensors whose states no cache can hold: 16 Mi elements in 8; 1e9 in 16 on a GPU."""
    elements, tensors = (16 << 20, 8) if on_cpu else (10**9, 16)
    if room is not None:
        elements = min(elements, room)
    width = 2048
    return ((max(1, elements // tensors // width), width),) * tensors


def _small(on_cpu: bool, room: int | None) -> tuple[tuple[int, ...], ...]:
    """What a small network looks like, and what the host pays per call: 300 tensors of 64."""
    return ((64,),) * 300


def _mix(on_cpu: bool, room: int | None) -> tuple[tuple[int, ...], ...]:
    """A transformer's few hundred float32 tensors: 1 KB to 4 MB on the CPU, to 100 MB on a GPU."""
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
    """A small transformer's matrices, of two shapes, for what steps by whole matrices."""
    return ((256, 256),) * 24 + ((1024, 256),) * 12


SHARDED = (squares(64), squares(512))
"""What ranks step by parts, unless asked for another."""

WORKLOADS = {"large": _large, "small": _small, "mix": _mix}
ASKED_FOR = {"matrices": _matrices}
"""Those that are measured where they are asked for."""


class Gradients:
    """Scaled gradients, given anew before every step.

    Steps spoil gradients: ``GradScaler`` unscales them in place, so that a few steps later they
    would be subnormal, which is slow. What a step gets is what a backward pass leaves: new tensor
    objects, in memory that was just written.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        """Draw a gradient for each of ``params``."""
        self._params = params
        self._values = []
        for param in params:
            generator = torch.Generator(param.device).manual_seed(1)
            value = torch.randn(param.shape, generator=generator, device=param.device)
            self._values.append(value.mul_(_TYPICAL * SCALE).to(param.dtype))
        self._given = [torch.empty_like(value) for value in self._values]

    def restore(self) -> None:
        """Give every parameter its gradient again."""
        copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy(self._given, self._values)
        for param, given in zip(self._params, self._given, strict=True):
            param.grad = given.detach()
