"""The accelerators that kernels are compiled for, by their modules of torch's.

``torch.cuda`` and ``torch.xpu`` have the same calls, which speak of the current device where none
is named; here each question is asked of a device that is given.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["ACCELERATORS", "captures", "current", "stream"]

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
    with current(device):
        return torch.get_device_module(device).is_current_stream_capturing()
