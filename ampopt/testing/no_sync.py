"""Every way for Python to look at the values of a tensor, made an error."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ampopt._synchronization import sync_debug_mode, watching

__all__ = ["ReadBack", "assert_no_sync"]


class ReadBack(AssertionError):
    """The host looked at the values of a tensor."""


@contextmanager
def assert_no_sync() -> Iterator[None]:
    """Raise :class:`ReadBack` where the host looks at the values of a tensor.

    Works without a GPU: CPU tensors stand in for those of a device, so any look at a tensor counts,
    on whatever device it is. These are caught: ``item``, ``tolist``, ``cpu``, ``numpy`` and
    ``bool(t)``, ``float(t)``, ``int(t)``, a tensor as an index of a list, in an ``if`` or in an
    f-string; and operations whose result has a shape that depends on values, as ``nonzero``,
    ``x[mask]`` and ``unique``. With CUDA in use, torch's own detector
    (``torch.cuda.set_sync_debug_mode("error")``) watches as well.

    How far that goes: what a device alone can show is not seen without one, such as a copy from
    memory that is not pinned, or an allocator that waits; nor is a kernel of one's own that reads
    memory past torch; nor, where the CPU stands in, ``t.to("cpu")``, which is no copy there. On the
    CPU, an ordinary ``step()`` and the backends for it do look, because nothing waits there: put
    :func:`ampopt.testing.as_on_a_device` around the whole life of the optimizer to have them do as
    on a device. Not for use across threads.

    Example:
        >>> with assert_no_sync():  # doctest: +SKIP
        ...     _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
    """

    def refuse(look: str) -> None:
        raise ReadBack(f"the host looked at the values of a tensor: {look}")

    cuda = sync_debug_mode("error") if torch.cuda.is_initialized() else nullcontext()
    with watching(refuse), cuda:
        yield
