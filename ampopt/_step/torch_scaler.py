"""Steps that read the flag and scale which ``torch.amp.GradScaler`` sets on an optimizer.

If ``_step_supports_amp_scaling`` of an optimizer is true, ``scaler.step(optimizer)`` does not read
the overflow flag, so it does not synchronize. It sets ``optimizer.grad_scale`` (the factor by which
the gradients are multiplied; ``None`` after ``scaler.unscale_``) and ``optimizer.found_inf`` (a sum
of flags of the gradients in their current, scaled or unscaled, form), calls ``optimizer.step()``,
and deletes both attributes. A wrapper makes a hand-written step read both attributes. The same
wrapper makes a plain ``step()`` skip if the ``unscale`` before it found an overflow.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampopt._step import ranks
from ampopt._step.step_hooks import SCALER_WRAPPER, beneath_hooks, has_own_step, has_step
from ampopt._step.stepping import StepOutcome
from ampopt._step.torch_private import uncompiled
from ampopt.backend import backend_for
from ampopt_kernels.step_data import Decision, Request

__all__ = ["ScalerHandoff", "SupportsAmpScaling", "following_unscale", "take_handoff", "wrap_step"]


@dataclass
class ScalerHandoff:
    """The two values that a scaler sets on an optimizer.

    Attributes:
        grad_scale: the factor by which the gradients are multiplied, a tensor; ``None`` for 1.
        found_inf: a tensor of one element, more than 0 after an overflow; the number 0 without
            gradients.
        is_final: whether the step need not check gradients that the scaler has not unscaled.
    """

    grad_scale: Tensor | None
    found_inf: Any
    is_final: bool = False

    @property
    def request(self) -> Request:
        """The request for the step.

        Gradients that the scaler has not unscaled are checked again, because the unscale can
        overflow, and are unscaled in place, as torch's steps do. Gradients that the scaler has
        unscaled are not checked again: the user may have changed them since.
        """
        found_inf = self.found_inf if isinstance(self.found_inf, Tensor) else None
        is_scaled = self.grad_scale is not None
        checks = is_scaled and not self.is_final
        return Request(scale=self.grad_scale, check=checks, found_inf=found_inf, write=is_scaled)

    def leave_for_scaler(self, optimizer: Any, decision: Decision | None) -> None:
        """Set both attributes again: the scaler deletes them, and step hooks read ``found_inf``."""
        optimizer.grad_scale = self.grad_scale
        optimizer.found_inf = self.request.found_inf if decision is None else decision.found_inf


class SupportsAmpScaling:
    """Descriptor for ``_step_supports_amp_scaling``: true, unless FSDP1 has flattened parameters.

    With FSDP1, torch's ``ShardedGradScaler`` all-reduces the flag only where the scaler itself
    unscales. If the step did, each rank would use its own flag and continue with another scale.
    """

    def __get__(self, optimizer: Any, cls: type) -> bool:
        """Return the value for ``optimizer``, and note that it was read; ``True`` for the class."""
        if optimizer is None:
            return True
        supports = not ranks.is_fsdp1(optimizer.param_groups)
        optimizer._ampopt.missing_scale.read_by_scaler = supports
        return supports


def take_handoff(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ScalerHandoff | None:
    """Remove the attributes that a scaler has set, and return their values.

    Args:
        optimizer: an :class:`ampopt.Optimizer` that is about to step.
        args: the positional arguments of ``step``.
        kwargs: the keyword arguments of ``step``.

    Returns:
        The values; ``None`` if no scaler is stepping ``optimizer``.

    Raises:
        RuntimeError: ``step`` has a closure, so its gradients are computed after the scaler's
            check; an unscale is pending, so the scaler would unscale a second time; sums wait; or
            ``skip_when`` has not seen the gradients, as the scaler has unscaled them.
    """
    attributes = vars(optimizer)
    if "found_inf" not in attributes or "grad_scale" not in attributes:
        return None
    handoff = ScalerHandoff(attributes.pop("grad_scale"), attributes.pop("found_inf"))
    optimizer._ampopt.missing_scale.read_by_scaler = False
    _refuse_unfinished(optimizer)
    if any(map(callable, (*args, kwargs.get("closure")))):
        name = type(optimizer).__name__
        raise RuntimeError(
            "torch.amp.GradScaler.step(optimizer, closure) checks the gradients before the closure "
            "computes them, so its overflow flag says nothing about this step. Use "
            "ampopt.GradScaler, whose step(optimizer, closure) runs an overflowed closure again "
            f"with a smaller scale; or {name}.unscale_and_step(closure, grads_scaled_by=scale), "
            "without a scaler; or call the closure yourself and then scaler.step(optimizer)"
        )
    ours = optimizer._ampopt
    agreement, device, scale = ours.agreement(), ours.decision_device, handoff.grad_scale
    if scale is None and ours.observers.causes:
        raise RuntimeError(
            "skip_when cannot test gradients that torch.amp.GradScaler.unscale_ has unscaled, as "
            "they may be clipped by now. Use ampopt.GradScaler, or leave unscale_ out and clip by "
            "ampopt.GradScaler.step(optimizer, max_norm=...)"
        )
    if agreement is not None and not agreement.is_sharded_throughout:
        if scale is None:  # the step checks nothing, and the flag may be of this rank alone
            handoff.found_inf = agreement.flag(handoff.found_inf, device)
        return handoff
    # The scaler's flag is that of all ranks. Under a scale below 1, an unscale can overflow.
    is_observed = ours.observers.causes or ours.observers.watch is not None
    if scale is None or is_observed or not backend_for(device).host_sees:
        return handoff
    handoff.is_final = 1.0 <= scale.item() < float("inf")
    return handoff


def _refuse_unfinished(optimizer: Any) -> None:
    """Raise if an unscale is pending, or sums wait: the scaler that steps unscales by itself."""
    optimizer._ampopt.phase.refuse_unfinished("torch.amp.GradScaler.step, which unscales by itself")


def wrap_step(cls: type[Any], root: type[Any]) -> None:
    """Wrap a hand-written ``step`` of ``cls`` so that it skips and unscales as is requested.

    A class that defines ``_step_supports_amp_scaling = True`` itself, at or below the class that
    defines ``step``, reads the attributes of a scaler already.

    Args:
        cls: the subclass of ``ampopt.Optimizer`` to wrap.
        root: ``ampopt.Optimizer``, whose own ``_step_supports_amp_scaling`` does not count.
    """
    reads_scaler = False
    for base in cls.__mro__:
        supports = vars(base).get("_step_supports_amp_scaling")
        if supports and base is not root:
            if isinstance(supports, SupportsAmpScaling):  # the step of a rule
                return
            reads_scaler = True
            break
        if has_own_step(base):
            break
    if not has_step(cls):  # a subclass may get one from another base
        return
    step: Any = beneath_hooks(cls.step)  # torch adds the hooks again around the wrapper
    if getattr(step, SCALER_WRAPPER, None) is not step:
        cls.step = _with_requests(step, reads_scaler=reads_scaler)


def _with_requests(step: Callable[..., Any], *, reads_scaler: bool) -> Callable[..., Any]:
    """Wrap ``step`` so that a call follows the flag of a scaler or of a pending unscale.

    Args:
        step: ``step(optimizer, ...)``.
        reads_scaler: whether ``step`` reads the attributes that a scaler sets.
    """

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        handoff = None if reads_scaler else _handoff(self, args, kwargs)
        request = _plain_request(self, args, kwargs) if handoff is None else handoff.request
        if request is None:
            result = self._ampopt.within_step(step, self, *args, **kwargs)
            _end_pending(self)  # if torch's hooks, which do so, are not around this step
            return result
        call = functools.partial(step, self, *args, **kwargs)
        outcome = _attempt(self, request, call)
        if handoff is not None:
            handoff.leave_for_scaler(self, outcome.decision)
        return outcome.result

    # ``wraps`` copies the attributes of ``step``, but the wrapper must not count as hooked.
    vars(wrapper).pop("hooked", None)
    setattr(wrapper, SCALER_WRAPPER, wrapper)
    return wrapper


def following_unscale(step: Callable[..., Any]) -> Callable[..., Any]:
    """A method from ``step``, an attribute of an instance, that follows a pending unscale.

    The step hooks run within ``step``.
    """

    @functools.wraps(step)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = _plain_request(self, args, kwargs)
        if request is None:
            return step(*args, **kwargs)
        result = self._ampopt.attempt(request).result
        _end_pending(self)
        return result

    return method


_handoff = uncompiled(take_handoff)


@uncompiled
def _plain_request(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request | None:
    """The request of a plain ``step``; see :meth:`HandwrittenStep.plain_request`."""
    if {"found_inf", "grad_scale"} <= vars(optimizer).keys():  # of a scaler, for the step to read
        try:
            _refuse_unfinished(optimizer)
        except RuntimeError:
            del optimizer.found_inf, optimizer.grad_scale
            raise
        return None
    has_closure = any(map(callable, (*args, kwargs.get("closure"))))
    return optimizer._ampopt.plain_request(has_closure=has_closure)


@uncompiled
def _end_pending(optimizer: Any) -> None:
    """Forget the unscaled gradients or sums: this step has used them."""
    optimizer._ampopt.phase.end()


@uncompiled
def _attempt(optimizer: Any, request: Request, step: Callable[[], Any]) -> StepOutcome:
    """Run or skip ``step``, within the step hooks of ``optimizer``, as ``request`` says."""
    return optimizer._ampopt.attempt(request, step)
