"""Small host tables on the device, sent again only when they changed."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Uploads"]


class Uploads:
    """A device copy of each named list of numbers, from step to step.

    A step whose addresses and hyperparameters are those of the step before sends nothing, which
    also is what lets a captured CUDA graph replay it.
    """

    def __init__(self) -> None:
        """Start with nothing on any device."""
        self._held: dict[str, tuple[Sequence[float], Tensor]] = {}

    def get(
        self, name: str, values: Sequence[float], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """``values`` as a 1-d tensor on ``device``. Does not synchronize.

        The tensor is this object's own until ``values`` change, when a new one takes its place:
        work still queued keeps the table that it was given.
        """
        held = self._held.get(name)
        if held is not None and held[0] == values and held[1].device == device:
            return held[1]
        table = torch.tensor(values, dtype=dtype)
        if device.type == "cuda":
            # The caching host allocator keeps the pinned block until the copy is done.
            table = table.pin_memory()
        table = table.to(device, non_blocking=True)
        self._held[name] = (values, table)
        return table
