"""The accelerators that kernels are compiled for, by their modules of torch's.

``torch.cuda`` and ``torch.xpu`` have the same calls, which speak of the current device where none
is named; here each question is asked of a device that is given.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ACCELERATORS",
    "Copying",
    "captures",
    "carried_into",
    "copied_to_host",
    "current",
    "refuse_while_captured",
    "stream",
    "to_device",
]


ACCELERATORS = ("cuda", "xpu")
"""Types of devices that have streams, and copy from pinned memory while the host goes on."""


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within this, ``device``, an accelerator, is the current one."""
    return torch.get_device_module(device).device(device)


def stream(device: torch.device) -> Any:
    """What is queued on ``device``, an accelerator, is queued there."""
    return torch.get_device_module(device).current_stream(device)


def captures(device: torch.device) -> bool:
    """Whether what is queued on ``device``, of any type, is captured into a graph."""
    if device.type not in ACCELERATORS:
        return False
    module = torch.get_device_module(device)
    if not module.is_initialized():
        return False
    if device.index == module.current_device():  # each step asks, mostly of the current device
        return module.is_current_stream_capturing()
    with current(device):
        return module.is_current_stream_capturing()


def refuse_while_captured(device: torch.device, what: str) -> None:
    """Refuse what no replay would do again, or would do with other memory.

    Args:
        device: where it is to be done.
        what: is refused, for the message.

    Raises:
        RuntimeError: a graph is captured on ``device``.
    """
    if captures(device):
        raise RuntimeError(
            f"a CUDA graph cannot capture {what}. Take the same step once before the capture, keep "
            "the gradients where they are (zero_grad(set_to_none=False)), and change nothing in "
            "between; ampopt.TrainStep(cuda_graph=True) does all that"
        )


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
