"""How a hand-written ``step()``, which knows nothing of loss scales, is run or skipped."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.rule_step import RuleRunner
from ampopt._step.step_hooks import (
    has_hooks,
    hooked,
    is_replaced,
    run_step_hooks,
    written_step,
)
from ampopt._step.step_rollback import LARGE, SkipPolicy, skip_policy_of
from ampopt._step.step_snapshot import Snapshot
from ampopt._step.stepping import StepOutcome, StepStrategy
from ampopt._step.torch_private import mark_as_called
from ampopt._warnings import warn_user
from ampopt.loss_scale.base import AnyScale
from ampopt_kernels.step_data import Decision, Request

__all__ = ["HandwrittenStep"]

StateMaker = Callable[[Any, Tensor], None]


class HandwrittenStep(StepStrategy):
    """The strategy of a hand-written ``step()``: unscale the gradients, then run or skip the step.

    A :class:`~ampopt._step.rule_step.RuleStep` does both in one pass.

    Attributes:
        _runs_step: whether :meth:`attempt` is running the step.
        _decision: the decision that the running step follows; ``None`` if there is none.
        _decision_of_step: ``_decision`` once the step is over, for post-hooks. ``None`` while the
            step runs: fused optimizers of torch skip if they find ``found_inf``, and must not find
            ours.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        make_state: StateMaker | None = None,
        never_written: frozenset[str] = frozenset(),
        most_copied: float = LARGE,
        runner: RuleRunner | None = None,
    ) -> None:
        """Store what is known of the step.

        Args:
            optimizer: the optimizer to step.
            make_state: ``make_state(optimizer, param)`` creates the state of a parameter with the
                values it has before the first step. With it, no step adds state.
            never_written: keys of state tensors that the step replaces, and never writes in place
                (see :class:`Snapshot`).
            most_copied: see :class:`~ampopt._step.step_rollback.SkipPolicy`.
            runner: runs the rule in ``super().step()``, if ``step`` overrides that of a rule-based
                optimizer.
        """
        super().__init__(optimizer, runner)
        self._make_state, self._never_written = make_state, never_written
        self._most_copied = most_copied
        self._runs_step = False
        self._decision: Decision | None = None
        self._decision_of_step: Decision | None = None

    @functools.cached_property
    def skip_policy(self) -> SkipPolicy | None:
        """How the step is skipped; ``None`` if it reads ``found_inf`` itself."""
        skip_by = self.skip_by
        if skip_by == "step":
            return None
        if self.runner is not None and skip_by == "auto" and self.decision_device.type != "cpu":
            _warn_of_own_step(type(self.optimizer).__name__)
        return skip_policy_of(skip_by, self.decision_device, most_copied=self._most_copied)

    # --- called by control points -----------------------------------------------------------------

    def attempt(
        self,
        request: Request,
        step: Callable[[], Any] | None = None,
        *,
        scale: AnyScale | None = None,
    ) -> StepOutcome:
        """See :class:`StepStrategy`. Step hooks run after unscaling.

        What hooks change is not part of the step: a skip does not roll it back.

        Args:
            request: what to do.
            step: the function to call, if step hooks already run around this call.
            scale: see :class:`StepStrategy`.
        """
        self.check_step()
        with torch.no_grad():
            decision = self.unscale(request)
        followed = decision or request.earlier_decision
        if decision is None and self.agreement() is not None:  # other ranks may step
            decision = followed
        self._decision, self._decision_of_step, self._runs_step = followed, None, True
        try:
            if step is None:
                return self._step_and_hooks(decision)
            outcome = self.within_step(self._step_or_skip, step, decision)
        except BaseException:
            if scale is not None and self._decision_of_step is None:  # it was not a post-hook
                self._start_pending(scale, decision)
            raise
        finally:
            self._decision, self._runs_step = None, False
        self._decision = followed  # the post-hooks run after this call
        return outcome

    def plain_request(self, *, has_closure: bool) -> Request | None:
        """The request that a plain ``step()`` follows: that of a pending unscale, or of the sums.

        ``None`` if there is nothing to follow, or if a control point runs the step and follows it.

        Raises:
            RuntimeError: an unscale is pending, or sums wait, and the step has a closure, which
                would compute other gradients than those that were checked.
        """
        if self._runs_step:
            return None
        if self.accumulation.cycle is not None:
            self.end_cycle_in_plain_step(has_closure=has_closure)
        if has_closure:
            self.phase.refuse_pending("step(closure)")
        self._decision_of_step = None
        pending = self.phase.pending
        return None if pending is None else pending.request

    @torch.no_grad()
    def check_closure_gradients(self, request: Request) -> Decision | None:
        """See :class:`StepStrategy`. Gradients are unscaled in place."""
        if self.observers.causes:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step(closure) cannot be skipped once it has "
                "evaluated the closure, as skip_when needs: step without a closure, with "
                "unscale_and_step(grads_scaled_by=scale, loss=loss)"
            )
        self._decision = self.unscale(request)
        return self._decision

    @contextmanager
    def restored_on_failure(self, restore_rng: Callable[[], None]) -> Iterator[None]:
        """See :class:`StepStrategy`. The decision of a step that raised is dropped."""
        snapshot = Snapshot(self.optimizer, shared_keys=self._never_written)
        with super().restored_on_failure(restore_rng):
            try:
                yield
            except BaseException:
                snapshot.restore()
                raise
            finally:
                self._decision = None

    def check_gradients(self) -> None:
        """See :class:`StepStrategy`."""
        self.masters.check_float16(gradients.params_with_grads(self.optimizer.param_groups))

    def make_states(self) -> None:
        """See :class:`StepStrategy`."""
        if self.runner is not None:
            super().make_states()
        elif self._make_state is None:
            raise NotImplementedError(
                f"initialize_states: the step() of {type(self.optimizer).__name__} makes its "
                "states itself, so only a step can make them"
            )
        else:
            for param in gradients.params_of(self.optimizer.param_groups):
                if param.requires_grad:
                    self._make_state(self.optimizer, param)

    @property
    def decision_of_step(self) -> Decision | None:
        """See :class:`StepStrategy`."""
        return self._decision_of_step

    def step_is_over(self) -> None:
        """See :class:`StepStrategy`. A ``super().step()`` is a part of the step, and may follow."""
        if not self.is_stepping:
            super().step_is_over()
        if self._decision is None:
            # Not before the step: that of a wrapper calls a control point of the inner optimizer.
            self.missing_scale.warn()
        self._decision_of_step = self._decision
        if not self._runs_step:  # else it may be a ``super().step()`` that is over
            self._decision = None

    # --- calling the step -------------------------------------------------------------------------

    def within_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``call``, which runs the step that a class defines, for :attr:`is_stepping`."""
        before, self.is_stepping = self.is_stepping, True
        try:
            return call(*args, **kwargs)
        finally:
            self.is_stepping = before

    def _step_and_hooks(self, decision: Decision | None) -> StepOutcome:
        """Step or skip, and run the step hooks of the optimizer once."""
        optimizer = self.optimizer
        if is_replaced(optimizer):  # by a function that may run the step hooks itself
            outcome = self._step_or_skip(optimizer.step, decision)
            if not outcome.called:
                run_step_hooks(optimizer)
            return outcome
        step = written_step(type(optimizer))

        def within_hooks(*args: Any, **kwargs: Any) -> StepOutcome:
            own_step = functools.partial(step, *args, **kwargs)
            return self.within_step(self._step_or_skip, own_step, decision)

        if has_hooks(optimizer):
            outcome = hooked(within_hooks)(optimizer)
        else:  # without torch's wrapper, which costs time
            outcome = within_hooks(optimizer)
            self.step_is_over()
        mark_as_called(optimizer)
        return outcome

    def _step_or_skip(self, step: Callable[[], Any], decision: Decision | None) -> StepOutcome:
        """Call ``step``, or skip it.

        A hand-written step cannot read a flag on the device. So either the flag is copied to the
        CPU, which synchronizes, or the step runs and is rolled back (see
        :attr:`ampopt.Optimizer.skip_by`).
        """
        if decision is None:
            return StepOutcome(None, called=False)
        optimizer, skip_policy = self.optimizer, self.skip_policy
        if skip_policy is None:
            return StepOutcome(decision, self._step_with_flag(step, decision.skip))
        if self._make_state is not None:
            for _, param in gradients.present(optimizer.param_groups):
                self._make_state(optimizer, param)
        called, result = skip_policy.step(optimizer, step, decision)
        return StepOutcome(decision, result, called)

    def _step_with_flag(self, step: Callable[[], Any], skip: Tensor) -> Any:
        """Call a ``step`` that reads ``optimizer.found_inf``, or whose rule does."""
        optimizer = self.optimizer
        optimizer.found_inf = flag = skip.to(torch.float32)
        if self.runner is not None:
            self.step_request = Request(check=False, found_inf=flag)
        try:
            return step()
        finally:
            self.step_request = None
            vars(optimizer).pop("found_inf", None)


def _warn_of_own_step(name: str) -> None:
    """Warn that skipping an overridden ``step`` of a rule costs a rollback or a synchronization."""
    warn_user(
        f"{name}.step overrides the step of a rule. So a step that overflows is run and rolled "
        "back, or every step waits for the overflow flag. If the override only refuses some steps, "
        "define check_step() instead. If its own code need not be skipped, set "
        'skip_by = "step" in the class. Otherwise set skip_by = "transaction" or "host"',
    )
