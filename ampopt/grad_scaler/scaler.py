"""``torch.amp.GradScaler`` for those who keep a scaler: any schedule, any optimizer, closures."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampopt._step import gradients
from ampopt._step.overflow import device_of
from ampopt._step.ranks import UnpicklableGroup, check_process_group
from ampopt._step.torch_private import pytree
from ampopt.grad_scaler import other_optimizers as others
from ampopt.grad_scaler import scheduled
from ampopt.grad_scaler.closures import evaluation, refused, split
from ampopt.grad_scaler.other_optimizers import Record
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
"""Those of ``unscale_and_step`` that ``step`` hands on."""


class GradScaler(scheduled.ScheduledScaler):
    """``torch.amp.GradScaler`` with the loss scales, the skipping and the replay of ampopt.

    Same constructor, methods and state dicts, so that it takes the place of torch's in a loop or a
    framework. It works with every optimizer: ampopt's are told what to do by their control points
    and wait for nothing; torch's and others' are stepped as torch's scaler steps them::

        scaler = ampopt.GradScaler("cuda", loss_scale=ampopt.DynamicLossScale.like("megatron"))
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

    Differs from torch:

    * the schedule is any :class:`ampopt.LossScale`, and all arguments are checked;
    * gradients are judged after unscaling, and one flag that is more than 0 skips, however many
      optimizers and devices there are, whose flags are joined by their maximum;
    * ``scale`` multiplies in float32 at least, so that a float16 loss does not overflow by it;
    * ``step`` takes closures and runs them again with a smaller scale while they overflow;
    * :attr:`skipped` says whether the last step was left out;
    * an optimizer without gradients is stepped over, and does not count towards growth;
    * :meth:`discard` drops an unscale that no step is to follow, and so does an ampopt
      optimizer's ``zero_grad()``;
    * a wrapper with the ``param_groups`` of its optimizer stands for that optimizer;
    * of torch's private attributes, ``_scale`` alone is kept true;
    * user mistakes are ``RuntimeError``, ``TypeError`` and ``ValueError``, not ``AssertionError``.
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
            init_scale: see :class:`ampopt.DynamicLossScale`, as for the next three.
            growth_factor: likewise.
            backoff_factor: likewise.
            growth_interval: likewise.
            enabled: ``False`` makes ``step`` call ``optimizer.step()``, and the rest do nothing.
            loss_scale: a scale of any schedule to begin with, in place of these four.
            process_group: the ranks that decide together about each optimizer, of any class; see
                :class:`ampopt.Optimizer`, of which one with a group of its own keeps to that, and
                any other gets this one. Also an attribute.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: an argument is out of range, or given besides ``loss_scale``, or
                ``process_group`` does not contain this rank.
        """
        check_process_group(process_group)
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
        self._stepped: list[Record] = []
        self._replicas: dict[torch.device, LossScale] = {}
        self._replaying: LossScale | None = None
        self._has_scaled = False
        if self._enabled:
            assert loss_scale is not None
            self._adopt(loss_scale)

    # --- an iteration ------------------------------------------------------------------------

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Multiply a tensor, or all tensors of a nested structure, by the scale.

        In float32 at least; see :func:`ampopt.scale_outputs`. An iterator is scaled as it is
        consumed. The scale goes to the device of the first tensor that it scales.

        Args:
            outputs: tensors of floating point.

        Returns:
            The same structure of products; ``outputs`` itself if the scaler is disabled.

        Raises:
            TypeError: there is something else in ``outputs``.
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
        """Unscale the gradients of ``optimizer`` in place, to clip or look at before ``step``.

        Does not synchronize. With ``master_weights=True``, the step takes the unscaled gradients of
        :meth:`ampopt.Optimizer.master_params`, so clip those; ``p.grad`` holds the same numbers in
        its own dtype, to look at.

        Args:
            optimizer: whose gradients are complete.

        Raises:
            RuntimeError: it was unscaled or stepped since the last :meth:`update`; nothing was
                scaled; gradients that cannot be unscaled in place.
            TypeError: it is no optimizer.
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
            record.learn(*optimizer.unscale(grads_scaled_by=record.scale))
            record.owned = True
            record.holder = getattr(optimizer.unscale, "__self__", optimizer)
            record.pending = _pending(record.holder)
        else:
            others.unscale(record, optimizer)
        record.wrote, record.stage = True, OptState.UNSCALED

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Unscale, unless :meth:`unscale_` has, and step, or skip the step after an overflow.

        In either case ``p.grad`` holds unscaled gradients afterwards, as after a step of torch's:
        those that were there, in their own dtype (small ones of float16 may be 0, after the step
        has used them), and, with ``master_weights=True``, what :meth:`unscale_` left on the
        masters. Whether ``max_norm`` has clipped them there is not specified. An optimizer with an
        ``unscale_and_step`` of its own leaves what that leaves.

        Gradients that were changed after :meth:`unscale_` are not judged again. As under torch's
        scaler, one that was made NaN is applied, and an overflow that was mended is skipped.

        Does not synchronize for ampopt's optimizers without a closure (see ``skip_by`` of
        :class:`ampopt.Optimizer`), nor for those of others that skip by themselves, as torch's
        fused ones do. For any other the host looks at the flag.

        A closure is run again with a smaller scale while its gradients overflow, so nothing is
        skipped; see :meth:`ampopt.Optimizer.unscale_and_step`. It zeroes the gradients, runs the
        model, scales the loss, calls ``backward()`` and returns the unscaled loss. It scales the
        loss by the scale that it takes as its argument, or, without one, by ``scaler.scale``.

        Args:
            optimizer: to step.
            args: for ``optimizer.step``, the closure first.
            kwargs: likewise; and for ampopt's optimizers ``max_norm``, ``max_replays`` and
                ``preserve_rng`` of :meth:`ampopt.Optimizer.unscale_and_step`.

        Returns:
            What the optimizer returned; ``None`` after a skip.

        Raises:
            NonFiniteGradientError: a closure's loss is not finite, or replays did not help.
            RuntimeError: it was stepped since the last :meth:`update`; nothing was scaled; the
                optimizer can run no closure again; there is a closure after :meth:`unscale_`.
            TypeError: the closure takes more than a scale; it is no optimizer.
        """
        closure, rest, keywords = split(args, kwargs)
        own = _has_control_points(type(optimizer))
        controlled = own and not rest and keywords.keys() <= _KEYWORDS
        if not self._enabled:
            if controlled and (closure or keywords):
                closure = closure and evaluation(self, closure)
                return optimizer.unscale_and_step(closure, None, **keywords).loss
            return optimizer.step(*args, **kwargs)
        record = self._record(optimizer, "step", scaled=closure is None)
        if record.stage is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once, when "
                "every optimizer has stepped"
            )
        if closure is not None and (not controlled or record.stage is OptState.UNSCALED):
            raise refused(optimizer, controlled)
        if record.stage is OptState.READY:
            if _has_control_points(optimizer) and not own:
                # A wrapper that hands on what it has not: its own step is the one to take.
                self.unscale_(optimizer)
            else:
                self._refuse_shared(record, optimizer)
        if controlled and record.stage is OptState.UNSCALED and not record.owned:
            controlled = False  # a wrapper was unscaled in its place
        if controlled:
            if record.stage is OptState.UNSCALED:
                result = _step_after_unscale(optimizer, **keywords)
            else:
                closure = closure and evaluation(self, closure)
                result = _unscaling_step(optimizer)(closure, record.scale, **keywords)
            record.learn(result.found_inf, result.scale)
            record.wrote = True
            returned = result.loss
        elif others.wants_scaler(optimizer):
            others.warn_of_scaler()
            returned = optimizer.step(*args, **kwargs, grad_scaler=self)
        else:
            returned = others.step(record, optimizer, *args, **kwargs)
        record.stage = OptState.STEPPED
        if self._scale is None:
            self._adopt(self._loss_scale)  # which a closure's step has put on its device
        return returned

    def update(self, new_scale: float | Tensor | None = None) -> None:  # type: ignore[override]
        """End the iteration: the scale to use next is the successor of this one.

        Lower if any optimizer overflowed. Unchanged if none of them had gradients, or none was
        stepped. Does not synchronize, unless a static scale is given a tensor on a device, whose
        number it keeps.

        Args:
            new_scale: a number or a tensor of one element, to go on with instead.

        Raises:
            TypeError: ``new_scale`` is something else.
            ValueError: it is out of range.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            scale = scheduled.at(self._loss_scale, new_scale)
        else:
            learned = [
                record.successor
                for record in self._records
                if record.successor is not None and record.successor is not record.scale
            ]
            scale = self._loss_scale
            if learned:
                scale = next_scale(*learned)
                scale = scheduled.on(self._loss_scale.device or scale.value.device, scale)
                if scale._settings() != self._loss_scale._settings():  # changed since
                    scale = scheduled.changed(scale, **self._loss_scale._settings())
        for record in self._records:
            if record.pending is not None and record.pending is _pending(record.holder):
                record.holder._ampopt.pending = None
        self._stepped = self._last_steps()  # an iteration may have none
        self._records = []
        self._replicas = {}
        self._adopt(scale)

    def discard(self, optimizer: Any = None) -> None:
        """Drop what :meth:`unscale_` made of the gradients: no step is to follow it.

        Zeroes those gradients, to which scaled ones can no longer be added, and forgets whether
        they overflowed. For a step that is left out on purpose, or an accumulation that ends
        early. Without a pending unscale it does nothing.

        Args:
            optimizer: whose gradients; ``None`` for all optimizers.
        """
        for record in list(self._records):
            mine = optimizer is None or record.of(optimizer)
            if mine and record.stage is OptState.UNSCALED:
                record.optimizer.zero_grad()
                self._records.remove(record)

    # --- what happened -----------------------------------------------------------------------

    @property
    def skipped(self) -> bool:
        """Whether the last ``step`` left an update out; of several in an iteration, any of them.

        Holds until the next iteration's first ``step``. Synchronizes: the host waits for the
        device. See :meth:`was_skipped` for one of several optimizers.
        """
        return any(record.skipped for record in self._last_steps())

    @property
    def overflowed(self) -> list[str]:
        """The parameters whose gradients overflowed in the last ``step``, by name. Synchronizes.

        Of several in an iteration, those of all; see :attr:`ampopt.StepResult.overflowed`.
        """
        flags = [record.found_inf for record in self._last_steps()]
        return [name for flag in flags if flag is not None for name in overflowed(flag)]

    def was_skipped(self, optimizer: Any) -> bool:
        """Whether the last ``step`` of ``optimizer`` was left out. Synchronizes.

        Raises:
            RuntimeError: it was not stepped in the last iteration with a step.
        """
        for record in self._last_steps():
            if record.of(optimizer):
                return record.skipped
        raise RuntimeError(
            f"was_skipped: the {type(optimizer).__name__} was not stepped by this scaler in the "
            "last iteration. Ask after scaler.step(optimizer)"
        )

    # --- saving ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state of this class or of torch's, and end the iteration: see the base class."""
        super().load_state_dict(state_dict)
        self._records, self._replicas = [], {}

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle. A ``RuntimeError`` between unscaling and updating."""
        if self._records:
            raise RuntimeError(
                "a GradScaler can be copied or pickled between iterations only: call update() first"
            )
        state = {**self.__dict__, "_stepped": [], "_replicas": {}}
        if self.process_group is not None:
            state["process_group"] = UnpicklableGroup(self.process_group)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support copying and pickling."""
        to_device = state.get("process_group")
        if isinstance(to_device, UnpicklableGroup):
            state = {**state, "process_group": to_device.process_group}
        super().__setstate__(state)

    # --- the parts ---------------------------------------------------------------------------

    def _last_steps(self) -> list[Record]:
        return [r for r in self._records if r.stage is OptState.STEPPED] or self._stepped

    def _record(self, optimizer: Any, call: str, scaled: bool = True) -> Record:
        """That of ``optimizer``, or of what it is a wrapper around; a new one if there is none."""
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{call}() takes an optimizer, or a wrapper with its param_groups, got "
                f"{type(optimizer).__name__}: give it what steps the parameters"
            )
        if scaled and self._loss_scale.device is None:
            raise RuntimeError(
                f"{call}() needs gradients of a loss that was scaled, and nothing was: call "
                "scaler.scale(loss).backward() first"
            )
        for record in self._records:
            if record.of(optimizer):
                pending = record.pending
                dropped = pending is not None and pending is not _pending(record.holder)
                if record.stage is not OptState.UNSCALED or not dropped:
                    return record
                self._records.remove(record)  # by zero_grad() or a plain step()
                break
        scale, device = self._loss_scale, device_of(optimizer.param_groups)
        if device is not None and scale.device not in (None, device):
            if device not in self._replicas:
                self._replicas[device] = scheduled.on(device, scale)
            scale = self._replicas[device]
        group = self.process_group
        inner = getattr(getattr(optimizer, "unscale", None), "__self__", optimizer)
        if group is not None and isinstance(inner, Optimizer):
            if inner._ampopt.process_group is None:
                inner._ampopt.decide_with(group)
        self._records.append(Record(optimizer, optimizer.param_groups, scale, group))
        return self._records[-1]

    def _refuse_shared(self, record: Record, optimizer: Any) -> None:
        """Refuse to unscale again what was unscaled for another optimizer."""
        others = [other for other in self._records if other is not record and other.wrote]
        if not others:
            return
        taken = {id(p) for other in others for group in other.groups for p in group["params"]}
        for _, param in gradients.present(record.groups):
            if id(param) in taken:
                self._records.remove(record)
                raise RuntimeError(
                    f"{gradients.name_of(record.groups, param)} of this {type(optimizer).__name__} "
                    "belongs to another optimizer too, for which its gradient was unscaled "
                    "already. Leave it to one of them, or update() and run backward() between"
                )

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """For optimizers whose ``step`` takes the scaler."""
        others.judge_gradients(self._record(optimizer, "_check_inf_per_device"), optimizer)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        found_inf = self._record(optimizer, "_found_inf_per_device").found_inf
        return {} if found_inf is None else {found_inf.device: found_inf}


def _has_control_points(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in _CONTROL_POINTS)


def _pending(optimizer: Any) -> Any:
    """The mark of an unscale that no step has followed yet, if ``optimizer`` is ours."""
    return optimizer._ampopt.pending if isinstance(optimizer, Optimizer) else None


def _step_after_unscale(optimizer: Any, **keywords: Any) -> StepResult:
    """That of ``optimizer``, after which ``p.grad`` holds what it stepped with."""
    is_ours = isinstance(optimizer, Optimizer)
    grads, unscaled = optimizer._ampopt.masters.unscaled_gradients() if is_ours else ([], [])
    result = optimizer.step_after_unscale(**keywords)
    if grads:
        with torch.no_grad():
            torch._foreach_copy_(grads, unscaled)  # pyright: ignore[reportPrivateImportUsage]
    return result


def _unscaling_step(optimizer: Any) -> Callable[..., StepResult]:
    """``unscale_and_step`` of ``optimizer``; if it is ours, one that leaves gradients unscaled."""
    step = optimizer.unscale_and_step
    if getattr(step, "__func__", None) is Optimizer.unscale_and_step:
        return functools.partial(step_scaled_gradients, step.__self__, write=True)
    return step
