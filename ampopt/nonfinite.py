"""Find the first module whose output, or gradient, is inf or NaN."""

import contextvars
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ampopt._step.sharding import dtensor
from ampopt._step.torch_private import pytree
from ampopt_kernels.tensors import real

__all__ = [
    "FirstNonFinite",
    "NonFiniteOutput",
    "first_nonfinite",
    "found_now",
    "is_looking",
    "look_anew",
]


_ADVICE = {
    ("forward", True): "Its inputs were finite. A loss scale does not help: run the module in "
    "float32, or scale down its inputs.",
    ("forward", False): "Its inputs were not finite already: check the batch, and operations "
    "between modules.",
    ("backward", True): "Its incoming gradient was finite: a smaller loss scale may help.",
    ("backward", False): "Its incoming gradient was not finite already: check the loss, whose "
    "scale may be too large, and tensors used several times, whose gradients are added up.",
}
"""Where to search next, by direction and by whether the inputs of the module were finite."""


@dataclass(frozen=True)
class NonFiniteOutput:
    """A tensor that is not finite, and the module that made it, forward or backward.

    Attributes:
        name: the name of the module, as in ``model.named_modules()``; ``""`` for the model itself.
        kind: the name of the module's class.
        direction: ``"forward"`` for an output, ``"backward"`` for a gradient.
        dtype: the dtype of the tensor that is not finite.
        shape: the shape of that tensor.
        largest: the largest finite magnitude in that tensor; ``None`` if no element is finite.
        given_finite: whether the module's inputs (backward, its incoming gradients) were finite, so
            that the module itself is the cause.
        operation: backward, the node of the autograd graph that made the gradient, such as
            ``"AddmmBackward0"``; forward, ``None``.
    """

    name: str
    kind: str
    direction: Literal["forward", "backward"]
    dtype: torch.dtype
    shape: tuple[int, ...]
    largest: float | None
    given_finite: bool
    operation: str | None = None

    @property
    def subject(self) -> str:
        """The tensor that is not finite, in words."""
        module = f"{self.name!r} ({self.kind})" if self.name else f"the model itself ({self.kind})"
        if self.direction == "forward":
            return f"the output of {module}"
        return f"the gradient that {module} made backward, in {self.operation},"

    def __str__(self) -> str:
        """What was found, and where to search next."""
        limit = torch.finfo(self.dtype).max
        values = (
            "without a finite element"
            if self.largest is None
            else f"largest finite magnitude {self.largest:.4g} of at most {limit:.4g}"
        )
        return (
            f"{self.subject} is not finite: {str(self.dtype).removeprefix('torch.')} of shape "
            f"{self.shape}, {values}. {_ADVICE[self.direction, self.given_finite]}"
        )


class FirstNonFinite:
    """The result of :func:`first_nonfinite`: print it, or read :attr:`first`.

    Attributes:
        first: what was found; ``None`` while everything was finite.
        calls: the number of module calls that were checked.
    """

    def __init__(self) -> None:
        """Nothing has been found yet."""
        self.first: NonFiniteOutput | None = None
        self.calls = 0

    def __bool__(self) -> bool:
        """Whether something was found."""
        return self.first is not None

    def __str__(self) -> str:
        """What was found, in words."""
        if self.first is not None:
            return str(self.first)
        if not self.calls:
            return (
                "no module of the model was called: run the step within the context. A CUDA graph "
                "that is replayed calls none, nor does model.forward(x) where model(x) is meant"
            )
        return f"everything that {self.calls} calls of modules made was finite"

    __repr__ = __str__


