"""A step added to a ledger on the CPU by one loop of C++, in a few microseconds."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ampopt_kernels.found import Found
from ampopt_kernels.ledger import NOT_GIVEN, ChunkRange, Ledger, RecordedStep

__all__ = ["note"]


def note(
    loops: ctypes.CDLL,
    ledger: Ledger,
    attempt: RecordedStep,
    found: Found | None,
    parts: Sequence[ChunkRange],
    *,
    notes_step: bool,
) -> None:
    """Do what :func:`ampopt_kernels.ledger.note` does; all tensors are the host's.

    Args:
        loops: those of ``numbers``.
        ledger: to add to.
        attempt: that was made.
        found: in the gradients.
        parts: of parameters of this ledger.
        notes_step: whether the step itself is noted here too.
    """
    measures = flags = None
    if found is None or found.measures is None:
        parts = ()
    else:
        measures = found.measures
        flags = None if found.surely_finite else found.flags_on(torch.device("cpu"))
    cause = 0.0
    if attempt.skip is not None and attempt.skip.item() > 0:
        cause = max(_number(attempt.cause, 0.0), 1.0)
    scale, norm = (_number(x, NOT_GIVEN) for x in (attempt.scale, attempt.norm))
    where = array("q", chain.from_iterable(parts))
    told = array("d", (attempt.number, cause, scale, norm))
    loops.note(
        None if measures is None else measures.data_ptr(),
        None if flags is None else flags.data_ptr(),
        where.buffer_info()[0],
        len(parts),
        told.buffer_info()[0],
        ledger.numbers.data_ptr(),
        ledger.numbers.numel(),
        ledger.places,
        notes_step,
    )


def _number(tensor: Tensor | None, otherwise: float) -> float:
    return otherwise if tensor is None else tensor.item()
