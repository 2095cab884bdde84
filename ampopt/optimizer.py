"""The base optimizer: loss scaling's control points, by inheritance."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ampopt._step import closures, ranks, torch_scaler
from ampopt._step.accumulation import DROPS
from ampopt._step.ordinary import Ordinary
from ampopt._step.snapshot import loaded_uncast
from ampopt._step.step_hooks import beneath_hooks, has_step
from ampopt._step.stepping import Attached, Pending, readable
from ampopt._step.torch_private import uncompiled
from ampopt.loss_scale.arguments import request_for, successor_of
from ampopt.options import show_options
from ampopt.results import StepResult, Unscaled
from ampopt_kernels.step import Request

__all__ = ["Optimizer", "check_max_norm", "unscale_and_step"]

Pair = tuple[Tensor, Tensor]

_HANDS_ON = (["self"], "args", "kwargs")

_REQUIRED: Any = type("required", (), {"__repr__": lambda self: "<required with a closure>"})()


class Optimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with mixed-precision control points.

    Subclass it like torch's and write an ordinary ``step()``: it need not know of scaling. Where
    the step is elementwise, :class:`ampopt.ElementwiseOptimizer` asks for less and gives more.

    A step goes through these states::

        unscale(S)             idle -> pending       p.grad holds unscaled gradients
        step_after_unscale()   pending -> idle       steps, or skips if unscale found an overflow
        step()                 pending -> idle       steps whatever unscale found
        accumulate(S)          idle -> idle          p.grad is cleared, and in sums for the step
        zero_grad()            pending -> idle       forgets it
        unscale_and_step(S)    idle -> idle          both at once; p.grad unspecified afterwards

    Anything else is a ``RuntimeError`` that names the call to make first.

    **A skipped step** leaves parameters, optimizer state and random-number generators bitwise as
    they were. Step hooks run on every attempt. What the forward pass has written stays: after a
    batch with an infinity, BatchNorm's running statistics are NaN, although the step is skipped.

    **Threads.** An optimizer is not thread-safe, and neither are torch's: calls of several threads
    on one optimizer lose steps or raise. Put a lock around them.

    ``torch.amp.GradScaler`` works with it: ``scaler.step(optimizer)`` leaves its flag to the
    optimizer, which unscales, judges unscaled gradients too, and skips where either overflowed; in
    either case ``p.grad`` holds unscaled gradients afterwards, as after a step of torch's. After
    ``scaler.unscale_(optimizer)`` nothing is judged again, as in torch: a gradient made NaN since
    then is applied, and so is one that overflowed by being unscaled there, under a scale below 1; a
    parameter of two optimizers is unscaled there for each. :class:`ampopt.GradScaler` catches both.
    It leaves it on the very object that it is given. As with torch's fused optimizers, give it the
    optimizer inside a wrapper that hands on what attributes it has not itself, or use
    :class:`ampopt.GradScaler`.

    **Synchronization.** With an ordinary ``step()`` the host waits for the overflow flag where
    :attr:`skip_by` says so; rule-based optimizers never wait. A closure makes the host look at the
    flag after each evaluation.

    **The scale** is ``None`` (scaling off: nothing is checked), a number or one-element tensor,
    or a :class:`ampopt.LossScale`. A number stands for the float32 nearest to it, which is what
    :func:`ampopt.scale_outputs` multiplies by and closures are handed: use these, or a number that
    float32 has, where gradients are float64. Every control point returns the scale to use next:
    ``None`` for ``None``, the successor of a ``LossScale``, and for a bare number or tensor, which
    has no history, a one-element tensor with the number, or half of it, and no less than
    ``2**-126``, after an overflow; but 1.0, which scales nothing, stays 1.0, except while a closure
    is replayed.
    A bare number never grows again. A gradient is judged after unscaling, in float32 (float64 for
    float64 gradients).

    **What cannot be seen** without waiting for the device, and is done as asked: gradients do not
    show what scale they carry, so a plain ``step()``, ``grads_scaled_by=None`` or the scale of
    another loss steps with gradients that are too large or too small; and a second step without a
    backward pass between steps again with the same gradients, which were divided by the scale
    already where the first call unscaled them in place. Give each control point the very scale that
    its loss was multiplied by, one call for each backward pass.

    Attributes:
        grad_norm: global 2-norm of the unscaled gradients of the last ``unscale_and_step`` that
            was given ``max_norm``, before clipping; a 0-d tensor on the parameters' device, 0 if
            there were no gradients. ``None`` before the first such call.
        skip_by: how an ordinary ``step()`` is skipped; set it on the class or, before its first
            step, on the instance.

            ``"auto"``: the host looks at the overflow flag first, where that costs nothing, as on
            the CPU; else transactions, once a step has been seen to allow them.

            ``"host"``: the host looks first, always.

            ``"transaction"``: the step is taken, and undone on the device if it overflowed, at the
            cost of a copy of what it writes; the host looks only where a step changed more than the
            contents of tensors. Not for a step that writes past torch's dispatcher, as custom
            kernels may, nor for one that a non-finite gradient makes read out of bounds.

            ``"step"``: the step skips by itself: a control point hands it the flag as
            :attr:`found_inf`. For a step that is a kernel of your own.
        process_group: the ranks that decide together, a ``torch.distributed.ProcessGroup``: one
            flag and one norm for all of them, by an all-reduce in each control point that judges or
            clips, which every one of them has to call, with gradients or without. For a model whose
            parts are ordinary tensors, as stages of a pipeline, experts and shards are: each rank's
            count towards the norm, unless ``replicated=True`` in a param group says that all ranks
            hold its parameters alike. ``None`` needs nothing more for DDP without closures, for
            ``DTensor`` parameters (the ranks of their meshes) and for FSDP1 (the default group).
            Stages of a pipeline without it decide each for itself, and part at the first overflow;
            ordinary tensors look the same under DDP, so nothing else says so. Set it, or give it to
            the constructor. Copies have it too; pickling is refused.
    """

    skip_by: str = "auto"
    process_group: Any = None
    _ampopt = Attached(Ordinary)
    _step_supports_amp_scaling = torch_scaler.LeftToStep()
    """Read by ``torch.amp.GradScaler``, which then leaves its flag to ``step``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make an ordinary ``step`` heed what ``torch.amp.GradScaler`` leaves on the optimizer.

        An author whose step reads ``self.grad_scale`` and ``self.found_inf`` itself says so by
        ``_step_supports_amp_scaling = True`` in the class. A constructor that hands all on to a
        class of torch's shows the arguments that it takes, and so does one that takes the shared
        options; see :mod:`ampopt.options`.
        """
        super().__init_subclass__(**kwargs)
        theirs = next((base for base in cls.__bases__ if base in vars(torch.optim).values()), None)
        if theirs is not None and inspect.getfullargspec(cls.__init__)[:3] == _HANDS_ON:
            cls.__init__ = _showing(cls, theirs)
        show_options(cls)
        torch_scaler.heed_in(cls, Optimizer)
        step = beneath_hooks(cls.step)
        if "_ampopt" not in vars(cls) and step is not cls._ampopt.step:
            cls._ampopt = cls._ampopt.of_another_step()
        cls._ampopt.step = step

    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        """Make the optimizer.

        Args:
            *args: what the base classes take: ``params`` and ``defaults``, or as torch's optimizer.
            process_group: the ranks that decide together; see the class.
            **kwargs: what the base classes take.

        Raises:
            TypeError: ``process_group`` is something else.
            ValueError: it does not contain this rank.
        """
        ranks.check_process_group(process_group)
        super().__init__(*args, **kwargs)
        if process_group is not None:
            self.process_group = process_group

    def _patch_step_function(self) -> None:
        """Put hooks around the step of the class, as torch does.

        A class that has no step is left without one, where torch would put a wrapper around its
        own, which raises: in a class derived from this and another, it would hide the other's.
        """
        super()._patch_step_function()
        cls = type(self)
        if "step" in vars(cls) and not has_step(cls):
            del cls.step

    # --- what can be read -----------------------------------------------------------------------

    @readable
    def pending(self) -> Unscaled | None:
        """What the last :meth:`unscale` returned, if no step has followed it yet."""
        pending = self._ampopt.pending
        return None if pending is None else Unscaled(pending.found_inf, pending.successor)

    @readable
    def grad_norm(self) -> Tensor | None:
        """The norm of the gradients that were last clipped; see the class."""
        return self._ampopt.grad_norm

    @readable
    def found_inf(self) -> Tensor | None:
        """The overflow flag on the device, for kernels and step hooks; more than 0 means to skip.

        In a ``step()`` with ``skip_by = "step"``, the flag of the control point that takes the
        step, float32 and 0-d; ``None`` in a plain ``step()``. In a class that overrides
        :meth:`step_after_unscale`, also that of a pending unscale. While ``torch.amp.GradScaler``
        steps an optimizer that it leaves the skipping to, what it has put here.

        In a step post-hook, which runs after skipped steps too, more than 0 if the step before was
        skipped; 0 or ``None`` if it was not, as after a plain ``step()``. Whoever takes the step.
        Also :attr:`grad_norm` is that of this step there. What it is elsewhere is not defined: the
        control points return theirs. Reading it does not synchronize. Example:
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

    @readable
    def grads_scaled_by(self) -> Tensor | None:
        """In a step post-hook, the scale that the gradients of the step before carried.

        One element, on the device; ``None`` if they carried none, or nobody knows, as in a plain
        ``step()`` and after ``scaler.unscale_`` of torch's scaler. What it is elsewhere is not
        defined. Reading it does not synchronize.
        """
        decision = self._ampopt.decided
        return None if decision is None else (decision.judged or decision).scaled_by

    # --- what torch's methods do to a pending unscale: they end it or refuse it -------------------

    # They take what the class of an author takes, whose defaults may be others.

    @uncompiled
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, as torch does, and forget an unscale and what was accumulated."""
        ours = self._ampopt
        ours.pending = None
        ours.sums.discard()
        super().zero_grad(*args, **kwargs)
        ours.masters.read_early = None
        ours.masters.drop_gradients()

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does; a ``replicated`` that is no bool is a ``TypeError``."""
        if isinstance(param_group, dict):  # torch refuses anything else
            ranks.check_replicated(param_group)
        super().add_param_group(param_group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state, as torch's. A pending unscale is a ``RuntimeError``: it cannot be saved."""
        self._ampopt.refuse_unfinished("state_dict")
        state_dict = super().state_dict(*args, **kwargs)
        if ranks.REPLICATED not in self.defaults:
            for group in state_dict.get("param_groups", ()):  # a wrapper may have others
                group.pop(ranks.REPLICATED, None)  # which those who load it know
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a state, as torch does, but bitwise. A pending unscale is a ``RuntimeError``.

        Differs from torch: a state tensor keeps the dtype it was saved with, where torch casts it
        to that of its parameter, so that saving and loading changes no later step.
        """
        self._ampopt.refuse_unfinished("load_state_dict")
        known = [group.get(ranks.REPLICATED) for group in self.param_groups]
        with loaded_uncast(self):
            super().load_state_dict(state_dict, *args, **kwargs)
        for group, replicated in zip(self.param_groups, known, strict=True):
            if replicated is not None:
                group.setdefault(ranks.REPLICATED, replicated)

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle. A pending unscale is a ``RuntimeError``."""
        self._ampopt.refuse_unfinished("copying or pickling")
        copied = super().__getstate__()
        if (named := self._ampopt.process_group) is not None:
            copied["process_group"] = ranks.Carried(named)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        carried = state.get("process_group")
        if isinstance(carried, ranks.Carried):
            state = {**state, "process_group": carried.process_group}
        super().__setstate__(state)

    @uncompiled
    def _optimizer_step_code(self) -> None:
        # torch calls this after every step(), whichever class defines it.
        super()._optimizer_step_code()
        self._ampopt.step_is_over()

    # --- control points -------------------------------------------------------------------

    @uncompiled
    @torch.no_grad()
    def accumulate(self, grads_scaled_by: Any = None, *, drop: str = "window") -> Unscaled:
        """Add the gradients, unscaled, to sums in float32, and clear them.

        A window of such calls ends with the next control point, or plain :meth:`step`, which steps
        with the sums and with what is in ``p.grad`` by then, unscaled by the scale that it is
        given. For losses with scales of their own, for micro-batches that half-precision gradients
        would be too coarse to add up, and to leave a bad one out. Does not synchronize.

        The sums are float64 where gradients or parameters are, and kept from window to window. In
        a CUDA graph, capture whole windows, and leave the last micro-batch to the control point.

        Under ``DistributedDataParallel``, leave ``no_sync()`` out: gradients of a backward pass
        within it are those of one rank, and what is added up of them is never averaged. An
        optimizer knows nothing of the model, so nothing else says so.

        Among ranks, the flag and scale that are returned are those of this one, and the control
        point agrees on the window; with ``drop="micro_batch"`` each call agrees, so leave nothing
        to the control point that only some of them have.

        Example, of two losses, of which the larger scale for one is not held back by the other:
            >>> scale_outputs(loss_a, scale_a).backward()
            >>> _, scale_a = optimizer.accumulate(grads_scaled_by=scale_a)
            >>> scale_outputs(loss_b, scale_b).backward()
            >>> _, _, scale_b = optimizer.unscale_and_step(grads_scaled_by=scale_b)

        Args:
            grads_scaled_by: the scale of the loss that the gradients come from, which is not used
                up: micro-batches under one scale all give the same. ``None`` says of no overflow
                here, though the step is skipped for it if what ends the window has a scale.
            drop: what an overflow costs: the ``"window"``, whose step is skipped; or the
                ``"micro_batch"``, which is left out, and the sum of the others taken for the sum of
                all. Then the scale hears of the overflow all the same, and the step is skipped if
                nothing is left, or if the sum overflows.

        Returns:
            ``Unscaled(found_inf, scale)``: whether these gradients overflowed, and the successor of
            the scale if that is rebound here, and not where the window ends.

        Raises:
            RuntimeError: an unscale is pending; the scale was stepped with before; gradients that
                the step cannot take.
            ValueError: as for :meth:`unscale`; or ``drop`` is something else, or not that of the
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
        decision = ours.sums.add(request_for(scale), ours.agreement(), drop)
        judged = None if scale is None else decision
        return Unscaled(ours.flag(judged), successor_of(scale, decision))

    @uncompiled
    @torch.no_grad()
    def unscale(self, grads_scaled_by: Any = None) -> Unscaled:
        """Divide the gradients by the scale in place, and look for overflow.

        Use it to clip or inspect gradients before :meth:`step_after_unscale`. Does not
        synchronize. With ``master_weights=True`` the step takes the unscaled gradients of
        :meth:`master_params`, which are float32, so clip and edit those. ``p.grad`` holds the same
        numbers in its own dtype, for those who look there (small ones of float16 may be 0); the
        step refuses gradients that were edited there.

        Args:
            grads_scaled_by: the scale of the loss that the gradients come from.

        Returns:
            ``Unscaled(found_inf, scale)``: a float32 0-d flag on the parameters' device, more
            than 0 for overflow, and the scale to use next.

        Raises:
            RuntimeError: an unscale is pending; the scale was stepped with before; gradients are
                float16 or complex32, where unscaled values would underflow to zero.
            ValueError: a number that cannot be a scale, or a tensor of wrong shape or device.
            TypeError: not a scale.
        """
        ours = self._ampopt
        ours.refuse_pending("unscale")
        ours.check_step()
        scale = ours.scale(grads_scaled_by)
        decision = None
        if ours.sums.window is not None:
            decision = ours.take_sums(ours.asking(request_for(scale)))
            ours.fill_masters()
        elif scale is None:
            ours.fill_masters()
        else:
            decision = ours.unscale(request_for(scale))
            ours.masters.show_unscaled()
            if decision is None:
                ours.warn_without_gradients()
        found_inf = ours.flag(decision)
        successor = successor_of(scale, decision)
        ours.pending = Pending(found_inf, scale, successor, decision)
        return Unscaled(found_inf, successor)

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
        """Unscale the gradients and step, or skip the step if one of them is not finite.

        After ``unscale_`` of a scaler, call its ``step`` instead, which knows that there is nothing
        left to unscale. After that of :class:`ampopt.GradScaler` this is an error; of what torch's
        has done to the gradients an optimizer is told nothing, and they would be unscaled twice.

        Args:
            closure: ``closure(scale) -> loss``: zeroes the gradients, runs the model, calls
                ``scale_outputs(loss, scale).backward()`` and returns the unscaled loss. If the
                gradients overflow it is run again with the next scale until they are finite, each
                time the optimizer asks for an evaluation; so nothing is skipped.
            grads_scaled_by: the scale of the loss; with a closure, the one to begin with. ``None``
                checks nothing and behaves as ``step()``.
            max_norm: clip the unscaled gradients to this global 2-norm, as
                ``torch.nn.utils.clip_grad_norm_`` does; ``inf`` only measures. See
                :attr:`grad_norm`.
            max_replays: how often an evaluation may be run again.
            preserve_rng: give replays the random state of the first attempt (torch's generators of
                the CPU and of the parameters' CUDA devices), and put it back if they do not help.
            loss: without a closure, the unscaled loss, for :class:`ampopt.skip_when`, which judges
                the mean of those that ranks give.

        Returns:
            ``StepResult(loss, found_inf, scale)``.

        Raises:
            NonFiniteGradientError: a closure's loss is not finite, or replays did not help;
                parameters and state are as before the call.
            RuntimeError: an unscale is pending; the scale was stepped with before; ranks that
                decide together are asked for different things (another scale, ``max_norm``,
                ``skip_when``, parameters or call), which every one of them is told: at once where
                the host sees the tensors, else up to 20 steps later, without waiting.
            ValueError: an argument is out of range.
            TypeError: the closure does not take the scale, or does not return a loss.
        """
        return _unscale_and_step(
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

        What was done to the gradients since is applied as it is; it is not judged again.

        Args:
            closure: ``closure(scale) -> (loss, found_inf, scale)``: as for
                :meth:`unscale_and_step`, and also calls ``unscale(grads_scaled_by=scale)`` and
                returns what that returned behind the loss. Nothing may be pending then.
            current_grad_scale: the scale to begin with; required with a closure (``None`` for
                no scaling), not allowed without.
            max_replays: see :meth:`unscale_and_step`.
            preserve_rng: see :meth:`unscale_and_step`.

        Returns:
            ``StepResult(loss, found_inf, scale)``.

        Raises:
            NonFiniteGradientError: see :meth:`unscale_and_step`.
            RuntimeError: no unscale is pending, or one is and there is a closure.
            TypeError: arguments that do not go together; a closure that does not take the scale
                or returns something else.
        """
        if closure is None:
            return _step_pending(self, current_grad_scale)
        ours = self._ampopt
        ours.refuse_unfinished("step_after_unscale(closure)")
        if current_grad_scale is _REQUIRED:
            raise TypeError(
                "step_after_unscale(closure) needs current_grad_scale, the scale to begin with: "
                "step_after_unscale(closure, current_grad_scale=scale)"
            )
        return closures.step_after_unscale(
            self,
            closure,
            current_grad_scale,
            max_replays=max_replays,
            preserve_rng=preserve_rng,
        )

    def master_params(self) -> Iterator[Tensor]:
        """The tensors that steps update in full precision: for clipping between the two calls.

        Float32 master weights where there are some, else the parameters themselves. After
        :meth:`unscale`, the ``grad`` of each holds its unscaled gradient. Before, master weights
        have none: a step whose gradients were there when masters were read so warns, once, that
        nothing was clipped.
        """
        self._ampopt.masters.note_reading()
        for _, full in self.params_and_masters():
            yield full

    def params_and_masters(self, group: dict[str, Any] | None = None) -> Iterator[Pair]:
        """Each parameter, beside the tensor that steps update: its master, or the parameter itself.

        For what changes parameters between steps: write to the second, and copy it to the first
        where it is another tensor, or the next step undoes it.

        Args:
            group: a param group, for its parameters alone.
        """
        yield from self._ampopt.masters.pairs(self.param_groups if group is None else [group])


# --- their parts ----------------------------------------------------------------------------------


def _unscale_and_step(
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
    """As the method of ``optimizer``; ``write`` leaves unscaled gradients in ``p.grad``."""
    ours = optimizer._ampopt
    ours.refuse_pending("unscale_and_step")
    scale = ours.scale(grads_scaled_by)
    if max_norm is not None:
        check_max_norm(max_norm)
    write = write and scale is not None
    if closure is not None:
        return closures.unscale_and_step(
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
    if scale is None and max_norm is None:
        return StepResult(optimizer.step(), ours.flag(None), None)
    attempt = ours.attempt if ours.sums.window is None else ours.attempt_with_sums
    with nullcontext() if loss is None else ours.told(loss):
        decision, returned, _ = attempt(request_for(scale, max_norm=max_norm, write=write))
    if decision is None:
        ours.warn_without_gradients()
    successor = successor_of(scale, decision)
    ours.mark_stepped(scale, successor)
    return StepResult(returned, ours.flag(decision), successor)


unscale_and_step = uncompiled(_unscale_and_step)


def _step_pending(optimizer: Optimizer, current_grad_scale: Any) -> StepResult:
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
    if pending.scale is None:
        return StepResult(optimizer.step(), pending.found_inf, None)
    drop = pending.scale.drop_overflow_update
    attempt = ours.attempt(
        Request(check=False, found_inf=pending.found_inf, drop=drop, judged=pending.decision)
    )
    # Stepping or not, unless a step hook has raised. Not every wrapper's step has hooks that
    # would have done it.
    ours.end_pending()
    return StepResult(attempt.returned, pending.found_inf, pending.successor)


def _showing(cls: type[Optimizer], theirs: type[torch.optim.Optimizer]) -> Any:
    """The constructor of ``cls`` with the signature that it has with ``theirs`` behind it."""
    init: Any = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    signature = inspect.signature(theirs.__init__)
    ours = [base.__init__ for base in cls.__mro__ if issubclass(base, Optimizer)]
    added = [p for init in ours for p in inspect.signature(init).parameters.values()]
    keywords = {p.name: p for p in added if p.kind is p.KEYWORD_ONLY}
    parameters = [*signature.parameters.values(), *keywords.values()]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return __init__


def check_max_norm(max_norm: Any) -> None:
    """Refuse what is no norm to clip to.

    Raises:
        ValueError: it is neither ``None`` nor a number that is 0 or more.
    """
    if max_norm is None:
        return
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise ValueError(f"max_norm must be a number, 0 or more, or None, got {max_norm!r}")
