"""Counts losses that were multiplied by a loss scale, to find calls that should get the scale.

A gradient does not show its scale. But the order of the calls in a thread shows that a loss was
multiplied by a scale, and that no control point has got a scale since.
"""

import threading
from typing import Any

import torch
from torch import Tensor

__all__ = ["note_scaled_loss", "note_scale_passed", "scaled_losses", "missing_scale"]


class _ScaledLosses(threading.local):
    """The losses that this thread has multiplied.

    Attributes:
        count: the number of these losses.
        passed: :attr:`count` at the last control point that got a scale.
        scale: the last scale, as the user passed it.
    """

    count = 0
    passed = 0
    scale: Any = None


_scaled_losses = _ScaledLosses()


def note_scaled_loss(product: Tensor, scale: Any) -> Tensor:
    """Record that ``product`` is a loss times ``scale``, if it has a backward pass; return it."""
    if not torch.compiler.is_compiling() and product.requires_grad:
        _scaled_losses.count += 1
        _scaled_losses.scale = scale
    return product


def note_scale_passed() -> None:
    """Record that a control point got a scale, or that gradients were discarded."""
    _scaled_losses.passed, _scaled_losses.scale = _scaled_losses.count, None


def scaled_losses() -> int:
    """The number of losses that this thread has multiplied so far."""
    return _scaled_losses.count


def missing_scale(since: int) -> Any:
    """The scale of the last loss if no control point has got a scale since, else ``None``.

    Args:
        since: a number of :func:`scaled_losses`; only losses after it count.
    """
    losses = _scaled_losses
    return losses.scale if losses.count > max(since, losses.passed) else None
