"""The search for the first output or gradient that is inf or NaN, by hooks on modules."""

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
from ampopt.nonfinite.result import FiniteOutput, FirstNonFinite, NonFiniteOutput
from ampopt_kernels.tensors import real

__all__ = ["first_nonfinite", "found_now", "is_looking", "look_again"]


@contextmanager
def first_nonfinite(model: torch.nn.Module) -> Iterator[FirstNonFinite]:
    """Find the first module whose output or, in the backward pass, gradient is not finite.

    Run the failing step again within this context: the forward pass, and if gradients overflow,
    the backward pass. Gradients of parameters and of inputs are checked. Of nested modules the
    innermost is named. Operations in the ``forward`` of a module, between calls of its submodules,
    are attributed to that module; the submodule that got their result, and the last finite output
    before, are named, too. A parameter of the module is named if it is not finite. If the gradients
    in all modules are finite, and that of a parameter is not, it was made outside of modules, for
    instance by a penalty in the loss; then the parameter is named, too.

    If a closure is evaluated again after an overflow, as under ``TrainStep(max_replays=...)``, the
    result is about the last evaluation that overflowed. A :class:`ampopt.NonFiniteGradientError`
    raised within the context names the module, too.

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
            before = functools.partial(search.before, name)
            hooks = (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(search.after, always_call=True),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        stack.enter_context(search.watching_parameters(model))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the import is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield search.result


def is_looking() -> bool:
    """Whether this call runs within a :func:`first_nonfinite` context."""
    return bool(_searches.get())


def look_again() -> None:
    """Restart the searches around this call, because the same batch is about to run again."""
    for search in _searches.get():
        search.restart()


def found_now() -> NonFiniteOutput | None:
    """The result of a search around this call since :func:`look_again`; ``None`` without one."""
    return next((s.result.first for s in _searches.get() if not s.restarted), None)


@dataclass(frozen=True)
class _Bad:
    """A tensor that is not finite: its dtype, shape and largest finite magnitude."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    largest: float | None


@dataclass
class _ModuleCall:
    """A call of a module that has not returned yet.

    Attributes:
        name: the module's name in the model.
        module: the module.
        bad_input: the first of its inputs that is not finite; ``None`` if all are.
        around: the module call that it was made in; ``None`` for an outermost one.
    """

    name: str
    module: torch.nn.Module
    bad_input: _Bad | None
    around: "_ModuleCall | None"


class _Thread(threading.local):
    """The innermost module call that is running in this thread; ``None`` outside of modules."""

    call: _ModuleCall | None = None


