"""A pretended device: CPU tensors that torch takes for an accelerator's.

Operations on tensors of different devices fail, except with 0-d CPU tensors. Reads of values by the
host are recorded. A non-blocking copy to the host is an error, and so is one from the host, whose
memory is not pinned. The device cannot be unregistered, so this is for a process of its own.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["launch", "looks", "pretending"]

CPU = torch.device("cpu")
_READ = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "_coalesce")
_IN_NO_FIXED_ORDER = ("cumsum", "cumprod")
"""Float operations that CUDA refuses under ``torch.use_deterministic_algorithms(True)``."""
looks: list[str] = []
"""Names of the operations that have read values back."""
_wrappers: "weakref.WeakValueDictionary[int, _There]" = weakref.WeakValueDictionary()
"""All tensors on pretended devices, by ``id``."""


class _There(Tensor):
    """A tensor on a pretended device; ``held`` is the CPU tensor with its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "_There":
        there = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=device
        )
        there.held = held
        _wrappers[id(there)] = there
        return there

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr:
            return args[0].held.data_ptr()
        if func is Tensor.untyped_storage:
            return args[0].held.untyped_storage()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    inputs: list[Tensor] = []

    def held(tensor: Tensor) -> Tensor:
        inputs.append(tensor)
        return _on_cpu(tensor)

    held_args, held_kwargs = _mapped(held, (args, kwargs))
    moves = name in ("_to_copy", "copy_", "_copy_from", "_foreach_copy_")
    devices = {t.device for t in inputs if moves or t.ndim or t.device != CPU}
    away = {d for d in devices if d != CPU}
    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
    if moves:
        to = device or (args[0].device if name == "_to_copy" else _first(args[0]).device)
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if away and to == CPU:
            assert blocks, f"{name} to the host is not waited for"
        if to != CPU and CPU in devices:
            assert blocks, f"{name} from memory that is not pinned is not waited for"
    else:
        assert len(devices) <= 1, f"{name} of tensors on {sorted(map(str, devices))}"
        to = device or next(iter(devices), CPU)
    if away and name in _IN_NO_FIXED_ORDER:
        assert not any(t.is_floating_point() for t in inputs), f"{name} has no fixed order there"
    if away and name in _READ:
        looks.append(name)
    if device is not None:
        held_kwargs["device"] = CPU
    result = func(*held_args, **held_kwargs)
    there = {id(t.held): t for t in inputs if isinstance(t, _There)}

    def placed(result: Any) -> Any:
        if isinstance(result, _There):
            return result
        if id(result) in there:  # the result of an in-place operation
            return there[id(result)]
        return result if to == CPU else _There(result, to)

    return _mapped(placed, result)


def _mapped(function: Any, value: Any) -> Any:
    """``value`` with ``function`` of each tensor in it; quicker than ``torch.utils._pytree``."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(function, part) for part in value])
    if isinstance(value, dict):
        return {key: _mapped(function, part) for key, part in value.items()}
    return value


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, (list, tuple)) else value


def _on_cpu(value: Any) -> Any:
    return value.held if isinstance(value, _There) else value


def launch(device: torch.device, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Launch a kernel on a pretended device in Triton's interpreter; a ``Launcher``.

    Every tensor argument must be on ``device``. The kernel gets further memory by addresses in its
    tables, so while it runs, memory of other devices is filled with NaN, and checked for writes.
    """
    from ampopt_kernels.triton.launch import launch as interpret

    for key, value in arguments.items():
        if isinstance(value, Tensor):
            assert value.device == device, (
                f"{variant.name}: {key} is on {value.device}, not on {device}"
            )
    if not programs:  # compile only
        return
    with _unreadable_beside(device):
        interpret(CPU, variant, programs, {key: _on_cpu(value) for key, value in arguments.items()})


@contextmanager
def _unreadable_beside(device: torch.device) -> Iterator[None]:
    elsewhere = [t.held.untyped_storage() for t in _wrappers.values() if t.device != device]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in elsewhere}
    contents = {address: ctypes.string_at(address, n) for address, n in sizes.items()}
    for address, n in sizes.items():
        ctypes.memset(address, 0xFF, n)
    yield
    for address, content in contents.items():
        untouched = ctypes.string_at(address, len(content)) == b"\xff" * len(content)
        assert untouched, f"a kernel on {device} has written to memory of another device"
        ctypes.memmove(address, content, len(content))


@contextmanager
def pretending() -> Iterator[None]:
    """Allow tensors with ``device="pretend:0"``, or any other index."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        result = of_cpu(data, **kwargs)
        return result if device is None else result.to(device)

    _setup_privateuseone_for_python_backend("pretend")
    of_cpu, torch.tensor = torch.tensor, tensor  # torch.tensor bypasses the dispatcher
    try:
        with _Pretending():
            yield
    finally:
        torch.tensor = of_cpu
