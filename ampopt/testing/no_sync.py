"""A check that Python never reads the values of a tensor."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ampopt._synchronization import sync_debug_mode, watching

__all__ = ["ReadBack", "assert_no_sync"]


class ReadBack(AssertionError):
    """Python read the values of a tensor."""


@contextmanager
def assert_no_sync() -> Iterator[None]:
    """Raise :class:`ReadBack` if Python reads the values of a tensor within the block.

    Works without a GPU: CPU tensors stand in for an accelerator's, so reading any tensor counts.
    Caught are ``item``, ``tolist``, ``cpu``, ``numpy``, ``bool(t)``, ``float(t)``, ``int(t)``, a
    tensor used as a list index, in an ``if`` or in an f-string, and operations whose output shape
    depends on values, such as ``nonzero``, ``x[mask]`` and ``unique``. If CUDA is initialized,
    torch's own detector is on as well (``torch.cuda.set_sync_debug_mode("error")``).

    Not caught without a device: copies from unpinned memory, an allocator that synchronizes, a
    custom kernel that reads memory itself, and ``t.to("cpu")`` of a CPU tensor, which copies
    nothing. On the CPU a hand-written ``step()`` and the CPU backends do read tensors, because
    nothing waits there: use :func:`ampopt.testing.as_on_a_device` around the whole life of the
    optimizer to have them behave as on a device. Not for use across threads.

    Example:
        >>> with assert_no_sync():  # doctest: +SKIP
        ...     _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
    """

    def refuse(look: str) -> None:
        raise ReadBack(f"the host looked at the values of a tensor: {look}")

    cuda = sync_debug_mode("error") if torch.cuda.is_initialized() else nullcontext()
    with watching(refuse), cuda:
        yield
