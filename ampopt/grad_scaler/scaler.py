"""``ampopt.GradScaler``: torch's interface, with any loss scale, any optimizer, and closures."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampopt._argument_checks import check_device_type
from ampopt._step import gradients
from ampopt._step.gradients import device_of
from ampopt._step.overflow import OverflowCheck
from ampopt._step.ranks import UnpicklableGroup, check_process_group
from ampopt._step.torch_private import pytree
from ampopt.grad_scaler import other_optimizers as others
from ampopt.grad_scaler import scheduled
from ampopt.grad_scaler.other_optimizers import Record
from ampopt.grad_scaler.step_closures import evaluation, refusal, split
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.combining import next_scale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.optimizer import Optimizer, step_scaled_gradients
from ampopt.results import StepResult, overflowed

__all__ = ["GradScaler"]

_Outputs = TypeVar("_Outputs")
_CONTROL_POINTS = ("unscale", "unscale_and_step", "step_after_unscale")
_KEYWORDS = frozenset({"max_norm", "max_replays", "preserve_rng"})
"""The keyword arguments that ``step`` passes to ``unscale_and_step``."""


class GradScaler(scheduled.ScheduledScaler):
    """A drop-in for ``torch.amp.GradScaler`` with ampopt's loss scales, skips and replays.

    It has the same constructor, methods and state dicts, so it can replace torch's scaler in a loop
    or a framework. It works with every optimizer. ampopt's optimizers step without synchronizing;
    others are stepped as torch's scaler does, with one synchronization per step, unless they are
    fused::

        scaler = ampopt.GradScaler("cuda", loss_scale=ampopt.DynamicLossScale.like("megatron"))
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

    Differs from torch:

    * the schedule is any :class:`ampopt.LossScale`, and all arguments are checked;
    * gradients are checked for inf/NaN after unscaling, and an overflow on any device skips the
      whole step of an optimizer;
    * ``scale`` multiplies in float32 at least, so that the product does not overflow in float16;
    * ``step`` takes closures and runs them again with a smaller scale while they overflow;
    * :attr:`skipped` says whether the last step was skipped;
    * for an optimizer without gradients, ``step`` does nothing, where torch raises an error, and
      the scale does not count the step;
    * :meth:`discard` drops an unscale without a step, and so do an ampopt optimizer's
      ``zero_grad()`` and :meth:`load_state_dict`;
    * a wrapper that has the same ``param_groups`` list as its optimizer counts as that optimizer;
    * of torch's private attributes, only ``_scale`` is kept up to date;
    * user mistakes raise ``RuntimeError``, ``TypeError`` or ``ValueError``, not ``AssertionError``.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        loss_scale: LossScale | None = None,
        process_group: Any = None,
    ) -> None:
        """Make a scaler.

        Args:
            device: type of the device to train on; "cuda" without CUDA disables the scaler with a
                warning, as in torch.
            init_scale: the scale of the first iteration; see :class:`ampopt.DynamicLossScale`.
            growth_factor: the factor by which the scale grows.
            backoff_factor: the factor by which the scale is multiplied after an overflow.
            growth_interval: the number of consecutive finite steps after which the scale grows.
            enabled: ``False`` makes ``step`` call ``optimizer.step()``, and the rest do nothing.
            loss_scale: the first loss scale, with any schedule, instead of the four above.
            process_group: the ranks that all-reduce the overflow flag, for every optimizer that
                has no process group of its own; see :class:`ampopt.Optimizer`. Can be set later as
                ``scaler.process_group``.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: an argument is out of range; a schedule is passed in addition to
                ``loss_scale``; or ``process_group`` does not contain this rank.
        """
        check_process_group(process_group)
        check_device_type("device", device)
        schedule = (init_scale, growth_factor, backoff_factor, growth_interval)
        if enabled and loss_scale is None:
            loss_scale = DynamicLossScale(
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
            )
        elif enabled and schedule != (2.0**16, 2.0, 0.5, 2000):
            raise ValueError(
                "loss_scale has a schedule of its own: pass init_scale, growth_factor, "
                "backoff_factor and growth_interval to it instead of to GradScaler"
            )
        if enabled and not isinstance(loss_scale, LossScale):
            raise TypeError(
                "loss_scale must be a DynamicLossScale or StaticLossScale, got "
                f"{type(loss_scale).__name__}"
            )
        super().__init__(device, enabled=enabled)
        self.process_group = process_group
        self._records: list[Record] = []
        self._stepped_records: list[Record] = []
        self._replaying: LossScale | None = None
        self._has_scaled = False
        if self._enabled:
            assert loss_scale is not None
            self._adopt(loss_scale)

    # --- an iteration ------------------------------------------------------------------------

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Multiply a tensor, or all tensors of a nested structure, by the scale.

        The products are float32 or wider; see :func:`ampopt.scale_outputs`. An iterator is scaled
        as it is consumed. The scale moves to the device of the first tensor. Does not synchronize.

        Args:
            outputs: floating-point tensors of any shape.

        Returns:
            The same structure of products; ``outputs`` itself if the scaler is disabled.

        Raises:
            TypeError: ``outputs`` contains something that is not a floating-point tensor.
        """
        if not self._enabled:
            return outputs

        def scaled(output: Any) -> Any:
            if isinstance(output, Iterable) and not isinstance(output, (Tensor, str, bytes)):
                return map(self.scale, output)
            if isinstance(output, Tensor) and self._loss_scale.device is None:
                self._loss_scale._place(output.device)
                self._adopt(self._loss_scale)
            self._has_scaled = True
            return scale_outputs(output, self._replaying or self._loss_scale)

        return scaled(outputs) if isinstance(outputs, Tensor) else pytree.tree_map(scaled, outputs)

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of ``optimizer`` in place, to clip or inspect them before ``step``.

        Does not synchronize. With ``master_weights=True``, the step reads the unscaled gradients of
        :meth:`ampopt.Optimizer.master_params`, so clip these gradients; ``p.grad`` has the same
        values in its own dtype, to inspect only.

        Args:
            optimizer: the optimizer, after the last ``backward()`` of its gradients.

        Raises:
            RuntimeError: ``optimizer`` was unscaled or stepped since the last :meth:`update`, or
                shares a parameter with one that was unscaled; or no loss was scaled.
            TypeError: ``optimizer`` has no ``param_groups``.
            ValueError: a gradient of an optimizer that is not ampopt's is float16 or complex32.
        """
        if not self._enabled:
            return
        record = self._record(optimizer, "unscale_")
        if record.stage is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). "
                "Call step(optimizer) and update(), or discard(optimizer) to drop the gradients"
            )
        if record.stage is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(). Call update() once the iteration is done"
            )
        self._refuse_shared(record, optimizer)
        if _has_control_points(optimizer):
            record.found_inf, record.next_scale = optimizer.unscale(grads_scaled_by=record.scale)
            _note_unscale(record, optimizer)
        else:
            others.unscale(record, optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Unscale unless :meth:`unscale_` was called, and step, or skip the step after an overflow.

        ``p.grad`` holds the unscaled gradients afterwards, as with torch's scaler, even if the step
        was skipped; after ``accumulate`` it holds scaled gradients. In ``p.grad``, small values may
        be 0 in float16; the step itself uses float32. Gradients that you change after
        :meth:`unscale_` are not checked again. If a step that is not made from a rule raises, its
        gradients are unscaled already: call ``step`` again, or :meth:`discard` before the next
        backward pass.

        Does not synchronize for ampopt's optimizers without a closure (see ``skip_by`` of
        :class:`ampopt.Optimizer`), nor for optimizers that read ``found_inf`` themselves, such as
        torch's fused ones. For any other optimizer it synchronizes to read the flag.

        A closure zeroes the gradients, runs the model, scales the loss, calls ``backward()`` and
        returns the unscaled loss. If its gradients overflow, it is evaluated again with a smaller
        scale, and nothing is skipped. The closure scales the loss by its argument or, if it takes
        none, by ``scaler.scale``.

        Args:
            optimizer: the optimizer to step.
            args: positional arguments for ``optimizer.step``, the closure first.
            kwargs: keyword arguments for ``optimizer.step``; for ampopt's optimizers ``max_norm``,
                ``max_replays`` and ``preserve_rng`` of :meth:`ampopt.Optimizer.unscale_and_step`.

        Returns:
            What ``optimizer.step`` returned; ``None`` after a skip.

        Raises:
            NonFiniteGradientError: the loss of the closure is not finite, or its gradients still
                overflow after the last replay.
            RuntimeError: ``optimizer`` was stepped since the last :meth:`update`; no loss was
                scaled; the class of ``optimizer`` cannot evaluate a closure again; a closure or
                ``max_norm`` is passed after :meth:`unscale_`; or ``grad_scale`` of an ampopt
                optimizer is set.
            TypeError: the closure requires more than one argument, or ``optimizer`` has no
                ``param_groups``.
        """
        closure, rest, keywords = split(args, kwargs)
        own = _has_control_points(type(optimizer))
        controlled = own and not rest and keywords.keys() <= _KEYWORDS
        if not self._enabled:
            if controlled and (closure or keywords):
                closure = closure and evaluation(self, closure)
                return optimizer.unscale_and_step(closure, None, **keywords).loss
            return optimizer.step(*args, **kwargs)
        if controlled and vars(optimizer).get("grad_scale") is not None:
            raise RuntimeError(
                f"step(): grad_scale of this {type(optimizer).__name__} is set, which this scaler "
                "does not read: multiply the loss by it, and delete the attribute"
            )
        record = self._record(optimizer, "step", scaled=closure is None)
        if record.stage is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once, when "
                "every optimizer has stepped"
            )
        if closure is not None and (not controlled or record.stage is OptState.UNSCALED):
            raise refusal(optimizer, controlled)
        if record.stage is OptState.READY:
            if not own and _has_control_points(optimizer):
                # A wrapper that forwards missing attributes: its own step must be called.
                self.unscale_(optimizer)
            else:
                self._refuse_shared(record, optimizer)
        if record.stage is OptState.UNSCALED and record.holder is None:
            controlled = False  # unscale_() was called with a wrapper of this optimizer
        if controlled:
            if record.stage is OptState.UNSCALED:
                if (max_norm := keywords.pop("max_norm", None)) is not None:
                    raise RuntimeError(
                        f"step(optimizer, max_norm={max_norm!r}) clips as it unscales, but "
                        "unscale_() was called: leave unscale_() out, or clip with "
                        "torch.nn.utils.clip_grad_norm_(optimizer.master_params(), max_norm)"
                    )
                result = _step_after_unscale(optimizer, **keywords)
            else:
                closure = closure and evaluation(self, closure)
                try:
                    result = _unscaling_step(optimizer)(closure, record.scale, **keywords)
                except BaseException:
                    if _pending(optimizer) is not None:  # the step has raised after unscaling
                        _note_unscale(record, optimizer)
                    raise
            return_value, record.found_inf, record.next_scale = result
        elif others.wants_scaler(optimizer):
            others.warn_of_scaler()
            return_value = optimizer.step(*args, **kwargs, grad_scaler=self)
        else:
            return_value = others.step(record, optimizer, *args, **kwargs)
        record.stage = OptState.STEPPED
        return return_value

    def update(self, new_scale: float | Tensor | None = None) -> None:  # type: ignore[override]
        """End the iteration and update the scale.

        The scale gets lower if any optimizer overflowed, and stays if no optimizer was unscaled or
        stepped with gradients. Does not synchronize, unless ``new_scale`` is a tensor on an
        accelerator and the scale is static.

        Args:
            new_scale: the scale of the next iteration, a number or a floating-point tensor of one
                element; ``None`` lets the schedule decide. A tensor on an accelerator is not
                checked to be in range, as that would synchronize, unless the scale is static.

        Raises:
            TypeError: ``new_scale`` is neither a number nor a tensor.
            ValueError: ``new_scale`` is out of range, or a tensor that is not floating-point, has
                not exactly one element, or requires grad.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            scale = scheduled.at(self._loss_scale, new_scale)
        else:
            scale = self._loss_scale
            candidates = [
                record.next_scale
                if record.next_scale._policy == scale._policy
                # set_growth_factor() or a similar call has changed the scale since the step
                else scheduled.with_settings(record.next_scale, **scale._settings())
                for record in self._records
                if record.next_scale is not None and record.next_scale is not record.scale
            ]
            if candidates:
                scale = scheduled.on(scale.value.device, next_scale(*candidates))
        for record in self._records:
            if record.pending is not None and record.pending is _pending(record.holder):
                record.holder._ampopt.phase.forget()
        # If this iteration had no steps, those of the last.
        self._stepped_records = self._last_steps()
        self._records = []
        self._adopt(scale)

    def discard(self, optimizer: Any = None) -> None:
        """Drop gradients that :meth:`unscale_` has unscaled, without a step.

        Zeroes them (scaled gradients cannot be added to unscaled ones) and forgets whether they
        overflowed. Use it to omit a step on purpose, or to end an accumulation early. Does nothing
        if :meth:`unscale_` was not called.

        Args:
            optimizer: the optimizer of these gradients; ``None`` for all optimizers.
        """
        for record in list(self._records):
            selected = optimizer is None or record.of(optimizer)
            if selected and record.stage is OptState.UNSCALED:
                record.optimizer.zero_grad()
                self._records.remove(record)

    # --- what happened -----------------------------------------------------------------------

    @property
    def skipped(self) -> bool:
        """Whether any ``step`` of the last iteration was skipped. Synchronizes.

        The value stays until the first ``step`` of the next iteration. See :meth:`was_skipped` for
        a single optimizer.
        """
        return any(record.skipped for record in self._last_steps())

    @property
    def overflowed(self) -> list[str]:
        """The names of the parameters whose gradients overflowed. Synchronizes.

        It lists the parameters of all optimizers that were stepped in the last iteration; see
        :attr:`ampopt.StepResult.overflowed`.
        """
        flags = [record.found_inf for record in self._last_steps()]
        return [name for flag in flags if flag is not None for name in overflowed(flag)]

    def was_skipped(self, optimizer: Any) -> bool:
        """Whether the last ``step`` of ``optimizer`` was skipped. Synchronizes.

        ``False`` if the scaler is disabled.

        Args:
            optimizer: the optimizer, or a wrapper that has its ``param_groups``.

        Raises:
            RuntimeError: ``optimizer`` was not stepped in the last iteration that had a step.
        """
        for record in self._last_steps():
            if record.of(optimizer):
                return record.skipped
        if not self._enabled:
            return False
        raise RuntimeError(
            f"was_skipped: the {type(optimizer).__name__} was not stepped by this scaler in the "
            "last iteration: call scaler.step(optimizer) first"
        )

    # --- saving ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state dict of this class or of ``torch.amp.GradScaler``, and end the iteration.

        Gradients that :meth:`unscale_` has unscaled are dropped, as by :meth:`discard`. Settings
        that torch's state does not have, such as ``min_scale``, stay as they are. Does nothing if
        the scaler is disabled.

        Args:
            state_dict: what :meth:`state_dict` of either class returned.

        Raises:
            RuntimeError: ``state_dict`` is empty, like that of a disabled scaler.
            ValueError: an entry is missing or out of range, or the state is of another type of
                scale. Nothing has changed then.
        """
        super().load_state_dict(state_dict)
        self.discard()
        self._records = []

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle.

        Raises:
            RuntimeError: ``unscale_`` or ``step`` was called since the last ``update``.
        """
        if self._records:
            raise RuntimeError(
                "a GradScaler can be copied or pickled between iterations only: call update() first"
            )
        state = {**self.__dict__, "_stepped_records": []}
        if self.process_group is not None:
            state["process_group"] = UnpicklableGroup(self.process_group)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support copying and pickling."""
        group = state.get("process_group")
        if isinstance(group, UnpicklableGroup):
            state = {**state, "process_group": group.process_group}
        super().__setstate__(state)

    # --- the parts ---------------------------------------------------------------------------

    def _last_steps(self) -> list[Record]:
        """The records of the steps of this iteration; before its first step, of the last one."""
        return [r for r in self._records if r.stage is OptState.STEPPED] or self._stepped_records

    def _record(self, optimizer: Any, call: str, scaled: bool = True) -> Record:
        """The record of ``optimizer`` or of the optimizer that it wraps, made if there is none.

        Args:
            optimizer: the optimizer.
            call: the method that was called, for messages.
            scaled: whether the gradients must be of a loss that :meth:`scale` has scaled.
        """
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{call}() takes an optimizer, or a wrapper with its param_groups, got "
                f"{type(optimizer).__name__}: pass the object whose step() updates the parameters"
            )
        if scaled and self._loss_scale.device is None:
            raise RuntimeError(
                f"{call}() needs gradients of a scaled loss, but no loss was scaled: call "
                "scaler.scale(loss).backward() first"
            )
        for record in self._records:
            if record.of(optimizer):
                unscaled = record.pending
                if record.stage is not OptState.UNSCALED or unscaled is _pending(record.holder):
                    return record
                if unscaled.has_stepped:  # by optimizer.step(), instead of this scaler's
                    record.stage = OptState.STEPPED
                    return record
                self._records.remove(record)  # zero_grad() has discarded its unscale
                break
        scale = self._loss_scale
        if scale.device is not None:
            scale = scheduled.on(device_of(optimizer.param_groups), scale)
        if (group := self.process_group) is not None:
            inner = getattr(getattr(optimizer, "unscale", None), "__self__", optimizer)
            if isinstance(inner, Optimizer) and inner._ampopt.process_group is None:
                inner._ampopt.process_group = group
        checks = [last.check for last in self._stepped_records if last.of(optimizer)]
        check = checks[-1] if checks else OverflowCheck()
        record = Record(optimizer, optimizer.param_groups, scale, check, group)
        self._records.append(record)
        return record

    def _refuse_shared(self, record: Record, optimizer: Any) -> None:
        """Refuse gradients of a record that is ready, but were unscaled for another optimizer."""
        unscaled_params = {
            id(param)
            for other in self._records
            if other.stage is not OptState.READY
            for param in gradients.params_of(other.groups)
        }
        if not unscaled_params:
            return
        for _, param in gradients.present(record.groups):
            if id(param) in unscaled_params:
                self._records.remove(record)
                raise RuntimeError(
                    f"{gradients.name_of(record.groups, param)} of this {type(optimizer).__name__} "
                    "belongs to another optimizer too, for which its gradient was unscaled "
                    "already. Give it to only one optimizer, or call update() and run backward() "
                    "between their steps"
                )

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """Check the gradients; called by optimizers whose ``step`` takes the scaler."""
        others.check_gradients(self._record(optimizer, "_check_inf_per_device"), optimizer)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """The flag of ``optimizer`` by its device, as torch's optimizers read it from a scaler."""
        found_inf = self._record(optimizer, "_found_inf_per_device").found_inf
        return {} if found_inf is None else {found_inf.device: found_inf}