class _Search:
    """The hooks of one :func:`first_nonfinite`.

    For the backward pass it hooks the nodes of the autograd graph, and remembers which module made
    each node. Hooks on modules, or on their outputs, would miss the gradients of parameters, which
    usually overflow first, could not distinguish several uses of a tensor, and would change the
    graph.
    """

    def __init__(self) -> None:
        """Start a search that has found nothing."""
        self.result = FirstNonFinite()
        self.restarted = False
        self._over = False
        self._last_finite: FiniteOutput | None = None
        self._thread = _Thread()

    def restart(self) -> None:
        """Replace what was found by what the next evaluation finds, if it finds anything."""
        self.restarted, self._last_finite = True, None

    def end(self) -> None:
        """Stop checking: a watched graph may run backward after the context has ended."""
        self._over = True

    def before(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: ``module`` is about to run."""
        arguments, around = (args, kwargs), self._thread.call
        self._watch_nodes(arguments, around)
        # Check the inputs now, because a module that works in place overwrites them.
        checked = _tensors(arguments) if self._looking else ()
        inputs = [tensor for tensor in checked if not _is_mask(tensor)]
        self._thread.call = _ModuleCall(name, module, self._first_bad(inputs), around)

    def after(self, module: Any, args: Any, output: Any) -> None:
        """A forward hook: ``module`` has run, or raised an error."""
        call = self._thread.call
        if call is None or call.module is not module:
            return  # a pre-hook that ran before ours has raised
        self._thread.call = call.around
        self.result.calls += 1
        self._watch_nodes(output, call)
        if not self._looking:
            return
        bad = self._first_bad(output)
        if bad is None:
            self._last_finite = _finite_output(call, output) or self._last_finite
            return
        # The forward of the innermost call with finite inputs made the tensor, if not this module.
        inner, outer = call, call.around
        while inner.bad_input is not None and outer is not None:
            if outer.bad_input is None:
                self._note(outer, inner.bad_input, "forward", given_to=inner.name)
                return
            inner, outer = outer, outer.around
        self._note(call, bad, "forward", given_finite=call.bad_input is None)

    def _watch_nodes(self, structure: Any, call: _ModuleCall | None) -> None:
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

    def _backward(
        self, call: _ModuleCall, operation: str, grad_inputs: Any, grad_outputs: Any
    ) -> None:
        """A hook of an autograd node that ``call`` made: the node has run."""
        bad = None if self._over else self._first_bad(grad_inputs)
        if bad is not None:
            given_finite = _first_not_finite(grad_outputs) is None
            self._note(call, bad, "backward", given_finite=given_finite, operation=operation)

    @contextmanager
    def watching_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the block, and at its end, check the gradients that parameters have got.

        Gradients that were not finite before are left out, as long as they are the same tensors.
        """
        checks = []
        with ExitStack() as stack:
            for module_name, module in model.named_modules():
                for name, param in module.named_parameters(module_name, recurse=False):
                    before = None if _first_not_finite(param.grad) is None else param.grad
                    call = _ModuleCall(module_name, module, None, None)
                    check = functools.partial(self._check_gradient, call, name, before)
                    checks.append((check, param))
                    if param.requires_grad and param.is_leaf:
                        stack.callback(param.register_post_accumulate_grad_hook(check).remove)
            yield
            for check, param in checks:
                check(param)

    def _check_gradient(
        self, owner: _ModuleCall, name: str, before: Tensor | None, param: Tensor
    ) -> None:
        """Check the gradient of a parameter of ``owner``, unless it is ``before``."""
        if param.grad is not before:
            bad = self._first_bad(param.grad)
            if bad is not None:
                self._note(owner, bad, "backward", parameter=name)

    @property
    def _looking(self) -> bool:
        """Whether nothing was found yet, or the batch runs again."""
        return self.restarted or not self.result

    def _first_bad(self, structure: Any) -> _Bad | None:
        """The first tensor in ``structure`` that is not finite, while the search goes on."""
        return _first_not_finite(structure) if self._looking else None

    def _note(
        self,
        call: _ModuleCall,
        bad: _Bad,
        direction: Literal["forward", "backward"],
        *,
        given_finite: bool = True,
        operation: str | None = None,
        given_to: str | None = None,
        parameter: str | None = None,
    ) -> None:
        """Store what was found: ``bad``, a tensor of the module call ``call``.

        The other arguments are attributes of :class:`NonFiniteOutput`.
        """
        self.restarted = False
        forward = direction == "forward"
        self.result.first = NonFiniteOutput(
            name=call.name,
            kind=type(call.module).__name__,
            direction=direction,
            dtype=bad.dtype,
            shape=bad.shape,
            largest=bad.largest,
            given_finite=given_finite,
            operation=operation,
            parameter=_bad_parameter(call) if forward else parameter,
            given_to=given_to,
            last_finite=self._last_finite if forward else None,
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
        tensor = tensor.coalesce()
    if tensor.is_nested or tensor.layout != torch.strided:
        tensor = tensor.values()
    values = real(tensor.resolve_conj().resolve_neg())
    return values.float() if values.dtype.itemsize == 1 else values


def _first_not_finite(structure: Any) -> _Bad | None:
    """The first tensor in ``structure`` with inf or NaN, or ``None``. Synchronizes."""
    for tensor in _tensors(structure):
        values = _values(tensor)
        if not values.isfinite().all():
            shape = tuple((values if tensor.is_nested else tensor).shape)
            return _Bad(tensor.dtype, shape, _largest(values[values.isfinite()]))
    return None


def _is_mask(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a mask to be added to attention scores: constant, with -inf alone."""
    if tensor.requires_grad:
        return False
    values = _values(tensor)
    infinite = values[~values.isfinite()]
    return bool((infinite == -torch.inf).all())


def _finite_output(call: _ModuleCall, output: Any) -> FiniteOutput | None:
    """The output of ``call``, which is finite; ``None`` if it has no floating-point elements."""
    candidates = [(_largest(_values(tensor)), tensor.dtype) for tensor in _tensors(output)]
    sizes = [(largest, dtype) for largest, dtype in candidates if largest is not None]
    if not sizes:
        return None
    largest, dtype = max(sizes, key=lambda size: size[0])
    return FiniteOutput(call.name, type(call.module).__name__, dtype, largest)


def _largest(finite: Tensor) -> float | None:
    """The largest magnitude in ``finite``; ``None`` without elements."""
    return finite.abs().max().item() if finite.numel() else None


def _bad_parameter(call: _ModuleCall) -> str | None:
    """The name of a parameter of the module that is not finite, or of a buffer that has NaN.

    Infinities in buffers are masks more often than errors.
    """
    for name, param in call.module.named_parameters(call.name):
        if _first_not_finite(param) is not None:
            return name
    for name, buffer in call.module.named_buffers(call.name):
        if any(_values(tensor).isnan().any() for tensor in _tensors(buffer)):
            return name
    return None
