"""Checkpoints in memory."""

import io
import warnings
from typing import Any

import torch

__all__ = ["from_bytes", "to_bytes"]


def to_bytes(value: Any) -> bytes:
    """Return ``value`` as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(checkpoint: bytes) -> Any:
    """Return what ``torch.load`` reads from ``checkpoint``."""
    with warnings.catch_warnings():
        # From 2.15 on, torch warns of the time that checking sparse tensors takes.
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
        return torch.load(io.BytesIO(checkpoint))
