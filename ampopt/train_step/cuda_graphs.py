"""A training step as one CUDA graph: warmed up, captured, and replayed on other batches.

A graph reads and writes fixed addresses, so everything that steps pass on is kept in place::

    inputs                copied into buffers before each replay
    gradients             zeroed, not freed
    scale, counters       overwritten with the next ones by the graph itself
    hyperparameters       sent before a replay if they changed, or tensors on the device
    parameters, state     must stay the same tensors; if not, capturing starts over
    buffers, modes        of the model's modules: likewise
    tables of addresses   kept by the optimizer, even if other steps need others; see ``Uploads``
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ampopt._step.gradients import name_of, params_of
from ampopt._step.plan import Plan
from ampopt._step.rule_step import RuleStep
from ampopt._step.step_hooks import run_step_hooks
from ampopt._step.torch_private import POST_HOOKS, PRE_HOOKS, pytree, version
from ampopt.backend import backend_for
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.results import StepResult, as_flag, reports_of
from ampopt_kernels.native.objects import IdentityGuard

__all__ = ["Body", "CapturedSteps", "CudaGraphs", "Graphs", "check_capturable"]

Body = Callable[[Any, Any, Callable[[], None]], StepResult]
"""``body(batch, scale, clear) -> result``: clears gradients, evaluates, and steps."""

_WARM_STEPS = 3
"""Steps without a graph for each shape, in which libraries initialize and kernels compile."""


class Graphs(Protocol):
    """How CUDA graphs are made on a device. Tests replace it by a fake."""

    def aside(self) -> AbstractContextManager[None]:
        """Run the block on the capture stream, ordered after earlier and before later work."""
        ...

    def capture(self) -> AbstractContextManager[Callable[[], None]]:
        """Capture the work queued in the block, without running it; yields the replay function."""
        ...


class CudaGraphs:
    """Graphs of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream for warm-up and capture."""
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See :class:`Graphs`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                yield
            current.wait_stream(self._stream)

    @contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """See :class:`Graphs`. Synchronizes, as torch does before a capture."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            # Use the stream of the warm-up, because autograd accumulates gradients on the stream
            # where they were first made. "thread_local": calls that would break the capture raise
            # in this thread only, as others, such as one that pins memory for a DataLoader, make
            # such calls all the time.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                yield graph.replay


