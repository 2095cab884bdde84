"""CPU tensors treated as those of a device, where the host may not look."""

from collections.abc import Iterator
from contextlib import contextmanager

from ampopt import backend

__all__ = ["as_on_a_device"]


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Optimizers do with CPU tensors what they do with those of an accelerator.

    On the CPU the host may look at a tensor at no cost, so an overflowed step is simply not taken
    there. On an accelerator, steps are taken and undone, or select, without the host looking. In
    this block that is what happens on the CPU too: an ordinary ``step()`` is a transaction, where
    it allows it, and rules run in the eager backend's way for devices (unless ``triton`` is the
    chosen backend, which is that way already). Make the optimizer within the block.
    """
    with backend.host_looking_away():
        yield
