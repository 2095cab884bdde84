"""Where the host looks at the values of tensors, or launches kernels: for tests, bench and users.

Without a device, every way for Python to look at a tensor is watched, dispatched by torch or not.
On a CUDA device, CUDA itself says where the host waits, and what it was given to run.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ampopt._step.torch_private import TorchDispatchMode

__all__ = ["kernels", "sync_debug_mode", "synchronizations", "watching"]

_METHODS = ("item", "tolist", "numpy", "cpu", "__array__")
"""Those that give values to Python, of which not all pass torch's dispatcher."""

_OPERATORS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
"""Those whose result depends on values, in Python or in its shape."""

_INDEXING = ("index", "index_put", "index_put_")
"""Those that look at their indices if these are masks, to count what is in them."""


class _Watching(TorchDispatchMode):
    def __init__(self, saw: Callable[[str], None]) -> None:
        super().__init__()
        self.saw = saw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _OPERATORS or (name in _INDEXING and any(map(_is_mask, args[1]))):
            self.saw(str(func))
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def watching(saw: Callable[[str], None]) -> Iterator[None]:
    """Call ``saw(name)`` before each look of Python's at the values of a tensor, on any device.

    ``saw`` may raise, which keeps the look from happening. A method that looks several times is one
    look. Copies that the host waits for without looking are not seen.
    """
    within = threading.local()

    def told(name: str) -> None:
        if not getattr(within, "a_look", False):
            saw(name)

    def method(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        @functools.wraps(original)
        def look(*args: Any, **kwargs: Any) -> Any:
            told(f"Tensor.{name}")
            outer = getattr(within, "a_look", False)
            within.a_look = True
            try:
                return original(*args, **kwargs)
            finally:
                within.a_look = outer

        return look

    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, method(name)))
        stack.enter_context(_Watching(told))
        yield


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Have torch ``"warn"`` of what makes the host wait for CUDA, or make it an ``"error"``."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def synchronizations() -> Iterator[list[warnings.WarningMessage]]:
    """Collect a warning for each time that the host waits for a CUDA device, as far as torch knows.

    Each has the ``filename`` and ``lineno`` of the innermost Python that waited. Other warnings are
    given again afterwards.
    """
    found: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync_debug_mode("warn"):
            yield found
    for w in caught:
        if "called a synchronizing CUDA operation" in str(w.message):
            found.append(w)
        elif "debug mode is a prototype" not in str(w.message):  # of set_sync_debug_mode itself
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)


@contextmanager
def kernels(device: torch.device) -> Iterator[list[str]]:
    """Collect the names of the kernels that are launched on a CUDA device. Synchronizes at the end.

    Copies and fills by the driver are not kernels.
    """
    from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
    from torch.profiler import ProfilerActivity, profile

    names: list[str] = []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield names
        torch.cuda.synchronize(device)
    names += [
        event.name
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation  # torch's optimizers mark their steps so
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
