"""Combine the scales that several optimizers returned into one."""

from typing import Any, cast

import torch
from torch import Tensor

from ampopt.loss_scale.arguments import check_scale_tensor
from ampopt.loss_scale.base import LossScale
from ampopt_kernels.devices import to_device

__all__ = ["next_scale"]


def next_scale(a: Any, *more: Any) -> Any:
    """The smallest of the scales that several optimizers returned in one iteration.

    For optimizers that share a loss, and so a scale. The result is the same as if one optimizer had
    stepped, whose ``found_inf`` is set if that of any optimizer is: ``next_scale(S.next(f),
    S.next(g))`` equals ``S.next(max(f, g))``, counters included. The scales may have started from
    different numbers. Does not synchronize.

    Args:
        a: a scale as an optimizer returns it: a :class:`LossScale`, a tensor of one element, or
            ``None`` if scaling is off.
        more: further scales of the same kind, with the same settings except for the number that
            they started from.

    Returns:
        A new scale with the smallest value and its counters, on the device of the first scale that
        has one. If values are equal, it has the smaller counters. ``None`` if all are ``None``. For
        static scales, the smallest one itself, not a copy.

    Raises:
        TypeError: the scales are of different kinds, or an argument is not a scale.
        ValueError: the settings differ; or a tensor is not one floating-point element, or is a
            ``found_inf``.
    """
    scales = (a, *more)
    if all(scale is None for scale in scales):
        return None
    if all(isinstance(scale, Tensor) for scale in scales):
        for scale in scales:
            check_scale_tensor("next_scale", scale)
        # A CPU tensor is copied to a device without waiting; the other way, the host would wait.
        smallest, *others = sorted(scales, key=lambda scale: scale.is_cpu)
        for other in others:
            other = to_device(other, smallest.device, smallest.dtype)
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
                "next_scale takes scales with the same settings, but these differ: "
                f"{smallest!r} and {other!r}. Start the optimizers from the same scale."
            )
    for other in others:
        smallest = _smaller(smallest, other)
    return smallest


def _smaller(a: LossScale, b: LossScale) -> LossScale:
    """The smaller of two scales, with its counters; see :func:`next_scale`."""
    if a._counters is None:
        return min(a, b, key=float)  # both are static, and the host has their numbers
    if a.device is None or (a.value.is_cpu and not b.value.is_cpu):
        a, b = b, a
    device = a.value.device
    value_a, value_b = a.value, to_device(b.value, device)
    counters_a, counters_b = cast(Tensor, a._counters), cast(Tensor, b._counters)
    counters_b = to_device(counters_b, device)
    # An overflow at min_scale, or growth at max_scale, leaves both values equal. The scale that
    # overflowed then has the smaller counters: 0 finite steps, and no more budget than the other.
    counters = torch.where(
        value_a < value_b,
        counters_a,
        torch.where(value_b < value_a, counters_b, torch.minimum(counters_a, counters_b)),
    )
    return a._with(torch.minimum(value_a, value_b), counters)
