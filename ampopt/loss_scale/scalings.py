"""Losses that were multiplied by a loss scale, and whether a control point was told of the scale.

Nothing in a gradient shows its scale. But a step that is told of no scale, although a loss was
multiplied by one before, can be noticed by the order of the calls in a thread.
"""

import threading
from typing import Any

import torch
from torch import Tensor

__all__ = ["note_scaling", "note_told", "scalings", "untold_scale"]


class _Scalings(threading.local):
    """The losses that this thread has multiplied.

    Attributes:
        count: the number of them.
        told: :attr:`count` at the last control point that was told of a scale.
        scale: the last scale, as the user passed it.
    """

    count = 0
    told = 0
    scale: Any = None


_scalings = _Scalings()


def note_scaling(product: Tensor, scale: Any) -> Tensor:
    """Record that ``product`` is a loss times ``scale``, if it has a backward pass; return it."""
    if not torch.compiler.is_compiling() and product.requires_grad:
        _scalings.count += 1
        _scalings.scale = scale
    return product


def note_told() -> None:
    """Record that a control point was told of a scale, or that gradients were discarded."""
    _scalings.told, _scalings.scale = _scalings.count, None


def scalings() -> int:
    """The number of losses that this thread has multiplied so far."""
    return _scalings.count


def untold_scale(since: int) -> Any:
    """The scale of the last loss if no control point was told of a scale since, else ``None``.

    Args:
        since: the :func:`scalings` before the losses that count.
    """
    return _scalings.scale if _scalings.count > max(since, _scalings.told) else None
