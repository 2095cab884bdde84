"""CPU tensors treated as an accelerator's, whose values the host must not read."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ampopt import backend
from ampopt_kernels.eager import Eager

__all__ = ["as_on_a_device"]


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Make optimizers treat CPU tensors as they treat an accelerator's.

    Reading a CPU tensor costs nothing, so on the CPU an overflowed step is simply not run. On an
    accelerator the host does not read the flag: a step is run and rolled back, or selects old or
    new values, on the device. Within this block the same happens on the CPU: a hand-written
    ``step()`` is run as a transaction where that is possible, and rules run in the eager backend's
    mode for devices (or in the ``triton`` backend if that is selected). Make the optimizer within
    the block. Not safe across threads.
    """
    with mock.patch.object(backend, "_cpu_backend", lambda name: Eager()):
        yield
