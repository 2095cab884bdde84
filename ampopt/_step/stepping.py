"""How an optimizer steps, and what it remembers between calls: one object, its ``_ampopt``."""

import inspect
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from ampopt._step import accumulated_step, gradients, ranks
from ampopt._step.accumulation import Accumulation
from ampopt._step.all_reduce import Agreement
from ampopt._step.masters import Masters
from ampopt._step.optimizer_reference import RefersToOptimizer
from ampopt._step.overflow import device_of
from ampopt._step.snapshot import Snapshot
from ampopt.loss_scale.arguments import as_loss_scale
from ampopt.loss_scale.base import AnyScale, LossScale
from ampopt.results import as_flag
from ampopt_kernels.decision import Decision, Request
from ampopt_kernels.rule import Rule
from ampopt_kernels.uploads import Uploads

if TYPE_CHECKING:
    from ampopt._step.rule_runner import RuleRunner

__all__ = ["StrategyAttribute", "StepOutcome", "Pending", "StepStrategy", "overridable_property"]


@dataclass(frozen=True)
class Pending:
    """An unscale that no step has followed yet.

    Attributes:
        found_inf: what it found.
        scale: that it was given.
        successor: of it.
        decision: what it has decided; ``None`` without gradients or scale.
    """

    found_inf: Tensor
    scale: AnyScale | None
    successor: Any
    decision: Decision | None = None


class StepOutcome(NamedTuple):
    """A step that was taken or skipped.

    Attributes:
        decision: ``None`` if there were no gradients.
        returned: by the step; ``None`` if it was not called.
        called: whether it was.
    """

    decision: Decision | None
    returned: Any = None
    called: bool = True


