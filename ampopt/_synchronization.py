"""Detection of host-device synchronization and of kernel launches, for tests and benchmarks.

Without a device, every way in which Python can read a tensor's values is watched, whether or not it
goes through torch's dispatcher. On a CUDA device, torch and CUDA report synchronizations and
launches.
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
"""Tensor methods that return values to Python; not all of them go through torch's dispatcher."""

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
"""Operators whose result, or its shape, depends on values."""

_INDEXING = ("index", "index_put", "index_put_")
"""Operators that read their indices if those are masks, to count the true elements."""


class _Watching(TorchDispatchMode):
    """A dispatch mode that reports each operator that reads the values of a tensor to Python."""

    def __init__(self, saw: Callable[[str], None]) -> None:
        """Store ``saw``, which is called with the name of each such operator."""
        super().__init__()
        self.saw = saw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report ``func`` if it reads values, and run it."""
        name = func.overloadpacket.__name__
        if name in _OPERATORS or (name in _INDEXING and any(map(_is_mask, args[1]))):
            self.saw(str(func))
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    """Whether ``index`` is a mask, so that the size of what it selects depends on values."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def watching(saw: Callable[[str], None]) -> Iterator[None]:
    """Call ``saw(name)`` before Python reads the values of a tensor, on any device.

    If ``saw`` raises, the read does not happen. A method that reads several times is reported once.
    Copies that block without returning values to Python are not detected.
    """
    within = threading.local()

    def report(name: str) -> None:
        if not getattr(within, "a_look", False):
            saw(name)

    def method(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        @functools.wraps(original)
        def look(*args: Any, **kwargs: Any) -> Any:
            report(f"Tensor.{name}")
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
        stack.enter_context(_Watching(report))
        yield


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Make torch warn (``"warn"``) of CUDA synchronizations, or raise (``"error"``)."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def synchronizations() -> Iterator[list[warnings.WarningMessage]]:
    """Collect one warning for each CUDA synchronization that torch detects.

    Each warning has the ``filename`` and ``lineno`` of the innermost Python frame. Other warnings
    are issued again at the end.
    """
    sync_warnings: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as all_warnings:
        warnings.simplefilter("always")
        with sync_debug_mode("warn"):
            yield sync_warnings
    for w in all_warnings:
        if "called a synchronizing CUDA operation" in str(w.message):
            sync_warnings.append(w)
        elif "debug mode is a prototype" not in str(w.message):  # from set_sync_debug_mode
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)


@contextmanager
def kernels(device: torch.device) -> Iterator[list[str]]:
    """Collect the names of the kernels launched on a CUDA device. Synchronizes at the end.

    Copies and fills by the driver are not kernels.
    """
    from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
    from torch.profiler import ProfilerActivity, profile

    names: list[str] = []
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    # With acc_events torch does not warn that it forgets the events of earlier cycles.
    with profile(activities=activities, acc_events=True) as profiler:
        yield names
        torch.cuda.synchronize(device)
    names += [
        event.name
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation  # torch's optimizers annotate their steps
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
