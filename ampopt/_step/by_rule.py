"""How a step that is a rule is taken: unscaled, judged, clipped and skipped as it runs.

It is planned once and run in a few launches; where no rule can, it is torch's own.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients, ranks
from ampopt._step.checks import Checks
from ampopt._step.masters import Masters, needs_master
from ampopt._step.overflow import check_and_unscale_held, device_of
from ampopt._step.plan import Plan
from ampopt._step.rule_state import complete, convert, state_of, widen_scalars
from ampopt._step.settings import kind_of
from ampopt._step.step_hooks import beneath_hooks, is_watched
from ampopt._step.stepping import StepOutcome, StepStrategy
from ampopt._step.torch_private import mark_as_called
from ampopt._step.transaction import SkipPolicy, skip_policy_of
from ampopt_kernels.decision import Decision, Request
from ampopt_kernels.rule import Rule
from ampopt_kernels.uploads import Uploads

__all__ = ["RuleStep", "RuleRunner"]


class RuleStep(StepStrategy):
    """Does in one pass, and without a look, what :class:`OrdinaryStep` does in two."""

    runner: "RuleRunner"

    def __init__(self, optimizer: torch.optim.Optimizer, runner: "RuleRunner", step: Any) -> None:
        """Begin.

        Args:
            optimizer: to step.
            runner: runs its rule.
            step: the ``step`` of its class, which passes :attr:`step_request` to ``runner``.
        """
        super().__init__(optimizer, runner, step_has_collectives=runner.rule.averages is not None)
        self._step = step

    @property
    def skip_policy(self) -> SkipPolicy:
        """How torch's own step is skipped, where that is to be taken."""
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
        """See :class:`StepStrategy`. Gradients stay scaled, but for torch's own step."""
        if self.runner.checks.need_torch():
            decision = self.unscale(request)
            self.step_request = Request(
                check=False, found_inf=_other(decision), earlier_decision=decision
            )
            return decision
        judged = replace(self.with_watch_and_causes(request), max_norm=None)
        decision = check_and_unscale_held(
            gradients.held(self.optimizer.param_groups),
            judged,
            self.agreement(),
            self.decision_device,
            write=False,
            uploads=self.uploads,
        )
        if decision is None:
            self.note_norm(request, None)
            return None
        # The step that follows unscales and clips as it reads the gradients.
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
        """Nothing: the step evaluates a closure before it updates anything."""
        return None

    @property
    def decided(self) -> Decision | None:
        """See :class:`StepStrategy`."""
        return self.runner.decision


class RuleRunner:
    """The steps of one :class:`ampopt.ElementwiseOptimizer`.

    Attributes:
        complete_state: see the constructor.
        checks: what is refused before a step.
        masters: of its parameters.
        uploads: what devices hold of earlier steps.
        plan: what the last step worked on; ``None`` before the first.
        decision: of the last step; ``None`` if it had no gradients, and while torch's step runs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        torchs_step: Callable[[Any], Any],
        *,
        rule: Rule | None = None,
        complete_state: Callable[[dict[str, Any]], None] | None = None,
        torch_needs_state: bool = False,
    ) -> None:
        """Begin.

        Args:
            optimizer: to step, which is not kept alive.
            torchs_step: gives the method ``step`` of its class of torch's.
            rule: of the steps; ``None`` for that of the optimizer.
            complete_state: adds the scalar states that a checkpoint of torch's lacks to the state
                of a parameter, if the flags ask for any.
            torch_needs_state: whether torch's step has to find the state of each parameter.
        """
        self._optimizer = weakref.ref(optimizer)
        self._torchs_step, self._rule = torchs_step, rule
        self.complete_state, self._torch_needs_state = complete_state, torch_needs_state
        self.masters = Masters(optimizer)
        self.uploads: dict[torch.device, Uploads] = {}
        self.plan: Plan | None = None
        self.decision: Decision | None = None
        self.checks = Checks(optimizer)

    @property
    def optimizer(self) -> Any:
        """Whose steps these are."""
        return self._optimizer()

    @property
    def rule(self) -> Rule:
        """What a step does."""
        return self.optimizer.rule if self._rule is None else self._rule

    @functools.cached_property
    def skip_policy(self) -> SkipPolicy:
        """How torch's own step is skipped; chosen before the first."""
        optimizer = self.optimizer
        decision_device = device_of(optimizer.param_groups) or torch.device("cpu")
        return skip_policy_of(optimizer.skip_by, decision_device)

    def step(self, request: Request) -> Decision | None:
        """Step, or skip, with what is in the gradients. ``None`` if no rank has any."""
        on_masters = bool(self.masters.unscaled)
        if on_masters:
            self.masters.check_unedited()
        elif self.masters.read_early is not None:
            self.masters.warn_of_early_reading()
        self.decision = None  # torch's own step is not to see that of the last one
        plan = self.plan
        if plan is None or not plan.revalidate(self):
            plan = self._planned(request.needs_agreement)
        self.decision = self._step_as_torch(request) if plan is None else plan.run(request)
        if on_masters:
            self.masters.drop_gradients()
        return self.decision

    def check_gradients(self) -> None:
        """Refuse gradients that no step can take, before anything changes."""
        held = gradients.held(self.optimizer.param_groups)
        self.checks.warn_of_float16(self.rule)
        if self.checks.need_torch():
            self.checks.check_dtypes()
            self.masters.check_float16(held)
        else:
            self.checks.check_plannable(self.rule)

    def convert_states(self) -> None:
        """Convert the states that were loaded as a step would, but for those that it refuses."""
        optimizer, rule, converted = self.optimizer, self.rule, []
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if not (state := optimizer.state.get(param)):
                    continue
                with contextlib.suppress(KeyError, RuntimeError, TypeError, ValueError):
                    self.checks.check_states(rule, index, [position])
                    flags = rule.flag_values(group, kind_of(group, param))
                    convert(rule, state, param, flags, has_master=needs_master(group, param))
                    converted.append(state)
        widen_scalars(rule, converted)

    def completed(
        self, state: dict[str, Any], group: dict[str, Any], param: Tensor
    ) -> dict[str, Any]:
        """A copy of ``state`` of ``param``, with what a first step would add to it."""
        state = state.copy()
        complete(self, state, param, self.rule.flag_values(group, kind_of(group, param)))
        return state

    def _planned(self, needs_agreement: bool) -> Plan | None:
        """What this step and the next work on; ``None`` if torch's own step has to do this one."""
        self.checks.warn_of_float16(self.rule)
        if self.checks.need_torch():
            return None
        self.plan = Plan(self, needs_agreement=needs_agreement)
        return self.plan

    def _step_as_torch(self, request: Request) -> Decision | None:
        """Take torch's own step, unless the request says to skip it; see ``skip_by``."""
        optimizer = self.optimizer
        if self._torch_needs_state:
            for index, param in gradients.present(optimizer.param_groups):
                if not optimizer.state.get(param):
                    group = optimizer.param_groups[index]
                    state_of(self, param, self.rule.flag_values(group, kind_of(group, param)))
        agreement = ranks.agreement(optimizer.param_groups, optimizer.process_group)
        decision = self.masters.unscale(request, agreement, self.uploads)
        # Hooks of torch's class have run around ours.
        step = beneath_hooks(self._torchs_step(optimizer).__func__)
        if decision is None:
            step(optimizer)
        else:
            call = functools.partial(step, optimizer)
            self.skip_policy.step(optimizer, call, decision)
        return decision


def _other(decision: Decision | None) -> Tensor | None:
    """More than 0 if the step is to be skipped for something else than overflow."""
    return None if decision is None else decision.cause
