"""``Optimizer``: the base class that gives every optimizer its control points."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ampopt._step import closures, gradients, ranks, torch_scaler
from ampopt._step.accumulation import DROPS
from ampopt._step.descriptors import StrategyAttribute, overridable_property
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.loading import loaded_uncast
from ampopt._step.rank_settings import REPLICATED, replicated_of
from ampopt._step.step_hooks import beneath_hooks, has_step
from ampopt._step.torch_private import uncompiled
from ampopt.loss_scale.arguments import check_max_norm
from ampopt.loss_scale.scaled_losses import note_scale_passed
from ampopt.loss_scale.step_scale import next_scale_of, request_for
from ampopt.options import show_options, show_torch_signature
from ampopt.results import StepResult, Unscaled
from ampopt_kernels.rule import Rule
from ampopt_kernels.step_data import Request

__all__ = ["Optimizer", "check_optimizer", "step_scaled_gradients"]

Pair = tuple[Tensor, Tensor]

# The default of a scale that has to be passed: None will not do, as it means no scaling. help()
# shows its repr.
_REQUIRED: Any = type("required", (), {"__repr__": lambda self: "<required with a closure>"})()


class Optimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with control points: methods that work under loss scaling.

    Each *control point* does one or more of these: it divides the gradients by the loss scale ``S``
    and checks them for inf and NaN (overflow); it steps, or skips the step after an overflow::

        unscale_and_step(grads_scaled_by=S)   unscale, then step; skip the step after an overflow
        unscale(S)                            unscale and check only, to inspect or clip gradients
        step_after_unscale()                  the step, or skip, that follows unscale
        accumulate(S)                         unscale, check, and add to sums for the next step

    A training step is::

        optimizer.zero_grad()
        ampopt.scale_outputs(loss_fn(model(x), y), scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    A step returns ``StepResult(loss, found_inf, scale)``; ``unscale`` and ``accumulate`` return
    ``Unscaled(found_inf, scale)``. Pass the returned scale to the next step. A scale is a
    :class:`ampopt.LossScale`, a number, a one-element tensor, or ``None``, which checks nothing. A
    skipped step changes no bit of parameters, states and random-number generators. Calls in a wrong
    order raise a ``RuntimeError`` that names the call to make first. A step by a rule
    (:class:`ampopt.ElementwiseOptimizer`) synchronizes only if it has a closure.

    Traps: a step with a wrong scale, and two steps after one backward pass, raise no error. Not
    thread-safe. See also :doc:`/guides/states_of_an_optimizer` (order of calls, and ``p.grad``
    after each), :doc:`/guides/what_a_skip_undoes`, :doc:`/guides/what_waits`,
    :doc:`/guides/how_ranks_agree` and :doc:`/guides/your_own_optimizer` (``skip_by``).

    Attributes:
        grad_norm: the global 2-norm of the unscaled gradients, before clipping, in the last
            ``unscale_and_step`` with ``max_norm``: a 0-d tensor on the parameters' device, 0
            without gradients. ``None`` before the first such call.
        skip_by: how a hand-written ``step()`` is skipped on an accelerator: ``"host"``,
            ``"transaction"``, ``"step"``, or ``"auto"``. Set it before the first step.
        process_group: the ``torch.distributed.ProcessGroup`` of ranks that hold different plain
            tensors (pipelines, experts, shards made by hand) and have to skip together. Not needed
            with ``DTensor`` parameters, FSDP1, or DDP without closures and ``skip_when(loss=...)``.
    """

    skip_by: str = "auto"
    process_group: Any = None
    _ampopt = StrategyAttribute(HandwrittenStep)
    _step_supports_amp_scaling = torch_scaler.SupportsAmpScaling()
    """Makes ``torch.amp.GradScaler`` pass its overflow flag to ``step``, and not skip by itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Prepare ``step`` of a subclass for loss scaling, and the signature for ``help``.

        Raises:
            TypeError: the class has a rule, and inherits no step that would run it.
        """
        # `step` is wrapped to use the scale and flag that torch.amp.GradScaler sets on the
        # optimizer, unless the class says by `_step_supports_amp_scaling = True` that its step
        # reads them itself.
        super().__init_subclass__(**kwargs)
        if isinstance(getattr(cls, "rule", None), Rule) and not has_step(cls):
            raise TypeError(
                f"{cls.__name__} has a rule, but no step, as it derives from ampopt.Optimizer: "
                "derive it from ampopt.ElementwiseOptimizer, whose step runs the rule"
            )
        show_torch_signature(cls, Optimizer)
        show_options(cls)
        torch_scaler.wrap_step(cls, Optimizer)
        step = beneath_hooks(cls.step)
        own_control_points = bool({"unscale", "unscale_and_step"} & vars(cls).keys())
        if "_ampopt" not in vars(cls) and step is not cls._ampopt.step:
            cls._ampopt = cls._ampopt.for_another_step()
        elif "_ampopt" not in vars(cls) and own_control_points:
            cls._ampopt = copy.copy(cls._ampopt)
        cls._ampopt.step = step
        cls._ampopt.has_own_control_points |= own_control_points

    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        """Create the optimizer. Subclasses pass ``params`` and ``defaults``, as to torch's class.

        Args:
            *args: the positional arguments of the base classes.
            process_group: the ranks over which the overflow flag and the norm are all-reduced; see
                the class.
            **kwargs: the keyword arguments of the base classes.

        Raises:
            TypeError: no base class has a keyword argument of that name; or ``process_group`` is
                neither ``None`` nor a ``torch.distributed.ProcessGroup``.
            ValueError: ``process_group`` does not contain this rank.
        """
        ranks.check_process_group(process_group)
        base: Any = super().__init__
        if getattr(base, "__func__", None) is torch.optim.Optimizer.__init__:
            # torch's message would name torch's class, which the user has not called.
            for name in kwargs.keys() - {"params", "defaults"}:
                # Where the class takes the argument, its constructor has passed it on.
                own = name in inspect.signature(type(self)).parameters
                instead = f": pass it as super().__init__(params, {{{name!r}: {name}}})" * own
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument "
                    f"{name!r}{instead}"
                )
        base(*args, **kwargs)
        _ = self._ampopt  # made now: losses that were scaled before do not concern its steps
        if process_group is not None:
            self.process_group = process_group

    def _patch_step_function(self) -> None:
        """Wrap the step of the class in step hooks, as torch does.

        torch also gives a wrapper to a class without a step of its own, which raises
        ``NotImplementedError``. In a class that derives from this one and from another optimizer,
        it would hide the other's step, so it is removed.
        """
        super()._patch_step_function()
        cls = type(self)
        if "step" in vars(cls) and not has_step(cls):
            del cls.step

    # --- what can be read -----------------------------------------------------------------------

    @overridable_property
    def pending(self) -> Unscaled | None:
        """The result of the last :meth:`unscale`; ``None`` after its step, or once discarded."""
        pending = self._ampopt.phase.pending
        return None if pending is None else Unscaled(pending.found_inf, pending.next_scale)

    @overridable_property
    def grad_norm(self) -> Tensor | None:
        """The norm of the gradients that were last clipped; see the class."""
        return self._ampopt.grad_norm

    @overridable_property
    def found_inf(self) -> Tensor | None:
        """The overflow flag on the device, for kernels and step hooks; more than 0 means to skip.

        Its value depends on where it is read::

            in step(), with skip_by = "step"       the flag of the control point that called step(),
                                                   float32 and 0-d; None if none called it
            in a step post-hook                    more than 0 if the step was skipped; 0 or None
                                                   if it was not
            in an overridden step_after_unscale    the flag that unscale returned
            while torch.amp.GradScaler steps an    the flag that the scaler has set
            optimizer that skips by itself
            anywhere else                          undefined; use what the control point returned

        Step post-hooks run after every step: skipped, plain, or of a scaler. In such a hook,
        :attr:`grad_norm` is the norm of the step that has just run, if that step had ``max_norm``.
        Reading the flag does not synchronize.

        Example:
            >>> skipped = torch.zeros(())
            >>> def count(optimizer, args, kwargs):
            ...     if optimizer.found_inf is not None:
            ...         skipped.add_(optimizer.found_inf > 0)
            >>> optimizer.register_step_post_hook(count)
        """
        ours = self._ampopt
        taken_over = type(self).step_after_unscale is not Optimizer.step_after_unscale
        if taken_over and ours.phase.pending is not None:
            return ours.phase.pending.found_inf
        decision = ours.decision_of_step
        return None if decision is None else decision.skip.to(torch.float32)

    @overridable_property
    def grads_scaled_by(self) -> Tensor | None:
        """In a step post-hook, the scale of the gradients of the step that has just run.

        A tensor of one element, on the device; ``None`` if the gradients had no scale or it is not
        known, as in a plain ``step()`` and after ``scaler.unscale_`` of torch's scaler. Undefined
        outside of step post-hooks. Reading it does not synchronize.
        """
        decision = self._ampopt.decision_of_step
        return None if decision is None else (decision.earlier_decision or decision).scaled_by

    # --- torch's methods, which end a pending unscale or refuse it --------------------------------

    # They forward all arguments, because a base class may have others than torch's, or defaults.

    @uncompiled
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, as torch does; discard a pending unscale and accumulated sums."""
        ours = self._ampopt
        ours.left_out.note_zero_grad(gradients.params_of(self.param_groups))
        ours.phase.discard()
        if ours.missing_scale.is_in_gradients():
            note_scale_passed()
        super().zero_grad(*args, **kwargs)

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does; checks ``replicated`` in it."""
        if isinstance(param_group, dict):  # torch refuses anything else
            replicated_of(param_group)
        super().add_param_group(param_group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state, as torch's. Raises between ``unscale`` or ``accumulate`` and their step."""
        self._ampopt.phase.refuse_unfinished("state_dict")
        state_dict = super().state_dict(*args, **kwargs)
        if REPLICATED not in self.defaults:
            for group in state_dict.get("param_groups", ()):  # a wrapper's state may have none
                group.pop(REPLICATED, None)  # the loading optimizer sets it for itself
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state, as torch does. Raises between ``unscale`` or ``accumulate`` and their step.

        Differs from torch: each state tensor keeps the dtype that it was saved with, where torch
        casts it to the dtype of its parameter. So saving and loading changes no later step.
        """
        self._ampopt.phase.refuse_unfinished("load_state_dict")
        entries = [group.get(REPLICATED) for group in self.param_groups]
        with loaded_uncast(self):
            super().load_state_dict(state_dict, *args, **kwargs)
        self._ampopt.phase.forget_scales()
        for group, replicated in zip(self.param_groups, entries, strict=True):
            if replicated is not None:
                group.setdefault(REPLICATED, replicated)

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle. An error between ``unscale`` and the step."""
        self._ampopt.phase.refuse_unfinished("copying or pickling")
        attributes = super().__getstate__()
        if (group := self._ampopt.process_group) is not None:
            attributes["process_group"] = ranks.UnpicklableGroup(group)
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        group = state.get("process_group")
        if isinstance(group, ranks.UnpicklableGroup):
            state = {**state, "process_group": group.process_group}
        super().__setstate__(state)

    @uncompiled
    def _optimizer_step_code(self) -> None:
        """End the step: torch calls this after every ``step()``, whichever class defines it."""
        super()._optimizer_step_code()
        self._ampopt.step_is_over()

    @uncompiled
    @torch.no_grad()
    def initialize_states(self) -> None:
        """Make every state that a first step makes, without a step.

        For code that loads a checkpoint into existing states, such as a strict load by
        ``torch.distributed.checkpoint``. Every parameter that requires a gradient gets its states,
        master weight, step count, codes and random key, with initial values, in the right dtype and
        sharding, as a skipped first step would leave them (for a class with a ``step()`` of its
        own, only the masters). Existing states, parameters, gradients and random generators stay as
        they are. Does not synchronize. With ``DTensor`` parameters, all ranks call it.

        Without it, ``get_state_dict`` of ``torch.distributed.checkpoint`` takes a step with
        learning rate 0 and gradients of zero, which advances step counts and averages.

        Example:
            >>> optimizer = ampopt.AdamW(model.parameters(), master_weights=True)
            >>> optimizer.initialize_states()
            >>> model_state, optimizer_state = get_state_dict(model, optimizer)
            >>> dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
            >>> set_state_dict(
            ...     model,
            ...     optimizer,
            ...     model_state_dict=model_state,
            ...     optim_state_dict=optimizer_state,
            ... )

        Raises:
            RuntimeError: between ``unscale`` or ``accumulate`` and the step.
            NotImplementedError: a hand-written ``step()`` makes the states as it runs, as in
                ``LBFGS`` and in most classes that ``extend`` takes.
        """
        self._ampopt.phase.refuse_unfinished("initialize_states")
        self._ampopt.make_states()

    # --- control points -------------------------------------------------------------------

    @uncompiled
    @torch.no_grad()
    def accumulate(self, grads_scaled_by: Any = None, *, drop: str = "window") -> Unscaled:
        """Divide the gradients by the scale, add them to float32 sums, and clear them.

        The next control point or plain :meth:`step` adds ``p.grad`` to the sums, and steps with
        them or skips. Does not synchronize. Losses with different scales need it::

            scale_outputs(loss_a, scale_a).backward()
            _, scale_a = optimizer.accumulate(grads_scaled_by=scale_a)
            scale_outputs(loss_b, scale_b).backward()
            _, _, scale_b = optimizer.unscale_and_step(grads_scaled_by=scale_b)

        :doc:`/guides/accumulation` has other uses, and what to do on several ranks.

        Args:
            grads_scaled_by: the scale of the loss that the gradients come from. ``None`` checks
                nothing in this call; the step checks the sums if another call has a scale.
            drop: whether an overflow discards all sums, so that the step is skipped (``"window"``),
                or only the gradients of this call (``"micro_batch"``). Both lower the scale.

        Returns:
            ``Unscaled(found_inf, scale)``: the flag of these gradients, and the next scale. If all
            calls share one scale, ignore it: the step returns the next one.

        Raises:
            RuntimeError, ValueError, TypeError: as for :meth:`unscale`; also, ranks disagree, a
                gradient is sparse, ``drop`` changes, or the optimizer needs a closure.
        """
        ours = self._ampopt
        ours.phase.refuse_pending("accumulate")
        if drop not in DROPS:
            raise ValueError(f"drop must be one of {', '.join(map(repr, DROPS))}, got {drop!r}")
        if ours.needs_closure:
            raise TypeError(
                f"{type(self).__name__} evaluates the loss itself, in a closure, whose backward "
                "passes add up under one scale: leave accumulate out"
            )
        scale = ours.scale(grads_scaled_by)
        if scale is None:
            ours.missing_scale.warn()
        decision = ours.accumulation.add(
            request_for(scale), ours.agreement(), drop, ours.check_gradients
        )
        flag = ours.flag(None if scale is None else decision)
        return Unscaled(flag, next_scale_of(scale, decision))

    @uncompiled
    @torch.no_grad()
    def unscale(self, grads_scaled_by: Any = None) -> Unscaled:
        """Divide the gradients by the scale in place, and check them for inf and NaN.

        Use it to inspect or clip gradients before :meth:`step_after_unscale`::

            optimizer.unscale(scale)
            torch.nn.utils.clip_grad_norm_(optimizer.master_params(), 1.0)
            _, found_inf, scale = optimizer.step_after_unscale()

        Does not synchronize. With ``master_weights=True`` the step uses the gradients of
        :meth:`master_params`, which are float32: clip and edit those. ``p.grad`` has the same
        numbers in its own dtype, to read only (small ones may be 0 in float16): if ``p.grad`` was
        edited, the step raises an error.

        Args:
            grads_scaled_by: the scale of the loss that the gradients come from.

        Returns:
            ``Unscaled(found_inf, scale)``: the flag, float32 and 0-d on the parameters' device,
            more than 0 after an overflow; and the next scale.

        Raises:
            RuntimeError: an unscale is pending; an earlier step has used the scale; gradients are
                float16 or complex32, in which unscaled values would underflow to zero.
            ValueError: ``grads_scaled_by`` is a number out of range, or a tensor of the wrong shape
                or device.
            TypeError: ``grads_scaled_by`` is not ``None``, a number, a tensor or a ``LossScale``.
        """
        ours = self._ampopt
        ours.phase.refuse_pending("unscale")
        ours.check_step()
        pending = ours.unscale_for_later(ours.scale(grads_scaled_by))
        return Unscaled(pending.found_inf, pending.next_scale)

    @uncompiled
    def unscale_and_step(
        self,
        closure: Callable[[Any], Any] | None = None,
        grads_scaled_by: Any = None,
        *,
        max_norm: float | None = None,
        max_replays: int = 100,
        preserve_rng: bool = False,
        loss: Any = None,
    ) -> StepResult:
        """Unscale the gradients and step, or skip the step if a gradient is not finite.

        Synchronizes with a closure (:doc:`/guides/closures`), and for a hand-written ``step()`` as
        :attr:`skip_by` says. A rule leaves ``p.grad`` scaled and unclipped.

        Args:
            closure: ``closure(scale) -> loss``: zeroes the gradients, calls
                ``scale_outputs(loss, scale).backward()``, and returns the unscaled loss. After an
                overflow it is called again with a smaller scale; no step is skipped.
            grads_scaled_by: the scale of the loss; with a closure, the first to try. ``None`` steps
                unchecked. Pass it by name.
            max_norm: the global 2-norm to clip to; ``inf`` only measures :attr:`grad_norm`.
            max_replays: how often each evaluation of a closure may be repeated.
            preserve_rng: whether replays start from the random state of the first attempt.
            loss: without a closure, the unscaled loss (one element), for :class:`ampopt.Watch` and
                :class:`ampopt.skip_when`, which tests the mean of the losses of all ranks.

        Returns:
            ``StepResult(loss, found_inf, scale)``.

        Raises:
            NonFiniteGradientError: the loss of a closure is not finite, or all replays overflowed.
            RuntimeError: an unscale is pending; an earlier step has used the scale; ranks disagree.
            ValueError: an argument is out of range.
            TypeError: an argument, or what the closure takes or returns, has the wrong type.
        """
        with nullcontext() if loss is None else self._ampopt.observers.with_loss(loss):
            return _step_scaled_gradients(
                self,
                closure,
                grads_scaled_by,
                max_norm=max_norm,
                max_replays=max_replays,
                preserve_rng=preserve_rng,
            )

    @uncompiled
    def step_after_unscale(
        self,
        closure: Callable[[Any], Any] | None = None,
        current_grad_scale: Any = _REQUIRED,
        *,
        max_replays: int = 100,
        preserve_rng: bool = False,
    ) -> StepResult:
        """Step with the gradients that :meth:`unscale` left, or skip if it found an overflow.

        Gradients that were edited in between, for instance clipped, are used as they are. They are
        not checked again: a NaN that the edit made is applied.

        Args:
            closure: ``closure(scale) -> (loss, found_inf, scale)``: the same as for
                :meth:`unscale_and_step`, except that it ends with ``return (loss,
                *optimizer.unscale(scale))``. No unscale may be pending before the call.
            current_grad_scale: the first scale to pass to the closure, the same kind of value as
                ``grads_scaled_by``. Required with a closure (``None`` for no scaling), and an error
                without.
            max_replays: see :meth:`unscale_and_step`.
            preserve_rng: see :meth:`unscale_and_step`.

        Returns:
            ``StepResult(loss, found_inf, scale)``.

        Raises:
            NonFiniteGradientError: see :meth:`unscale_and_step`.
            RuntimeError: called without a closure while no unscale is pending, or with a closure
                while one is pending.
            TypeError: the arguments do not go together; ``closure`` does not take the scale, does
                not return three values, or is a ``found_inf`` passed in its place.
        """
        if closure is None:
            return _step_pending(self, current_grad_scale)
        if current_grad_scale is _REQUIRED and not callable(closure):
            raise TypeError(
                f"step_after_unscale takes a closure, got a {type(closure).__name__}: unscale has "
                "kept flag and scale, so call step_after_unscale() without an argument"
            )
        ours = self._ampopt
        ours.phase.refuse_unfinished("step_after_unscale(closure)")
        if current_grad_scale is _REQUIRED:
            raise TypeError(
                "step_after_unscale(closure) needs current_grad_scale, the scale to begin with: "
                "step_after_unscale(closure, current_grad_scale=scale)"
            )
        return closures.step_with_unscaling_closure(
            self,
            closure,
            current_grad_scale,
            max_replays=max_replays,
            preserve_rng=preserve_rng,
        )

    def master_params(self) -> Iterator[Tensor]:
        """The tensors that a step updates in full precision, for clipping after :meth:`unscale`.

        These are the float32 master weights where an optimizer keeps them, else the parameters.
        After :meth:`unscale`, the ``grad`` of each is its unscaled gradient. Before, master weights
        have no gradient: if they are read between the backward pass and the step, the step warns
        once that clipping them had no effect.
        """
        self._ampopt.masters.note_reading()
        for _, full in self.params_and_masters():
            yield full

    def params_and_masters(self, group: dict[str, Any] | None = None) -> Iterator[Pair]:
        """Pairs of each parameter and the tensor that a step updates: its master, or itself.

        For code that changes parameters between steps: write to the second tensor of a pair, and if
        it is a master, copy it to the first. A change of the parameter alone is overwritten by the
        next step, except where the master has 24 bits. Trap: such a master comes as a float32 copy,
        which is stored when the loop goes on to the next pair. So write within the loop: what is
        written later, as after ``list(...)``, is lost.

        Args:
            group: a param group, to get only its parameters.
        """
        yield from self._ampopt.masters.pairs(self.param_groups if group is None else [group])


def check_optimizer(value: Any) -> None:
    """Raise a ``TypeError`` unless ``value`` is an :class:`Optimizer`."""
    if not isinstance(value, Optimizer):
        raise TypeError(
            f"optimizer must be an ampopt.Optimizer, got {type(value).__module__}."
            f"{type(value).__name__}: import it from ampopt, or call "
            "ampopt.patch_optimizer(optimizer)"
        )


# --- how control points work ----------------------------------------------------------------------


def _step_scaled_gradients(
    optimizer: Optimizer,
    closure: Callable[[Any], Any] | None,
    grads_scaled_by: Any,
    *,
    max_norm: float | None = None,
    max_replays: int = 100,
    preserve_rng: bool = False,
    write: bool = False,
) -> StepResult:
    """The method of ``optimizer``; with ``write``, which needs a scale, it unscales ``p.grad``."""
    ours = optimizer._ampopt
    ours.phase.refuse_pending("unscale_and_step")
    scale = ours.scale(grads_scaled_by)
    if max_norm is not None:
        max_norm = check_max_norm(max_norm)
    if closure is not None:
        return closures.step_with_closure(
            optimizer,
            closure,
            grads_scaled_by,
            max_norm=max_norm,
            write=write,
            max_replays=max_replays,
            preserve_rng=preserve_rng,
        )
    if ours.needs_closure:
        raise TypeError(
            f"{type(optimizer).__name__} needs a closure: unscale_and_step(closure, ...)"
        )
    cycle = ours.accumulation.cycle
    if scale is None and max_norm is None and (cycle is None or not cycle.is_checked):
        return StepResult(optimizer.step(), ours.flag(None), None)
    if scale is None:
        ours.missing_scale.warn()
    request = request_for(scale, max_norm=max_norm, write=write)
    attempt = ours.attempt if cycle is None else ours.attempt_with_sums
    decision, result, _ = attempt(request, scale=scale)
    if decision is None:
        ours.warn_without_gradients()
    next_scale = next_scale_of(scale, decision)
    ours.phase.mark_stepped(scale, next_scale)
    return StepResult(result, ours.flag(decision), next_scale)


step_scaled_gradients = uncompiled(_step_scaled_gradients)


def _step_pending(optimizer: Optimizer, current_grad_scale: Any) -> StepResult:
    """Step with the gradients of the pending unscale; see :meth:`Optimizer.step_after_unscale`."""
    ours = optimizer._ampopt
    pending = ours.phase.pending
    if pending is None:
        raise RuntimeError(
            "step_after_unscale: nothing is unscaled. Call unscale(grads_scaled_by=scale) "
            "first, after the backward pass"
        )
    if current_grad_scale is not _REQUIRED:
        raise TypeError(
            "step_after_unscale takes current_grad_scale only with a closure: unscale knows "
            "the scale already"
        )
    if ours.needs_closure:
        raise TypeError(
            f"{type(optimizer).__name__} needs a closure: "
            "step_after_unscale(closure, current_grad_scale=scale)"
        )
    if pending.scale is None and pending.decision is None:
        return StepResult(optimizer.step(), pending.found_inf, None)
    outcome = ours.attempt(pending.request or Request(check=False))
    # Also after a skip. Usually the hook after the step has done it, but the step of a wrapper may
    # have no hooks.
    ours.phase.end()
    return StepResult(outcome.result, pending.found_inf, pending.next_scale)


# Accelerate passes ``set_to_none`` only to methods that show it.
vars(Optimizer.zero_grad)["__signature__"] = inspect.signature(torch.optim.Optimizer.zero_grad)