class StepStrategy(RefersToOptimizer, ABC):
    """How one optimizer steps, and what it remembers from one call to the next.

    Control points ask; :class:`~ampopt._step.ordinary.OrdinaryStep` answers for a ``step()`` that
    knows nothing of scaling, and :class:`~ampopt._step.by_rule.RuleStep` for one that is a rule.

    Attributes:
        runner: that ``ElementwiseOptimizer.step`` runs; ``None`` for other optimizers.
        second_runners: steps of the rules that it has besides, by rule.
        masters: float32 masters of half-precision parameters.
        needs_closure: whether ``step`` cannot be called without one.
        pending: an unscale that no step has followed yet.
        accumulation: what ``accumulate`` has added up that no step has taken yet.
        grad_norm: of the last step that was to clip; see :attr:`ampopt.Optimizer.grad_norm`.
        uploads: what devices hold of earlier calls.
        step_request: what the next call of ``optimizer.step`` is to do. The one value that cannot
            be an argument: between a control point and our step there may be hooks, a wrapper that
            somebody has put on the instance, or a closure. ``None`` outside of a control point.
        watch: who notes what there is in the gradients, an :class:`ampopt.Watch`.
        causes: for which steps are skipped besides, each an :class:`ampopt.skip_when`.
        loss: of the step that a control point takes, if the caller gave it.
        is_stepping: whether a control point runs the step now. Hooks that are run meanwhile are
            those of a step within it, as ``super().step()`` has them.
        in_closure: whether a closure runs now that is run again, under a smaller scale, if its
            gradients overflow.
    """

    is_stepping = False
    in_closure = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        runner: "RuleRunner | None",
        *,
        step_has_collectives: bool = False,
    ) -> None:
        """Begin, with nothing pending.

        Args:
            optimizer: to step, which is not kept alive.
            runner: see above.
            step_has_collectives: whether ranks meet within its step; see
                :class:`ampopt._step.all_reduce.Agreement`.
        """
        super().__init__(optimizer)
        self.runner = runner
        self.second_runners: dict[Rule, RuleRunner] = {}
        self.masters = Masters(optimizer, kept=False) if runner is None else runner.masters
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        self.pending: Pending | None = None
        self.watch: Any = None
        self.causes: tuple[Any, ...] = ()
        self.loss: Tensor | None = None
        self.accumulation = Accumulation(optimizer)
        self.grad_norm: Tensor | None = None
        self.uploads: dict[torch.device, Uploads] = {} if runner is None else runner.uploads
        self.step_request: Request | None = None
        self._agreement = ranks.AgreementCache(step_has_collectives=step_has_collectives)
        self._reserved_names: set[str] = set()
        self._warned_without_gradients = False
        self._process_group: Any = None  # where the optimizer has another use for the name
        self._stepped_with: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def skip_by(self) -> str:
        """How an ordinary step is skipped."""
        return "auto" if "skip_by" in self._reserved_names else self.optimizer.skip_by

    @property
    def process_group(self) -> Any:
        """The ranks that decide together, as far as the user has named them."""
        named = "process_group" not in self._reserved_names
        return self.optimizer.process_group if named else self._process_group

    def decide_with(self, process_group: Any) -> None:
        """The user names these ranks."""
        if "process_group" in self._reserved_names:
            self._process_group = process_group
        else:
            self.optimizer.process_group = process_group

    def reserve_name(self, name: str) -> None:
        """What the optimizer has under ``name`` is not meant for us."""
        self._reserved_names.add(name)

    def __reduce__(self) -> Any:
        """A copied or unpickled optimizer gets a new strategy; see :class:`StrategyAttribute`."""
        self.refuse_unfinished("copying or pickling")
        return type(None), ()

    # --- how a step is taken ------------------------------------------------------------------

    @abstractmethod
    def attempt(self, request: Request) -> StepOutcome:
        """Step as ``request`` says, or skip. Step hooks run in any case."""

    @abstractmethod
    def check_closure_gradients(self, request: Request) -> Decision | None:
        """Judge what a closure left in the gradients, and prepare the step that called it."""

    @abstractmethod
    def check_gradients(self) -> None:
        """Refuse gradients that cannot be unscaled and stepped with, before anything changes."""

    def check_step(self) -> None:
        """Raise if the optimizer is a rule and says that there is to be no step now."""
        if self.runner is not None:
            self.optimizer.check_step()

    @abstractmethod
    def snapshot(self) -> Snapshot | None:
        """What to restore if ``step(closure)`` fails half way; ``None`` if nothing changes then."""

    @property
    @abstractmethod
    def decided(self) -> Decision | None:
        """In a step post-hook: the decision that its step was taken under, if it was under one."""

    @property
    def skip_flag(self) -> Tensor | None:
        """In a step post-hook: more than 0 if its step was skipped; ``None`` if certainly not."""
        return None if self.decided is None else self.decided.skip

    def with_watch_and_causes(self, request: Request) -> Request:
        """``request`` with what is to be found out besides, unless that was."""
        judged = request.earlier_decision
        if self.watch is not None and not (judged is not None and judged.measured):
            request = replace(request, measure=True)
        if self.causes and request.check:
            known = [cause for cause, _ in request.causes]
            own = ((c, self._loss_for(c)) for c in self.causes if c not in known)
            request = replace(request, causes=(*request.causes, *own))
        return request

    def _loss_for(self, cause: Any) -> Tensor | None:
        """The loss that ``cause`` judges, with those of other ranks; ``None`` if it needs none.

        Raises:
            RuntimeError: this rank decides alone and has no loss; or other ranks train as well, and
                nothing says which of them have the same model.
        """
        if not cause.needs_loss:
            return None
        if self.agreement() is None:
            if self.loss is None:
                raise RuntimeError(
                    "skip_when(loss=...) needs the loss of the step: give it to the control "
                    "point, optimizer.unscale_and_step(grads_scaled_by=scale, loss=loss), or use "
                    "ampopt.TrainStep"
                )
            if ranks.are_several():
                raise RuntimeError(
                    "skip_when(loss=...) judges the mean loss of all ranks that train one model, "
                    "and nothing says which they are: give the optimizer process_group="
                    "torch.distributed.group.WORLD, and, under DistributedDataParallel, "
                    "replicated=True in its param groups. A model that this rank trains alone "
                    "takes a process_group of this rank alone"
                )
        return self.loss

    @contextmanager
    def with_loss(self, loss: Any) -> Iterator[None]:
        """Within this, gradients are judged that are those of ``loss``.

        Raises:
            TypeError: it is no loss.
        """
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss), device="cpu")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss must be a number or a tensor of one element, got {got}")
        self.loss = loss
        try:
            yield
        finally:
            self.loss = None

    def invalidate_plan(self) -> None:
        """Something else is to be found out from now on: a captured step is captured again."""
        if self.runner is not None:
            self.runner.plan = None

    def step_is_over(self) -> None:
        """``optimizer.step`` was called, whoever did, and its post-hooks are about to run."""
        self.end_pending()

    def attempt_with_sums(self, request: Request) -> StepOutcome:
        """As :meth:`attempt`, with what was accumulated; the decision is that on all of it."""
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

    # --- gradients ------------------------------------------------------------------------------

    def unscale(self, request: Request) -> Decision | None:
        """Unscale, judge and clip the gradients, in place or on their masters.

        Returns:
            The decision; ``None`` if there are no gradients.
        """
        if self.runner is not None and request.scale is not None:
            self.runner.checks.need_torch()  # refuses sparse gradients where the step would
        decision = self.masters.unscale(
            self.with_watch_and_causes(request), self.agreement(), self.uploads
        )
        self.note_norm(request, decision)
        return decision

    def fill_masters(self) -> None:
        """Put gradients that carry no scale on their masters, as :meth:`unscale` does others."""
        if self.runner is not None:
            self.runner.checks.need_torch()
        self.masters.take(gradients.held(self.optimizer.param_groups))

    def end_cycle(self, request: Request) -> Decision | None:
        """Put the accumulated sums in the place of the gradients; see ``accumulated_step``."""
        assert self.accumulation.cycle is not None
        decision_device, wide = self.accumulation.cycle.decision_device, [self.takes_wide_sums]
        return accumulated_step.end_cycles(
            [self.accumulation], request, self.agreement(), decision_device, wide=wide
        )

    @property
    def takes_wide_sums(self) -> bool:
        """Whether the step reads gradients of another dtype than the parameters'."""
        return self.runner is not None and not self.runner.checks.need_torch()

    def offenders(self) -> Iterator[str]:
        """Names of the parameters whose gradients are not finite. Synchronizes."""
        scale = None if self.step_request is None else self.step_request.scale
        return gradients.offenders(self.optimizer.param_groups, scale, self.masters.holder)

    def discard(self, decision: Decision | None) -> None:
        """A closure is run again, so that no step takes the gradients that this was decided of."""
        if self.watch is not None:
            self.watch._note_discarded(decision)

    def note_norm(self, request: Request, decision: Decision | None) -> None:
        """Set :attr:`grad_norm` if ``request`` asks for it; without gradients it is 0."""
        if request.max_norm is not None:
            self.grad_norm = self.no_overflow() if decision is None else decision.norm

    @contextmanager
    def restored_on_failure(self, restore_rng: Callable[[], None]) -> Iterator[None]:
        """What ``step(closure)`` does within is undone if it fails."""
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

    # --- where decisions are made -----------------------------------------------------------------

    @property
    def decision_device(self) -> torch.device:
        """Where decisions are made."""
        return device_of(self.optimizer.param_groups) or torch.device("cpu")

    def agreement(self) -> Agreement | None:
        """The ranks that decide with this one; ``None`` if it decides alone."""
        return self._agreement.get(self.optimizer.param_groups, self.process_group)

    def no_overflow(self) -> Tensor:
        """A flag that says so."""
        return torch.zeros((), dtype=torch.float32, device=self.decision_device)

    def flag(self, decision: Decision | None) -> Tensor:
        """The flag of ``decision`` as callers get it; ``None`` stands for one without gradients."""
        if decision is None:
            return as_flag(self.no_overflow())
        return as_flag(decision.found_inf, decision.overflow_details)

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
                "has other parameters by now, and the optimizer never moves them: make the "
                "optimizer after fully_shard. If there is to be no gradient yet, ignore this",
                RuntimeWarning,
                stacklevel=4,
            )

    # --- scales, and what may follow what ---------------------------------------------------------

    def scale(self, given: Any) -> AnyScale | None:
        """The scale that a caller gave.

        Raises:
            RuntimeError: it was stepped with already.
            TypeError: see :func:`ampopt.loss_scale.arguments.as_loss_scale`, as for ``ValueError``.
        """
        scale = as_loss_scale(given, self.decision_device, self.uploads, in_closure=self.in_closure)
        self.refuse_stepped(scale)
        return scale

    def refuse_stepped(self, scale: AnyScale | None) -> None:
        """Refuse a scale that was stepped with already, of a kind that moves on."""
        if scale is not None and scale._generation in self._stepped_with:
            raise RuntimeError(
                f"this {type(scale).__name__} was stepped with already: every control point "
                "returns the scale to use next, so rebind it, as in `_, _, scale = "
                "optimizer.unscale_and_step(grads_scaled_by=scale)`"
            )

    def mark_given(self, given: Any, successor: Any) -> None:
        """As :meth:`mark_stepped`, of what a caller gave, who may have given a bare number."""
        if isinstance(given, LossScale):
            self.mark_stepped(given, successor)

    def mark_stepped(self, scale: AnyScale | None, successor: Any) -> None:
        """Remember that ``scale`` was stepped with; it was not if it is its own successor."""
        if scale is not None and scale._generation is not None and successor is not scale:
            self._stepped_with.add(scale._generation)

    def end_pending(self) -> None:
        """What was unscaled, or accumulated, is stepped with."""
        if self.accumulation.swapped_in:
            self.accumulation.restore_gradients()
        if self.pending is not None:
            self.mark_stepped(self.pending.scale, self.pending.successor)
            self.pending = None

    def refuse_unfinished(self, call: str) -> None:
        """Refuse ``call`` between an unscale or ``accumulate`` and the step."""
        self.refuse_pending(call)
        if self.accumulation.cycle is not None:
            raise RuntimeError(
                f"{call}: accumulate() was called, and no step has taken what it added up. Call "
                "unscale_and_step() first, or zero_grad() to discard it"
            )

    def refuse_pending(self, call: str) -> None:
        """Refuse ``call`` between an unscale and its step."""
        if self.pending is not None:
            raise RuntimeError(
                f"{call}: an unscale is pending. Call step_after_unscale() first (if a scaler has "
                "unscaled, scaler.step(optimizer)), or zero_grad() to discard it"
            )


