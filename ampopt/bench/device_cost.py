"""What a step costs on a GPU besides time: launches, synchronizations and memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ampopt import _synchronization

__all__ = ["DeviceCost", "device_cost"]


@dataclass(frozen=True)
class DeviceCost:
    """The costs of one step on a GPU besides time.

    Attributes:
        launches: number of kernel launches.
        synchronizations: number of times the host waited for the device.
        extra_bytes: peak of allocated memory during the step, minus the memory allocated before.
    """

    launches: int
    synchronizations: int
    extra_bytes: int


def device_cost(
    step: Callable[[], object], restore: Callable[[], None], device: torch.device
) -> DeviceCost:
    """Count launches, synchronizations and memory of a warm ``step``. Synchronizes.

    Runs the step three times.
    """
    restore()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    extra = torch.cuda.max_memory_allocated(device) - before
    restore()
    with _synchronization.synchronizations() as waits:
        step()
    restore()
    torch.cuda.synchronize(device)
    with _synchronization.kernels(device) as launches:
        step()
    return DeviceCost(len(launches), len(waits), extra)
