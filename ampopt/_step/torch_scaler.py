"""What ``torch.amp.GradScaler`` leaves on an optimizer for its step, and steps that heed it.

For an optimizer whose ``_step_supports_amp_scaling`` is true, ``scaler.step(optimizer)`` does not
look at its flag. It sets ``optimizer.grad_scale`` (the factor that the gradients carry, ``None``
after ``scaler.unscale_``) and ``optimizer.found_inf`` (a sum of flags of the gradients as they
are), calls ``optimizer.step()`` and deletes both.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampopt._step import ranks
from ampopt._step.step_hooks import HEEDS, beneath_hooks, has_own_step, has_step
from ampopt._step.torch_private import uncompiled
from ampopt_kernels.decision import Decision, Request

if TYPE_CHECKING:
    from ampopt._step.stepping import StepOutcome
    from ampopt.optimizer import Optimizer

__all__ = ["ScalerHandoff", "SupportsAmpScaling", "wrap_step", "take"]


@dataclass(frozen=True)
class ScalerHandoff:
    """What a scaler left on an optimizer.

    Attributes:
        grad_scale: the factor that the gradients carry; ``None`` for 1.
        found_inf: one element, more than 0 for overflow; the number 0 without gradients.
    """

    grad_scale: Tensor | None
    found_inf: Any

    @property
    def request(self) -> Request:
        """The step to take.

        Gradients that the scaler has not unscaled are judged again, for they may overflow by it,
        and left unscaled, as torch's steps leave them. Those that it has are the user's since.
        """
        found_inf = self.found_inf if isinstance(self.found_inf, Tensor) else None
        scaled = self.grad_scale is not None
        return Request(scale=self.grad_scale, check=scaled, found_inf=found_inf, write=scaled)

    def leave_for_scaler(self, optimizer: Any, decision: Decision | None) -> None:
        """Leave it for the scaler to delete, the flag being ours, which step hooks can read."""
        optimizer.grad_scale = self.grad_scale
        optimizer.found_inf = self.found_inf if decision is None else decision.found_inf


class SupportsAmpScaling:
    """Whether a scaler is to leave its flag to the step: not if FSDP1 has flattened parameters.

    There each rank would be left what it has found alone, and go on with another scale. Where the
    scaler unscales, torch's ``ShardedGradScaler`` asks all ranks.
    """

    def __get__(self, optimizer: Any, cls: type) -> bool:
        """It, for an optimizer; true for a class."""
        return optimizer is None or not ranks.is_fsdp1(optimizer.param_groups)


def take(
    optimizer: "Optimizer", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ScalerHandoff | None:
    """Take away what a scaler left; ``None`` if no scaler is stepping ``optimizer``.

    Args:
        optimizer: about to step.
        args: what the step is given.
        kwargs: likewise.

    Raises:
        RuntimeError: that has a closure, whose gradients the scaler has not seen; or an unscale is
            pending, of gradients that the scaler takes for scaled.
    """
    attributes = vars(optimizer)
    if "found_inf" not in attributes or "grad_scale" not in attributes:
        return None
    left = ScalerHandoff(attributes.pop("grad_scale"), attributes.pop("found_inf"))
    if optimizer._ampopt.pending is not None:
        raise RuntimeError(
            f"unscale() of this {type(optimizer).__name__} was called, and its gradients are "
            "unscaled once more by the scaler that steps it now. Call step_after_unscale() in "
            "place of scaler.step(optimizer), or scaler.unscale_(optimizer) in place of unscale(); "
            "zero_grad() discards the unscale"
        )
    if any(map(callable, (*args, kwargs.get("closure")))):
        name = type(optimizer).__name__
        raise RuntimeError(
            "torch.amp.GradScaler.step(optimizer, closure) looks at the gradients before the "
            "closure makes them, so what it found says nothing about this step. Use "
            "ampopt.GradScaler, whose step(optimizer, closure) runs an overflowed closure again "
            f"with a smaller scale; or {name}.unscale_and_step(closure, grads_scaled_by=scale), "
            "without a scaler; or call the closure yourself and then scaler.step(optimizer)"
        )
    if left.grad_scale is None and (agreement := optimizer._ampopt.agreement()) is not None:
        # Nothing will be judged again, and the scaler may have asked this rank alone.
        return replace(
            left, found_inf=agreement.flag(left.found_inf, optimizer._ampopt.decision_device)
        )
    return left


def wrap_step(cls: type["Optimizer"], root: type["Optimizer"]) -> None:
    """Give ``cls`` a ``step`` that does what a scaler asks for, unless its author has seen to it.

    An author has if ``_step_supports_amp_scaling`` stands where the step does, or nearer; that of
    ``root``, the base of all, is nobody's.
    """
    for base in cls.__mro__:
        if vars(base).get("_step_supports_amp_scaling") and base is not root:
            return
        if has_own_step(base):
            break
    if not has_step(cls):  # what derives from it may have, from its other bases
        return
    step: Any = beneath_hooks(cls.step)  # around which torch puts them again
    if getattr(step, HEEDS, None) is not step:
        cls.step = _heeding(step)


def _heeding(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def heeding(self: "Optimizer", *args: Any, **kwargs: Any) -> Any:
        left = take(self, args, kwargs)
        if left is None:
            returned = step(self, *args, **kwargs)
            _end_pending(self)  # where torch puts no hooks around the step that would
            return returned
        call = functools.partial(step, self, *args, **kwargs)
        attempt = _around(self, call, left.request)
        left.leave_for_scaler(self, attempt.decision)
        return attempt.returned

    # Marks that wraps has copied from a step which the author made with it are not for this one.
    vars(heeding).pop("hooked", None)
    setattr(heeding, HEEDS, heeding)
    return heeding


@uncompiled
def _end_pending(optimizer: "Optimizer") -> None:
    optimizer._ampopt.end_pending()


@uncompiled
def _around(optimizer: "Optimizer", step: Callable[[], Any], request: Request) -> "StepOutcome":
    return optimizer._ampopt.around(step, request)