_T = TypeVar("_T")


class StrategyAttribute:
    """``_ampopt``, the one name that an optimizer has for us: its :class:`StepStrategy`.

    Made at its first use, for optimizers come about in other ways than by our constructor:
    unpickled, patched, or as wrappers that take over the attributes of another.

    Attributes:
        step: of the class that this is of, without hooks.
    """

    def __init__(self, make: Callable[..., StepStrategy], **facts: Any) -> None:
        """Say how a class steps.

        Args:
            make: ``make(optimizer, **facts)``.
            facts: what is known of the step of the class; see ``make``.
        """
        self._make, self._facts = make, facts
        self.step: Any = None

    def for_another_step(self) -> "StrategyAttribute":
        """The same for a class that derives from the one this is of, and has another step."""
        return self.with_options(own_step=True)

    def with_options(self, **facts: Any) -> "StrategyAttribute":
        """The same for a class of whose step more is known."""
        return StrategyAttribute(self._make, **{**self._facts, **facts})

    def new(self, optimizer: Any) -> StepStrategy:
        """A stepping for ``optimizer``, which remembers nothing."""
        return self._make(optimizer, **self._facts)

    def __get__(self, optimizer: Any, cls: Any) -> Any:
        """The stepping of ``optimizer``."""
        if optimizer is None:
            return self
        stepping = vars(optimizer).get("_ampopt")
        if stepping is None or stepping._optimizer() is not optimizer:
            stepping = vars(optimizer)["_ampopt"] = self.new(optimizer)
        return stepping

    def __set__(self, optimizer: Any, stepping: StepStrategy) -> None:
        """Have ``optimizer`` step otherwise than its class."""
        vars(optimizer)["_ampopt"] = stepping


class overridable_property(Generic[_T]):
    """A property that gives way to an attribute of its name, on the instance or in a class behind.

    So that an optimizer of someone else's that uses the name for itself keeps it.
    """

    def __init__(self, read: Callable[[Any], _T]) -> None:
        """Read by ``read(optimizer)``."""
        self._read = read
        self.__doc__ = read.__doc__

    @overload
    def __get__(self, optimizer: None, cls: Any) -> "overridable_property[_T]": ...
    @overload
    def __get__(self, optimizer: object, cls: Any) -> _T: ...

    def __get__(self, optimizer: Any, cls: Any) -> Any:
        """What is read."""
        return self if optimizer is None else self._read(optimizer)

    if TYPE_CHECKING:  # or it would hide what stands on an instance

        def __set__(self, optimizer: Any, value: _T) -> None: ...
