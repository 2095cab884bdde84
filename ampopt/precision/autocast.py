"""``torch.autocast``, with operators added by name to what runs in low precision or in float32."""

import contextlib
import difflib
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_overridable_functions

from ampopt._step.torch_private import function_modes

__all__ = ["autocast"]

_CAST = (torch.float16, torch.bfloat16, torch.float32)
# They keep running statistics in tensors that they are given, so those cannot be copies.
_KEEP_STATISTICS = ("batch_norm", "instance_norm")


class autocast(contextlib.ContextDecorator):
    """``torch.autocast``, with operators added to its lists by name.

    A name means the function wherever it lives: ``"softmax"`` is ``torch.softmax``,
    ``torch.nn.functional.softmax`` and ``Tensor.softmax``; ``"matmul"`` is ``@`` too. One inside of
    another adds its lists to those around it, and its own say wins. ``enabled=False``, of this or
    of a ``torch.autocast`` inside, turns the lists off. It is a decorator, too, and may be entered
    again. Tensors in float64, integers, and tensors on other devices stay as they are, and so do
    calls with ``out=`` or ``inplace=True``, as under ``torch.autocast``.

    Under ``torch.compile`` the lists are part of the graph: enter it around the compiled function,
    or make it inside. To run a part again in the backward pass, tell checkpointing::

        checkpoint(block, x, use_reentrant=False, context_fn=ampopt.autocast.context_fn)

    Without that, torch runs the part without the lists, and raises as its results have another
    dtype. Compiled functions need no ``context_fn``.

    **Where names do not reach.** What an operator does in C++ is not seen: for the product inside
    of ``torch.einsum``, name ``"einsum"``. Functions of ``torch.nn.functional`` that are written in
    Python are seen into, so that ``"linear"`` is found in ``torch.nn.MultiheadAttention``.

    **Cost**, of the host, besides the casts, measured against ``torch.autocast`` (torch 2.13.0,
    Python 3.11, one thread of an x86-64 server): where lists are on, 1.3 µs more for an operator
    that is not listed, 5.5 for a function of ``torch.nn.functional`` in Python, 19 for one that is
    listed. Without lists, and in compiled code, nothing.

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
        """Check the lists. Nothing is entered yet.

        Args:
            device_type: as ``torch.autocast``'s, ``"cuda"`` or ``"cpu"`` for instance.
            dtype: as ``torch.autocast``'s, ``torch.float16`` or ``torch.bfloat16``.
            allow: names of operators to run in ``dtype``.
            deny: names of operators to run in float32.
            enabled: ``False`` turns autocast off inside, and all lists with it.
            cache_enabled: as ``torch.autocast``'s.

        Raises:
            TypeError: a list is not a collection of names.
            ValueError: a name is in both lists, or no operator has it, or it writes to what it is
                given.
        """
        for name, given in (("allow", allow), ("deny", deny)):
            listed = isinstance(given, Collection) and not isinstance(given, str)
            if not (listed and all(isinstance(one, str) for one in given)):
                raise TypeError(f"{name} must be a list of names of operators, got {given!r}")
        allow, deny = tuple(allow), tuple(deny)
        _check_names(allow, deny)
        self._arguments = (device_type, dtype, allow, deny, enabled, cache_enabled)
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> "autocast":
        """Turn it on."""
        context = self._context()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *exc: Any) -> bool | None:
        """Turn back to what was on before."""
        return self._entered.pop().__exit__(*exc)

    @staticmethod
    def context_fn() -> tuple[Any, Any]:
        """For ``torch.utils.checkpoint``, to recompute under the lists that are on now."""
        # torch's checkpointing, which restores torch.autocast itself, reads the stack so, too.
        stack = function_modes()
        return contextlib.nullcontext(), _Again([m for m in stack if isinstance(m, _Lists)])

    def _recreate_cm(self) -> "autocast":
        """A decorated function gets one of its own for each call, as calls may overlap."""
        return autocast(*self._arguments)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        device_type, dtype, allow, deny, enabled, cache_enabled = self._arguments
        low = dict.fromkeys(_spellings(allow), True)
        low.update(dict.fromkeys(_spellings(deny), False))
        with torch.autocast(device_type, dtype, enabled, cache_enabled):
            if not low:
                yield
                return
            with _Lists(device_type, low):
                yield


class _Lists(TorchFunctionMode):
    """While autocast is on, runs the listed operators in a dtype of their own.

    They run with autocast off, so that neither torch's lists nor those around have a say.
    """

    def __init__(self, device_type: str, low: Mapping[str, bool]) -> None:
        self._device_type, self._low = device_type, low

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        low = self._low.get(func.__name__)
        if (
            low is None
            or not torch.is_autocast_enabled(self._device_type)
            or kwargs.get("out") is not None
            or kwargs.get("inplace")
        ):
            if func.__name__ == "unflatten":  # Dynamo cannot trace the super() in Tensor's method
                func = torch.unflatten
            body = _BODIES.get(func)
            if body is None:
                return func(*args, **kwargs)
            with self:
                return body(*args, **kwargs)
        dtype = torch.get_autocast_dtype(self._device_type) if low else torch.float32

        args = [self._cast(arg, dtype) for arg in args]
        kwargs = {name: self._cast(arg, dtype) for name, arg in kwargs.items()}
        with torch.autocast(self._device_type, enabled=False):
            return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            castable = value.device.type == self._device_type and value.dtype in _CAST
            return value.to(dtype) if castable else value
        if type(value) in (list, tuple):  # of tensors, as torch.cat takes
            return [self._cast(one, dtype) for one in value]
        return value


class _Again:
    """Puts lists on again; more than once, as a graph may be gone through more than once."""

    def __init__(self, lists: Sequence[_Lists]) -> None:
        self._lists = lists

    def __enter__(self) -> None:
        for one in self._lists:
            one.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for one in reversed(self._lists):
            one.__exit__(*exc)


def _seen_into() -> dict[Any, Any]:
    """Functions of ``torch.nn.functional`` → the same without the call that asks for modes.

    A mode that is on while such a function runs would be asked about it again, without end; and
    one that is off would not see what it calls.
    """
    asking = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**vars(F), **dict.fromkeys(asking, lambda *_: False)}
    bodies = {}
    for function in vars(F).values():
        if isinstance(function, types.FunctionType) and (
            "handle_torch_function" in function.__code__.co_names
        ):
            body = types.FunctionType(
                function.__code__, names, function.__name__, function.__defaults__
            )
            body.__kwdefaults__ = function.__kwdefaults__
            bodies[function] = body
    return bodies


_BODIES = _seen_into()


def _spellings(names: Collection[str]) -> list[str]:
    return [spelling for name in names for spelling in (name, f"__{name}__", f"__r{name}__")]


@torch.compiler.assume_constant_result
def _check_names(allow: tuple[str, ...], deny: tuple[str, ...]) -> None:
    both = sorted(set(allow) & set(deny))
    if both:
        raise ValueError(f"{both} in both allow and deny: leave each name in one of them")
    known = {
        function.__name__.strip("_")
        for functions in get_overridable_functions().values()
        for function in functions
        if not function.__name__.endswith("_") or function.__name__.startswith("__")
    }
    for name in (*allow, *deny):
        if name in _KEEP_STATISTICS or name.endswith("_"):
            raise ValueError(
                f"{name!r} writes to tensors that it is given, so they cannot be cast: choose the "
                "dtype of the module with ampopt.cast(keep=...) or ampopt.run_in"
            )
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=5)
            hint = f"did you mean one of {near}?" if near else "write it as torch.<name>"
            raise ValueError(f"no operator of torch is called {name!r}: {hint}")
