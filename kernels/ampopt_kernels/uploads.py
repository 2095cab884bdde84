"""Small host tables on the device, sent again only when they changed."""

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ampopt_kernels import devices
from ampopt_kernels.devices import (
    ACCELERATORS,
    carried_into,
    refuse_while_captured,
    stream,
    to_device,
)

__all__ = ["Uploads"]


class Uploads:
    """A device copy of each named list of numbers, from step to step.

    A step whose addresses and hyperparameters are those of the step before sends nothing, which
    also is what lets a captured CUDA graph replay it: a graph would send, at each replay, whatever
    is where the numbers were in the host's memory. What a graph has been given is kept for as long
    as this object: no one says when the graph is replayed for the last time.
    """

    def __init__(self) -> None:
        """Start with nothing on any device."""
        self._held: dict[str, tuple[Sequence[float], Tensor]] = {}
        self._captured: dict[int, Tensor] = {}

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
            dtype: of the table: int32, int64, float32 or float64.
            device: where it is.
            in_place: other values, as many, are written where the old ones were, once the work
                queued before has read those. So they also reach a captured graph.

        Raises:
            RuntimeError: values would have to be sent while a CUDA graph is captured.
        """
        held = self._held.get(name)
        if held is not None and held[0] == values and held[1].device == device:
            return held[1]
        refuse_while_captured(device, _OTHERS)
        table = _on_host(values, dtype)
        if held is not None and held[1].device == device:
            if in_place and held[1].shape == table.shape and held[1].dtype == dtype:
                table = carried_into(held[1], table)
            elif device.type in ACCELERATORS:
                # It may have been made on another stream, where its memory is used again; not
                # before what is queued on this one has read it.
                held[1].record_stream(stream(device))
        self._held[name] = (values, table := to_device(table, device))
        return table

    def keep_while_captured(self, device: torch.device, others: Iterable[Tensor] = ()) -> None:
        """Keep all tables, and ``others``, if a CUDA graph is captured on ``device``.

        The graph reads them at each replay, and later steps put other tables in their place.
        """
        if devices.captures(device):
            tables = (table for _, table in self._held.values())
            self._captured.update((id(tensor), tensor) for tensor in (*tables, *others))


_OTHERS = (
    "this step: the addresses, settings or loss scale that it works on are not those of the step "
    "before, and would have to be sent"
)
_TYPECODES = {torch.int32: "i", torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def _on_host(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A copy of ``values`` as a CPU tensor.

    ``torch.tensor`` converts one Python number after another, 3 times as slowly for a list. An
    ``array`` of the same type is copied as it is.
    """
    if not len(values):  # an empty buffer is refused
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(array(_TYPECODES[dtype], values), dtype=dtype)
