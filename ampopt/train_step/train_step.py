"""A training step as one call: forward, backward, accumulation, clipping and optimizer step."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ampopt._argument_checks import check_count
from ampopt._step.gradients import params_of
from ampopt._step.torch_private import pytree
from ampopt.errors import NonFiniteGradientError
from ampopt.loss_scale.arguments import check_max_norm
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.nonfinite import is_looking
from ampopt.optimizer import Optimizer, check_optimizer
from ampopt.precision.levels import Precision
from ampopt.results import StepResult, Unscaled, overflowed
from ampopt.train_step import cuda_graphs
from ampopt.train_step.arguments import (
    NOT_GIVEN,
    as_scale,
    check_divisible,
    check_loss,
    check_masters,
    check_overflow,
    of_autocast,
    on_device,
    outputs,
    parts,
)

__all__ = ["TrainStep"]


class TrainStep:
    """A whole training step in one object: call it with a batch.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = ampopt.AdamW(model.parameters())
        >>> step = TrainStep(model, torch.nn.MSELoss(), optimizer, ampopt.DynamicLossScale())
        >>> loss, found_inf, scale = step(torch.ones(8, 4), torch.ones(8, 1))

    ``step(inputs, *targets)`` clears the gradients, runs ``loss_fn(model(inputs), *targets)`` and
    the backward pass for each micro-batch, and calls ``unscale_and_step``. A tuple of inputs is
    passed as ``model(*inputs)``, a mapping as ``model(**inputs)``. Tensors of a batch are copied to
    the device of the parameters, on CUDA and XPU without synchronization. ``loss_fn`` returns the
    *mean* over its micro-batch. With ``batches_per_step=n`` or ``on_overflow="next_batch"``, call
    ``step(iterator)`` with an iterator of batches ``(inputs, *targets)``.

    A call synchronizes with ``on_overflow="replay"`` or ``"next_batch"``, where it captures a CUDA
    graph, and where ``unscale_and_step`` of the optimizer does. Trap: Python code of a captured
    step does not run in replays.

    See also :doc:`/guides/train_step`, for arguments, batches, graphs and subclasses.

    Attributes:
        model: the model that is trained.
        optimizer: the optimizer that steps.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        loss_fn: Callable[..., Tensor],
        optimizer: Optimizer,
        scale: LossScale | float | None = NOT_GIVEN,
        *,
        precision: Precision | None = None,
        autocast: torch.dtype | None = NOT_GIVEN,
        micro_batches: int = 1,
        batches_per_step: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        max_norm: float | None = None,
        on_gradients: Callable[[Optimizer], object] | None = None,
        on_overflow: Literal["skip", "replay", "next_batch"] | None = None,
        max_replays: int | None = None,
        preserve_rng: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        """Check the arguments, without running anything.

        Args:
            model: a module or function that is called with the inputs.
            loss_fn: ``loss_fn(outputs, *targets)``: returns the mean loss over a micro-batch, a
                tensor of one element.
            optimizer: an :class:`ampopt.Optimizer` of the model's parameters.
            scale: the first loss scale: a :class:`ampopt.LossScale`; a number, which stands for
                :class:`ampopt.StaticLossScale`; or ``None`` for no scaling and no check. Required,
                unless ``precision`` is given; then its default is ``precision.loss_scale()``.
            precision: a precision policy. Call ``precision.prepare(model)`` before, and create the
                optimizer with ``**precision.optimizer_options``.
            autocast: without ``precision``, the dtype for ``torch.autocast``: ``torch.float16``
                (the default, also on the CPU) or ``torch.bfloat16``; ``None`` for no autocast.
            micro_batches: the number of equal parts of a batch, which run one after the other.
            batches_per_step: the number of batches that a step takes from an iterator; ``None``,
                the default, if you call the step with a batch.
            reduction: how the losses of micro-batches become the loss of the step: ``"mean"`` or
                ``"sum"``.
            max_norm: the norm to clip to, see :meth:`ampopt.Optimizer.unscale_and_step`; not
                together with ``on_gradients``, which may clip by itself.
            on_gradients: a function that takes the optimizer. It is called after unscaling and
                before each step, even one that will be skipped, and may change the gradients of
                ``optimizer.master_params()`` in place.
            on_overflow: ``"skip"`` the step; ``"replay"``: run the batch again, under smaller and
                smaller scales, until its gradients are finite; ``"next_batch"``: take the next
                batches of the iterator until one does not overflow. The default is ``"skip"``, or
                ``"replay"`` if ``max_replays`` is given.
            max_replays: how often each evaluation of the loss may be repeated, or, with
                ``"next_batch"``, how many further batches a step may take; by default 100.
            preserve_rng: whether replays start from the same random state.
            cuda_graph: whether to capture the step as a CUDA graph. The optimizer must be
                rule-based, and the model not under ``DistributedDataParallel``.

        Raises:
            TypeError: an argument is of the wrong type; the model or the optimizer cannot be
                captured; the optimizer needs ``on_overflow="replay"``.
            ValueError: an argument is out of range, or two of them do not go together.
        """
        functions = {"model": model, "loss_fn": loss_fn}
        if on_gradients is not None:
            functions["on_gradients"] = on_gradients
        for name, value in functions.items():
            if not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        check_optimizer(optimizer)
        if precision is None:
            precision = of_autocast(autocast)
        elif autocast is not NOT_GIVEN:
            raise ValueError("precision has the dtype of autocast: leave autocast= out")
        else:
            check_masters(precision, optimizer)
            scale = precision.loss_scale() if scale is NOT_GIVEN else scale
        check_count("micro_batches", micro_batches)
        if batches_per_step is not None:
            check_count("batches_per_step", batches_per_step)
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        max_norm = check_max_norm(max_norm)
        if on_gradients is not None and max_norm is not None:
            raise ValueError(
                "max_norm cannot be combined with on_gradients: clip there, by torch.nn.utils."
                "clip_grad_norm_(optimizer.master_params(), max_norm)"
            )
        if on_overflow is None:
            on_overflow = "skip" if max_replays is None else "replay"
        check_overflow(on_overflow, max_replays, preserve_rng, cuda_graph)
        if optimizer._ampopt.needs_closure and on_overflow != "replay":
            raise TypeError(
                f"{type(optimizer).__name__} evaluates the loss itself: pass "
                'on_overflow="replay", which gives it a closure to evaluate'
            )
        if cuda_graph:
            cuda_graphs.check_capturable(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self._loss_fn, self._on_overflow = loss_fn, on_overflow
        self._captured_steps: cuda_graphs.CapturedSteps | None = None
        self.scale = scale
        _check_steps_model(model, optimizer)
        self._precision, self._micro_batches, self._max_norm = precision, micro_batches, max_norm
        self._batches_per_step, self._averages = batches_per_step, reduction == "mean"
        self._on_gradients = on_gradients
        self._max_replays = 100 if max_replays is None else max_replays
        self._preserve_rng = preserve_rng
        self._cuda_graph = cuda_graph

    @property
    def scale(self) -> LossScale | None:
        """The scale of the next step's loss. Does not synchronize; ``scale.item()`` does.

        Assign to it between steps to go on with another scale or schedule: it takes what the
        argument ``scale`` takes. A step that is captured as a CUDA graph is captured again. For
        example, to double the scale after every 500 finite steps from now on::

            now = step.scale.state_dict()
            step.scale = ampopt.DynamicLossScale()
            step.scale.load_state_dict({**now, "growth": 0, "growth_interval": 500})
        """
        return self._scale

    @scale.setter
    def scale(self, scale: LossScale | float | None) -> None:
        checks = (new := as_scale(scale)) is not None
        if not (checks or self._on_overflow == "skip" or self.optimizer._ampopt.needs_closure):
            raise ValueError(
                f"without a scale no step is checked, so on_overflow={self._on_overflow!r} would "
                "do nothing: pass scale=1.0, which checks without scaling"
            )
        self._scale = new
        self._forget_captured()

    def __call__(self, inputs: Any, *targets: Any) -> StepResult:
        """Run one training step. For synchronization, see the class.

        Args:
            inputs: the inputs of the model; with ``batches_per_step`` or
                ``on_overflow="next_batch"``, an iterator of batches, and nothing else. At its end
                ``StopIteration`` is raised.
            targets: the arguments of the loss function after the outputs.

        Returns:
            ``StepResult(loss, found_inf, scale)``: the mean loss, detached; the overflow flag,
            float32 and 0-d, more than 0 after an overflow; and the scale of the next step. They are
            new tensors on the device. With ``max_norm``, the norm before clipping is
            ``optimizer.grad_norm``.

        Raises:
            NonFiniteGradientError: the gradients still overflowed in the last replay or batch; see
                :meth:`ampopt.Optimizer.unscale_and_step`.
            RuntimeError: the step cannot be captured; an earlier step has used the scale.
            TypeError: ``loss_fn`` did not return a tensor of one element; an iterator is expected;
                the batch of a captured step contains an array of NumPy, or the like.
            ValueError: the batch cannot be divided into micro-batches of equal size.
        """
        if self._batches_per_step is None and self._on_overflow != "next_batch":
            try:
                return self._step([(inputs, *targets)])
            except TypeError as error:
                if targets or not isinstance(inputs, (tuple, list)):
                    raise
                raise TypeError(
                    f"{error}. The step got one {type(inputs).__name__} and no targets: for a "
                    "batch of inputs and targets, call step(*batch)"
                ) from error
        if targets or not isinstance(inputs, Iterator):
            raise TypeError(
                'with batches_per_step or on_overflow="next_batch" a step takes an iterator of '
                f"batches, such as iter(loader), and nothing else, got {type(inputs).__name__}"
            )
        if self._on_overflow == "next_batch":
            return self._first_finite(inputs)
        return self._step(self._next(inputs))

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizer and of the scale, without the model. Synchronizes."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scale": None if self._scale is None else self._scale.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states of the optimizer and of the scale. Load the model separately.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: ``state_dict`` is not a mapping.
            ValueError: ``state_dict`` is not of a ``TrainStep``; it has a scale and this step has
                none, or the reverse; or it does not fit the optimizer.

        After any error, nothing has changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        if set(state_dict) != {"optimizer", "scale"}:
            raise ValueError(
                "the state of a TrainStep has exactly the entries 'optimizer' and 'scale', got "
                f"{sorted(map(str, state_dict))}"
            )
        scale, saved_scale = self._scale, state_dict["scale"]
        if (scale is None) != (saved_scale is None):
            with_, without = ("this", "the saved") if saved_scale is None else ("the saved", "this")
            raise ValueError(f"{with_} step has a loss scale, {without} step has none")
        if scale is not None:
            scale = copy.deepcopy(scale)
            scale.load_state_dict(saved_scale)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._scale = scale
        self._forget_captured()

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, without a CUDA graph: the copy captures its own."""
        return {**self.__dict__, "_captured_steps": None}

    # --- methods that a subclass may override -------------------------------------------------

    def forward(self, inputs: Any, *targets: Any) -> Tensor:
        """The loss of the micro-batch ``(inputs, *targets)``, one element. Runs under autocast."""
        return self._loss_fn(outputs(self.model, inputs), *targets)

    def backward(self, loss: Tensor, scale: LossScale | None) -> None:
        """Backpropagate ``loss * scale``.

        Args:
            loss: the loss of a micro-batch, divided by the number of micro-batches unless
                ``reduction="sum"``.
            scale: the loss scale, or ``None``.
        """
        scale_outputs(loss, scale).backward()

    def update(
        self, scale: LossScale | None, closure: Callable[[Any], Any] | None = None
    ) -> StepResult:
        """Unscale the gradients, call ``on_gradients``, and step or skip.

        Args:
            scale: the scale of the gradients in ``p.grad``.
            closure: with ``on_overflow="replay"``, a function ``closure(scale) -> loss`` that
                computes the gradients under the scale that it is passed.
        """
        optimizer = self.optimizer
        replays: dict[str, Any] = {}
        if closure is not None:
            replays = {"max_replays": self._max_replays, "preserve_rng": self._preserve_rng}
        if self._on_gradients is None:
            return optimizer.unscale_and_step(
                closure, grads_scaled_by=scale, max_norm=self._max_norm, **replays
            )
        if closure is None:
            unscaled = self._unscale(scale)
            try:
                return optimizer.step_after_unscale()
            except BaseException:
                if optimizer._ampopt.phase.pending is None:  # the step is over: a hook has raised
                    self._scale = unscaled.scale
                raise

        def evaluate(closure_scale: Any) -> tuple[Any, ...]:
            return closure(closure_scale), *self._unscale(closure_scale)

        return optimizer.step_after_unscale(evaluate, current_grad_scale=scale, **replays)

    # --- the loop ------------------------------------------------------------------------------

    def _step(self, batches: list[Any]) -> StepResult:
        """Run one step on batches, by a CUDA graph if there is one, and keep the next scale."""
        device = self.optimizer._ampopt.decision_device
        batches = pytree.tree_map(functools.partial(on_device, device), batches)
        check_divisible(batches, self._micro_batches)
        steps = self._capturing_on(device)
        if steps is None:
            result = self._run(batches, self._scale, self.optimizer.zero_grad)
        else:
            result = steps.step(self._run, batches, self._scale)
        self._scale = result.scale
        return result

    def _next(self, batches: Iterator[Any]) -> list[Any]:
        """The batches of the next step, each a tuple."""
        taken = list(itertools.islice(batches, self._batches_per_step or 1))
        if not taken:
            raise StopIteration
        return [tuple(one) if isinstance(one, (tuple, list)) else (one,) for one in taken]

    def _first_finite(self, batches: Iterator[Any]) -> StepResult:
        """Step with the first of ``batches`` that do not overflow."""
        result, taken, observers = None, 0, self.optimizer._ampopt.observers
        for _ in range(self._max_replays + 1):
            tried = self._next(batches)
            result, taken = self._step(tried), taken + len(tried)
            # A step that a `skip_when` has skipped is over: a smaller scale would not help.
            if not result.skipped or (observers.causes and not result.overflowed):
                return result
        assert result is not None
        raise NonFiniteGradientError(
            f"the gradients of {taken} batches overflowed",
            reason="replays",
            parameters=overflowed(result.found_inf),
        )

    def _run(self, batches: list[Any], scale: Any, clear: Callable[[], None]) -> StepResult:
        """Run one step without a graph: clear the gradients with ``clear``, evaluate, and step."""
        evaluate = functools.partial(self._evaluate, batches, clear)
        if self._on_overflow == "replay":
            return self.update(scale, evaluate)
        loss = evaluate(scale)
        with self.optimizer._ampopt.observers.with_loss(loss):
            result = self.update(scale)
        return StepResult(loss, result.found_inf, result.scale)

    def _evaluate(self, batches: list[Any], clear: Callable[[], None], scale: Any) -> Tensor:
        """Compute the scaled gradients of all batches, and return their loss."""
        clear()
        losses = []
        n = len(batches) * self._micro_batches if self._averages else 1
        for batch in batches:
            for inputs, *targets in parts(batch, self._micro_batches):
                with self._precision.autocast(self.optimizer._ampopt.decision_device.type):
                    loss = self.forward(inputs, *targets)
                    check_loss(loss)
                    loss = loss / n if n > 1 else loss
                self.backward(loss, scale)
                losses.append(loss.detach())
        return functools.reduce(torch.add, losses)

    def _forget_captured(self) -> None:
        """Have the next step captured again."""
        if self._captured_steps is not None:
            self._captured_steps.forget()

    @torch.no_grad()
    def _unscale(self, scale: Any) -> Unscaled:
        """Unscale the gradients, and call ``on_gradients``."""
        unscaled = self.optimizer.unscale(grads_scaled_by=scale)
        assert self._on_gradients is not None
        self._on_gradients(self.optimizer)
        return unscaled

    def _capturing_on(self, device: torch.device) -> cuda_graphs.CapturedSteps | None:
        """The steps by CUDA graph on ``device``; ``None`` to run without a graph."""
        if not self._cuda_graph or is_looking():  # first_nonfinite hooks modules; replays call none
            return None
        if self._captured_steps is None:
            graphs = cuda_graphs.graphs_on(device)
            if graphs is None:
                return None
            optimizer: Any = self.optimizer
            modules = [x for x in (self.model, self._loss_fn) if isinstance(x, torch.nn.Module)]
            self._captured_steps = cuda_graphs.CapturedSteps(optimizer, graphs, modules)
        if torch.is_autocast_enabled(device.type):
            raise RuntimeError(
                "cuda_graph=True: called under torch.autocast, whose cache of cast weights a graph "
                "would share; call the step outside of it, and use its argument autocast="
            )
        return self._captured_steps


def _check_steps_model(model: Any, optimizer: Optimizer) -> None:
    """Raise ``ValueError`` if ``optimizer`` has no parameter of ``model``, a module with some."""
    if not isinstance(model, torch.nn.Module):
        return
    own = set(map(id, params_of(optimizer.param_groups)))
    names = [name for name, _ in model.named_parameters()]
    if names and own.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"the optimizer steps none of the model's parameters ({', '.join(names[:3])}, ...), so "
            "the model would never change: make the optimizer of model.parameters(), after the "
            "model was moved, cast or wrapped"
        )
