"""``torch.autocast``, with operators added by name to its half-precision and float32 lists."""

import contextlib
import difflib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_overridable_functions

from ampopt._argument_checks import check_device_type
from ampopt._step.torch_private import (
    constant_to_dynamo,
    function_modes,
    functional_bodies,
    operator_name,
    operators_named,
    schema_of,
)
from ampopt.precision.cast import as_tuple
from ampopt.precision.presets import PADDLE_NAMES

__all__ = ["autocast", "check_names"]

_CAST = (torch.float16, torch.bfloat16, torch.float32)


class autocast:
    """``torch.autocast``, with operators added to its lists by name.

    A name stands for all functions of that name: ``"softmax"`` for ``torch.softmax``,
    ``torch.nn.functional.softmax`` and ``Tensor.softmax``; ``"matmul"`` also for ``@``. An operator
    of ``torch.library`` is named as there: ``"mylib::attention"``. Contexts nest: the lists of an
    outer one stay on inside, and for an operator that both list, the inner list takes precedence.
    ``enabled=False``, of this or of a ``torch.autocast`` inside, turns all lists off. The object
    can be used as a decorator, and be entered several times. As under ``torch.autocast``, tensors
    in float64, integers, tensors on other devices, and calls with ``out=`` or ``inplace=True`` are
    not cast.

    **torch.compile.** The lists become part of the graph. Enter the context around the compiled
    function, or create it inside.

    **Checkpointing** runs a part of the model again in the backward pass. Pass the lists to it::

        checkpoint(block, x, use_reentrant=False, context_fn=ampopt.autocast.context_fn)

    Without ``context_fn``, torch recomputes the part without the lists, and raises an error because
    its results have another dtype. ``use_reentrant=True`` takes no ``context_fn``: it silently
    recomputes in other dtypes, so that gradients differ. A part that enters the context itself
    needs no ``context_fn``, nor do compiled functions.

    **Limits of names.** Operators that run inside others in C++ are not found: for the product in
    ``torch.einsum``, list ``"einsum"``. Functions of ``torch.nn.functional`` that are written in
    Python are searched, so that ``"linear"`` is found in ``torch.nn.MultiheadAttention``.

    **Cost.** While lists are on, the host does more for each operator. Without lists, and in
    compiled code, there is no such cost.

    Does not synchronize.

    Example:
        >>> x = torch.randn(4, 8)
        >>> with ampopt.autocast("cpu", torch.bfloat16, allow=["softmax"], deny=["matmul"]):
        ...     print((x @ x.T).dtype, x.softmax(-1).dtype)
        torch.float32 torch.bfloat16
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        allow: Collection[str] = (),
        deny: Collection[str] = (),
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        """Check the lists, without turning them on.

        Args:
            device_type: the device type, as for ``torch.autocast``: ``"cuda"`` or ``"cpu"``, for
                instance.
            dtype: the low dtype, as for ``torch.autocast``: ``torch.float16`` or
                ``torch.bfloat16``.
            allow: names of operators to run in ``dtype``.
            deny: names of operators to run in float32.
            enabled: whether autocast is on inside; ``False`` turns all lists off, too.
            cache_enabled: whether casts of weights are cached, as for ``torch.autocast``.

        Raises:
            TypeError: ``device_type`` is not a string, or a list not a collection of names.
            ValueError: a name is in both lists, is not that of an operator, or is that of an
                operator that writes to its arguments.
        """
        check_device_type("device_type", device_type)
        device_type = torch.device(device_type).type  # of "cuda:0", too, which torch accepts
        allow, deny = as_tuple("allow", allow), as_tuple("deny", deny)
        check_names(allow, deny)
        low = dict.fromkeys(_spellings(allow), True) | dict.fromkeys(_spellings(deny), False)
        self._torchs = (device_type, dtype, enabled, cache_enabled)
        self._lists = _Lists(device_type, low) if low else contextlib.nullcontext()
        self._contexts: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> "autocast":
        """Turn autocast and the lists on."""
        self._contexts.append(self._context())
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Turn the lists off, and restore the autocast state from before."""
        self._contexts.pop().__exit__(*exc)

    @staticmethod
    def context_fn() -> tuple[Any, Any]:
        """The contexts for ``torch.utils.checkpoint``, to recompute under the present lists."""
        # Checkpointing restores torch.autocast itself; only the lists are missing.
        return contextlib.nullcontext(), _Again(m for m in function_modes() if type(m) is _Lists)

    def __call__(self, function: Any) -> Any:
        """``function``, with this context around each of its calls, which may overlap."""
        return self._context()(function)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """``torch.autocast`` with the lists on, as a new context each time."""
        with torch.autocast(*self._torchs), self._lists:
            yield


