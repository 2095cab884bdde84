"""The step that a class with a rule inherits from torch, for what the rule cannot do.

It runs in place of the rule with ``differentiable=True``, and with sparse gradients; see
:meth:`ampopt._step.param_checks.Checks.need_torch`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ampopt._step import gradients
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.masters import Masters
from ampopt._step.rule_state import state_of
from ampopt._step.step_hooks import beneath_hooks
from ampopt._step.step_rollback import SkipPolicy, skip_policy_of
from ampopt_kernels.rule import Rule
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.uploads import Uploads

__all__ = ["TorchStep"]


class TorchStep(RefersToOptimizer):
    """Runs or skips torch's own step of one optimizer, with unscaled gradients."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        bound_step: Callable[[Any], Any],
        masters: Masters,
        uploads: dict[torch.device, Uploads],
        *,
        needs_state: bool,
    ) -> None:
        """Store how to step.

        Args:
            optimizer: the optimizer to step; stored as a weak reference.
            bound_step: ``bound_step(optimizer)`` is the bound ``step`` that the class inherits.
            masters: the master weights of the parameters.
            uploads: constants that earlier steps have copied to a device, by device.
            needs_state: whether a state of each parameter must exist before the step.
        """
        super().__init__(optimizer)
        self._bound_step, self._masters, self._uploads = bound_step, masters, uploads
        self._needs_state = needs_state

    @functools.cached_property
    def skip_policy(self) -> SkipPolicy:
        """How the step is skipped; chosen before the first."""
        optimizer = self.optimizer
        return skip_policy_of(optimizer.skip_by, optimizer._ampopt.decision_device)

    def run(self, rule: Rule, request: Request) -> Decision | None:
        """Unscale the gradients, and run or skip the step as ``optimizer.skip_by`` says.

        Without gradients there is no step, as with a rule.

        Args:
            rule: the rule in whose place the step runs, which declares the same states.
            request: the scale, and what else to check.

        Returns:
            The decision; ``None`` if no rank has gradients.
        """
        optimizer = self.optimizer
        if self._needs_state:
            for index, param in gradients.present(optimizer.param_groups):
                if not optimizer.state.get(param):
                    declared = DeclaredStates.of(rule, optimizer.param_groups[index], param)
                    state_of(optimizer, declared)
        decision = self._masters.unscale(request, optimizer._ampopt.agreement(), self._uploads)
        if decision is not None:
            optimizer._drop_initial_states()
            # Without hooks: those of the class run around our step already.
            step = beneath_hooks(self._bound_step(optimizer).__func__)
            self.skip_policy.step(optimizer, functools.partial(step, optimizer), decision)
        optimizer._complete_states()
        return decision