@contextmanager
def first_nonfinite(model: torch.nn.Module) -> Iterator[FirstNonFinite]:
    """Find the first module whose output, or backward whose gradient, is not finite.

    Run the failing step again within this context: the forward pass alone, or if gradients
    overflow, the backward pass too. Gradients of parameters and of inputs are checked. Of nested
    modules the innermost is named. Operations in the ``forward`` of a module, between calls of its
    submodules, are attributed to that module.

    If a closure is evaluated again after an overflow, as under ``TrainStep(max_replays=...)``, the
    search restarts with each evaluation, and its result is that of the last one that failed. A
    :class:`ampopt.NonFiniteGradientError` raised within the context names the module, too.

    For debugging, not for training: **synchronizes** at each call of a module and each operation of
    the backward pass. Results are bitwise the same as without it. Code compiled by
    ``torch.compile`` runs uncompiled meanwhile, so its results may differ in rounding, and
    ``TrainStep(cuda_graph=True)`` steps without its graph. Modules that return infinities on
    purpose, for example for a mask, are reported as well.

    Example:
        >>> class Explodes(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * 1e5
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), Explodes(), torch.nn.ReLU())
        >>> with ampopt.first_nonfinite(model.half()) as found:
        ...     _ = model(torch.full((2, 4), 100.0).half())
        >>> found.first.name, found.first.kind, found.first.direction
        ('1', 'Explodes', 'forward')

    Args:
        model: the module to search; the submodules that it has on entry are watched.

    Yields:
        A :class:`FirstNonFinite`, filled in as the model runs. It can be read after the block, too.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model that is "
            "trained, for instance step.model of a TrainStep"
        )
    search = _Search()
    token = _searches.set((*_searches.get(), search))
    with ExitStack() as stack:
        stack.callback(_searches.reset, token)
        stack.callback(search.end)
        for name, module in model.named_modules():
            whose = (name, type(module).__name__)
            before = functools.partial(search.before, whose)
            hooks = (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(search.after, always_call=True),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the import is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield search.found


def is_looking() -> bool:
    """Whether this call runs within a :func:`first_nonfinite` context."""
    return bool(_searches.get())


def look_anew() -> None:
    """Restart the searches around this call, because the same batch is about to run again."""
    for search in _searches.get():
        search.anew = True


def found_now() -> NonFiniteOutput | None:
    """What a search around this call has found since :func:`look_anew`; ``None`` if nothing."""
    return next((s.found.first for s in _searches.get() if s.found and not s.anew), None)


@dataclass
class _Call:
    """A call of a module that has not returned yet."""

    name: str
    kind: str
    given_finite: bool


class _Search:
    """The hooks of one :func:`first_nonfinite`.

    For the backward pass it hooks the nodes of the autograd graph, and remembers which module made
    each node. Hooks on modules, or on their outputs, would miss the gradients of parameters, which
    usually overflow first, could not distinguish several uses of a tensor, and would change the
    graph.
    """

    def __init__(self) -> None:
        self.found = FirstNonFinite()
        self.anew = False
        self._over = False
        self._running = threading.local()

    def end(self) -> None:
        """Stop checking: a watched graph may run backward after the context has ended."""
        self._over = True

    @property
    def _calls(self) -> list[_Call]:
        """The module calls that are running in this thread, the innermost last."""
        if not hasattr(self._running, "calls"):
            self._running.calls = []
        return self._running.calls

    def before(self, whose: tuple[str, str], module: Any, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: ``module`` is about to run."""
        given = (args, kwargs)
        self._watch_nodes(given, self._calls[-1] if self._calls else None)
        # Check the inputs now, because a module that works in place overwrites them.
        self._calls.append(_Call(*whose, given_finite=self._first_bad(given) is None))

    def after(self, module: Any, args: Any, output: Any) -> None:
        """A forward hook: ``module`` has run, or raised an error."""
        call = self._calls.pop()
        self.found.calls += 1
        self._watch_nodes(output, call)
        bad = self._first_bad(output)
        if bad is not None:
            self._note(call, bad, "forward", call.given_finite)

    def _watch_nodes(self, structure: Any, call: _Call | None) -> None:
        """Hook the nodes behind these tensors that are not hooked yet.

        Args:
            structure: a nested structure with the tensors.
            call: the module call that made the nodes; ``None`` if they were made outside of
                modules.
        """
        nodes: list[Any] = [tensor.grad_fn for tensor in _tensors(structure)]
        while nodes:
            node = nodes.pop()
            # Omit nodes of leaves: they only add up what others have made, and outlive the graph.
            if node is None or not node.next_functions or self in node.metadata:
                continue
            node.metadata[self] = True
            if call is not None:
                node.register_hook(functools.partial(self._backward, call, node.name()))
            nodes += [further for further, _ in node.next_functions]

    def _backward(self, call: _Call, operation: str, made: Any, given: Any) -> None:
        """A hook of an autograd node that ``call`` made: the node has run."""
        bad = None if self._over else self._first_bad(made)
        if bad is not None:
            self._note(call, bad, "backward", _first_not_finite(given) is None, operation)

    @property
    def _looking(self) -> bool:
        return self.anew or not self.found

    def _first_bad(self, made: Any) -> Tensor | None:
        return _first_not_finite(made) if self._looking else None

    def _note(
        self,
        call: _Call,
        bad: Tensor,
        direction: Literal["forward", "backward"],
        given_finite: bool,
        operation: str | None = None,
    ) -> None:
        self.anew = False
        self.found.first = NonFiniteOutput(
            name=call.name,
            kind=call.kind,
            direction=direction,
            dtype=bad.dtype,
            shape=tuple(bad.shape),
            largest=_largest(bad),
            given_finite=given_finite,
            operation=operation,
        )


_searches: contextvars.ContextVar[tuple[_Search, ...]] = contextvars.ContextVar(
    "searches", default=()
)
"""The searches whose contexts this thread has entered."""


def _tensors(structure: Any) -> list[Tensor]:
    """The tensors in ``structure`` that can be inf or NaN: not on meta, and not of integers."""
    leaves = (t for t in pytree.tree_leaves(structure) if isinstance(t, Tensor))
    return [t for t in leaves if not t.is_meta and (t.is_floating_point() or t.is_complex())]


@torch.no_grad()
def _values(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` on this rank: real numbers of a dtype that torch can compare."""
    tensor = dtensor.local(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    values = real(tensor.resolve_conj().resolve_neg())
    return values.float() if values.dtype.itemsize == 1 else values


def _first_not_finite(structure: Any) -> Tensor | None:
    return next((t for t in _tensors(structure) if not _values(t).isfinite().all()), None)


def _largest(tensor: Tensor) -> float | None:
    values = _values(tensor)
    finite = values[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else None
