"""Copies of small host tables on a device, sent again only if the numbers have changed."""

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

__all__ = ["Uploads", "on_host"]


class Uploads:
    """Named lists of numbers, each with its copy on a device, kept from step to step.

    A step with the addresses and hyperparameters of the step before sends nothing to the device.
    This also lets a CUDA graph capture the step: a captured copy would read, at each replay, the
    host memory where the numbers were once. Tables that a captured graph reads are kept as long as
    this object, as nothing tells when the graph is replayed for the last time.
    """

    def __init__(self) -> None:
        """Start without tables."""
        self._tables: dict[str, tuple[Sequence[float], Tensor]] = {}
        self._captured_tables: dict[int, Tensor] = {}

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

        Do not write to the tensor: it is returned again until ``values`` change. Then a new tensor
        replaces it, so that work queued before still reads the old values.

        Args:
            name: name of the table.
            values: the numbers of the table.
            dtype: int32, int64, float32 or float64.
            device: device of the result.
            in_place: whether as many changed values overwrite the old tensor, in the order of the
                stream, so that a captured graph reads them at its next replay.

        Raises:
            RuntimeError: ``values`` have changed, and a CUDA graph is being captured.
        """
        entry = self._tables.get(name)
        if entry is not None and entry[0] == values and entry[1].device == device:
            return entry[1]
        refuse_while_captured(device, _OTHERS)
        table = on_host(values, dtype)
        if entry is not None and entry[1].device == device:
            if in_place and entry[1].shape == table.shape:
                table = carried_into(entry[1], table)
            elif device.type in ACCELERATORS:
                # The old table may be from another stream: do not let that stream reuse its
                # memory before the work queued on this stream has read it.
                entry[1].record_stream(stream(device))
        self._tables[name] = (values, table := to_device(table, device))
        return table

    def keep_while_captured(self, device: torch.device, others: Iterable[Tensor] = ()) -> None:
        """Keep all tables, and ``others``, alive if a CUDA graph is being captured on ``device``.

        The graph reads them at each replay; without this, later steps would free them.
        """
        if devices.captures(device):
            tables = (table for _, table in self._tables.values())
            self._captured_tables.update((id(tensor), tensor) for tensor in (*tables, *others))


_OTHERS = (
    "this step: it has gradients of other parameters or in other memory, other settings, or "
    "another loss scale than the step before, and the host would have to send them"
)
_TYPECODES = {torch.int32: "i", torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def on_host(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A copy of ``values`` as a 1-d CPU tensor.

    By way of ``array``, as ``torch.tensor`` takes three times as long for a list.
    """
    if not len(values):  # frombuffer refuses an empty buffer
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(array(_TYPECODES[dtype], values), dtype=dtype)
