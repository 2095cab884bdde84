"""Small host tables on the device, sent again only when they changed."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Uploads"]


class Uploads:
    """A device copy of each named list of numbers, from step to step.

    A step whose addresses and hyperparameters are those of the step before sends nothing, which
    also is what lets a captured CUDA graph replay it: a graph would send, at each replay, whatever
    is where the numbers were in the host's memory.
    """

    def __init__(self) -> None:
        """Start with nothing on any device."""
        self._held: dict[str, tuple[Sequence[float], Tensor]] = {}

    def get(
        self,
        name: str,
        values: Sequence[float],
        dtype: torch.dtype,
        device: torch.device,
        *,
        in_place: bool = False,
    ) -> Tensor:
        """``values`` as a 1-d tensor on ``device``. Does not synchronize.

        The tensor is this object's own until ``values`` change, when a new one takes its place:
        work still queued keeps the table that it was given.

        Args:
            name: which table.
            values: what is in it.
            dtype: of the table.
            device: where it is.
            in_place: other values, as many, are written where the old ones were, once the work
                queued before has read those. So they also reach a captured graph.

        Raises:
            RuntimeError: values would have to be sent while a CUDA graph is captured.
        """
        held = self._held.get(name)
        if held is not None and held[0] == values and held[1].device == device:
            return held[1]
        if _captures(device):
            raise RuntimeError(
                "a CUDA graph cannot capture this step: the addresses or settings that it works on "
                "are not those of the step before, and would have to be sent. Take a step before "
                "the capture, keep the gradients where they are (zero_grad(set_to_none=False)), "
                "and change nothing in between; ampopt.TrainStep(cuda_graph=True) does all that"
            )
        table = torch.tensor(values, dtype=dtype)
        if device.type == "cuda":
            # The caching host allocator keeps the pinned block until the copy is done.
            table = table.pin_memory()
        if in_place and held is not None and held[1].device == device:
            if held[1].shape == table.shape and held[1].dtype == dtype:
                table = held[1].copy_(table, non_blocking=True)
        self._held[name] = (values, table := table.to(device, non_blocking=True))
        return table

    def tables(self) -> list[Tensor]:
        """All that is on a device now, to be kept for as long as a captured graph reads it."""
        return [table for _, table in self._held.values()]


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
