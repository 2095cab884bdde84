"""A whole training step as one call: forward, backward, accumulation, clipping and the step."""

import copy
import functools
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt import cuda_graphs
from ampopt._step.torch_private import pytree
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.mistakes import instead_of
from ampopt.loss_scale.numbers import check_count
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.loss_scale.static import StaticLossScale
from ampopt.nonfinite import is_looking
from ampopt.optimizer import Optimizer, check_max_norm
from ampopt.precision.levels import Precision
from ampopt.results import StepResult
from ampopt_kernels.transfers import carried

__all__ = ["TrainStep"]

_NOT_GIVEN: Any = object()


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

    **On overflow** the step is skipped, or, with ``max_replays``, the same batch is run again under
    the next smaller scale, until its gradients are finite.

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

    **Synchronization.** None, but for the capture, ``max_replays``, and what
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
        scale: LossScale | float | None = _NOT_GIVEN,
        *,
        precision: Precision | None = None,
        autocast: torch.dtype | None = _NOT_GIVEN,
        micro_batches: int = 1,
        max_norm: float | None = None,
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
            max_replays: run an overflowed batch again, so often at most; ``None`` to skip instead.
                See :meth:`ampopt.Optimizer.unscale_and_step`.
            preserve_rng: replay with the same random state. Needs ``max_replays``.
            cuda_graph: capture the step, where there are graphs. Needs an optimizer that is a rule,
                and a model that is not under ``DistributedDataParallel``.

        Raises:
            TypeError: an argument is of the wrong type, or model or optimizer cannot be captured,
                or the optimizer needs ``max_replays``.
            ValueError: an argument is out of range, or two of them do not go together.
        """
        for name, value in (("model", model), ("loss_fn", loss_fn)):
            if not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be an ampopt.Optimizer, got "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}: import it from ampopt, "
                "or call ampopt.patch_optimizer(optimizer)"
            )
        if precision is None:
            precision = _of_autocast(autocast)
        elif autocast is not _NOT_GIVEN:
            raise ValueError("precision says what autocast does: leave autocast= out")
        else:
            _check_masters(precision, optimizer)
            scale = precision.loss_scale() if scale is _NOT_GIVEN else scale
        check_count("micro_batches", micro_batches)
        check_max_norm(max_norm)
        if max_replays is not None:
            check_count("max_replays", max_replays, least=0)
            if cuda_graph:
                raise ValueError(
                    "max_replays does not go with cuda_graph=True: to replay, the host has to look "
                    "at each step; leave one of them out"
                )
        elif preserve_rng:
            raise ValueError("preserve_rng is for replays: give max_replays too, 100 for instance")
        elif optimizer._ampopt.needs_closure:
            raise TypeError(
                f"{type(optimizer).__name__} evaluates the loss itself: give max_replays, 100 for "
                "instance, which hands it the evaluation as a closure"
            )
        if cuda_graph:
            cuda_graphs.check_capturable(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self._loss_fn, self._scale = loss_fn, _as_scale(scale)
        self._precision, self._micro_batches, self._max_norm = precision, micro_batches, max_norm
        self._max_replays, self._preserve_rng = max_replays, preserve_rng
        self._cuda_graph = cuda_graph
        self._captured: cuda_graphs.Captured | None = None

    @property
    def scale(self) -> LossScale | None:
        """The scale of the next step's loss. Does not synchronize; ``scale.item()`` does."""
        return self._scale

    def __call__(self, inputs: Any, *targets: Any) -> StepResult:
        """Take one step. Does not synchronize, but for what the class says.

        Args:
            inputs: what the model takes.
            targets: what the loss function takes besides the outputs.

        Returns:
            ``StepResult(loss, found_inf, scale)``: the mean loss, detached; the flag, float32 and
            0-d, more than 0 for overflow; and the scale of the next step. With ``max_norm``, the
            norm before clipping is ``optimizer.grad_norm``. All are on the device and new tensors.

        Raises:
            NonFiniteGradientError: replays did not help; see
                :meth:`ampopt.Optimizer.unscale_and_step`.
            RuntimeError: the step cannot be captured; the scale was stepped with before.
            TypeError: ``loss_fn`` did not return a tensor of one element.
            ValueError: the batch cannot be divided into micro-batches of equal size.
        """
        device = self.optimizer._ampopt.home
        batch = pytree.tree_map_only(Tensor, lambda t: carried(t, device), (inputs, *targets))
        self._check_divisible(batch)
        steps = self._capturing_on(device)
        if steps is None:
            result = self._run(batch, self._scale, self.optimizer.zero_grad)
        else:
            result = steps.step(batch, self._scale, mode=getattr(self.model, "training", None))
        self._scale = result.scale
        return result

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

    # --- the parts ---------------------------------------------------------------------------

    def _run(self, batch: Any, scale: Any, clear: Callable[[], None]) -> StepResult:
        evaluate = functools.partial(self._evaluate, batch, clear)
        if self._max_replays is not None:
            return self.optimizer.unscale_and_step(
                evaluate,
                grads_scaled_by=scale,
                max_norm=self._max_norm,
                max_replays=self._max_replays,
                preserve_rng=self._preserve_rng,
            )
        loss = evaluate(scale)
        result = self.optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=self._max_norm)
        return StepResult(loss, result.found_inf, result.scale)

    def _evaluate(self, batch: Any, clear: Callable[[], None], scale: Any) -> Tensor:
        """Leave the batch's gradients, scaled, and return its loss."""
        clear()
        losses = []
        for inputs, *targets in self._parts(batch):
            with self._precision.autocast(self.optimizer._ampopt.home.type):
                loss = self._loss_fn(_outputs(self.model, inputs), *targets)
                _check_loss(loss)
                loss = loss / self._micro_batches if self._micro_batches > 1 else loss
            scale_outputs(loss, scale).backward()
            losses.append(loss.detach())
        return functools.reduce(torch.add, losses)

    def _parts(self, batch: Any) -> Iterator[Any]:
        n = self._micro_batches
        if n == 1:
            yield batch
            return
        leaves, structure = pytree.tree_flatten(batch)
        split = [x.split(len(x) // n) if _has_rows(x) else [x] * n for x in leaves]
        for part in zip(*split, strict=True):
            yield pytree.tree_unflatten(part, structure)

    def _check_divisible(self, batch: Any) -> None:
        n = self._micro_batches
        for leaf in pytree.tree_leaves(batch) if n > 1 else ():
            if _has_rows(leaf) and (len(leaf) % n or not len(leaf)):
                raise ValueError(
                    f"a batch of {len(leaf)} cannot be divided into micro_batches={n} of equal "
                    "size: choose a batch size that it divides, and drop_last=True in the loader"
                )

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


def _of_autocast(dtype: Any) -> Precision:
    if dtype not in (torch.float16, torch.bfloat16, None, _NOT_GIVEN):
        raise ValueError(f"autocast must be torch.float16, torch.bfloat16 or None, got {dtype!r}")
    dtype = torch.float16 if dtype is _NOT_GIVEN else dtype
    return Precision(compute_dtype=dtype or torch.float32)


def _check_masters(precision: Any, optimizer: Optimizer) -> None:
    if not isinstance(precision, Precision):
        raise TypeError(f"precision must be an ampopt.Precision, got {type(precision).__name__}")
    if precision.master_weights and not all(
        group.get("master_weights") for group in optimizer.param_groups
    ):
        raise ValueError(
            f"precision asks for master weights, and {type(optimizer).__name__} was made without: "
            "give it **precision.optimizer_options"
        )


def _as_scale(scale: Any) -> LossScale | None:
    if scale is _NOT_GIVEN:
        raise TypeError("TrainStep needs a loss scale, None for none of it, or precision=")
    if scale is None or isinstance(scale, LossScale):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            "scale must be a LossScale, such as ampopt.DynamicLossScale(), a positive number or "
            f"None, got {type(scale).__name__}{instead_of(scale)}"
        )
    return StaticLossScale(float(scale))


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn must return a tensor of one element, got {got}")


def _outputs(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
