"""Tensors on other devices, waited for only where memory would be read too early or freed."""

import torch
from torch import Tensor

from ampopt_kernels.devices import ACCELERATORS

__all__ = ["carried", "carried_into"]


def carried(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``, in ``dtype`` if given.

    On its way to an accelerator the host goes on; whatever runs there runs later. On its way to the
    host it is waited for, as torch would have the host read memory that is yet to be written.
    """
    if tensor.is_cpu:  # a copy that converts would go through memory that is not pinned
        tensor = tensor.to(dtype or tensor.dtype)
    tensor, goes_on = _ready(tensor, device)
    return tensor.to(device, dtype or tensor.dtype, non_blocking=goes_on)


def carried_into(there: Tensor, tensor: Tensor) -> Tensor:
    """``there``, with ``tensor`` written over it; the host waits as for :func:`carried`."""
    tensor, goes_on = _ready(tensor, there.device)
    return there.copy_(tensor, non_blocking=goes_on)


def _ready(tensor: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """``tensor`` from where it can be copied to ``device``, and whether the host may go on.

    Memory of the host's that is not pinned may be freed, or be written again, before it was read.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor, device.type != "cpu"
    if device.type not in ACCELERATORS or tensor.layout != torch.strided:
        return tensor, False
    # The caching host allocator keeps the pinned block until the copy is done.
    return tensor.pin_memory(), True