class _Lists(TorchFunctionMode):
    """While autocast is on, runs the listed operators in the dtype of their list.

    They run with autocast off, so that neither torch's lists nor those of outer contexts apply.
    """

    def __init__(self, device_type: str, low: Mapping[str, bool]) -> None:
        """Store the lists.

        Args:
            device_type: the type of the device that autocast is on for.
            low: by name of a listed operator, whether it runs in autocast's dtype, or in float32.
        """
        self._device_type, self._low = device_type, low

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` in the dtype of its list, or as torch does if no list has it."""
        kwargs = kwargs or {}
        writes = kwargs.get("out") is not None or kwargs.get("inplace")
        low = None if writes else self._low.get(_name_of(func))
        if low is None or not torch.is_autocast_enabled(self._device_type):
            if func not in _BODIES:
                return func(*args, **kwargs)
            with self:
                return _BODIES[func](*args, **kwargs)
        dtype = torch.get_autocast_dtype(self._device_type) if low else torch.float32
        kwargs = {name: self._cast(arg, dtype) for name, arg in kwargs.items()}
        with torch.autocast(self._device_type, enabled=False):
            return func(*self._cast(args, dtype), **kwargs)

    def _cast(self, x: Any, dtype: torch.dtype) -> Any:
        """``x``, or the tensors of the list ``x``, in ``dtype`` where autocast would cast them."""
        if isinstance(x, Tensor) and x.dtype in _CAST and x.device.type == self._device_type:
            return x.to(dtype)
        if type(x) in (list, tuple):  # of tensors, as torch.cat takes
            return [self._cast(one, dtype) for one in x]
        return x


class _Again(list[_Lists]):
    """Enters lists again, any number of times: a graph may be traversed more than once."""

    def __enter__(self) -> None:
        """Enter each of the lists."""
        for one in self:
            one.__enter__()

    def __exit__(self, *exc: Any) -> None:
        """Leave the lists in reverse order."""
        for one in reversed(self):
            one.__exit__(*exc)


# Tensor.unflatten calls super(), which Dynamo cannot trace, so torch.unflatten replaces it.
_BODIES = {**functional_bodies(), Tensor.unflatten: torch.unflatten}


def _spellings(names: Collection[str]) -> list[str]:
    """``names``, and the methods of operators, such as ``__matmul__``, that they stand for."""
    return [spelling for name in names for spelling in (name, f"__{name}__", f"__r{name}__")]


_name_of = constant_to_dynamo(operator_name)


@functools.cache  # for a context that is made anew in each training step
def _operator_names() -> set[str]:
    """The names of all functions of torch that ``__torch_function__`` can intercept."""
    return {f.__name__ for fs in get_overridable_functions().values() for f in fs}


@constant_to_dynamo
def check_names(allow: tuple[str, ...], deny: tuple[str, ...]) -> None:
    """Check the names of two lists.

    Raises:
        ValueError: a name is in both lists, is not an operator, or cannot be cast.
    """
    for name in (*allow, *deny):
        if name in allow and name in deny:
            raise ValueError(f"{name!r} is in both allow and deny: leave it in one of them")
        # Norms update running statistics in their arguments; a cast copy would lose the update.
        if name in ("batch_norm", "instance_norm") or name.endswith("_"):
            raise ValueError(
                f"{name!r} writes to its arguments, so they cannot be cast: choose the dtype of "
                "the module with ampopt.cast(keep=...) or ampopt.run_in"
            )
        registered = operators_named(name)
        if any(schema_of(operator).is_mutable for operator in registered):
            raise ValueError(
                f"{name!r} writes to its arguments, so they cannot be cast: register the dtypes of "
                "the operator with torch.library.register_autocast"
            )
        if name not in _operator_names() and not registered:
            raise ValueError(f"no operator of torch is called {name!r}: {_hint(name)}")


def _hint(name: str) -> str:
    """What to write instead of ``name``, which no operator has."""
    if name in PADDLE_NAMES:
        return f"Paddle's operator is {PADDLE_NAMES[name]!r} in torch"
    if "::" in name:
        return "import the library that registers it before"
    near = difflib.get_close_matches(name, sorted(_operator_names()), n=5)
    return f"did you mean one of {near}?" if near else _OTHERS


_OTHERS = (
    "an operator of torch.library is named as in 'mylib::attention', or casts its arguments by "
    "torch.library.register_autocast; a function or module of your own gets ampopt.run_in; and "
    "forward of a torch.autograd.Function gets torch.amp.custom_fwd(cast_inputs=...)"
)