@dataclass(frozen=True)
class _Capture:
    """A captured step, and all tensors that must not be freed while it may be replayed.

    Attributes:
        replay: the function that runs the graph.
        inputs: the tensors of the batch that the graph reads.
        scale: the loss scale that the graph reads, and overwrites with the next one.
        result: the result that the graph writes.
        norm: the gradient norm that the graph writes; ``None`` if it does not clip.
        decision: the overflow decision that the graph writes.
        plan: the optimizer's plan, with the parameters and states of the step.
        fixed: see :meth:`CapturedSteps._fixed`.
        modules: the modes and the buffers of the model's modules.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    scale: Any
    result: StepResult
    norm: Tensor | None
    decision: Any
    plan: Plan
    fixed: list[Any]
    modules: IdentityGuard


class CapturedSteps:
    """Runs training steps, by a CUDA graph as soon as there is one."""

    def __init__(
        self, optimizer: ElementwiseOptimizer, graphs: Graphs, modules: list[torch.nn.Module]
    ) -> None:
        """Start without a graph.

        Args:
            optimizer: the optimizer that steps; see :func:`check_capturable`.
            graphs: how graphs are made on the device.
            modules: the modules that the training step runs, with those inside them.
        """
        self._optimizer, self._graphs, self._modules = optimizer, graphs, modules
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._trainable: list[bool] = []
        self._zeroed_versions: list[int] = []  # the version of each gradient after it was zeroed
        self._last_step: tuple[Any, list[Any]] = None, []  # of the warm-up: decision, and `_fixed`
        self._capture: _Capture | None = None
        self._kind: Any = None
        self._warm = 0
        self._latest: Any = None  # generation of the scale that is in the buffers of the capture

    def forget(self) -> None:
        """Discard the graph, and start over with the warm-up."""
        self._gradients, self._capture, self._kind, self._warm = [], None, None, 0

    def step(self, body: Body, batch: Any, scale: Any) -> StepResult:
        """Run one step. Synchronizes only when it captures.

        Args:
            body: the training step, which is not kept: a method of the owner of this object would
                keep the owner's tensors on the device until the garbage collector runs.
            batch: a nested structure of tensors on the device, and of values that are equal in all
                steps.
            scale: a loss scale or ``None``.

        Raises:
            RuntimeError: the step cannot be captured.
            TypeError: see :func:`_kind`.
        """
        leaves, structure = pytree.tree_flatten(batch)
        modes = [module.training for module in self._modules]
        kind = (modes, structure, [_kind(leaf) for leaf in leaves])
        self._put_gradients_back()
        if not self._holds(scale):
            self.forget()
        if self._capture is None:
            if kind != self._kind:
                self._kind, self._warm = kind, 0
            if self._warm < _WARM_STEPS or not self._was_last_step(scale):
                result = self._run_without_graph(body, batch, scale)
                self._warm += 1
                return result
            self._capture = self._capture_step(body, leaves, structure, scale)
        if kind != self._kind:
            return self._run_without_graph(body, batch, scale)
        return self._replay_step(self._capture, leaves, scale)

    def _run_without_graph(self, body: Body, batch: Any, scale: Any) -> StepResult:
        """Run one step without a graph, and remember which parameters had gradients."""
        clear = self._optimizer.zero_grad if self._capture is None else self._clear
        modules = self._guarded_modules()
        with self._graphs.aside():
            result = body(batch, scale, clear)
        if self._capture is None:
            # Steps before the last may register buffers.
            if self._warm >= _WARM_STEPS - 1 and not modules.unchanged():
                raise RuntimeError(
                    "cuda_graph=True: the model replaces a buffer, or changes the mode of a "
                    "module, while it runs. A graph writes to the same memory at each replay: "
                    "change buffers in place, as in self.buffer.copy_(value), or leave cuda_graph "
                    "out"
                )
            before, params = self._gradients, list(params_of(self._optimizer.param_groups))
            self._gradients = [(p, p.grad) for p in params if p.grad is not None]
            self._trainable = [p.requires_grad for p in params]
            self._last_step = self._optimizer._ampopt.runner.decision, self._fixed(scale)
            if self._warm:
                self._refuse_others({p for p, _ in before} ^ {p for p, _ in self._gradients})
        return result

    def _was_last_step(self, scale: Any) -> bool:
        """Whether the optimizer has taken no step since the warm-up, and would take the same again.

        A step by hand, or a new watch, needs other tables, which a capture cannot send.
        """
        decision, fixed = self._last_step
        is_last = self._optimizer._ampopt.runner.decision is decision
        return is_last and _are_same(self._fixed(scale), fixed)

    def _capture_step(self, body: Body, leaves: list[Any], structure: Any, scale: Any) -> _Capture:
        """Capture the step, with copies of the inputs and of the scale, which replays overwrite."""
        optimizer, plan = self._optimizer, self._optimizer._ampopt.runner.plan
        self._check(plan)
        assert plan is not None
        inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        live = _copy_of(scale)
        self._send_hyper(plan)
        with _without_step_hooks(optimizer), self._graphs.capture() as replay:
            result = body(pytree.tree_unflatten(inputs, structure), live, self._clear)
            self._refuse_others(self._unwritten())
            if result.scale is not live:
                live._value.copy_(result.scale._value)
                live._counters.copy_(result.scale._counters)
        return _Capture(
            replay=replay,
            inputs=[x for x in inputs if isinstance(x, Tensor)],
            scale=live,
            result=result,
            norm=optimizer._ampopt.grad_norm,
            decision=optimizer._ampopt.runner.decision,
            plan=plan,
            fixed=self._fixed(scale),
            modules=self._guarded_modules(),
        )

    def _replay_step(self, capture: _Capture, leaves: list[Any], scale: Any) -> StepResult:
        """Copy the inputs into the graph, replay it, and return copies of its results."""
        optimizer, ours = self._optimizer, self._optimizer._ampopt
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for buffer, leaf in zip(capture.inputs, tensors, strict=True):
            buffer.copy_(leaf, non_blocking=True)
        if capture.scale is not scale and scale._generation is not self._latest:
            capture.scale._value.copy_(scale._value)
            capture.scale._counters.copy_(scale._counters)
        self._send_hyper(capture.plan)
        capture.replay()
        capture.plan.finish()
        # Return copies, because the next replay overwrites the tensors of this one.
        loss, found_inf, _ = capture.result
        next_scale = _copy_of(capture.scale)
        self._latest = None if next_scale is None else next_scale._generation
        if capture.norm is not None:
            ours.grad_norm = capture.norm.clone()
        decision = capture.decision
        ours.runner.decision = decision and replace(
            decision,
            coefficients=decision.coefficients_on_device.clone(),
            scaled_by=None if scale is None else scale._value,
        )
        with ours.observers.with_loss(loss):
            run_step_hooks(optimizer)
        reports = [report.copy() for report in reports_of(found_inf)]
        return StepResult(loss.clone(), as_flag(found_inf.clone(), reports), next_scale)

    def _send_hyper(self, plan: Plan) -> None:
        """Send the hyperparameters of the param groups to the device, if they have changed."""
        for work in plan.works:
            _backend(work.device).send_hyper(work)

    def _clear(self) -> None:
        """Zero the gradients in place, and remember their versions; see :meth:`_unwritten`."""
        self._optimizer.zero_grad()
        self._put_gradients_back()
        if self._gradients:
            zero: Any = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]
            zero([grad for _, grad in self._gradients])
        self._zeroed_versions = [version(grad) for _, grad in self._gradients]

    def _unwritten(self) -> set[Tensor]:
        """The parameters whose gradients no backward pass has written since :meth:`_clear`."""
        pairs = zip(self._gradients, self._zeroed_versions, strict=True)
        return {p for (p, grad), old in pairs if p.grad is grad and version(grad) == old}

    def _refuse_others(self, others: set[Tensor]) -> None:
        """Raise if some parameters had a gradient in one step and none in another.

        Args:
            others: these parameters.
        """
        if others:
            groups = self._optimizer.param_groups
            names = ", ".join(sorted(name_of(groups, param) for param in others))
            raise RuntimeError(
                "cuda_graph=True: some steps before or in the capture computed gradients of "
                f"{names}, and others did not. A graph computes and applies the same gradients at "
                "each replay: have the model use every parameter in each step, freeze parameters "
                "that it does not use (requires_grad_(False)), or leave cuda_graph out"
            )

    def _put_gradients_back(self) -> None:
        """Restore the gradient tensors, which the graph writes to, after ``zero_grad``."""
        for param, grad in self._gradients:
            param.grad = grad

    def _holds(self, scale: Any) -> bool:
        """Whether the optimizer still works on the tensors of the graph, or of the last step.

        And whether the model has its buffers and modes, and ``scale`` its schedule, of the graph.
        """
        steps, capture = self._optimizer._ampopt.runner, self._capture
        plan = steps.plan
        params = params_of(self._optimizer.param_groups)
        if [p.requires_grad for p in params] != self._trainable:
            return False
        if plan is None or not plan.reusable:  # capturing it is an error; see _check
            return capture is None
        if capture is not None:
            is_same = plan is capture.plan and _are_same(self._fixed(scale), capture.fixed)
            if not (is_same and capture.modules.unchanged()):
                return False
        present = plan.present
        with torch.no_grad():  # as in a step, because a plan also depends on the grad mode
            return plan.revalidate(steps.optimizer, steps.rule) and plan.present == present

    def _fixed(self, scale: Any) -> list[Any]:
        """The objects that a graph uses as they are now.

        These are the watch and the skip conditions, the hyperparameters that are tensors, and the
        schedule of ``scale``, or its tensor if it is static.
        """
        optimizer, observers = self._optimizer, self._optimizer._ampopt.observers
        values = [x for group in optimizer.param_groups for x in optimizer.rule.hyper_values(group)]
        fixed = [observers.watch, *observers.causes, *(x for x in values if isinstance(x, Tensor))]
        if scale is not None:
            fixed.append(scale._value if scale._counters is None else scale._policy)
        return fixed

    def _guarded_modules(self) -> IdentityGuard:
        """The modes and the buffers of all modules, as they are now; not of scripted ones."""
        dicts = [vars(module) for root in self._modules for module in root.modules()]
        dicts = [each for each in dicts if isinstance(each.get("_buffers"), dict)]
        modes = [(each, {"training"} & each.keys()) for each in dicts]
        return IdentityGuard([], [*modes, *((each["_buffers"], None) for each in dicts)])

    def _check(self, plan: Plan | None) -> None:
        """Raise if the last step, with this plan, cannot be captured."""
        if plan is None or not plan.reusable:
            raise RuntimeError(
                "cuda_graph=True: this step works on copies, or is torch's own, as with sparse "
                "gradients, so no graph can replay it. Use dense gradients, parameters without "
                "gaps in memory, and states with their strides, or leave cuda_graph out"
            )
        if not plan.works:
            raise RuntimeError(
                "cuda_graph=True: no parameter of the optimizer has a gradient; create the "
                "optimizer with the parameters of the model"
            )
        if len(plan.works) > 1:
            raise RuntimeError(
                "cuda_graph=True: the parameters are on several devices, but a graph runs on one; "
                "leave cuda_graph out"
            )
        if getattr(self._optimizer, PRE_HOOKS):
            raise RuntimeError(
                "cuda_graph=True: a step pre-hook cannot change a step that is replayed; remove "
                "it, or leave cuda_graph out. Post-hooks run after each replay"
            )


def check_capturable(model: Any, optimizer: Any) -> None:
    """Refuse a model or optimizer whose step cannot be captured.

    Raises:
        TypeError: the optimizer does not step by a rule; the model is, or contains, a
            ``DistributedDataParallel``.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise TypeError(
            "cuda_graph=True: the model is under DistributedDataParallel, which rearranges its "
            "communication during its first eleven backward passes, and must be created and "
            "warmed up on the stream where it is captured; leave cuda_graph out"
        )
    if (
        not isinstance(optimizer, ElementwiseOptimizer)
        or not isinstance(optimizer._ampopt, RuleStep)
        or optimizer.defaults.get("differentiable")
    ):
        raise TypeError(
            "cuda_graph=True needs an ElementwiseOptimizer without a step() of its own, got "
            f"{type(optimizer).__name__}, whose step may depend on the host's memory; leave "
            "cuda_graph out"
        )


