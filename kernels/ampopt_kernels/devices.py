"""Streams, graph capture and copies on accelerators, for any device.

``torch.cuda`` and ``torch.xpu`` have the same functions, but many are for the current device only.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ACCELERATORS",
    "Copying",
    "captures",
    "carried_into",
    "copied_together",
    "copied_to_host",
    "current",
    "refuse_while_captured",
    "stream",
    "to_device",
]


ACCELERATORS = ("cuda", "xpu")
"""Device types that have streams and asynchronous copies from pinned memory."""


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which ``device``, an accelerator, is the current device."""
    return torch.get_device_module(device).device(device)


def stream(device: torch.device) -> Any:
    """The current stream of ``device``, an accelerator."""
    return torch.get_device_module(device).current_stream(device)


def captures(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured into a graph.

    ``False`` for devices without streams.
    """
    if device.type not in ACCELERATORS:
        return False
    module = torch.get_device_module(device)
    if not module.is_initialized():
        return False
    if device.index == module.current_device():  # the usual case, in each step
        return module.is_current_stream_capturing()
    with current(device):
        return module.is_current_stream_capturing()


def refuse_while_captured(device: torch.device, what: str) -> None:
    """Raise if a graph is being captured: call this before work that a replay would not repeat.

    Args:
        device: the device of the work.
        what: the work, for the message: the object of "cannot capture".

    Raises:
        RuntimeError: a graph is being captured on ``device``.
    """
    if captures(device):
        raise RuntimeError(
            f"a CUDA graph cannot capture {what}. Take the same step once before the capture, with "
            "gradients of the same parameters, keep the gradients where they are "
            "(zero_grad(set_to_none=False)), and change nothing in between; "
            "ampopt.TrainStep(cuda_graph=True) does all that"
        )


class Copying(NamedTuple):
    """An asynchronous copy to the host.

    Attributes:
        tensor: the copy, a CPU tensor that is valid once :meth:`done` returns true.
        event: the event that is recorded after the copy; ``None`` if the copy is done.
    """

    tensor: Tensor
    event: Any

    def done(self) -> bool:
        """Whether the copy is done. Does not synchronize."""
        return self.event is None or self.event.query()


def copied_to_host(tensor: Tensor) -> Copying:
    """Start to copy ``tensor`` to the host. Does not synchronize with CUDA and XPU devices."""
    if tensor.device.type not in ACCELERATORS:
        return Copying(tensor.clone() if tensor.is_cpu else tensor.cpu(), None)
    (copy,), (event,) = copied_together([tensor])
    assert copy is not None
    return Copying(copy, event)


def copied_together(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Any]]:
    """Start to copy ``tensors`` from accelerators to the host. Does not synchronize.

    Returns:
        Copies, ``None`` for ``None``, and the events after which they are complete. The tensors of
        other devices are returned as they are.
    """
    copies: list[Tensor | None] = []
    sources = set()
    for tensor in tensors:
        if tensor is not None and tensor.device.type in ACCELERATORS:
            sources.add(tensor.device)
            with current(tensor.device):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                tensor = copy.copy_(tensor.detach(), non_blocking=True)
        copies.append(tensor)
    return copies, [_recorded_event(device) for device in sources]


def _recorded_event(device: torch.device) -> Any:
    """An event after all work that is queued on the current stream of ``device``."""
    with current(device):
        event = torch.get_device_module(device).Event()
        event.record(stream(device))
    return event


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``, converted to ``dtype`` if it is not ``None``.

    Does not synchronize for copies to an accelerator, also from the host. Synchronizes for copies
    to the host: with ``non_blocking=True``, torch would return memory that is not written yet.
    """
    if tensor.device == device and (dtype is None or tensor.dtype == dtype):
        return tensor
    if tensor.is_cpu:  # on the host, as torch converts in pageable memory
        tensor = tensor.to(dtype or tensor.dtype)
    tensor, non_blocking = _ready(tensor, device)
    return tensor.to(device, dtype or tensor.dtype, non_blocking=non_blocking)


def carried_into(there: Tensor, tensor: Tensor) -> Tensor:
    """Copy ``tensor`` into ``there``; synchronizes as :func:`to_device` does. Returns ``there``."""
    tensor, non_blocking = _ready(tensor, there.device)
    return there.copy_(tensor, non_blocking=non_blocking)


def _ready(tensor: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """``tensor``, pinned if it must be, and the ``non_blocking`` argument of a copy to ``device``.

    Pageable host memory might be freed or overwritten before an asynchronous copy reads it, and a
    captured graph would read it at each replay.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor, device.type != "cpu"
    if device.type not in ACCELERATORS or tensor.layout != torch.strided:
        return tensor, False
    refuse_while_captured(device, "a loss scale, or another tensor, on its way from the host")
    # The caching host allocator keeps the pinned block until the copy is done.
    return tensor.pin_memory(), True
