"""The step that a class with a rule inherits from torch, for what the rule cannot do.

It runs in place of the rule with ``differentiable=True``, and with sparse gradients; see
:meth:`ampopt._step.param_checks.Checks.need_torch`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.step_hooks import beneath_hooks
from ampopt._step.step_rollback import SkipPolicy, skip_policy_of
from ampopt_kernels.step_data import Decision, Request

__all__ = ["TorchStep"]


class TorchStep(RefersToOptimizer):
    """Runs or skips torch's own step of one optimizer, with unscaled gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, bound_step: Callable[[Any], Any]) -> None:
        """Store how to step.

        Args:
            optimizer: the optimizer to step; stored as a weak reference.
            bound_step: ``bound_step(optimizer)`` is the bound ``step`` that the class inherits.
        """
        super().__init__(optimizer)
        self._bound_step = bound_step

    @functools.cached_property
    def skip_policy(self) -> SkipPolicy:
        """How the step is skipped; chosen before the first."""
        optimizer = self.optimizer
        return skip_policy_of(optimizer.skip_by, optimizer._ampopt.decision_device)

    def run(self, request: Request) -> Decision | None:
        """Unscale the gradients, and run or skip the step as ``optimizer.skip_by`` says.

        Without gradients there is no step, as with a rule.

        Args:
            request: the scale, and what else to check.

        Returns:
            The decision; ``None`` if no rank has gradients.
        """
        optimizer = self.optimizer
        optimizer._prepare_torchs_step()
        decision = optimizer._ampopt.masters.unscale(request)
        if decision is not None:
            # Without hooks: those of the class run around our step already.
            step = beneath_hooks(self._bound_step(optimizer).__func__)
            self.skip_policy.step(optimizer, functools.partial(step, optimizer), decision)
        optimizer._complete_states()
        return decision
