"""How the step of an update rule runs: one pass unscales, checks, clips and updates."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.overflow import check_and_unscale_params
from ampopt._step.rule_runner import RuleRunner
from ampopt._step.step_hooks import is_watched
from ampopt._step.stepping import StepOutcome, StepStrategy
from ampopt._step.torch_private import mark_as_called
from ampopt._step.transaction import SkipPolicy
from ampopt_kernels.decision import Decision, Request

__all__ = ["RuleStep"]


class RuleStep(StepStrategy):
    """The strategy of an optimizer with a rule: checked and skipped on the device.

    One pass over the gradients does what :class:`~ampopt._step.ordinary.OrdinaryStep` does in two,
    without synchronizing.
    """

    runner: RuleRunner

    def __init__(self, optimizer: torch.optim.Optimizer, runner: RuleRunner, step: Any) -> None:
        """Store the runner.

        Args:
            optimizer: the optimizer to step.
            runner: runs its rule.
            step: ``ElementwiseOptimizer.step`` without hooks, which passes :attr:`step_request` to
                ``runner``.
        """
        super().__init__(optimizer, runner, step_has_collectives=runner.rule.averages is not None)
        self._step = step

    @property
    def skip_policy(self) -> SkipPolicy:
        """How torch's own step is skipped, if it runs in place of the rule."""
        return self.runner.skip_policy

    def attempt(self, request: Request) -> StepOutcome:
        """See :class:`StepStrategy`."""
        optimizer = self.optimizer
        optimizer.check_step()
        if is_watched(optimizer, self._step):
            self.runner.decision = None
            self.step_request = request
            try:
                optimizer.step()
            finally:
                self.step_request = None
        else:
            with torch.no_grad():
                self.note_norm(request, self.runner.step(self.with_watch_and_causes(request)))
            mark_as_called(optimizer)
        return StepOutcome(self.runner.decision)

    @torch.no_grad()
    def check_closure_gradients(self, request: Request) -> Decision | None:
        """See :class:`StepStrategy`. Gradients stay scaled, unless torch's own step follows."""
        if self.runner.checks.need_torch():
            decision = self.unscale(request)
            self.step_request = Request(
                check=False, found_inf=_other(decision), earlier_decision=decision
            )
            return decision
        check_request = replace(self.with_watch_and_causes(request), max_norm=None)
        decision = check_and_unscale_params(
            gradients.params_with_grads(self.optimizer.param_groups),
            check_request,
            self.agreement(),
            self.decision_device,
            write=False,
            uploads=self.uploads,
        )
        if decision is None:
            self.note_norm(request, None)
            return None
        # The step that follows unscales and clips when it reads the gradients.
        self.step_request = Request(
            scale=request.scale,
            check=False,
            found_inf=_other(decision),
            max_norm=request.max_norm,
            write=request.write,
            earlier_decision=decision,
        )
        return decision

    def check_gradients(self) -> None:
        """See :class:`StepStrategy`."""
        self.runner.check_gradients()

    def snapshot(self) -> None:
        """``None``: the step evaluates the closure before it updates anything."""
        return None

    @property
    def decided(self) -> Decision | None:
        """See :class:`StepStrategy`."""
        return self.runner.decision


def _other(decision: Decision | None) -> Tensor | None:
    """A flag that is more than 0 if a ``skip_when``, and not an overflow, skips the step."""
    return None if decision is None else decision.cause
