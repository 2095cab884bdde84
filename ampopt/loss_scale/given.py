"""Whatever the caller passed as the scale of the gradients, as one thing: a loss scale or none."""

import numbers
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.base import AnyScale, LossScale
from ampopt.loss_scale.mistakes import check_scale_tensor, no_scale
from ampopt.loss_scale.numbers import check_scale_number
from ampopt_kernels.policy import PolicyConstants
from ampopt_kernels.step import Decision, Request
from ampopt_kernels.triton.uploads import Uploads

__all__ = ["BareScale", "as_loss_scale", "request_for", "successor_of"]

_HALVED_IN_CLOSURES = PolicyConstants(
    growth_factor=1.0,
    backoff_factor=0.5,
    first_growth=1.0,
    growth_period=1.0,
    hysteresis=1.0,
    refill_on_finite=1.0,
    refill_on_backoff=0.0,
    min_scale=2.0**-126,
    max_scale=float("inf"),
)
_HALVED = _HALVED_IN_CLOSURES._replace(kept_scale=1.0)
"""Outside of closures 1, which scales nothing, stays 1: a number never grows, so that a loop which
goes on with what a step returns would end at the smallest scale and stay there."""


class BareScale(AnyScale):
    """A number or a tensor given as a scale. It has no history: its successor is a tensor."""

    def __init__(self, value: Tensor, held: Uploads, *, in_closure: bool = False) -> None:
        """Wrap a floating tensor of one element.

        Args:
            value: that tensor.
            held: what its device holds of earlier calls.
            in_closure: whether a closure is run again under its successor after an overflow.
        """
        self._value = value
        self._policy = _HALVED_IN_CLOSURES if in_closure else _HALVED
        self._counters = held.get("counters of a bare scale", [0, 0], torch.int32, value.device)

    def _successor(self, value: Tensor, counters: Tensor) -> Tensor:
        return value

    def _unstepped(self) -> Tensor:
        return self._value.clone()


def as_loss_scale(
    given: Any,
    device: torch.device,
    uploads: dict[torch.device, Uploads],
    *,
    in_closure: bool = False,
) -> AnyScale | None:
    """The scale that ``given`` stands for, on ``device``.

    Args:
        given: by the caller.
        device: where decisions are made.
        uploads: what devices hold of earlier calls, a number that was given again among it.
        in_closure: see :class:`BareScale`.

    Raises:
        TypeError: ``given`` is not a scale.
        ValueError: it is a number that cannot be one, a tensor that has not one floating element,
            or lives on another device.
    """
    if given is None:
        return None
    if isinstance(given, LossScale):
        if not given._placed or given._value.device != device:
            given._place(device)
        return given
    if isinstance(given, Tensor):
        check_scale_tensor("grads_scaled_by", given)
        if given.is_meta and device.type != "meta":
            raise ValueError(
                f"grads_scaled_by: the scale is on meta, where it has no number; make it on "
                f"{str(device)!r}, where the parameters are"
            )
        if given.device != device:
            raise ValueError(
                f"grads_scaled_by: the scale is on {given.device}, the parameters on {device}; "
                f"move it there with scale.to({str(device)!r})"
            )
        dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
        held = uploads.setdefault(device, Uploads())
        return BareScale(given.detach().to(dtype), held, in_closure=in_closure)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise no_scale("grads_scaled_by", given)
    held = uploads.setdefault(device, Uploads())
    (value,) = held.get("bare scale", [check_scale_number(given)], torch.float32, device)
    return BareScale(value, held, in_closure=in_closure)


def request_for(scale: AnyScale | None, **asked: Any) -> Request:
    """What to ask of a step whose gradients carry ``scale``; ``asked`` are further fields."""
    if scale is None:
        return Request(check=False, **asked)
    return Request(
        scale=scale._value,
        drop=scale._drop,
        policy=scale._policy,
        counters=scale._counters,
        **asked,
    )


def successor_of(scale: AnyScale | None, decision: Decision | None) -> Any:
    """The scale to use next, as the caller gets it; ``decision`` is ``None`` without gradients."""
    if scale is None:
        return None
    if decision is None:
        return scale._unstepped()
    decided: Any = decision  # it has a successor where the scale has a policy
    successor = scale._successor(decided.scale, decided.counters)
    seen = decision.factors  # by the host, for which the scale is at hand too
    if not isinstance(seen, Tensor) and seen.skip > 0 and isinstance(successor, LossScale):
        successor._warn_if_collapsed()
    return successor
