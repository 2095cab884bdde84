"""``GradScaler``'s record of each optimizer, and its steps of optimizers that are not ampopt's.

They are stepped as ``torch.amp.GradScaler`` steps them, except that gradients are checked for
inf/NaN after unscaling, and that there is one flag, 0 or 1, for all gradients of an optimizer.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampopt._step import gradients
from ampopt._step.overflow import OverflowCheck
from ampopt._step.torch_private import mark_as_called
from ampopt._warnings import warn_user
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.step_scale import next_scale_of, request_for
from ampopt.results import as_flag

__all__ = ["Record", "check_gradients", "step", "unscale", "wants_scaler", "warn_of_scaler"]


@dataclass(eq=False)
class Record:
    """The record of one optimizer since the last ``update``.

    Attributes:
        optimizer: the optimizer or wrapper that was passed first.
        groups: its ``param_groups``. A wrapper has the same list object as its optimizer.
        scale: the scale by which its gradients are multiplied, on its device.
        check: checks its gradients.
        process_group: the ranks that all-reduce the overflow flag of its steps.
        stage: torch's ``OptState``: ready, unscaled or stepped. Unless it is ready, the gradients
            are unscaled.
        found_inf: a tensor, more than 0 after an overflow; ``None`` until gradients were checked.
        next_scale: the next scale, computed from ``scale``; ``scale`` itself without gradients.
        holder: the optimizer that has unscaled by its own ``unscale``, so that its
            ``step_after_unscale`` must follow; can be inside a wrapper. ``None`` without one.
        pending: the holder's pending unscale, to detect that it was discarded since.
    """

    optimizer: Any
    groups: list[dict[str, Any]]
    scale: LossScale
    check: OverflowCheck
    process_group: Any = None
    stage: OptState = OptState.READY
    found_inf: Tensor | None = None
    next_scale: LossScale | None = None
    holder: Any = None
    pending: Any = None

    def of(self, optimizer: Any) -> bool:
        """Whether this is the record of ``optimizer``, or of the optimizer that it wraps."""
        return optimizer is self.optimizer or optimizer.param_groups is self.groups

    @property
    def skipped(self) -> bool:
        """Whether the step is skipped. Synchronizes."""
        if self.found_inf is None or not self.scale.drop_overflow_update:
            return False
        return bool(self.found_inf > 0)


def unscale(record: Record, optimizer: Any) -> None:
    """Unscale the gradients of ``optimizer`` in place.

    Raises:
        ValueError: a gradient is float16 or complex32, in which unscaled values would underflow.
    """
    for group, param in gradients.present(optimizer.param_groups):
        if gradients.grad_of(param).dtype in gradients.UNDERFLOWING:
            raise ValueError(
                f"Attempting to unscale FP16 gradients: group {group} of "
                f"{type(optimizer).__name__} has some. Keep the parameters in float32 and run the "
                "model under torch.autocast, or use an ampopt optimizer with master_weights=True"
            )
    check_gradients(record, optimizer, write=True)
    record.stage = OptState.UNSCALED


def check_gradients(record: Record, optimizer: Any, *, write: bool = False) -> None:
    """Check the gradients of ``optimizer`` for inf/NaN, and store the result in ``record``.

    Args:
        record: the record of ``optimizer``.
        optimizer: an optimizer of any class.
        write: whether to unscale the gradients in place.
    """
    scale = record.scale
    agreement = record.check.agreement([optimizer], record.process_group)
    decision = record.check.check([optimizer], request_for(scale, write=write), agreement)
    record.next_scale, record.found_inf = next_scale_of(scale, decision), None
    if decision is not None:
        record.found_inf = as_flag(decision.found_inf, decision.overflow_reports)


def step(record: Record, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Step, or skip the step after an overflow, and return what the step returned.

    Synchronizes, unless ``optimizer`` reads the flag itself, as torch's fused optimizers do.
    """
    if _skips_by_itself(optimizer):
        return _step_with_flag(record, optimizer, *args, **kwargs)
    if record.stage is OptState.READY:
        unscale(record, optimizer)
    if record.found_inf is None or record.skipped:
        mark_as_called(optimizer)
        return None
    return optimizer.step(*args, **kwargs)


def _step_with_flag(record: Record, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Step an optimizer that reads ``grad_scale`` and ``found_inf``, its attributes meanwhile."""
    # The user may have set grad_scale, for this step: multiply by it, as torch does.
    users = vars(optimizer).get("grad_scale")
    scale = users
    if record.stage is OptState.READY:
        check_gradients(record, optimizer)
        scale = record.scale.value if users is None else record.scale.value * users
    if record.found_inf is None:
        mark_as_called(optimizer)
        return None
    found_inf = record.found_inf
    if not record.scale.drop_overflow_update:
        found_inf = torch.zeros_like(found_inf)
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def wants_scaler(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` takes the scaler as an argument, which torch has deprecated."""
    return (
        _skips_by_itself(optimizer)
        and "grad_scaler" in inspect.signature(optimizer.step).parameters
    )


def _skips_by_itself(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` reads ``optimizer.found_inf`` itself.

    Looked up without ``__getattr__``: a wrapper that forwards attributes would answer for the
    optimizer inside it, on which the flag is not set.
    """
    return bool(inspect.getattr_static(optimizer, "_step_supports_amp_scaling", False))


def warn_of_scaler() -> None:
    """Warn as torch's scaler does, at the line that calls ``GradScaler.step``."""
    warn_user(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
    )
