"""The accelerators that kernels are compiled for, by their modules of torch's.

``torch.cuda`` and ``torch.xpu`` have the same calls, which speak of the current device where none
is named; here each question is asked of a device that is given.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["ACCELERATORS", "captures", "current", "refuse_while_captured", "stream"]

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
