"""The object ``optimizer._ampopt``: how an optimizer steps, and its state between two calls.

Between two calls, an optimizer is in one of three states::

               accumulate()
       idle ----------------> accumulating
         |                         |
         +-----------+-------------+
                     | unscale()
                     v
                  pending

Every step, and ``zero_grad``, returns to *idle*. *Accumulating* is
``StepStrategy.accumulation.cycle is not None``: sums of gradients wait for a step. *Pending* is
``StepStrategy.pending is not None``: gradients are unscaled, and no step has used them yet. A call
that the state does not allow raises an error: see :meth:`StepStrategy.refuse_pending` and
:meth:`StepStrategy.refuse_unfinished`.
"""

import inspect
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import accumulated_step, gradients, ranks
from ampopt._step.accumulation import Accumulation
from ampopt._step.all_reduce import Agreement
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.masters import Masters
from ampopt._step.overflow import device_of
from ampopt._step.rank_settings import LeftOut
from ampopt._step.snapshot import Snapshot
from ampopt.loss_scale.arguments import as_loss_scale, next_scale_of, request_for
from ampopt.loss_scale.base import AnyScale, LossScale, host_may_read
from ampopt.loss_scale.scalings import scalings, untold_scale
from ampopt.results import as_flag
from ampopt_kernels.decision import Decision, Request
from ampopt_kernels.uploads import Uploads

__all__ = ["Pending", "StepOutcome", "StepStrategy"]