def graphs_on(device: torch.device) -> Graphs | None:
    """How graphs are made on ``device``; ``None`` if the device has no graphs.

    Raises:
        RuntimeError: the device has graphs, but does not run the triton backend.
    """
    if device.type != "cuda":
        return None
    _backend(device)
    return CudaGraphs(device)


def _backend(device: torch.device) -> Any:
    """The Triton backend of ``device``.

    Raises:
        RuntimeError: another backend runs there, which cannot be captured.
    """
    backend = backend_for(device)
    if backend.name != "triton":
        raise RuntimeError(
            f"cuda_graph=True needs the triton backend on {device}, got {backend.name}, which "
            "would capture the present hyperparameters; install Triton and set_backend('auto')"
        )
    return backend


def _copy_of(scale: Any) -> Any:
    """A dynamic scale with tensors of its own; any other scale, which no step changes, itself."""
    if scale is None or scale._counters is None:
        return scale
    return scale._with(scale._value.clone(), scale._counters.clone())


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Whether both have the same objects."""
    return list(map(id, now)) == list(map(id, before))


def _kind(leaf: Any) -> Any:
    """The key that a replay compares: shape and dtype of a tensor, or any other object itself.

    Raises:
        TypeError: the object is one whose contents may change, such as an array of NumPy.
    """
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    if not isinstance(leaf, Hashable):
        raise TypeError(
            f"cuda_graph=True: a batch contains a {type(leaf).__name__}, whose present values each "
            "replay would use again: make a tensor of it"
        )
    return leaf


@contextmanager
def _without_step_hooks(optimizer: ElementwiseOptimizer) -> Iterator[None]:
    """Disable step hooks: a capture runs no step. They run after each replay."""
    hooks = getattr(optimizer, POST_HOOKS)
    setattr(optimizer, POST_HOOKS, OrderedDict())
    try:
        yield
    finally:
        setattr(optimizer, POST_HOOKS, hooks)
