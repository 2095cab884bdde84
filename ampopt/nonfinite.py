"""Which module is the first to make something that is not finite, forward or backward."""

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

from ampopt._step import dtensor
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
    ("forward", True): "What it was given was finite. No loss scale mends that: have it compute in "
    "float32, or make what it is given smaller.",
    ("forward", False): "What it was given was not finite already: look at the batch, and at what "
    "is done between modules.",
    ("backward", True): "What it was given was finite: a smaller loss scale may mend that.",
    ("backward", False): "What it was given was not finite already: look at the loss, which may be "
    "scaled by too much, and at tensors used several times, whose gradients are added up.",
}
"""Where to look next, by direction and by whether what the module was given was finite."""


@dataclass(frozen=True)
class NonFiniteOutput:
    """What a module made that is not finite: its output, or backward, a gradient.

    Attributes:
        name: of the module, as ``model.named_modules()`` has it; ``""`` for the model itself.
        kind: the name of its class.
        direction: ``"forward"`` or ``"backward"``.
        dtype: of the tensor that is not finite.
        shape: likewise.
        largest: its largest finite magnitude; ``None`` if no element of it is finite.
        given_finite: whether what the module was given was finite, so that it is the module's own
            doing.
        operation: backward, the node of torch's graph that made it, as ``"AddmmBackward0"``.
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
        """What is not finite, in words."""
        module = f"{self.name!r} ({self.kind})" if self.name else f"the model itself ({self.kind})"
        if self.direction == "forward":
            return f"the output of {module}"
        return f"the gradient that {module} made backward, in {self.operation},"

    def __str__(self) -> str:
        """What was found, and where to look next."""
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
    """What :func:`first_nonfinite` has found; ``print`` it, or read :attr:`first`.

    Attributes:
        first: what was found; ``None`` as long as everything was finite.
        calls: how many calls of modules were looked at.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
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

    Run the step that went wrong once more within it: a forward pass will do, and the backward pass
    too where gradients overflow. The gradients of parameters and of inputs are looked at alike. Of
    nested modules the innermost is named; what is done in the ``forward`` of one between calls of
    others is its own.

    Under ``TrainStep(max_replays=...)``, and wherever else a closure is run again, each evaluation
    begins anew, so that it is that of the last one that overflowed; a
    :class:`ampopt.NonFiniteGradientError` that is raised within names it, too.

    For looking, not for training: **synchronizes** at each call of a module and each operation of
    the backward pass. Results are bitwise what they are without it, but for what ``torch.compile``
    has compiled, which runs uncompiled meanwhile; ``TrainStep(cuda_graph=True)`` steps without its
    graph. A module that returns infinities on purpose, as for a mask, is found as well.

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
        model: whose modules are watched; those that it has when this begins.

    Yields:
        A :class:`FirstNonFinite`, filled in as the model runs, which can be read afterwards too.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: give the model that is "
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
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and to import it takes long
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield search.found


def is_looking() -> bool:
    """Whether a search is going on around this call."""
    return bool(_searches.get())


def look_anew() -> None:
    """The same batch is about to be run again: what is found then counts."""
    for search in _searches.get():
        search.anew = True


def found_now() -> NonFiniteOutput | None:
    """What a search around this call has found since :func:`look_anew`."""
    return next((s.found.first for s in _searches.get() if s.found and not s.anew), None)


@dataclass
class _Call:
    """A call of a module that has not returned yet."""

    name: str
    kind: str
    given_finite: bool


class _Search:
    """The hooks of one :func:`first_nonfinite`.

    Backward, it is the nodes of autograd's graph that are watched, each for the module that made
    it. Hooks on modules or on their outputs would not see gradients of parameters, which overflow
    first as a rule, nor tell the uses of a tensor apart, and change the graph.
    """

    def __init__(self) -> None:
        self.found = FirstNonFinite()
        self.anew = False
        self._over = False
        self._running = threading.local()

    def end(self) -> None:
        """Be silent where a graph that was watched is run backward later."""
        self._over = True

    @property
    def _calls(self) -> list[_Call]:
        """Of modules that are running in this thread, the innermost last."""
        if not hasattr(self._running, "calls"):
            self._running.calls = []
        return self._running.calls

    def before(self, whose: tuple[str, str], module: Any, args: Any, kwargs: Any) -> None:
        """A hook: ``module`` is about to run."""
        given = (args, kwargs)
        self._watch_nodes(given, self._calls[-1] if self._calls else None)
        # Now, since a module that works in place overwrites it.
        self._calls.append(_Call(*whose, given_finite=self._first_bad(given) is None))

    def after(self, module: Any, args: Any, output: Any) -> None:
        """A hook: ``module`` has run, or raised an error."""
        call = self._calls.pop()
        self.found.calls += 1
        self._watch_nodes(output, call)
        bad = self._first_bad(output)
        if bad is not None:
            self._note(call, bad, "forward", call.given_finite)

    def _watch_nodes(self, structure: Any, call: _Call | None) -> None:
        """Watch the nodes behind these tensors that are new, which ``call`` made, if any did."""
        nodes: list[Any] = [tensor.grad_fn for tensor in _tensors(structure)]
        while nodes:
            node = nodes.pop()
            # A leaf's only adds up what others have made, and outlives the graph.
            if node is None or not node.next_functions or self in node.metadata:
                continue
            node.metadata[self] = True
            if call is not None:
                node.register_hook(functools.partial(self._backward, call, node.name()))
            nodes += [further for further, _ in node.next_functions]

    def _backward(self, call: _Call, operation: str, made: Any, given: Any) -> None:
        """A hook: a node that ``call`` made has run."""
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
"""Those that are going on around what this thread runs."""


def _tensors(structure: Any) -> list[Tensor]:
    """The tensors in it that may have something not finite."""
    leaves = (t for t in pytree.tree_leaves(structure) if isinstance(t, Tensor))
    return [t for t in leaves if not t.is_meta and (t.is_floating_point() or t.is_complex())]


@torch.no_grad()
def _values(tensor: Tensor) -> Tensor:
    """What ``tensor`` holds here, real, and of a dtype that torch can compare."""
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
