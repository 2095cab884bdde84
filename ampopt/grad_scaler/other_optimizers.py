"""What ``ampopt.GradScaler`` notes about optimizers, and how it steps those without control points.

Those are torch's and anyone's. They are stepped as ``torch.amp.GradScaler`` steps them, but judged
after unscaling, and under one flag that is 1 or 0.
"""

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampopt._step import gradients
from ampopt._step.overflow import check_and_unscale
from ampopt._step.torch_private import mark_as_called
from ampopt.loss_scale.arguments import request_for, successor_of
from ampopt.loss_scale.base import LossScale
from ampopt.results import as_flag
from ampopt_kernels.decision import Request

__all__ = ["Record", "judge_gradients", "step", "unscale", "wants_scaler", "warn_of_scaler"]


@dataclass(eq=False)
class Record:
    """What has happened to one optimizer since the last ``update``.

    Attributes:
        optimizer: as it was given first.
        groups: its param groups, by which a wrapper around it is known.
        scale: the scale that its gradients carry, on its device.
        process_group: of the ranks that decide together about it.
        stage: as torch counts them.
        found_inf: more than 0 for overflow; ``None`` until its gradients are judged.
        successor: of ``scale``; ``scale`` itself if there were no gradients.
        owned: whether it has unscaled them itself, so that its ``step_after_unscale`` is to follow.
        holder: the optimizer that has unscaled them, which a wrapper hands that on to.
        pending: the holder's own mark of an unscale, to see that it was not discarded.
        wrote: whether gradients were unscaled in place.
    """

    optimizer: Any
    groups: list[dict[str, Any]]
    scale: LossScale
    process_group: Any = None
    stage: OptState = OptState.READY
    found_inf: Tensor | None = None
    successor: LossScale | None = None
    owned: bool = False
    holder: Any = None
    pending: Any = None
    wrote: bool = False

    def of(self, optimizer: Any) -> bool:
        """Whether it is that of ``optimizer``, or of what that is a wrapper around."""
        return optimizer is self.optimizer or optimizer.param_groups is self.groups

    def learn(self, found_inf: Tensor | None, successor: LossScale) -> None:
        """Note what its gradients were found to be."""
        self.found_inf, self.successor = found_inf, successor

    @property
    def skipped(self) -> bool:
        """Whether its step is to be skipped. Synchronizes."""
        if self.found_inf is None or not self.scale.drop_overflow_update:
            return False
        return bool(self.found_inf > 0)


def unscale(record: Record, optimizer: Any) -> None:
    """Unscale the gradients of ``optimizer`` in place.

    Raises:
        ValueError: some are float16 or complex32, where unscaled values would underflow to zero.
    """
    for group, param in gradients.present(optimizer.param_groups):
        if param.grad is not None and param.grad.dtype in gradients.UNDERFLOWING:
            raise ValueError(
                f"Attempting to unscale FP16 gradients: group {group} of "
                f"{type(optimizer).__name__} has some. Keep the parameters in float32 and run the "
                "model under torch.autocast, or use an ampopt optimizer with master_weights=True"
            )
    judge_gradients(record, optimizer, write=True)
    record.wrote = True


def judge_gradients(
    record: Record, optimizer: Any, *, write: bool = False, times: Any = None
) -> None:
    """Judge the gradients of ``optimizer``.

    Args:
        record: to note the result.
        optimizer: of any class.
        write: unscale them in place.
        times: a factor that they carry besides the scale.
    """
    scale = record.scale
    request = request_for(scale) if times is None else Request(scale=scale.value * times)
    decision = check_and_unscale(
        optimizer.param_groups, request, write=write, process_group=record.process_group
    )
    if decision is None:
        record.learn(None, scale)
        return
    found_inf = as_flag(decision.found_inf, decision.overflow_details)
    if times is None:
        record.learn(found_inf, successor_of(scale, decision))
    else:
        record.learn(found_inf, scale.next(found_inf))


def step(record: Record, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Step or skip, and return what the step returned. Waits, unless it can skip by itself."""
    if _skips_by_itself(optimizer):
        return _step_with_flag(record, optimizer, *args, **kwargs)
    if record.stage is OptState.READY:
        unscale(record, optimizer)
    if record.found_inf is None or record.skipped:
        mark_as_called(optimizer)
        return None
    return optimizer.step(*args, **kwargs)


def _step_with_flag(record: Record, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    theirs = vars(optimizer).get("grad_scale")  # composed with ours, and left where it was
    scale = theirs
    if record.stage is OptState.READY:
        judge_gradients(record, optimizer, times=theirs)
        scale = record.scale.value if theirs is None else record.scale.value * theirs
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
        if theirs is not None:
            optimizer.grad_scale = theirs


def wants_scaler(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` takes the scaler itself, which torch has deprecated."""
    return (
        _skips_by_itself(optimizer)
        and "grad_scaler" in inspect.signature(optimizer.step).parameters
    )


def _skips_by_itself(optimizer: Any) -> bool:
    """Whether ``optimizer`` reads the flag that is left on it.

    A wrapper that hands on what it has not says so of the optimizer in it, which finds no flag.
    """
    return bool(inspect.getattr_static(optimizer, "_step_supports_amp_scaling", False))


def warn_of_scaler() -> None:
    """Warn as torch does, from three calls up."""
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
        stacklevel=3,
    )
