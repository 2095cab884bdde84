"""``Optimizer``: the base class that gives every optimizer its control points."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ampopt._step import closures, gradients, ranks, torch_scaler
from ampopt._step.accumulation import DROPS
from ampopt._step.descriptors import StrategyAttribute, overridable_property
from ampopt._step.ordinary import OrdinaryStep
from ampopt._step.snapshot import loaded_uncast
from ampopt._step.step_hooks import beneath_hooks, has_step
from ampopt._step.torch_private import uncompiled
from ampopt.loss_scale.arguments import check_max_norm, next_scale_of, request_for
from ampopt.loss_scale.scalings import note_told
from ampopt.options import show_options, show_torch_signature
from ampopt.results import StepResult, Unscaled
from ampopt_kernels.decision import Request

__all__ = ["Optimizer", "step_scaled_gradients"]

Pair = tuple[Tensor, Tensor]

# The default of a scale that has to be passed: None will not do, as it means no scaling. help()
# shows its repr.
_REQUIRED: Any = type("required", (), {"__repr__": lambda self: "<required with a closure>"})()


class Optimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with control points: methods that step under loss scaling.

    A *control point* divides the gradients by the loss scale and checks them for inf and NaN
    (overflow)::

        unscale_and_step(grads_scaled_by=S)   unscale, then step; skip the step after an overflow
        unscale(S)                            unscale and check only, to inspect or clip gradients
        step_after_unscale()                  the step, or skip, that follows unscale
        accumulate(S)                         unscale, check, and add to sums for the next step

    A training step is::

        optimizer.zero_grad()
        ampopt.scale_outputs(loss_fn(model(x), y), scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    **Results.** A control point that steps returns three values, ``StepResult(loss, found_inf,
    scale)``, in which ``loss`` is ``None`` without a closure. ``unscale`` and ``accumulate`` return
    two, ``Unscaled(found_inf, scale)``. Pass the returned scale to the next step. Pass the scale to
    ``unscale_and_step`` by name: its first positional argument is the closure.

    **Your own optimizer.** Subclass this class like torch's, and write an ordinary ``step()``,
    which need not know about scaling. If the update is elementwise, write it as a *rule*: functions
    of parameter, gradient and states, which run on every backend, in a few launches for a whole
    model and without synchronization. See :class:`ampopt.ElementwiseOptimizer`.

    **States.** An optimizer is *pending* between ``unscale`` and the step that follows, else
    *idle*::

        call                   before    after     effect
        unscale(S)             idle      pending   p.grad is divided by S
        step_after_unscale()   pending   idle      steps, or skips if unscale found an overflow
        step()                 pending   idle      the same
        step()                 idle      idle      torch's step: nothing is unscaled or checked
        unscale_and_step(S)    idle      idle      steps or skips; p.grad may stay scaled
        accumulate(S)          idle      idle      p.grad / S is added to sums, and p.grad cleared
        zero_grad()            any       idle      discards the sums and the result of unscale

    To apply gradients that were repaired after an overflow, unscale with a scale that has
    ``drop_overflow_update=False``. A ``step()`` after ``accumulate`` skips if an accumulated
    gradient overflowed. An ordinary ``step(closure)`` cannot skip what its closure unscales: pass
    such a closure to ``step_after_unscale``.

    An unscale also ends, without a step, when all its gradients have been cleared, as
    ``model.zero_grad()`` does, or when another control point finds that it had none, or that other
    gradients have replaced all of them, as a backward pass after ``model.zero_grad()`` does. It
    does not end when gradients are set to zero in place (``set_to_none=False``), which could be an
    edit. A step uses gradients that were replaced, as edited.

    Other calls raise a ``RuntimeError`` that names the call to make first: while pending
    ``unscale``, ``unscale_and_step`` and ``accumulate``, and ``step(closure)`` of an ordinary step;
    while idle ``step_after_unscale()``; and while pending or after ``accumulate`` also
    ``state_dict``, ``load_state_dict``, copying and pickling.

    **A skipped step** leaves parameters, optimizer state and random-number generators bitwise
    unchanged. Step hooks run nevertheless. What the forward pass wrote is not restored: after a
    batch with an infinity, the running statistics of BatchNorm are NaN although the step was
    skipped.

    **The scale** is ``None`` (no scaling and no check: right for bfloat16), a number, a one-element
    tensor, or a :class:`ampopt.LossScale`. A number stands for the nearest float32 number, which is
    what :func:`ampopt.scale_outputs` multiplies by, and what a closure is passed: use these, or a
    number that float32 represents exactly, if gradients are float64. The returned scale is

    - ``None`` for ``None``;
    - the next scale of a ``LossScale``, according to its schedule;
    - a one-element tensor for a number or tensor: the same value, or after an overflow half of it,
      but at least ``2**-126``. It never grows again. 1.0, which means no scaling, stays 1.0, except
      in the replays of a closure.

    Gradients are checked after unscaling, in float32 (float64 for float64 gradients).

    **Synchronization.** When the host waits for the device::

                                  on a CPU   on an accelerator,   on an accelerator,
                                             by a rule            by an ordinary step()
        unscale, accumulate       never      never                never
        unscale_and_step          never      never                as skip_by says
        step_after_unscale        never      never                as skip_by says
        either with a closure     never      each evaluation      each evaluation
        step                      never      never                where its code does, and
                                                                  after unscale as skip_by says

    An optimizer steps by a rule if it is an ``ElementwiseOptimizer`` whose subclass does not
    override ``step()``, and its gradients are dense. ``found_inf`` and ``scale`` stay on the
    device; ``found_inf.item()``, ``result.skipped`` and ``scale.item()`` wait for it.

    **Mistakes that are not detected**, because a gradient does not show its scale:

    - stepping with another scale than the loss was multiplied by: the update is too large or too
      small. Stepping without a scale after :func:`ampopt.scale_outputs` warns, once;
    - stepping twice after one backward pass: the same gradients are applied again, and where the
      first call unscaled them in place, they are divided by the scale twice.

    **torch.amp.GradScaler** works with this class. ``scaler.step(optimizer)`` passes the result of
    its own check to the optimizer, which unscales the gradients, checks them again, and skips if
    either check found inf or NaN. ``p.grad`` then holds unscaled gradients, as after a step of
    torch's optimizers. After ``scaler.unscale_(optimizer)`` there is no second check, as in torch.
    Two cases go wrong without an error, and :class:`ampopt.GradScaler` catches them: gradients that
    overflow when they are divided by a scale below 1, and a parameter of two optimizers, which is
    unscaled twice. A NaN that is written to a gradient after ``unscale_`` is applied under either
    scaler. torch's scaler sets attributes on the object that is passed to ``scaler.step``. If that
    is a wrapper that only forwards reading of attributes, pass the optimizer inside it, as for
    torch's fused optimizers, or use :class:`ampopt.GradScaler`.

    **Threads.** Like torch's optimizers, this class is not thread-safe: concurrent calls on one
    optimizer lose steps or raise errors. Protect them by a lock.

    Attributes:
        grad_norm: the global 2-norm of the unscaled gradients, before clipping, in the last
            ``unscale_and_step`` with ``max_norm``: a 0-d tensor on the parameters' device, 0
            without gradients. ``None`` before the first such call.
        skip_by: how an ordinary ``step()`` is skipped on an accelerator. Set it on the class, or on
            an instance before its first step.

            ``"auto"``: by ``"transaction"`` if the step allows it, else by ``"host"``. To find out,
            the host reads the overflow flag before the first steps, and compares what they changed.
            On a CPU, where reading the flag costs nothing, always by ``"host"``.

            ``"host"``: the host reads the flag before each step, which synchronizes.

            ``"transaction"``: the step runs, and is rolled back on the device if a gradient
            overflowed. This costs a copy of all tensors that the step writes. Where a step changes
            anything besides the contents of tensors on the device, such as Python attributes,
            entries of the state, or tensors on the CPU, the host reads the flag after the step.
            Functions that ``torch.compile`` has compiled run uncompiled within the step. Do not use
            it for a step that writes tensors without torch's dispatcher, as custom kernels may, or
            that reads out of bounds if a gradient is not finite.

            ``"step"``: the step skips itself: it reads the flag from :attr:`found_inf`. For a step
            that is your own kernel.
        process_group: a ``torch.distributed.ProcessGroup`` of the ranks that hold parts of the
            model. The overflow flag and the gradient norm are all-reduced over it, so that its
            ranks skip together and clip by one norm. Set the attribute, or pass it to the
            constructor.

            All ranks of the group must make the same calls of control points, even if they have no
            gradients; otherwise the all-reduce hangs.

            Needed if the parameters of ranks differ and are ordinary tensors: stages of a pipeline,
            experts, shards made by hand. Without it, each rank decides for itself, and ranks
            diverge at the first overflow, without an error. Not needed for DDP (except with
            closures), for ``DTensor`` parameters as of FSDP2 (the ranks of their meshes are used),
            and for FSDP1 (the default group is used).

            The gradients of each rank count towards the norm. ``replicated=True`` in a param group
            says that all ranks hold copies of its parameters, which then count once;
            ``replicated=[0, 2]`` says that ranks 0 and 2 do, this one among them.

            Copies of the optimizer have the same group; pickling an optimizer with a group is an
            error.
    """

    skip_by: str = "auto"
    process_group: Any = None
    _ampopt = StrategyAttribute(OrdinaryStep)
    _step_supports_amp_scaling = torch_scaler.SupportsAmpScaling()
    """Makes ``torch.amp.GradScaler`` pass its overflow flag to ``step``, and not skip by itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Prepare ``step`` of a subclass for loss scaling, and the signature for ``help``."""
        # `step` is wrapped to use the scale and flag that torch.amp.GradScaler sets on the
        # optimizer, unless the class says by `_step_supports_amp_scaling = True` that its step
        # reads them itself.
        super().__init_subclass__(**kwargs)
        show_torch_signature(cls, Optimizer)
        show_options(cls)
        torch_scaler.wrap_step(cls, Optimizer)
        step = beneath_hooks(cls.step)
        if "_ampopt" not in vars(cls) and step is not cls._ampopt.step:
            cls._ampopt = cls._ampopt.for_another_step()
        cls._ampopt.step = step

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
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}"
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
        """The result of the last :meth:`unscale`; ``None`` once a step or the end has followed."""
        pending = self._ampopt.pending
        return None if pending is None else Unscaled(pending.found_inf, pending.next_scale)

    @overridable_property
    def grad_norm(self) -> Tensor | None:
        """The norm of the gradients that were last clipped; see the class."""
        return self._ampopt.grad_norm

    @overridable_property
    def found_inf(self) -> Tensor | None:
        """The overflow flag on the device, for kernels and step hooks; more than 0 means to skip.

        Its value depends on where it is read::

            in step(), with skip_by = "step"       the flag of the control point, float32 and 0-d;
                                                   None in a step() without one
            in a step post-hook                    more than 0 if the step was skipped; 0 or None
                                                   if it was not
            in an overridden step_after_unscale    the flag that unscale returned
            while torch.amp.GradScaler steps an    the flag that the scaler has set
            optimizer that skips by itself
            anywhere else                          undefined; use what the control point returned

        Step post-hooks run after skipped steps too, also after plain steps and steps of a scaler.
        In such a hook, :attr:`grad_norm` is the norm of the step before it. Reading the flag does
        not synchronize.

        Example:
            >>> skipped = torch.zeros(())
            >>> def count(optimizer, args, kwargs):
            ...     if optimizer.found_inf is not None:
            ...         skipped.add_(optimizer.found_inf > 0)
            >>> optimizer.register_step_post_hook(count)
        """
        ours = self._ampopt
        taken_over = type(self).step_after_unscale is not Optimizer.step_after_unscale
        if taken_over and ours.pending is not None:
            return ours.pending.found_inf
        flag = ours.skip_flag
        return None if flag is None else flag.to(torch.float32)

    @overridable_property
    def grads_scaled_by(self) -> Tensor | None:
        """In a step post-hook, the scale of the gradients of the step before it.

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
        ours.pending = None
        ours.accumulation.discard()
        if ours.has_untold_gradients():
            note_told()
        super().zero_grad(*args, **kwargs)
        ours.masters.read_early = None
        ours.masters.drop_gradients()

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does; checks ``replicated`` in it."""
        if isinstance(param_group, dict):  # torch refuses anything else
            ranks.check_replicated(param_group)
        super().add_param_group(param_group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state, as torch's. An error between ``unscale`` or ``accumulate`` and the step."""
        self._ampopt.refuse_unfinished("state_dict")
        state_dict = super().state_dict(*args, **kwargs)
        if ranks.REPLICATED not in self.defaults:
            for group in state_dict.get("param_groups", ()):  # a wrapper's state may have none
                group.pop(ranks.REPLICATED, None)  # the loading optimizer sets it for itself
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state, as torch does. An error between ``unscale`` or ``accumulate`` and the step.

        Differs from torch: each state tensor keeps the dtype that it was saved with, where torch
        casts it to the dtype of its parameter. So saving and loading changes no later step.
        """
        self._ampopt.refuse_unfinished("load_state_dict")
        entries = [group.get(ranks.REPLICATED) for group in self.param_groups]
        with loaded_uncast(self):
            super().load_state_dict(state_dict, *args, **kwargs)
        for group, replicated in zip(self.param_groups, entries, strict=True):
            if replicated is not None:
                group.setdefault(ranks.REPLICATED, replicated)

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle. An error between ``unscale`` and the step."""
        self._ampopt.refuse_unfinished("copying or pickling")
        attributes = super().__getstate__()
        if (group := self._ampopt.process_group) is not None:
            attributes["process_group"] = ranks.UnpicklableGroup(group)
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        to_device = state.get("process_group")
        if isinstance(to_device, ranks.UnpicklableGroup):
            state = {**state, "process_group": to_device.process_group}
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

        For code that loads a checkpoint into states that exist, as a strict load by
        ``torch.distributed.checkpoint`` does. ``state_dict`` then has what a skipped first step
        with gradients of all parameters would leave: the initial values, of the right dtype and
        sharding, also of master weights, step counts, codes and random keys, for every parameter
        that requires a gradient. States that exist, parameters, gradients and random generators
        stay as they are. Does not synchronize. With ``DTensor`` parameters, all ranks call it.

        torch's way, a step with learning rate 0 and gradients of zero, which
        ``get_state_dict`` of ``torch.distributed.checkpoint`` takes if there is no state yet,
        advances step counts and averages.

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
            RuntimeError: between ``unscale`` or ``accumulate`` and the step; or, as a
                ``NotImplementedError``, a ``step()`` that somebody has written makes the states as
                it runs, as that of ``LBFGS`` and of most classes that ``extend`` takes.
        """
        self._ampopt.refuse_unfinished("initialize_states")
        self._ampopt.make_states()

    # --- control points -------------------------------------------------------------------

    @uncompiled
    @torch.no_grad()
    def accumulate(self, grads_scaled_by: Any = None, *, drop: str = "window") -> Unscaled:
        """Divide the gradients by the scale, add them to float32 sums, and clear them.

        Call it after each micro-batch but the last. The *accumulation cycle* ends with the next
        control point that steps, or with a plain :meth:`step`: that call adds the gradients in
        ``p.grad``, unscaled by the scale that it is passed, and steps with the sums, or skips after
        an overflow. Does not synchronize.

        Use it for losses with different scales, for micro-batches whose half-precision sum would be
        too inexact, and to drop a micro-batch that overflowed. Otherwise let ``backward()`` add up
        gradients under one scale.

        The sums are float64 if gradients or parameters are; their memory is reused in the next
        cycle. In a CUDA graph, capture whole cycles, and do not call ``accumulate`` for the last
        micro-batch.

        On several ranks, each call with a scale makes one all-reduce: ``found_inf`` and ``scale``
        as returned are the same on all ranks, and all of them need to make the same calls, with
        gradients or without. Under ``DistributedDataParallel``, do not use ``no_sync()``: gradients
        of a backward pass within it are those of one rank, and their sums are never averaged. An
        optimizer cannot detect this.

        Example, two losses, so that an overflow of one does not lower the scale of the other:
            >>> scale_outputs(loss_a, scale_a).backward()
            >>> _, scale_a = optimizer.accumulate(grads_scaled_by=scale_a)
            >>> scale_outputs(loss_b, scale_b).backward()
            >>> _, _, scale_b = optimizer.unscale_and_step(grads_scaled_by=scale_b)

        Args:
            grads_scaled_by: the scale of the loss that the gradients come from. One ``LossScale``
                may be passed to all calls of a cycle. With ``None`` the returned ``found_inf`` is
                0; inf and NaN are still found at the step, if that or another call has a scale.
            drop: what an overflow discards. ``"window"``: the whole cycle, whose step is skipped.
                ``"micro_batch"``: the gradients of this call; the sum of the others is multiplied
                by the number of calls, and divided by the number kept; calls in which no rank has a
                gradient do not count. The scale is lowered nevertheless. The step is skipped if no
                micro-batch is left, or if the sum overflows.

        Returns:
            ``Unscaled(found_inf, scale)``: the flag of these gradients, and the next scale. Use
            this scale if each micro-batch or loss updates a scale of its own, as in the example. If
            one scale serves the whole cycle, ignore it, and use the scale that the step returns.

        Raises:
            RuntimeError: an unscale is pending; an earlier step has used the scale; the step cannot
                use these gradients; ranks pass different scales or ``drop``, as for
                :meth:`unscale_and_step`, which discards the sums.
            ValueError: as for :meth:`unscale`; or ``drop`` is unknown, or differs from that of the
                calls before.
            TypeError: as for :meth:`unscale`; a gradient is sparse; the optimizer needs a closure.
        """
        ours = self._ampopt
        ours.refuse_pending("accumulate")
        if drop not in DROPS:
            raise ValueError(f"drop must be one of {', '.join(map(repr, DROPS))}, got {drop!r}")
        if ours.needs_closure:
            raise TypeError(
                f"{type(self).__name__} evaluates the loss itself, in a closure, whose backward "
                "passes add up under one scale: leave accumulate out"
            )
        scale = ours.scale(grads_scaled_by)
        ours.check_gradients()
        decision = ours.accumulation.add(request_for(scale), ours.agreement(), drop)
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
        :meth:`master_params`, which are float32: clip and edit those. ``p.grad`` then holds the
        same numbers in its own dtype, for code that reads them there (small ones may be 0 in
        float16), and a step after ``p.grad`` was edited is an error.

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
        ours.refuse_pending("unscale")
        ours.check_step()
        pending = ours.start_pending(ours.scale(grads_scaled_by))
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

        An optimizer that steps by a rule leaves ``p.grad`` scaled and unclipped. To log the norm,
        read :attr:`grad_norm`, with ``max_norm=float("inf")`` if nothing is to be clipped; to read
        single gradients, call :meth:`unscale` and :meth:`step_after_unscale`.

        After ``unscale_`` of a scaler call ``scaler.step(optimizer)`` instead, which does not
        unscale again. After that of :class:`ampopt.GradScaler` this method is an error. After that
        of torch's scaler it divides the gradients a second time, because an optimizer cannot detect
        that they are unscaled.

        Args:
            closure: ``closure(scale) -> loss``: zeroes the gradients, runs the model, calls
                ``scale_outputs(loss, scale).backward()`` and returns the unscaled loss. If the
                gradients overflow, it is called again with the next, smaller scale, up to
                ``max_replays`` times for each evaluation that the optimizer requests. An overflow
                is retried, and no step skipped.
            grads_scaled_by: the scale of the loss; with a closure, the first one to try. ``None``
                checks nothing: the call does what ``step()`` does. Pass it by name.
            max_norm: the global 2-norm to clip the unscaled gradients to, as
                ``torch.nn.utils.clip_grad_norm_`` does; ``inf`` only measures. See
                :attr:`grad_norm`.
            max_replays: how many times an evaluation is repeated before the call fails.
            preserve_rng: whether each replay starts from the random state of the first attempt
                (that of torch's generators of the CPU and of the parameters' CUDA devices). If all
                replays overflow, the state from before the call is restored.
            loss: without a closure, the unscaled loss, a number or a tensor of one element, which
                :class:`ampopt.skip_when` compares with earlier ones, and :class:`ampopt.Watch`
                records. Ranks should pass their mean.

        Returns:
            ``StepResult(loss, found_inf, scale)``.

        Raises:
            NonFiniteGradientError: the loss of a closure is not finite, or all replays overflowed.
                Parameters and state are as before the call.
            RuntimeError: an unscale is pending; an earlier step has used the scale; ranks of one
                process group make different calls (another method, scale, ``max_norm``,
                ``skip_when``, class, set of parameters, or options of parameters that all ranks
                have), or one has left out a call. All of these ranks raise it: at once if tensors
                are on the CPU, else up to 20 steps later, without waiting.
            ValueError: an argument is out of range.
            TypeError: the closure does not take the scale, or does not return a loss.
        """
        return _step_scaled_gradients(
            self,
            closure,
            grads_scaled_by,
            max_norm=max_norm,
            max_replays=max_replays,
            preserve_rng=preserve_rng,
            loss=loss,
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
            closure: ``closure(scale) -> (loss, found_inf, scale)``: does what the closure of
                :meth:`unscale_and_step` does, then unscales, and ends with ``return (loss,
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
            RuntimeError: there is no closure and no unscale is pending, or there is a closure and
                one is.
            TypeError: the arguments do not go together; ``closure`` is the ``found_inf`` that
                :meth:`unscale` returned, does not take the scale, or returns something else than
                three values.
        """
        if closure is None:
            return _step_pending(self, current_grad_scale)
        if current_grad_scale is _REQUIRED and not callable(closure):
            raise TypeError(
                f"step_after_unscale takes a closure, got a {type(closure).__name__}: unscale has "
                "kept flag and scale, so call step_after_unscale() without an argument"
            )
        ours = self._ampopt
        ours.refuse_unfinished("step_after_unscale(closure)")
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
        next step.

        Args:
            group: a param group, to get only its parameters.
        """
        yield from self._ampopt.masters.pairs(self.param_groups if group is None else [group])


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
    loss: Any = None,
) -> StepResult:
    """The method of ``optimizer``; with ``write``, ``p.grad`` is unscaled afterwards."""
    ours = optimizer._ampopt
    ours.refuse_pending("unscale_and_step")
    scale = ours.scale(grads_scaled_by)
    if max_norm is not None:
        check_max_norm(max_norm)
    write = write and scale is not None
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
    attempt = ours.attempt if cycle is None else ours.attempt_with_sums
    with nullcontext() if loss is None else ours.with_loss(loss):
        if scale is None and max_norm is None and (cycle is None or not cycle.is_checked):
            return StepResult(optimizer.step(), ours.flag(None), None)
        decision, result, _ = attempt(request_for(scale, max_norm=max_norm, write=write))
    if decision is None:
        ours.warn_without_gradients()
    next_scale = next_scale_of(scale, decision)
    ours.mark_stepped(scale, next_scale)
    return StepResult(result, ours.flag(decision), next_scale)


step_scaled_gradients = uncompiled(_step_scaled_gradients)


def _step_pending(optimizer: Optimizer, current_grad_scale: Any) -> StepResult:
    """Step with the gradients of the pending unscale; see :meth:`Optimizer.step_after_unscale`."""
    ours = optimizer._ampopt
    pending = ours.pending
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
    ours.end_pending()
    return StepResult(outcome.result, pending.found_inf, pending.next_scale)
