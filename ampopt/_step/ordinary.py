"""How an ordinary ``step()``, which knows nothing of scaling, is taken or skipped."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.rule_runner import RuleRunner
from ampopt._step.snapshot import Snapshot
from ampopt._step.step_hooks import hooked, is_replaced, run_step_hooks, written_step
from ampopt._step.stepping import StepOutcome, StepStrategy
from ampopt._step.torch_private import mark_as_called
from ampopt._step.transaction import SkipPolicy, skip_policy_of
from ampopt_kernels.decision import Decision, Request

__all__ = ["OrdinaryStep"]

StateMaker = Callable[[Any, Tensor], None]


class OrdinaryStep(StepStrategy):
    """Unscales in one pass, and then steps or skips; what a rule does in one."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        own_step: bool = False,
        make_state: StateMaker | None = None,
        never_written: frozenset[str] = frozenset(),
        step_has_collectives: bool = False,
        runner: RuleRunner | None = None,
    ) -> None:
        """Begin.

        Args:
            optimizer: to step.
            own_step: whether its step is another than that of the class that the next three are of.
            make_state: ``make_state(optimizer, param)`` makes the state that a first step would, as
                it would be before; after which the step allows transactions.
            never_written: keys of the state whose tensors the step replaces and never writes (see
                :class:`Snapshot`).
            step_has_collectives: whether it works on whole ``DTensor``s, so that ranks meet within
                it.
            runner: that ``super().step()`` runs, in a step around one.
        """
        super().__init__(
            optimizer, runner, step_has_collectives=step_has_collectives and not own_step
        )
        self._make_state = None if own_step else make_state
        self._never_written = frozenset() if own_step else never_written
        self._decision: Decision | None = None  # of a control point, while step and hooks run
        self._around: Decision | None = None  # of a scaler's step, or closure's, until hooks run
        self._decided: Decision | None = None  # that of the two, or none, which these hooks follow

    @functools.cached_property
    def skip_policy(self) -> SkipPolicy | None:
        """How the step is skipped, chosen before the first; ``None`` if it skips by itself."""
        skip_by = self.skip_by
        if skip_by == "step":
            return None
        if self.runner is not None and skip_by == "auto" and self.decision_device.type != "cpu":
            _warn_of_own_step(type(self.optimizer).__name__)
        transacts = self._make_state is not None
        # Rules are run by kernels, which torch's dispatcher does not see.
        unseen = self.runner is not None
        return skip_policy_of(skip_by, self.decision_device, transacts=transacts, unseen=unseen)

    # --- what control points ask ----------------------------------------------------------------

    def attempt(self, request: Request, step: Callable[[], Any] | None = None) -> StepOutcome:
        """Step as ``request`` says, or skip. Step hooks run in any case, after unscaling.

        What they do is not part of the step, so it is neither undone nor a reason to look.

        Args:
            request: what is asked.
            step: to call, where hooks run around this already.
        """
        self.check_step()
        decision = self.unscale(request)
        self._decision = decision or request.earlier_decision
        self._decided = None
        try:
            if step is not None:
                return self._step_in_hooks(step, decision)
            return self._step_and_hooks(decision)
        finally:
            self._decision = None

    def around(self, step: Callable[[], Any], request: Request) -> StepOutcome:
        """Unscale and call ``step``, within the hooks, as ``request`` says, or skip it."""
        attempt = self.attempt(request, step)
        self._around = attempt.decision
        return attempt

    def check_closure_gradients(self, request: Request) -> Decision | None:
        """Judge what a closure left in the gradients, and make them ready for ``step()``."""
        if self.causes:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step(closure) cannot be skipped once it has "
                "evaluated the closure, as skip_when wants it: step without a closure, with "
                "unscale_and_step(grads_scaled_by=scale, loss=loss)"
            )
        self._around = self.unscale(request)
        return self._around

    @contextmanager
    def restored_on_failure(self, restore_rng: Callable[[], None]) -> Iterator[None]:
        """See :class:`StepStrategy`. The next step does not see the decision of a failed one."""
        try:
            with super().restored_on_failure(restore_rng):
                yield
        finally:
            self._around = None

    def check_gradients(self) -> None:
        """See :class:`StepStrategy`."""
        self.masters.check_float16(gradients.held(self.optimizer.param_groups))

    def snapshot(self) -> Snapshot:
        """See :class:`StepStrategy`."""
        return Snapshot(self.optimizer, shared=self._never_written)

    @property
    def decided(self) -> Decision | None:
        """See :class:`StepStrategy`."""
        return self._decided

    @property
    def skip_flag(self) -> Tensor | None:
        """See :class:`StepStrategy`.

        Not while the step runs: those of torch's, which skip where they see one, may see none.
        Nor of a scaler, which has left its own on the optimizer.
        """
        if self._decision is None or self._decided is None:
            return None
        return self._decided.skip

    def step_is_over(self) -> None:
        """See :class:`StepStrategy`."""
        self.end_pending()
        self._decided = self._around if self._decision is None else self._decision
        self._around = None

    # --- a step, or none --------------------------------------------------------------------------

    def _step_and_hooks(self, decision: Decision | None) -> StepOutcome:
        optimizer = self.optimizer
        if is_replaced(optimizer):  # by a step whose hooks cannot be told from it
            attempt = self._step_or_skip(optimizer.step, decision)
            if not attempt.called:
                run_step_hooks(optimizer)
            return attempt
        step = written_step(type(optimizer))

        def within_hooks(*args: Any, **kwargs: Any) -> StepOutcome:
            return self._step_in_hooks(functools.partial(step, *args, **kwargs), decision)

        attempt = hooked(within_hooks)(optimizer)
        mark_as_called(optimizer)
        return attempt

    def _step_in_hooks(self, step: Callable[[], Any], decision: Decision | None) -> StepOutcome:
        """As :meth:`_step_or_skip`, where hooks are run around it."""
        self.is_stepping = True
        try:
            return self._step_or_skip(step, decision)
        finally:
            self.is_stepping = False

    def _step_or_skip(self, step: Callable[[], Any], decision: Decision | None) -> StepOutcome:
        """Call ``step`` or skip it.

        An ordinary step cannot be told of a flag on the device: the host looks, or the step is a
        transaction (see :attr:`ampopt.Optimizer.skip_by`).
        """
        if decision is None:
            return StepOutcome(None, called=False)
        optimizer, skip_policy = self.optimizer, self.skip_policy
        if skip_policy is None:
            return StepOutcome(decision, self._step_told(step, decision.skip))
        if self._make_state is not None:
            for _, param in gradients.present(optimizer.param_groups):
                self._make_state(optimizer, param)
        called, returned = skip_policy.step(optimizer, step, decision)
        return StepOutcome(decision, returned, called)

    def _step_told(self, step: Callable[[], Any], skip: Tensor) -> Any:
        """Call a ``step`` that skips by itself where ``found_inf`` says so; a rule in it does."""
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
    """What the step of a rule loses by another around it, which can be skipped as a whole alone."""
    warnings.warn(
        f"the step of {name} is around that of a rule, so both are taken and undone where they "
        "are to be skipped, or the host waits for the overflow flag. If it only refuses some "
        "steps, define check_step() in its place; if what it does need not be skipped, say "
        'skip_by = "step" in the class; else skip_by = "transaction" or "host"',
        UserWarning,
        stacklevel=2,
    )
