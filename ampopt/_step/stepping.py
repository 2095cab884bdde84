"""The object ``optimizer._ampopt``: how an optimizer steps.

There are two ways: :mod:`rule_step` runs an update rule, :mod:`handwritten_step` a hand-written
``step()``. What they share is here. What an optimizer is in the middle of is its :class:`Phase`.
"""

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import accumulated_step, gradients, ranks
from ampopt._step.accumulation import Accumulation
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.masters import Masters
from ampopt._step.missing_scale import MissingScale
from ampopt._step.observers import Observers
from ampopt._step.phase import Pending, Phase
from ampopt._step.rank_agreement import Agreement
from ampopt._step.rank_settings import LeftOut
from ampopt._step.torch_private import undo_state_initialization
from ampopt._warnings import warn_user
from ampopt.loss_scale.base import AnyScale
from ampopt.loss_scale.step_scale import as_loss_scale, next_scale_of, request_for
from ampopt.results import as_flag
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.uploads import Uploads

if TYPE_CHECKING:
    from ampopt._step.rule_step import RuleRunner

__all__ = ["StepOutcome", "StepStrategy"]


class StepOutcome(NamedTuple):
    """The result of a step that was run or skipped.

    Attributes:
        decision: whether to skip, and the coefficients; ``None`` if there were no gradients.
        result: the return value of ``step()``; ``None`` if it was not called.
        called: whether ``step()`` was called.
    """

    decision: Decision | None
    result: Any = None
    called: bool = True


