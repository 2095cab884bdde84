"""How the step of an update rule runs: one pass unscales, checks, clips and updates.

A :class:`RuleStep` is called by control points, a :class:`RuleRunner` by the step of the optimizer.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ampopt._step import gradients
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.masters import Masters
from ampopt._step.param_checks import Checks
from ampopt._step.plan import Plan
from ampopt._step.sharding import dtensor
from ampopt._step.stale_memory import drop_in_collections
from ampopt._step.step_hooks import is_watched
from ampopt._step.step_rollback import SkipPolicy
from ampopt._step.stepping import StepOutcome, StepStrategy
from ampopt._step.torch_private import mark_as_called
from ampopt._step.torch_step import TorchStep
from ampopt.loss_scale.base import AnyScale
from ampopt_kernels.devices import refuse_while_captured
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.tensors import real
from ampopt_kernels.uploads import Uploads

__all__ = ["FIRST", "RuleRunner", "RuleStep"]

FIRST = "the first step"
"""The reason of the first plan."""

_SECOND_RUNNERS = 8
"""The rules beside that of the optimizer whose plans are kept: those that were run last."""

_MAKES_STATES = (
    "a step that makes states: the first of an optimizer or of a parameter, or one with other "
    "options or layouts than the step before. Each replay would make the states again"
)


class RuleRunner(RefersToOptimizer):
    """Runs one rule of an :class:`ampopt.ElementwiseOptimizer`.

    Attributes:
        checks: checks of parameters, options and states before a step.
        masters: the master weights of the parameters.
        plan: the plan of the last step; ``None`` before the first.
        decision: the decision of the last step; ``None`` if it had no gradients, and while torch's
            own step runs.
        torch_step: torch's own step, which runs where the rule cannot; ``None`` for a rule that is
            run beside that of the optimizer.
        second_states: the states of the rules that ``run_rule`` was called with, in order.
        reasons: how often a plan was made, by the reason in words; :data:`FIRST` is one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        torchs_step: Callable[[Any], Any] | None = None,
        *,
        rule: Rule | None = None,
    ) -> None:
        """Store how to run the rule.

        Args:
            optimizer: the optimizer to step; stored as a weak reference.
            torchs_step: see :class:`TorchStep`; ``None`` if it never runs.
            rule: the rule to run; ``None`` for ``optimizer.rule``.
        """
        super().__init__(optimizer)
        self._rule = rule
        self.masters = Masters(optimizer)
        self._uploads: dict[torch.device, Uploads] = {}
        self.torch_step: TorchStep | None = None
        if torchs_step is not None:
            self.torch_step = TorchStep(optimizer, torchs_step)
        self._second_runners: dict[Rule, RuleRunner] = {}
        self.second_states: dict[State, None] = {}
        self.plan: Plan | None = None
        self.reasons: Counter[str] = Counter()
        self.decision: Decision | None = None
        self.checks = Checks(optimizer)
        drop_in_collections(self)

    @property
    def rule(self) -> Rule:
        """The rule to run."""
        return self._rule or self.optimizer.rule

    def step(self, request: Request) -> Decision | None:
        """Run or skip a step with the present gradients.

        Returns:
            The decision; ``None`` if no rank has gradients.
        """
        if self.masters.holders:
            self.masters.check_unedited()
        else:
            self.masters.warn_of_early_reading()
        self.decision = None  # hooks in torch's own step must not read the last one
        plan, optimizer = self.plan, self.optimizer
        if plan is None or not plan.revalidate(optimizer, self._rule or optimizer.rule):
            plan = self._new_plan(plan, request.needs_agreement)
        if plan is not None:
            self.decision = plan.run(request)
        else:
            assert self.torch_step is not None
            self.decision = self.torch_step.run(request)
        return self.decision

    def drop_stale(self) -> None:
        """Drop the plan if its tensors were replaced, so that their memory is free."""
        optimizer = self.optimizer  # ``None`` if someone keeps this runner alone
        if self.plan is None:
            return
        if optimizer is not None and self.plan.tensor_guard.is_current(optimizer):
            return
        self.plan = None
        self.masters.drop_rows()

    def second(self, rule: Rule) -> "RuleRunner":
        """The runner of ``rule``, which the user runs beside :attr:`rule`; made if it is new."""
        runners = self._second_runners
        runner = runners.pop(rule, None) or RuleRunner(self.optimizer, rule=rule)
        runners[rule] = runner
        self.second_states |= dict.fromkeys(rule.state)
        if len(runners) > _SECOND_RUNNERS:
            del runners[next(iter(runners))]
        return runner

    def make_states(self) -> None:
        """Make every state that a step would make, also of parameters without a gradient.

        Making a plan makes them. The plan is not kept, so the first step makes its own.
        """
        if self.checks.need_torch():
            raise NotImplementedError(
                "initialize_states: torch's own step runs, because of sparse gradients or "
                "differentiable=True, and it makes its states only as it steps"
            )
        params = gradients.params_of(self.optimizer.param_groups)
        absent = {
            id(param): real(dtensor.local(param.detach())).dtype
            for param in params
            if param.requires_grad and param.grad is None
        }
        self._plan_with(absent, needs_agreement=False)

    def _new_plan(self, old_plan: Plan | None, needs_agreement: bool) -> Plan | None:
        """A plan of this step, kept for the next; ``None`` if torch's own step has to run."""
        optimizer, rule = self.optimizer, self.rule
        self.checks.warn_of_float16(rule)
        if self.checks.need_torch():
            return None
        reason, absent = FIRST, {}
        self.masters.drop_rows()  # they may have parameters that were removed
        if old_plan is not None:
            reason = old_plan.reason(optimizer, rule)
            absent = old_plan.tensor_guard.absent(optimizer)
        self.plan = self._plan_with(absent, needs_agreement=needs_agreement)
        self.reasons[reason] += 1
        return self.plan

    def _plan_with(self, absent: dict[int, torch.dtype], *, needs_agreement: bool) -> Plan:
        """A new plan, with rows also for the parameters in ``absent``; it makes missing states."""
        optimizer, rule = self.optimizer, self.rule
        refuse_while_captured(gradients.device_of(optimizer.param_groups), _MAKES_STATES)
        planned, variants = self.checks.check_plannable(rule, absent)
        optimizer._complete_states()
        return Plan(
            optimizer,
            rule,
            self.masters,
            self._uploads,
            planned,
            variants,
            needs_agreement=needs_agreement,
        )


