"""``torch.autocast``, with operators added by name to what runs in low precision or in float32."""

import contextlib
import difflib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_overridable_functions

from ampopt._step.torch_private import constant_to_dynamo, function_modes, functional_bodies
from ampopt.precision.cast import as_tuple

__all__ = ["autocast"]

_CAST = (torch.float16, torch.bfloat16, torch.float32)


class autocast:
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
    dtype; with ``use_reentrant=True``, which takes no ``context_fn``, it does not even raise. A
    part that enters it by itself needs nothing, nor do compiled functions.

    **Where names do not reach.** What an operator does in C++ is not seen: for the product inside
    of ``torch.einsum``, name ``"einsum"``. Functions of ``torch.nn.functional`` that are written in
    Python are seen into, so that ``"linear"`` is found in ``torch.nn.MultiheadAttention``.

    **Cost**, of the host, besides the casts, measured against ``torch.autocast`` (torch 2.13.0,
    Python 3.11, an x86-64 server): where lists are on, 1.7 µs more for an operator that is not
    listed, 9.0 for a function of ``torch.nn.functional`` in Python, 9.0 for one that is listed.
    Without lists, and in compiled code, nothing. ``python -m ampopt.bench --autocast`` measures it
    where you are.

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
        allow, deny = as_tuple("allow", allow), as_tuple("deny", deny)
        _check_names(allow, deny)
        low = dict.fromkeys(_spellings(allow), True) | dict.fromkeys(_spellings(deny), False)
        self._torchs = (device_type, dtype, enabled, cache_enabled)
        self._lists = _Lists(device_type, low) if low else contextlib.nullcontext()
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> "autocast":
        """Turn it on."""
        self._entered.append(self._context())
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Turn back to what was on before."""
        self._entered.pop().__exit__(*exc)

    @staticmethod
    def context_fn() -> tuple[Any, Any]:
        """For ``torch.utils.checkpoint``, to recompute under the lists that are on now."""
        # torch's checkpointing, which restores torch.autocast itself, reads the stack so, too.
        return contextlib.nullcontext(), _Again(m for m in function_modes() if type(m) is _Lists)

    def __call__(self, function: Any) -> Any:
        """``function``, with this around each of its calls, which may overlap."""
        return self._context()(function)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with torch.autocast(*self._torchs), self._lists:
            yield


class _Lists(TorchFunctionMode):
    """While autocast is on, runs the listed operators in a dtype of their own.

    They run with autocast off, so that neither torch's lists nor those around have a say.
    """

    def __init__(self, device_type: str, low: Mapping[str, bool]) -> None:
        self._device_type, self._low = device_type, low

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = kwargs.get("out") is not None or kwargs.get("inplace")
        low = None if writes else self._low.get(func.__name__)
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
        if isinstance(x, Tensor) and x.dtype in _CAST and x.device.type == self._device_type:
            return x.to(dtype)
        if type(x) in (list, tuple):  # of tensors, as torch.cat takes
            return [self._cast(one, dtype) for one in x]
        return x


class _Again(list[_Lists]):
    """Puts lists on again; more than once, as a graph may be gone through more than once."""

    def __enter__(self) -> None:
        for one in self:
            one.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for one in reversed(self):
            one.__exit__(*exc)


# Dynamo cannot trace the super() in the method of Tensor.
_BODIES = {**functional_bodies(), Tensor.unflatten: torch.unflatten}


def _spellings(names: Collection[str]) -> list[str]:
    return [spelling for name in names for spelling in (name, f"__{name}__", f"__r{name}__")]


@functools.cache  # a training step may make a context each time
def _known() -> set[str]:
    return {f.__name__ for fs in get_overridable_functions().values() for f in fs}


@constant_to_dynamo
def _check_names(allow: tuple[str, ...], deny: tuple[str, ...]) -> None:
    for name in (*allow, *deny):
        if name in allow and name in deny:
            raise ValueError(f"{name!r} is in both allow and deny: leave it in one of them")
        # Norms keep running statistics in tensors that they are given, which cannot be copies.
        if name in ("batch_norm", "instance_norm") or name.endswith("_"):
            raise ValueError(
                f"{name!r} writes to tensors that it is given, so they cannot be cast: choose the "
                "dtype of the module with ampopt.cast(keep=...) or ampopt.run_in"
            )
        if name not in _known():
            near = difflib.get_close_matches(name, sorted(_known()), n=5)
            hint = f"did you mean one of {near}?" if near else "write it as torch.<name>"
            raise ValueError(f"no operator of torch is called {name!r}: {hint}")
