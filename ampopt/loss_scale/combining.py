"""One scale from those that several optimizers returned."""

from typing import Any, cast

import torch
from torch import Tensor

from ampopt.loss_scale.base import LossScale
from ampopt_kernels.transfers import carried

__all__ = ["next_scale"]


def next_scale(a: Any, *more: Any) -> Any:
    """The smallest of the scales that several optimizers returned in one iteration.

    For optimizers that share a loss and so a scale. It is as if one optimizer had stepped whose
    flag is on if any of theirs is: ``next_scale(S.next(f), S.next(g))`` is ``S.next(max(f, g))``,
    counters included. Scales that began at different numbers do, too. Does not synchronize.

    Args:
        a: a scale as an optimizer returns it: a :class:`LossScale`, a tensor of one element, or
            ``None`` where scaling is off.
        more: others of the same kind, if there are any, with the same settings but for the number
            that they began with.

    Returns:
        The smallest one's value and counters as a new scale, on the device of the first that is
        on one; of equal values, the smaller counters. ``None`` for ``None``; of static scales, the
        smallest itself.

    Raises:
        TypeError: the kinds differ, or one is not a scale.
        ValueError: the settings differ, or a tensor has not one floating-point element.
    """
    scales = (a, *more)
    if all(scale is None for scale in scales):
        return None
    if all(isinstance(scale, Tensor) for scale in scales):
        for scale in scales:
            if scale.numel() != 1 or not scale.is_floating_point():
                raise ValueError(
                    "a scale tensor has one floating-point element, got shape "
                    f"{tuple(scale.shape)} of {scale.dtype}"
                )
        # Numbers go to a device without waiting; to the CPU they would be waited for.
        smallest, *others = sorted(scales, key=lambda scale: scale.is_cpu)
        for other in others:
            other = carried(other, smallest.device, smallest.dtype)
            smallest = torch.minimum(smallest, other.reshape(smallest.shape))
        return smallest
    smallest, *others = scales
    if not isinstance(smallest, LossScale) or any(type(s) is not type(smallest) for s in others):
        raise TypeError(
            "next_scale takes scales of one kind, all DynamicLossScale, all StaticLossScale, all "
            f"one-element tensors or all None, got {', '.join(type(s).__name__ for s in scales)}"
        )
    for other in others:
        if smallest._rules() != other._rules():
            raise ValueError(
                "next_scale takes scales that grow and fall alike, but the settings differ: "
                f"{smallest!r} and {other!r}. Start the optimizers from the same scale."
            )
    for other in others:
        smallest = _smaller(smallest, other)
    return smallest


def _smaller(a: LossScale, b: LossScale) -> LossScale:
    if a._counters is None or b._counters is None:
        return min(a, b, key=float)  # static, whose number the host has
    if a.device is None or (a.value.is_cpu and not b.value.is_cpu):
        a, b = b, a
    device = a.value.device
    value_a, value_b = a.value, carried(b.value, device)
    counters_a, counters_b = cast(Tensor, a._counters), cast(Tensor, b._counters)
    counters_b = carried(counters_b, device)
    # An overflow at the floor, or growth at the ceiling, leaves equal values. The overflow then
    # shows in the counters: it has set the first to 0, and the second no higher than the other's.
    counters = torch.where(
        value_a < value_b,
        counters_a,
        torch.where(value_b < value_a, counters_b, torch.minimum(counters_a, counters_b)),
    )
    return a._successor(torch.minimum(value_a, value_b), counters)