class RuleStep(StepStrategy):
    """The strategy of an optimizer with a rule: checked and skipped on the device.

    One pass over the gradients does what
    :class:`~ampopt._step.handwritten_step.HandwrittenStep` does in two, without synchronizing.
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
        super().__init__(optimizer, runner)
        self._step = step

    @property
    def skip_policy(self) -> SkipPolicy:
        """How torch's own step is skipped, if it runs in place of the rule."""
        assert self.runner.torch_step is not None
        return self.runner.torch_step.skip_policy

    def attempt(self, request: Request, *, scale: AnyScale | None = None) -> StepOutcome:
        """See :class:`StepStrategy`. If the step raises, gradients are still scaled."""
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
            with torch.set_grad_enabled(False):  # takes half the time of no_grad()
                self.note_norm(request, self.runner.step(self.observers.extend(request)))
            mark_as_called(optimizer)
        return StepOutcome(self.runner.decision)

    @torch.no_grad()
    def check_closure_gradients(self, request: Request) -> Decision | None:
        """See :class:`StepStrategy`. Gradients stay scaled, unless torch's own step follows."""
        if self.needs_torch():
            decision, step = self.unscale(request), Request(check=False)
        else:
            check_request = replace(self.observers.extend(request), max_norm=None)
            decision = self.masters.unscale(check_request, write=False)
            # The step that follows unscales and clips when it reads the gradients.
            scale, max_norm, write = request.scale, request.max_norm, request.write
            step = Request(scale=scale, check=False, max_norm=max_norm, write=write)
        # An overflow is evaluated again; only a `skip_when` skips the step.
        skip = None if decision is None else decision.cause
        self.step_request = replace(step, found_inf=skip, earlier_decision=decision)
        return decision

    def check_gradients(self) -> None:
        """See :class:`StepStrategy`."""
        optimizer, checks, plan = self.optimizer, self.runner.checks, self.runner.plan
        if plan is not None and plan.fits(optimizer, self.runner.rule):
            return
        checks.warn_of_float16(self.runner.rule)
        if checks.need_torch():
            self.masters.check_float16(gradients.params_with_grads(optimizer.param_groups))
        else:
            checks.check_plannable(self.runner.rule, {})

    @property
    def decision_of_step(self) -> Decision | None:
        """See :class:`StepStrategy`."""
        return self.runner.decision
