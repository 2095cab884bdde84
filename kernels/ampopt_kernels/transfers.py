"""Tensors on other devices, waited for only where memory would be read too early or freed."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import ACCELERATORS, current, refuse_while_captured, stream

__all__ = ["Copying", "to_device", "carried_into", "copied_to_host"]


class Copying(NamedTuple):
    """A tensor on its way to the host.

    Attributes:
        tensor: in the host's memory, to be read once the copy is done.
        event: after which it is; ``None`` if it is done.
    """

    tensor: Tensor
    event: Any

    def done(self) -> bool:
        """Whether the copy is done. Never waits."""
        return self.event is None or self.event.query()


def copied_to_host(tensor: Tensor) -> Copying:
    """A copy of ``tensor`` in the host's memory. Does not wait for an accelerator."""
    if tensor.device.type not in ACCELERATORS:
        return Copying(tensor.clone() if tensor.is_cpu else tensor.cpu(), None)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    with current(tensor.device):
        copy.copy_(tensor, non_blocking=True)
        event = torch.get_device_module(tensor.device).Event()
        event.record(stream(tensor.device))
    return Copying(copy, event)


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``, in ``dtype`` if given.

    On its way to an accelerator the host goes on; whatever runs there runs later. On its way to the
    host it is waited for, as torch would have the host read memory that is yet to be written.
    """
    if tensor.device == device and (dtype is None or tensor.dtype == dtype):
        return tensor
    if tensor.is_cpu:  # a copy that converts would go through memory that is not pinned
        tensor = tensor.to(dtype or tensor.dtype)
    tensor, goes_on = _ready(tensor, device)
    return tensor.to(device, dtype or tensor.dtype, non_blocking=goes_on)


def carried_into(there: Tensor, tensor: Tensor) -> Tensor:
    """``there``, with ``tensor`` written over it; the host waits as for :func:`to_device`."""
    tensor, goes_on = _ready(tensor, there.device)
    return there.copy_(tensor, non_blocking=goes_on)


def _ready(tensor: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """``tensor`` from where it can be copied to ``device``, and whether the host may go on.

    Memory of the host's that is not pinned may be freed, or be written again, before it was read.
    A captured graph would read it at each replay.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor, device.type != "cpu"
    if device.type not in ACCELERATORS or tensor.layout != torch.strided:
        return tensor, False
    refuse_while_captured(device, "a loss scale, or another tensor, on its way from the host")
    # The caching host allocator keeps the pinned block until the copy is done.
    return tensor.pin_memory(), True
