"""The scale of a step: from the argument ``grads_scaled_by`` to what the step returns."""

from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.arguments import check_scale
from ampopt.loss_scale.base import AnyScale, LossScale
from ampopt.loss_scale.scaled_losses import note_scale_passed
from ampopt_kernels.next_scale import PolicyConstants
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.uploads import Uploads

__all__ = ["BareScale", "as_loss_scale", "next_scale_of", "request_for"]

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
"""The policy without a closure: 1.0, which means no scaling, stays 1.0. A bare number never grows
again, so a loop that reuses the scale each step returns would otherwise end at the smallest one."""


class BareScale(AnyScale):
    """A number or tensor passed as a scale. It has no history: the next scale is a tensor."""

    def __init__(self, value: Tensor, constants: Uploads, *, in_closure: bool) -> None:
        """Wrap a floating-point tensor of one element.

        Args:
            value: the scale: a floating-point tensor of one element, on the device of the step.
            constants: the constants that were sent to that device in earlier calls.
            in_closure: whether a closure is evaluated again, under half the scale, after an
                overflow.
        """
        self._value = value
        self._policy = _HALVED_IN_CLOSURES if in_closure else _HALVED
        self._counters = constants.get(
            "counters of a bare scale", [0, 0], torch.int32, value.device
        )

    def _with(self, value: Tensor, counters: Tensor) -> Tensor:
        """The value that the device computed, a plain tensor as the caller passed one."""
        return value

    def _unstepped(self) -> Tensor:
        """A copy of the scale, so that the caller never gets the tensor that it passed."""
        return self._value.clone()


def as_loss_scale(
    scale: Any,
    device: torch.device,
    uploads: dict[torch.device, Uploads],
    *,
    in_closure: bool = False,
) -> AnyScale | None:
    """Convert the argument ``grads_scaled_by`` to a loss scale on ``device``.

    Args:
        scale: the scale as the caller passed it.
        device: the device on which overflows are detected.
        uploads: for each device, the constants that were sent there in earlier calls. A number that
            is passed again is not sent again.
        in_closure: see :class:`BareScale`.

    Raises:
        TypeError: ``scale`` is not ``None``, a number, a tensor or a ``LossScale``.
        ValueError: ``scale`` is a number out of range, a tensor that is not one floating-point
            element, or lives on another device.
    """
    if scale is None:
        return None
    if isinstance(scale, LossScale):
        if not scale._placed or scale._value.device != device:
            scale._place(device)
        return scale
    scale = check_scale("grads_scaled_by", scale)
    constants = uploads.setdefault(device, Uploads())
    if isinstance(scale, Tensor):
        if scale.is_meta and device.type != "meta":
            raise ValueError(
                f"grads_scaled_by: the scale is on meta, where it has no number; make it on "
                f"{str(device)!r}, where the parameters are"
            )
        if scale.device != device:
            raise ValueError(
                f"grads_scaled_by: the scale is on {scale.device}, the parameters on {device}; "
                f"move it there with scale.to({str(device)!r})"
            )
        dtype = torch.float64 if scale.dtype == torch.float64 else torch.float32
        return BareScale(scale.detach().to(dtype), constants, in_closure=in_closure)
    (value,) = constants.get("bare scale", [scale], torch.float32, device)
    return BareScale(value, constants, in_closure=in_closure)


def request_for(scale: AnyScale | None, **fields: Any) -> Request:
    """The request for a step under ``scale``; ``fields`` are the other fields of the request."""
    if scale is None:
        return Request(check=False, **fields)
    note_scale_passed()
    return Request(
        scale=scale._value,
        drop=scale._drop,
        policy=scale._policy,
        counters=scale._counters,
        **fields,
    )


def next_scale_of(scale: AnyScale | None, decision: Decision | None) -> Any:
    """The next scale, as the caller gets it; ``decision`` is ``None`` without gradients."""
    if scale is None:
        return None
    if decision is None:
        return scale._unstepped()
    policy_decision: Any = decision  # has the next scale and counters if the scale has a policy
    next_scale = scale._with(policy_decision.scale, policy_decision.counters)
    coefficients = decision.coefficients  # no tensor if the host has read it, and so the scale, too
    if not isinstance(coefficients, Tensor) and coefficients.skip > 0:
        next_scale.item()  # a dynamic scale that has collapsed warns
    return next_scale