class StepStrategy(RefersToOptimizer, ABC):
    """How one optimizer steps. The methods of ``ampopt.Optimizer`` delegate to it.

    Attributes:
        runner: runs the update rule; ``None`` for an optimizer without a rule.
        masters: the float32 master weights of half-precision parameters.
        uploads: scales that earlier calls have copied to a device, by device.
        accumulation: the sums that ``accumulate`` has filled and no step has used yet.
        phase: what the optimizer is in the middle of, and which calls that allows.
        observers: the watch and the skip conditions.
        missing_scale: warns of a step without a scale, after a loss was multiplied by one.
        needs_closure: whether ``step`` requires a closure.
        grad_norm: the gradient norm of the last step with ``max_norm``; see
            :attr:`ampopt.Optimizer.grad_norm`.
        step_request: the request for the next call of ``optimizer.step``, set by a control point
            and cleared after the call. It is not an argument because hooks, a wrapper that a user
            put on the instance, or a closure may be between the control point and our ``step``.
        left_out: counts calls that this rank leaves out, to compare with other ranks.
        is_stepping: True while a hand-written step runs. Hooks that run meanwhile belong to a
            nested ``super().step()``: what counts steps ignores them.
        in_closure: True while a closure runs that is evaluated again, with a smaller scale, if its
            gradients overflow.
    """

    is_stepping = False
    in_closure = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        runner: "RuleRunner | None",
    ) -> None:
        """Start *idle*.

        Args:
            optimizer: the optimizer to step; stored as a weak reference.
            runner: see the class.
        """
        super().__init__(optimizer)
        self.runner = runner
        self.masters = Masters(optimizer, makes_masters=False) if runner is None else runner.masters
        self.uploads: dict[torch.device, Uploads] = {}
        self.accumulation = Accumulation(optimizer)
        self.phase = Phase(self.accumulation, self.masters)
        self.observers = Observers(optimizer)
        self.missing_scale = MissingScale(optimizer)
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        self.grad_norm: Tensor | None = None
        self.step_request: Request | None = None
        self.left_out = LeftOut()
        self._agreement = ranks.AgreementCache()
        self._warned_without_gradients = False

    @property
    def skip_by(self) -> str:
        """How a hand-written step is skipped; see :attr:`ampopt.Optimizer.skip_by`."""
        return self.optimizer.skip_by

    @property
    def process_group(self) -> Any:
        """The process group that all-reduces the overflow flag, if the user has set one."""
        return self.optimizer.process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        self.optimizer.process_group = process_group

    def __reduce__(self) -> Any:
        """A copied or unpickled optimizer gets a new strategy; see ``descriptors``."""
        self.phase.refuse_unfinished("copying or pickling")
        return type(None), ()

    # --- running a step ---------------------------------------------------------------------------

    @abstractmethod
    def attempt(self, request: Request, *, scale: AnyScale | None = None) -> StepOutcome:
        """Run or skip a step, as ``request`` says. Step hooks run in both cases.

        If the step raises and has left unscaled gradients, these are pending, as after ``unscale``,
        so that another try does not unscale them again.

        Args:
            request: what to do.
            scale: the loss scale of ``request``; ``None`` if the gradients are unscaled already.
        """

    @abstractmethod
    def check_closure_gradients(self, request: Request) -> Decision | None:
        """Check the gradients that a closure has computed, and prepare the step that called it."""

    @abstractmethod
    def check_gradients(self) -> None:
        """Raise for gradients that cannot be unscaled or stepped with, before anything changes."""

    @property
    @abstractmethod
    def decision_of_step(self) -> Decision | None:
        """In a step post-hook: the decision that the step followed; ``None`` if there was none."""

    def step_is_over(self) -> None:
        """Called after every ``optimizer.step``, before its post-hooks, whoever called it."""
        self.left_out.is_decided = True
        self.phase.end()

    def check_step(self) -> None:
        """Call ``ElementwiseOptimizer.check_step``, which raises if no step is allowed now."""
        if self.runner is not None:
            self.optimizer.check_step()

    def needs_torch(self) -> bool:
        """Whether the step is torch's or a hand-written one, and not that of a rule.

        Raises for sparse gradients that the rule does not take.
        """
        return self.runner is None or self.runner.checks.need_torch()

    def make_states(self) -> None:
        """Make every state that a first step would make, also of parameters without a gradient.

        Raises ``NotImplementedError`` if only a step can make them.
        """
        assert self.runner is not None
        self.runner.make_states()

    @contextmanager
    def restored_on_failure(self, restore_rng: Callable[[], None]) -> Iterator[None]:
        """Context manager: roll back what ``step(closure)`` has changed if it raises."""
        with self.masters.restored_on_failure():
            try:
                yield
            except BaseException:
                self.phase.discard()
                restore_rng()
                raise

    # --- with unscaled gradients, or sums ---------------------------------------------------------

    def attempt_with_sums(self, request: Request, *, scale: AnyScale | None) -> StepOutcome:
        """Like :meth:`attempt`, on the accumulated sums. The decision covers all micro-batches.

        If the step raises, the sums are pending, as after ``unscale``.
        """
        self.check_step()
        self.check_gradients()
        decision = self._end_cycle(replace(request, max_norm=None))  # the step clips
        found_inf = None if decision is None else decision.found_inf
        step = Request(
            check=False,
            found_inf=found_inf,
            drop=request.drop,
            max_norm=request.max_norm,
            earlier_decision=decision,
        )
        try:
            outcome = self.attempt(step)
        except BaseException:
            if self.accumulation.swapped_in:  # else a hook has raised after the step
                self._start_pending(scale, decision)
            raise
        self.accumulation.restore_gradients()
        return outcome._replace(decision=decision)

    def end_cycle_in_plain_step(self, *, has_closure: bool) -> None:
        """Have the plain ``step()`` that has begun step with the sums, or skip if one overflowed.

        Raises:
            RuntimeError: the step has a closure, or is one of ``torch.distributed.checkpoint``.
        """
        if has_closure:
            raise RuntimeError(
                "step(closure): accumulate() was called, but the closure would compute new "
                "gradients. Call step() or unscale_and_step() without one first, or zero_grad() to "
                "discard what was accumulated"
            )
        if undo_state_initialization(self.optimizer):
            call = "a step of torch.distributed.checkpoint, to make states"
            self.phase.refuse_unfinished(call)
        self.check_step()
        self.missing_scale.warn()
        self.unscale_for_later(None)

    def unscale_for_later(self, scale: AnyScale | None) -> Pending:
        """Unscale the gradients, or end the accumulation cycle, for a step that follows later."""
        decision, has_sums = None, self.accumulation.cycle is not None
        if has_sums:
            decision = self._end_cycle(request_for(scale))
        elif scale is not None:
            decision = self.unscale(request_for(scale))
            self.masters.show_unscaled()
            if decision is None:
                self.warn_without_gradients()
        groups = self.optimizer.param_groups
        if has_sums or scale is None:  # then no unscale has filled the masters
            self.needs_torch()
            self.masters.copy_gradients(gradients.params_with_grads(groups))
        return self._start_pending(scale, decision)

    def _start_pending(self, scale: AnyScale | None, decision: Decision | None) -> Pending:
        """Have the gradients wait for a step, as ``decision`` about them says."""
        every = gradients.params_of(self.optimizer.param_groups)
        params = [param for param in every if param.grad is not None]
        self.phase.pending = pending = Pending(
            self.flag(decision),
            scale,
            next_scale_of(scale, decision),
            decision,
            list(zip(params, map(weakref.ref, map(gradients.grad_of, params)), strict=True)),
        )
        return pending

    def unscale(self, request: Request) -> Decision | None:
        """Unscale, check and clip the gradients, in place or on the master weights.

        Returns:
            The decision; ``None`` if there are no gradients.
        """
        decision = self.masters.unscale(self.observers.extend(request))
        self.note_norm(request, decision)
        return decision

    def _end_cycle(self, request: Request) -> Decision | None:
        """Assign the accumulated sums to ``p.grad``; see ``accumulated_step``."""
        assert self.accumulation.cycle is not None
        return accumulated_step.end_cycles(
            [self],
            self.observers.extend(request),
            self.agreement(),
            self.accumulation.cycle.decision_device,
        )

    def note_norm(self, request: Request, decision: Decision | None) -> None:
        """Set :attr:`grad_norm` if ``request`` clips. Without gradients the norm is 0."""
        if request.max_norm is not None:
            self.grad_norm = self.no_overflow() if decision is None else decision.norm

    # --- device and ranks -------------------------------------------------------------------------

    @property
    def decision_device(self) -> torch.device:
        """The device on which overflow flag and scale are computed; see ``gradients.device_of``."""
        return gradients.device_of(self.optimizer.param_groups)

    def agreement(self) -> Agreement | None:
        """The ranks that all-reduce the overflow flag; ``None`` if this rank decides alone."""
        return self._agreement.get([self.optimizer], self.process_group)

    def no_overflow(self) -> Tensor:
        """A new flag that is 0."""
        return torch.zeros((), dtype=torch.float32, device=self.decision_device)

    def flag(self, decision: Decision | None) -> Tensor:
        """The ``found_inf`` that callers get: that of ``decision``, or 0 if it is ``None``."""
        if decision is None:
            return as_flag(self.no_overflow())
        return as_flag(decision.found_inf, decision.overflow_reports)

    def warn_without_gradients(self) -> None:
        """Warn, once, if parameters have no gradient because the model has others by now."""
        optimizer = self.optimizer
        if self._warned_without_gradients or optimizer.state:
            return
        call = None
        if ranks.may_be_replaced(optimizer.param_groups, self.process_group):
            call = "fully_shard"
        elif any(param.is_meta for param in gradients.params_of(optimizer.param_groups)):
            call = "to_empty"
        if call is not None:
            self._warned_without_gradients = True
            warn_user(
                f"no parameter of this {type(optimizer).__name__} has a gradient, so nothing was "
                f"stepped. If {call} was called after the optimizer was made, the model has other "
                "parameters by now, which the optimizer never updates: make the optimizer after "
                f"{call}. If no gradient is expected yet, ignore this",
                RuntimeWarning,
            )

    # --- scales -----------------------------------------------------------------------------------

    def scale(self, grads_scaled_by: Any) -> AnyScale | None:
        """Convert the argument ``grads_scaled_by`` to a loss scale.

        Raises:
            RuntimeError: an earlier step has used the scale.
            TypeError: see :func:`ampopt.loss_scale.step_scale.as_loss_scale`.
            ValueError: likewise.
        """
        scale = as_loss_scale(
            grads_scaled_by, self.decision_device, self.uploads, in_closure=self.in_closure
        )
        self.phase.refuse_stepped(scale)
        return scale
