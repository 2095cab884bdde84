"""A whole training step as one call: forward, backward, accumulation, clipping and the step."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ampopt._step.torch_private import pytree
from ampopt.errors import NonFiniteGradientError
from ampopt.loss_scale.arguments import check_count
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.nonfinite import is_looking
from ampopt.optimizer import Optimizer, check_max_norm
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
    outputs,
    parts,
)
from ampopt_kernels.transfers import carried

__all__ = ["TrainStep"]


class TrainStep:
    """One object that takes training steps: call it with a batch.

    A call ``step(inputs, *targets)`` does what this loop does, and gives bitwise what it gives::

        optimizer.zero_grad()
        for inputs, *targets in micro-batches of the batch:
            with torch.autocast(device, autocast):  # or precision.autocast(device)
                loss = loss_fn(model(inputs), *targets) / micro_batches
            scale_outputs(loss, scale).backward()
        result = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=max_norm)
        scale = result.scale

    Inputs that are a tuple are passed as ``model(*inputs)``, a mapping as ``model(**inputs)``. What
    is in a batch may be nested. Its tensors are brought to the device of the optimizer's
    parameters, which does not wait on CUDA and XPU, and is cheaper from pinned memory; and divided
    along their first dimension into micro-batches of equal size. What is no tensor, or has no
    dimension, goes into every micro-batch. So ``loss_fn`` averages over a micro-batch.

    **On overflow** the step is skipped; or, with ``on_overflow="replay"``, the same batch is run
    again under the next smaller scale, until its gradients are finite; or, with ``"next_batch"``,
    the next batch is. Then the step is called with an iterator of batches, each a tuple or list
    ``(inputs, *targets)``, of which it takes one, or as many more as overflow.

    **Parts of one's own.** ``on_gradients`` sees the unscaled gradients before each step. A
    subclass may override :meth:`forward`, :meth:`backward` and :meth:`update`, which the loop calls
    in this order. This one adds micro-batches up in float32, whatever the model's dtype; it is not
    captured as a graph::

        class Accumulating(ampopt.TrainStep):
            def backward(self, loss, scale):
                super().backward(loss, scale)
                self.optimizer.accumulate(grads_scaled_by=scale)

    **CUDA graphs.** ``cuda_graph=True`` captures all of it as one graph, with skips, scale, step
    counts, clipping and dropout. The first three calls with a shape of batch warm up; the fourth
    captures, which waits for the device once, and from then on calls replay. All of them are
    steps. Learning rates and other numbers in the param groups may change at any time; a tensor on
    the device may be written to. A batch of another shape is a step without the graph. If
    parameters, state or flags become others, as by ``load_state_dict``, or the model goes from
    training to evaluation or back, capturing begins again. Other threads, as those of a
    ``DataLoader`` that pins memory, may go on meanwhile. What model and loss function do in
    Python is done while warming up and capturing only, and must not look at a tensor. Step
    post-hooks run after each replay, pre-hooks are refused. Gradients stay where they are, in
    ``p.grad``. On the CPU, and on other devices without graphs, nothing is captured, with the same
    results. Capturing is tested with a stand-in on the CPU; it has not been run on a GPU yet.

    **Synchronization.** None, but for the capture, replays and next batches, and what
    :attr:`ampopt.Optimizer.skip_by` says of optimizers that are not rules.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = ampopt.AdamW(model.parameters())
        >>> step = TrainStep(model, torch.nn.MSELoss(), optimizer, ampopt.DynamicLossScale())
        >>> loss, found_inf, scale = step(torch.ones(8, 4), torch.ones(8, 1))

    Attributes:
        model: that is trained.
        optimizer: that steps.
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
        max_norm: float | None = None,
        on_gradients: Callable[[Optimizer], object] | None = None,
        on_overflow: Literal["skip", "replay", "next_batch"] | None = None,
        max_replays: int | None = None,
        preserve_rng: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        """Prepare the step. Nothing is run yet.

        Args:
            model: called with the inputs.
            loss_fn: ``loss_fn(outputs, *targets)``, a mean over the batch: a tensor of one element.
            optimizer: an :class:`ampopt.Optimizer`, of the model's parameters.
            scale: a loss scale to begin with, ``None`` for no scaling and no check, or a number,
                which stands for :class:`ampopt.StaticLossScale`. Left out, it is
                ``precision.loss_scale()``.
            precision: a level; ``precision.prepare(model)`` is for the caller to call, and the
                optimizer is made with ``**precision.optimizer_options``.
            autocast: without ``precision``, the dtype of ``torch.autocast``, ``torch.float16``,
                if left out, or ``torch.bfloat16``; ``None`` for none of it.
            micro_batches: how many parts a batch is run in, one after another.
            max_norm: see :meth:`ampopt.Optimizer.unscale_and_step`.
            on_gradients: called with the optimizer before each step, skipped ones too; gradients of
                ``optimizer.master_params()`` are unscaled then, to be changed in place.
            on_overflow: see the class; ``"skip"``, or ``"replay"`` if ``max_replays`` is given.
            max_replays: how often a step tries again at most, 100 times if left out. See
                :meth:`ampopt.Optimizer.unscale_and_step`.
            preserve_rng: replay with the same random state.
            cuda_graph: capture the step, where there are graphs. Needs an optimizer that is a rule,
                and a model that is not under ``DistributedDataParallel``.

        Raises:
            TypeError: an argument is of the wrong type, or model or optimizer cannot be captured,
                or the optimizer needs ``on_overflow="replay"``.
            ValueError: an argument is out of range, or two of them do not go together.
        """
        called = {"model": model, "loss_fn": loss_fn}
        if on_gradients is not None:
            called["on_gradients"] = on_gradients
        for name, value in called.items():
            if not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be an ampopt.Optimizer, got "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}: import it from ampopt, "
                "or call ampopt.patch_optimizer(optimizer)"
            )
        if precision is None:
            precision = of_autocast(autocast)
        elif autocast is not NOT_GIVEN:
            raise ValueError("precision says what autocast does: leave autocast= out")
        else:
            check_masters(precision, optimizer)
            scale = precision.loss_scale() if scale is NOT_GIVEN else scale
        check_count("micro_batches", micro_batches)
        check_max_norm(max_norm)
        if on_gradients is not None and max_norm is not None:
            raise ValueError(
                "max_norm does not go with on_gradients: clip there, by torch.nn.utils."
                "clip_grad_norm_(optimizer.master_params(), max_norm)"
            )
        if on_overflow is None:
            on_overflow = "skip" if max_replays is None else "replay"
        check_overflow(on_overflow, max_replays, preserve_rng, cuda_graph)
        if optimizer._ampopt.needs_closure and on_overflow != "replay":
            raise TypeError(
                f"{type(optimizer).__name__} evaluates the loss itself: give "
                'on_overflow="replay", which hands it the evaluation as a closure'
            )
        if cuda_graph:
            cuda_graphs.check_capturable(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self._loss_fn, self._scale = loss_fn, as_scale(scale)
        self._precision, self._micro_batches, self._max_norm = precision, micro_batches, max_norm
        self._on_gradients, self._on_overflow = on_gradients, on_overflow
        self._max_replays = 100 if max_replays is None else max_replays
        self._preserve_rng = preserve_rng
        self._cuda_graph = cuda_graph
        self._captured: cuda_graphs.Captured | None = None

    @property
    def scale(self) -> LossScale | None:
        """The scale of the next step's loss. Does not synchronize; ``scale.item()`` does."""
        return self._scale

    def __call__(self, inputs: Any, *targets: Any) -> StepResult:
        """Take one step. Does not synchronize, but for what the class says.

        Args:
            inputs: what the model takes; with ``on_overflow="next_batch"``, an iterator of batches,
                and nothing else. What ``next`` raises at its end goes through.
            targets: what the loss function takes besides the outputs.

        Returns:
            ``StepResult(loss, found_inf, scale)``: the mean loss, detached; the flag, float32 and
            0-d, more than 0 for overflow; and the scale of the next step. With ``max_norm``, the
            norm before clipping is ``optimizer.grad_norm``. All are on the device and new tensors.

        Raises:
            NonFiniteGradientError: replays, or further batches, did not help; see
                :meth:`ampopt.Optimizer.unscale_and_step`.
            RuntimeError: the step cannot be captured; the scale was stepped with before.
            TypeError: ``loss_fn`` did not return a tensor of one element.
            ValueError: the batch cannot be divided into micro-batches of equal size.
        """
        if self._on_overflow == "next_batch":
            return self._first_finite(inputs, targets)
        return self._step((inputs, *targets))

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the scale's; the model's is the model's. Synchronizes."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scale": None if self._scale is None else self._scale.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what was saved. Load the model's parameters, too.

        Raises:
            TypeError: ``state_dict`` is no dict.
            ValueError: it is not of such a step, or one has a scale and the other has not, or it
                does not fit the optimizer. Nothing has changed then, nor where the optimizer's
                ``load_state_dict`` raises something else.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        if set(state_dict) != {"optimizer", "scale"}:
            raise ValueError(
                "the state of a TrainStep has exactly the entries 'optimizer' and 'scale', got "
                f"{sorted(map(str, state_dict))}"
            )
        scale, saved = self._scale, state_dict["scale"]
        if (scale is None) != (saved is None):
            with_, without = ("this", "the saved") if saved is None else ("the saved", "this")
            raise ValueError(f"{with_} step has a loss scale, {without} one has none")
        if scale is not None:
            scale = copy.deepcopy(scale)
            scale.load_state_dict(saved)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._scale = scale
        if self._captured is not None:
            self._captured.forget()

    # --- the parts, to be overridden ---------------------------------------------------------

    def forward(self, inputs: Any, *targets: Any) -> Tensor:
        """The loss of the micro-batch ``(inputs, *targets)``, of one element; under autocast."""
        return self._loss_fn(outputs(self.model, inputs), *targets)

    def backward(self, loss: Tensor, scale: LossScale | None) -> None:
        """Add the gradients of ``loss``, a micro-batch's part of the batch's, times ``scale``."""
        scale_outputs(loss, scale).backward()

    def update(
        self, scale: LossScale | None, closure: Callable[[Any], Any] | None = None
    ) -> StepResult:
        """Unscale the gradients that are there, call ``on_gradients``, and step or skip.

        Args:
            scale: that the gradients carry.
            closure: with ``on_overflow="replay"``, what makes the gradients, from a scale.
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
            self._unscale(scale)
            return optimizer.step_after_unscale()

        def evaluate(given: Any) -> tuple[Any, ...]:
            return closure(given), *self._unscale(given)

        return optimizer.step_after_unscale(evaluate, current_grad_scale=scale, **replays)

    # --- what calls them -----------------------------------------------------------------------

    def _step(self, batch: Any) -> StepResult:
        device = self.optimizer._ampopt.home
        batch = pytree.tree_map_only(Tensor, lambda t: carried(t, device), batch)
        check_divisible(batch, self._micro_batches)
        steps = self._capturing_on(device)
        if steps is None:
            result = self._run(batch, self._scale, self.optimizer.zero_grad)
        else:
            result = steps.step(batch, self._scale, mode=getattr(self.model, "training", None))
        self._scale = result.scale
        return result

    def _first_finite(self, batches: Any, rest: Any) -> StepResult:
        """A step of the first of ``batches`` that does not overflow."""
        if rest or not isinstance(batches, Iterator):
            raise TypeError(
                'on_overflow="next_batch" takes an iterator of batches, such as iter(loader), and '
                f"nothing else, got {type(batches).__name__}"
            )
        result: Any = None
        for _ in range(self._max_replays + 1):
            batch = next(batches)
            result = self._step(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
            if not result.skipped:
                return result
        raise NonFiniteGradientError(
            f"the gradients of {self._max_replays + 1} batches overflowed, each under a smaller "
            "scale than the one before",
            reason="replays",
            parameters=overflowed(result.found_inf),
        )

    def _run(self, batch: Any, scale: Any, clear: Callable[[], None]) -> StepResult:
        evaluate = functools.partial(self._evaluate, batch, clear)
        if self._on_overflow == "replay":
            return self.update(scale, evaluate)
        loss = evaluate(scale)
        with self.optimizer._ampopt.told(loss):
            result = self.update(scale)
        return StepResult(loss, result.found_inf, result.scale)

    def _evaluate(self, batch: Any, clear: Callable[[], None], scale: Any) -> Tensor:
        """Leave the batch's gradients, scaled, and return its loss."""
        clear()
        losses, n = [], self._micro_batches
        for inputs, *targets in parts(batch, n):
            with self._precision.autocast(self.optimizer._ampopt.home.type):
                loss = self.forward(inputs, *targets)
                check_loss(loss)
                loss = loss / n if n > 1 else loss
            self.backward(loss, scale)
            losses.append(loss.detach())
        return functools.reduce(torch.add, losses)

    @torch.no_grad()
    def _unscale(self, scale: Any) -> Unscaled:
        unscaled = self.optimizer.unscale(grads_scaled_by=scale)
        assert self._on_gradients is not None
        self._on_gradients(self.optimizer)
        return unscaled

    def _capturing_on(self, device: torch.device) -> cuda_graphs.Captured | None:
        if not self._cuda_graph or is_looking():  # a replayed graph calls no module
            return None
        if self._captured is None:
            graphs = cuda_graphs.graphs_on(device)
            if graphs is None:
                return None
            optimizer: Any = self.optimizer
            self._captured = cuda_graphs.Captured(optimizer, self._run, graphs)
        if torch.is_autocast_enabled(device.type):
            raise RuntimeError(
                "cuda_graph=True: called under torch.autocast, whose cache of cast weights a graph "
                "would share; call the step outside of it, it has its own (autocast=)"
            )
        return self._captured
