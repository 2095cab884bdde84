"""Warns of a step without a scale whose gradients have one, of a loss or of torch's scaler."""

from typing import Any

import torch

from ampopt._step import gradients
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._warnings import warn_user
from ampopt.loss_scale.base import LossScale, host_may_read
from ampopt.loss_scale.scaled_losses import missing_scale, scaled_losses

__all__ = ["MissingScale"]


class MissingScale(RefersToOptimizer):
    """Whether the gradients of one optimizer seem to have a scale that no control point got.

    The losses that were scaled before the optimizer was made do not concern it.

    Attributes:
        read_by_scaler: whether ``_step_supports_amp_scaling`` was read, as torch's scaler does
            before a step, and no step has got scale and overflow flag of a scaler since. That
            happens if the scaler steps a wrapper, which forwards what is read and keeps what is
            set.
    """

    read_by_scaler = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store a weak reference to ``optimizer``."""
        super().__init__(optimizer)
        self._scaled_before = scaled_losses()
        self._warned = False

    def is_in_gradients(self) -> bool:
        """Whether gradients seem to have a scale that no control point got.

        Does not synchronize: a scale on an accelerator counts as one, even if it is 1.
        """
        scale = missing_scale(self._scaled_before)
        optimizer: Any = self.optimizer
        if scale is None or type(optimizer)._ampopt.has_own_control_points:
            return False
        if not gradients.present(optimizer.param_groups):
            return False
        number = scale._host_number if isinstance(scale, LossScale) else scale
        return not host_may_read(number) or number != 1.0

    def warn(self) -> None:
        """Warn, once, of a call without a scale, if its gradients seem to have one."""
        if self._warned or not (self.read_by_scaler or self.is_in_gradients()):
            return
        self._warned = True
        name = type(self.optimizer).__name__
        if self.read_by_scaler:
            message = (
                "torch.amp.GradScaler.step has set scale and overflow flag on a wrapper, which has "
                f"not passed them to {name}: this step neither unscaled nor skipped. Pass the "
                f"{name} itself to scaler.step(), or use ampopt.GradScaler. If no scaler called "
                "this step, ignore this"
            )
        else:
            message = (
                "a loss was multiplied by scale_outputs(loss, scale), or loss * scale, and then "
                f"{name} was called by step(), or without "
                "grads_scaled_by, which does not divide the gradients by the scale. Pass the "
                "scale, as in unscale_and_step(grads_scaled_by=scale). If the gradients are those "
                "of another loss, ignore this"
            )
        warn_user(message, RuntimeWarning)
