"""Copies between the tensors of a bundle and its scratch, one flat tensor that has them all.

For small tensors a torch call costs more than the copy that it makes. Once loops of C++ have been
compiled, one call copies all tensors of a bundle.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.numbers import loops
from ampopt_kernels.native.objects import addresses
from ampopt_kernels.tensors import flat

__all__ = ["Copies", "NativeCopies", "TorchCopies"]

_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Copies(ABC):
    """Copies between contiguous CPU parameters and flat scratch, which has one after another."""

    @abstractmethod
    def gather(self, grads: list[Tensor], scratch: Tensor) -> None:
        """Copy ``grads`` into ``scratch``, a flat tensor of their dtype.

        Args:
            grads: contiguous, one for each parameter, of its shape.
            scratch: as long as all of them.
        """

    @abstractmethod
    def load(self) -> None:
        """Copy the parameters into the scratch."""

    @abstractmethod
    def store(self) -> None:
        """Copy the scratch into the parameters."""


class TorchCopies(Copies):
    """Copies by torch operations."""

    def __init__(self, params: Sequence[Tensor], scratch: Tensor) -> None:
        """Make the views that the copies read and write.

        Args:
            params: contiguous, of one dtype.
            scratch: flat, as long as all of them. If its dtype is not that of ``params``, only
                :meth:`store` may be called.
        """
        self._params, self._scratch = params, scratch
        self._flat_params = [flat(p) for p in params]
        self._parts = _shaped(scratch, params)
        self._one_dimensional = all(p.ndim == 1 for p in params)
        self._grad_scratch: Tensor | None = None
        self._grad_parts: list[Tensor] = []

    def gather(self, grads: list[Tensor], scratch: Tensor) -> None:
        """See :meth:`Copies.gather`."""
        if self._one_dimensional:
            torch.cat(grads, out=scratch)  # takes less than half as long as the copies below
            return
        if scratch is not self._grad_scratch:
            self._grad_scratch, self._grad_parts = scratch, _shaped(scratch, self._params)
        _foreach_copy(self._grad_parts, grads)

    def load(self) -> None:
        """See :meth:`Copies.load`."""
        torch.cat(self._flat_params, out=self._scratch)

    def store(self) -> None:
        """See :meth:`Copies.store`."""
        _foreach_copy(self._params, self._parts)


class NativeCopies(Copies):
    """Copies by two loops of C++, which leave torch's version counters as they are."""

    def __init__(self, params: Sequence[Tensor], scratch: Tensor) -> None:
        """Store the addresses of ``params`` and ``scratch``.

        Args:
            params: contiguous, of one dtype; their memory must stay in place.
            scratch: flat, of that dtype, as long as all of them.

        Raises:
            OSError: there is no C++ compiler.
            RuntimeError: the compiler failed.
        """
        self._loops = loops()
        self._bytes = {
            width: array("q", [p.numel() * width for p in params]) for width in (2, 4, 8)
        }
        where, sizes = addresses(list(params)), self._bytes[scratch.element_size()]
        starts = where.buffer_info()[0], sizes.buffer_info()[0]
        self._arguments = (*starts, len(where), scratch.data_ptr())
        self._alive = where, scratch  # the arguments are pointers into these

    def gather(self, grads: list[Tensor], scratch: Tensor) -> None:
        """See :meth:`Copies.gather`."""
        where, sizes = addresses(grads), self._bytes[scratch.element_size()]
        starts = where.buffer_info()[0], sizes.buffer_info()[0]
        self._loops.gather(*starts, len(where), scratch.data_ptr())

    def load(self) -> None:
        """See :meth:`Copies.load`."""
        self._loops.gather(*self._arguments)

    def store(self) -> None:
        """See :meth:`Copies.store`."""
        self._loops.scatter(*self._arguments)


def _shaped(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the flat ``buffer`` with the shapes of the tensors ``like``."""
    parts = buffer.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