@dataclass(frozen=True)
class Pending:
    """The result of an ``unscale`` that no step has followed yet.

    Attributes:
        found_inf: float32 flag, more than 0 if a gradient was inf or NaN; what ``unscale``
            returned.
        scale: the loss scale that was passed to ``unscale``; ``None`` for gradients without a
            scale.
        next_scale: the next loss scale, which ``unscale`` returned.
        decision: the result of the check; ``None`` if there was nothing to check, or no gradient.
        gradients: each parameter that had a gradient, and a weak reference to that gradient.
    """

    found_inf: Tensor
    scale: AnyScale | None
    next_scale: Any
    decision: Decision | None
    gradients: tuple[tuple[Tensor, weakref.ref[Any]], ...]

    @property
    def request(self) -> Request | None:
        """The request of the step that follows; ``None`` if it has no overflow flag to follow."""
        if self.decision is None:
            return None
        return Request(
            check=False,
            found_inf=self.found_inf,
            drop=self.scale is None or self.scale.drop_overflow_update,
            earlier_decision=self.decision,
        )

    @property
    def is_cleared(self) -> bool:
        """Whether there were gradients, and no parameter has one now."""
        params = [param for param, _ in self.gradients]
        return bool(params) and all(param.grad is None for param in params)

    @property
    def is_left(self) -> bool:
        """Whether a parameter still has the gradient that was unscaled, and not another one."""
        return any(param.grad is not None and param.grad is ref() for param, ref in self.gradients)


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
    """How one optimizer steps, and its state between two calls.

    The overflow-aware methods of ``ampopt.Optimizer`` delegate to it. There are two subclasses:
    :class:`~ampopt._step.ordinary.OrdinaryStep` for a hand-written ``step()``, and
    :class:`~ampopt._step.by_rule.RuleStep` for an update rule that kernels run.

    Attributes:
        masters: the float32 master weights of half-precision parameters.
        needs_closure: whether ``step`` requires a closure.
        accumulation: the sums that ``accumulate`` has filled and no step has used yet.
        grad_norm: the gradient norm of the last step with ``max_norm``; see
            :attr:`ampopt.Optimizer.grad_norm`.
        uploads: constants that earlier calls have copied to a device, by device.
        step_request: the request for the next call of ``optimizer.step``, set by a control point
            and cleared after the call. It is not an argument because hooks, a wrapper that a user
            put on the instance, or a closure may be between the control point and our ``step``.
        watch: the :class:`ampopt.Watch` that records statistics of the gradients, or ``None``.
        causes: further conditions that skip a step, each an :class:`ampopt.skip_when`.
        left_out: counts calls that this rank leaves out, to compare with other ranks.
        loss: the loss that the caller passed to the running control point, for ``causes``; else
            ``None``.
        is_stepping: True while a control point runs the step. Hooks that run meanwhile belong to a
            nested ``super().step()``, and are ignored.
        in_closure: True while a closure runs that is evaluated again, with a smaller scale, if its
            gradients overflow.
    """

    is_stepping = False
    in_closure = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        uploads: dict[torch.device, Uploads],
        *,
        step_has_collectives: bool = False,
    ) -> None:
        """Start in the state *idle*.

        Args:
            optimizer: the optimizer to step; stored as a weak reference.
            masters: see the class.
            uploads: see the class.
            step_has_collectives: whether the step itself calls collectives, as operations on
                ``DTensor``s do; see :class:`ampopt._step.all_reduce.Agreement`.
        """
        super().__init__(optimizer)
        self.masters, self.uploads = masters, uploads
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        self._pending: Pending | None = None
        self.watch: Any = None
        self.causes: tuple[Any, ...] = ()
        self.loss: Tensor | None = None
        self.accumulation = Accumulation(optimizer)
        self.grad_norm: Tensor | None = None
        self.step_request: Request | None = None
        self.left_out = LeftOut()
        self._agreement = ranks.AgreementCache(step_has_collectives=step_has_collectives)
        self._reserved_names: set[str] = set()
        self._warned_without_gradients = self._warned_of_scale = False
        self._scalings_before = scalings()
        self._process_group: Any = None  # if the optimizer uses the name for something else
        self._stepped_with: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def skip_by(self) -> str:
        """How a hand-written step is skipped; see :attr:`ampopt.Optimizer.skip_by`."""
        return "auto" if "skip_by" in self._reserved_names else self.optimizer.skip_by

    @property
    def process_group(self) -> Any:
        """The process group that all-reduces the overflow flag, if the user has set one."""
        has_attribute = "process_group" not in self._reserved_names
        return self.optimizer.process_group if has_attribute else self._process_group

    def decide_with(self, process_group: Any) -> None:
        """Set :attr:`process_group`."""
        if "process_group" in self._reserved_names:
            self._process_group = process_group
        else:
            self.optimizer.process_group = process_group

    def reserve_name(self, name: str) -> None:
        """Ignore the attribute ``name`` of the optimizer, whose class uses it otherwise."""
        self._reserved_names.add(name)

    def __reduce__(self) -> Any:
        """A copied or unpickled optimizer gets a new strategy; see ``descriptors``."""
        self.refuse_unfinished("copying or pickling")
        return type(None), ()

    # --- running a step ---------------------------------------------------------------------------

    @abstractmethod
    def attempt(self, request: Request) -> StepOutcome:
        """Run or skip a step, as ``request`` says. Step hooks run in both cases."""

    @abstractmethod
    def check_closure_gradients(self, request: Request) -> Decision | None:
        """Check the gradients that a closure has computed, and prepare the step that called it."""

    @abstractmethod
    def check_gradients(self) -> None:
        """Raise for gradients that cannot be unscaled or stepped with, before anything changes."""

    @abstractmethod
    def check_step(self) -> None:
        """Call ``ElementwiseOptimizer.check_step``, which raises if no step is allowed now."""

    @abstractmethod
    def needs_torch(self) -> bool:
        """Whether the step is torch's or a hand-written one, and not that of a rule.

        Raises for sparse gradients that the rule does not take.
        """

    @abstractmethod
    def make_states(self) -> None:
        """Make every state that a first step would make, also of parameters without a gradient.

        Raises ``NotImplementedError`` if only a step can make them.
        """

    @abstractmethod
    def snapshot(self) -> Snapshot | None:
        """What to restore if ``step(closure)`` raises; ``None`` if it raises before any change."""

    @property
    @abstractmethod
    def decision_of_step(self) -> Decision | None:
        """In a step post-hook: the decision that the step followed; ``None`` if there was none."""

    @property
    def skip_flag(self) -> Tensor | None:
        """In a step post-hook: more than 0 if the step was skipped; ``None`` if it surely ran."""
        return None if self.decision_of_step is None else self.decision_of_step.skip

    def with_watch_and_causes(self, request: Request) -> Request:
        """Add to ``request`` what :attr:`watch` and :attr:`causes` need and do not have yet."""
        earlier = request.earlier_decision
        if self.watch is not None and not (earlier is not None and earlier.measured):
            request = replace(request, measure=True)
        if self.causes and request.check:
            new_causes = (cause for cause in self.causes if cause not in request.causes)
            request = replace(request, causes=(*request.causes, *new_causes))
            if any(cause.needs_loss for cause in self.causes):
                request = replace(request, loss=self._loss_for_causes())
        return request

    def _loss_for_causes(self) -> Tensor | None:
        """The loss of the step; ``None`` if other ranks supply theirs.

        Raises:
            RuntimeError: no process group is known, and this rank has no loss; or there are several
                ranks, and nothing says which of them train the same model.
        """
        if self.agreement() is None:
            if self.loss is None:
                raise RuntimeError(
                    "skip_when(loss=...) needs the loss of the step: pass it to the control "
                    "point, optimizer.unscale_and_step(grads_scaled_by=scale, loss=loss), or use "
                    "ampopt.TrainStep"
                )
            if ranks.are_several():
                raise RuntimeError(
                    "skip_when(loss=...) tests the mean loss of all ranks that train one model, "
                    "but it is not known which ranks these are: give the optimizer process_group="
                    "torch.distributed.group.WORLD, and, under DistributedDataParallel, "
                    "replicated=True in its param groups. A model that this rank trains alone "
                    "takes a process_group of this rank alone"
                )
        return self.loss

    @contextmanager
    def with_loss(self, loss: Any) -> Iterator[None]:
        """Context manager: the running control point follows ``loss``; see :meth:`set_loss`."""
        self.set_loss(loss)
        try:
            yield
        finally:
            self.loss = None

    def set_loss(self, loss: Any) -> None:
        """Set :attr:`loss`, for the conditions in :attr:`causes` and for :attr:`watch`.

        Raises:
            TypeError: ``loss`` is neither a number nor a tensor of one element.
        """
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss), device="cpu")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss must be a number or a tensor of one element, got {what}")
        self.loss = loss

    def step_is_over(self) -> None:
        """Called after every ``optimizer.step``, before its post-hooks, whoever called it."""
        self.end_pending()

    def attempt_with_sums(self, request: Request) -> StepOutcome:
        """Like :meth:`attempt`, on the accumulated sums. The decision covers all micro-batches."""
        self.check_gradients()
        decision = self.end_cycle(self.with_watch_and_causes(request))
        self.accumulation.unhook()
        found_inf = None if decision is None else decision.found_inf
        step = Request(
            check=False,
            found_inf=found_inf,
            drop=request.drop,
            max_norm=request.max_norm,
            earlier_decision=decision,
        )
        try:
            return self.attempt(step)._replace(decision=decision)
        finally:
            self.accumulation.restore_gradients()

    # --- between unscale and step -----------------------------------------------------------------

    @property
    def pending(self) -> Pending | None:
        """The result of an unscale that no step has followed yet; else ``None``.

        An unscale whose gradients have all been cleared since, as ``model.zero_grad()`` does, is
        over.
        """
        if self._pending is not None and self._pending.is_cleared:
            self._drop_pending()
        return self._pending

    @pending.setter
    def pending(self, pending: Pending | None) -> None:
        """Set or forget the result; gradients stay as they are."""
        self._pending = pending

    def start_pending(self, scale: AnyScale | None) -> Pending:
        """Unscale the gradients, or end the accumulation cycle, for a step that follows later."""
        decision = None
        if self.accumulation.cycle is not None:
            decision = self.end_cycle(self.with_watch_and_causes(request_for(scale)))
            self.fill_masters()
        elif scale is None:
            self.fill_masters()
        else:
            decision = self.unscale(request_for(scale))
            self.masters.show_unscaled()
            if decision is None:
                self.warn_without_gradients()
        self._pending = Pending(
            self.flag(decision),
            scale,
            next_scale_of(scale, decision),
            decision,
            tuple(
                (param, weakref.ref(grad))
                for _, param, grad in gradients.with_groups(self.optimizer.param_groups)
            ),
        )
        return self._pending

    def _drop_pending(self) -> None:
        """Forget an unscale whose gradients are gone, and what it has put on masters."""
        self._pending = None
        self.masters.drop_gradients()
        self.accumulation.restore_gradients(keep_present=True)

    # --- gradients --------------------------------------------------------------------------------

    def unscale(self, request: Request) -> Decision | None:
        """Unscale, check and clip the gradients, in place or on the master weights.

        Returns:
            The decision; ``None`` if there are no gradients.
        """
        if request.scale is not None:
            self.needs_torch()  # raises for sparse gradients if the step would
        decision = self.masters.unscale(
            self.with_watch_and_causes(request), self.agreement(), self.uploads
        )
        self.note_norm(request, decision)
        return decision

    def fill_masters(self) -> None:
        """Copy gradients without a scale to the master weights, as :meth:`unscale` does others."""
        self.needs_torch()
        self.masters.copy_gradients(gradients.params_with_grads(self.optimizer.param_groups))

    def end_cycle(self, request: Request) -> Decision | None:
        """Assign the accumulated sums to ``p.grad``; see ``accumulated_step``."""
        assert self.accumulation.cycle is not None
        decision_device, wide = self.accumulation.cycle.decision_device, [self.takes_wide_sums]
        return accumulated_step.end_cycles(
            [self.accumulation], request, self.agreement(), decision_device, wide=wide
        )

    @property
    def takes_wide_sums(self) -> bool:
        """Whether the step accepts gradients in another dtype than the parameters'."""
        return not self.needs_torch()

    def offenders(self) -> Iterator[str]:
        """Names of the parameters whose gradients are not finite. Synchronizes."""
        scale = None if self.step_request is None else self.step_request.scale
        return gradients.offenders(self.optimizer.param_groups, scale, self.masters.holder)

    def discard(self, decision: Decision | None) -> None:
        """Tell :attr:`watch` that no step uses these gradients, since their closure runs again."""
        if self.watch is not None:
            self.watch._note_discarded(decision)

    def note_norm(self, request: Request, decision: Decision | None) -> None:
        """Set :attr:`grad_norm` if ``request`` clips. Without gradients the norm is 0."""
        if request.max_norm is not None:
            self.grad_norm = self.no_overflow() if decision is None else decision.norm

    @contextmanager
    def restored_on_failure(self, restore_rng: Callable[[], None]) -> Iterator[None]:
        """Context manager: roll back what ``step(closure)`` has changed if it raises."""
        snapshot = self.snapshot()
        with self.masters.restored_on_failure():
            try:
                yield
            except BaseException:
                self.pending = None
                self.accumulation.discard()
                if snapshot is not None:
                    snapshot.restore()
                restore_rng()
                raise

    # --- device and ranks -------------------------------------------------------------------------

    @property
    def decision_device(self) -> torch.device:
        """The device on which overflow flag and scale are computed; see :func:`device_of`."""
        return device_of(self.optimizer.param_groups) or torch.device("cpu")

    def agreement(self) -> Agreement | None:
        """The ranks that all-reduce the overflow flag; ``None`` if this rank decides alone."""
        return self._agreement.get(self.optimizer, self.process_group)

    def no_overflow(self) -> Tensor:
        """A new flag that is 0."""
        return torch.zeros((), dtype=torch.float32, device=self.decision_device)

    def flag(self, decision: Decision | None) -> Tensor:
        """The ``found_inf`` that callers get: that of ``decision``, or 0 if it is ``None``."""
        if decision is None:
            return as_flag(self.no_overflow())
        return as_flag(decision.found_inf, decision.overflow_reports)

    def warn_without_gradients(self) -> None:
        """Warn, once, if parameters have no gradient because ``fully_shard`` has replaced them."""
        optimizer = self.optimizer
        if self._warned_without_gradients or optimizer.state:
            return
        if ranks.may_be_replaced(optimizer.param_groups, self.process_group):
            self._warned_without_gradients = True
            warnings.warn(
                f"no parameter of this {type(optimizer).__name__} has a gradient, so nothing was "
                "stepped. If fully_shard(model) was called after the optimizer was made, the model "
                "has other parameters by now, which the optimizer never updates: make the "
                "optimizer after fully_shard. If no gradient is expected yet, ignore this",
                RuntimeWarning,
                stacklevel=4,
            )

    def has_untold_gradients(self) -> bool:
        """Whether gradients seem to have a scale that no control point was told of.

        Does not synchronize: a scale on an accelerator counts as one, even if it is 1.
        """
        scale = untold_scale(self._scalings_before)
        optimizer: Any = self.optimizer
        if scale is None or type(optimizer)._ampopt.has_own_control_points:
            return False
        if not gradients.present(optimizer.param_groups):
            return False
        number = scale._host_number if isinstance(scale, LossScale) else scale
        return not host_may_read(number) or number != 1.0

    def warn_of_untold_scale(self) -> None:
        """Warn, once, of a step without a scale, if its gradients seem to have one."""
        if not self._warned_of_scale and self.has_untold_gradients():
            self._warned_of_scale = True
            warnings.warn(
                "a loss was multiplied by scale_outputs(loss, scale), or loss * scale, and then "
                f"{type(self.optimizer).__name__} was stepped by step(), or unscale_and_step() "
                "without grads_scaled_by, which use the gradients as they are: scale times too "
                "large. Call unscale_and_step(grads_scaled_by=scale) instead. If the gradients "
                "are those of another loss, ignore this",
                RuntimeWarning,
                stacklevel=4,
            )

    # --- scales, and the order of calls -----------------------------------------------------------

    def scale(self, grads_scaled_by: Any) -> AnyScale | None:
        """Convert the argument ``grads_scaled_by`` to a loss scale.

        Raises:
            RuntimeError: an earlier step has used the scale.
            TypeError: see :func:`ampopt.loss_scale.arguments.as_loss_scale`, as for ``ValueError``.
        """
        scale = as_loss_scale(
            grads_scaled_by, self.decision_device, self.uploads, in_closure=self.in_closure
        )
        self.refuse_stepped(scale)
        return scale

    def refuse_stepped(self, scale: AnyScale | None) -> None:
        """Raise if an earlier step has used ``scale``, and its kind changes with each step."""
        if scale is not None and scale._generation in self._stepped_with:
            raise RuntimeError(
                f"this {type(scale).__name__} was used by an earlier step: every control point "
                "returns the scale to use next, so assign it, as in `_, _, scale = "
                "optimizer.unscale_and_step(grads_scaled_by=scale)`"
            )

    def mark_argument_stepped(self, scale: Any, next_scale: Any) -> None:
        """Like :meth:`mark_stepped`, for an argument of a caller, which may be a plain number."""
        if isinstance(scale, LossScale):
            self.mark_stepped(scale, next_scale)

    def mark_stepped(self, scale: AnyScale | None, next_scale: Any) -> None:
        """Record that a step has used ``scale``, unless the next scale is the same object."""
        if scale is not None and scale._generation is not None and next_scale is not scale:
            self._stepped_with.add(scale._generation)

    def end_pending(self) -> None:
        """Return to the state *idle*: a step has used the unscaled gradients, or the sums."""
        if self.accumulation.swapped_in:
            self.accumulation.restore_gradients()
        if (pending := self._pending) is not None:
            self.mark_stepped(pending.scale, pending.next_scale)
            self._pending = None

    def refuse_unfinished(self, call: str) -> None:
        """Raise, naming ``call``, in the states *pending* and *accumulating*."""
        self.refuse_pending(call)
        if self.accumulation.cycle is not None:
            raise RuntimeError(
                f"{call}: accumulate() was called, and no step has used the sums yet. Call "
                "unscale_and_step() first, or zero_grad() to discard them"
            )

    def refuse_pending(self, call: str) -> None:
        """Raise, naming ``call``, in the state *pending*.

        If other gradients have replaced all that were unscaled, as a new backward pass after
        ``model.zero_grad()`` does, or there were none, as on a rank without gradients, the unscale
        is over instead. A step uses such gradients: they may have been edited out of place.
        """
        if self.pending is not None and not self.pending.is_left:
            self._drop_pending()
        if self.pending is not None:
            raise RuntimeError(
                f"{call}: an unscale is pending. Call step_after_unscale() first, to step with the "
                "unscaled gradients (if a scaler has unscaled them, scaler.step(optimizer)), or "
                "zero_grad() to discard them"
            )