def _has_control_points(optimizer: Any) -> bool:
    """Whether ``optimizer`` has the methods ``unscale``, ``unscale_and_step`` and so on."""
    return all(callable(getattr(optimizer, name, None)) for name in _CONTROL_POINTS)


def _pending(optimizer: Any) -> Any:
    """The pending unscale of an ampopt optimizer; ``None`` if there is none."""
    return optimizer._ampopt.phase.pending if isinstance(optimizer, Optimizer) else None


def _note_unscale(record: Record, optimizer: Any) -> None:
    """Note in ``record`` that ``optimizer`` has unscaled its gradients by its own ``unscale``."""
    record.stage = OptState.UNSCALED
    record.holder = getattr(optimizer.unscale, "__self__", optimizer)
    record.pending = _pending(record.holder)


def _step_after_unscale(optimizer: Any, **keywords: Any) -> StepResult:
    """Call ``step_after_unscale``; for master weights, copy their gradients to ``p.grad`` after."""
    is_ours = isinstance(optimizer, Optimizer)
    grads, unscaled_grads = optimizer._ampopt.masters.unscaled_gradients() if is_ours else ([], [])
    result = optimizer.step_after_unscale(**keywords)
    if grads:
        with torch.no_grad():
            torch._foreach_copy_(grads, unscaled_grads)  # pyright: ignore[reportPrivateImportUsage]
    return result


def _unscaling_step(optimizer: Any) -> Callable[..., StepResult]:
    """``unscale_and_step`` of ``optimizer``; ampopt's also unscales ``p.grad`` in place."""
    step = optimizer.unscale_and_step
    if getattr(step, "__func__", None) is Optimizer.unscale_and_step:
        return functools.partial(step_scaled_gradients, step.__self__, write=True)
    return step
