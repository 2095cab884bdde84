"""A snapshot of an optimizer's Python-side state, to detect and restore changes of a step."""

import copyreg
import ctypes
import enum
import functools
import logging
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt._step.sharding import dtensor
from ampopt._step.tensor_subclasses import inner_names
from ampopt._step.torch_private import CALLED, HOOKS, LOCAL_TENSOR
from ampopt_kernels.devices import captures

__all__ = ["HostState"]

_ATTEMPT = frozenset({"_ampopt", "found_inf", "grad_scale", "step", CALLED, *HOOKS})
"""Attributes of an optimizer that a rollback leaves alone: ampopt's own, those that torch's
schedulers and scaler set, ``step`` as schedulers patch it, and hooks, which run around the step."""

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    range,
    slice,
    torch.device,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_ATOMS = (
    *_PLAIN,
    type,
    logging.Logger,
    torch.Event,
    torch.Stream,
    types.BuiltinFunctionType,
    types.ModuleType,
    weakref.ref,
    *([torch.distributed.ProcessGroup] if torch.distributed.is_available() else []),
)
"""Types of objects that are immutable, or have no state that a step depends on."""


@dataclass
class _SavedObject:
    """One mutable object of the snapshot.

    Attributes:
        what: its name for messages, such as ``AdamW.state[...]``.
        read: returns its value now.
        write: sets its value.
        was: its value when the snapshot was taken.
        grows: whether it is a mapping, to which a first step may add keys.
    """

    what: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    was: Any
    grows: bool

    def differs(self) -> bool:
        """Whether the value has changed since the snapshot."""
        return not _same(self.was, self.read())

    def difference(self) -> str:
        """The name, for a message, of what has changed: an entry if the object is a mapping."""
        now = self.read()
        if isinstance(now, dict):
            for key in chain(self.was, now):
                if key not in now or key not in self.was or not _same(self.was[key], now[key]):
                    return f"{self.what}[{key!r}]" if isinstance(key, str) else self.what
        return self.what

    def only_grew(self) -> bool:
        """Whether nothing has changed except that a mapping has new keys, which are allowed."""
        now = self.read()
        return _same(self.was, now) or (
            self.grows and _same(self.was, {k: now[k] for k in self.was if k in now})
        )


class HostState:
    """A snapshot of what a select on the device cannot restore.

    It covers all objects that are reachable from the optimizer through its state, param groups and
    attributes, and the random generators of Python, NumPy and torch; of tensors, their identity and
    layout, not their contents. It does not cover globals and class attributes.

    Attributes:
        tensors: the strided tensors that were found, ``DTensor``s as their local shards.
        hidden_object: the name of the first object that cannot be inspected; ``None`` if there is
            none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the snapshot."""
        self.tensors: list[Tensor] = []
        self.hidden_object: str | None = None
        self._saved_objects: list[_SavedObject] = []
        self._objects: dict[int, Any] = {}  # by id; keeps objects alive, so that no id is reused
        self._queue: list[tuple[Any, str]] = []
        self._add(optimizer, type(optimizer).__name__)
        self._find()
        for name, generator in _generators(t.device for t in self.tensors):
            self._add(generator, name)
        self._find()

    def changed_object(self) -> str | None:
        """The name of an object that has changed, or ``None`` if none has.

        An object whose entries have changed is preferred to one that only gained keys.
        """
        differences = [
            (entry.only_grew(), entry.difference())
            for entry in self._saved_objects
            if entry.differs()
        ]
        return min(differences, key=operator.itemgetter(0))[1] if differences else None

    def only_grew(self) -> bool:
        """Whether the only changes are new keys in mappings."""
        return all(entry.only_grew() for entry in self._saved_objects)

    def restore(self) -> None:
        """Restore everything but the contents of tensors."""
        for entry in self._saved_objects:
            if entry.differs():
                entry.write(entry.was)

    def _add(self, value: Any, what: str) -> None:
        """Visit ``value`` later, unless it is immutable or is already to be visited."""
        if not isinstance(value, _ATOMS) and id(value) not in self._objects:
            self._objects[id(value)] = value
            self._queue.append((value, what))

    def _find(self) -> None:
        """Add all objects that are reachable from those in ``_queue`` to the snapshot."""
        while self._queue:
            value, what = self._queue.pop()
            if dtensor.is_dtensor(value):
                self._find_spread(value, what)
                continue
            is_known = self._find_contents(value, what)
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(value, types.MethodType):
                self._find_attributes(value, attributes, what)
                is_known = True
            if slots := _slots(value):
                self._find_slots(value, slots, what)
                is_known = True
            if not is_known:
                self.hidden_object = self.hidden_object or f"{what}, a {type(value).__name__}"

    def _find_contents(self, value: Any, what: str) -> bool:
        """Add the contents of ``value`` to the snapshot; ``False`` if its type is unknown."""
        numpy = sys.modules.get("numpy")
        if isinstance(value, Tensor):
            self._find_tensor(value, what)
        elif isinstance(value, dict):
            self._keep(what, lambda: dict(value), functools.partial(_refill, value), grows=True)
            for key, item in value.items():
                self._add(key, what)
                self._add_named(item, what, key)
        elif isinstance(value, (list, deque)):
            self._keep(what, lambda: list(value), functools.partial(_replace, value))
            self._add_each(value, what)
        elif isinstance(value, set):
            self._keep(what, lambda: set(value), functools.partial(_refill, value))
            self._add_each(value, what)
        elif isinstance(value, (tuple, frozenset)):
            self._add_each(value, what)
        elif isinstance(value, bytearray):
            self._keep(what, lambda: bytes(value), functools.partial(_replace, value))
        elif isinstance(value, (torch.Generator, random.Random)):
            self._keep(what, *_accessors(value))
        elif isinstance(value, types.MethodType):
            self._add_each((value.__func__, value.__self__), what)
        elif isinstance(value, types.FunctionType):
            self._add_each(value.__closure__ or (), what)
        elif isinstance(value, types.CellType):
            self._keep(what, lambda: _contents(value), functools.partial(_fill, value))
            self._add_each(_contents(value), what)
        elif isinstance(value, functools.partial):
            self._add_each((value.func, value.args, value.keywords), what)
        elif numpy is None:
            return False
        elif isinstance(value, numpy.generic):
            pass
        elif isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            self._keep(what, value.copy, functools.partial(numpy.copyto, value))
        elif isinstance(value, numpy.random.RandomState):
            self._keep(what, lambda: value.get_state(legacy=False), value.set_state)
        elif isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            self._keep(what, lambda: bits.state, functools.partial(setattr, bits, "state"))
        else:
            return False
        return True

    def _add_each(self, values: Iterable[Any], what: str) -> None:
        """Visit each of ``values`` later; ``what`` is the name of their container."""
        for index, value in enumerate(values):
            self._add_named(value, what, index)

    def _add_named(self, value: Any, what: str, key: Any) -> None:
        """Visit ``value``, the entry ``key`` of ``what``, later."""
        if not isinstance(value, _ATOMS):
            self._add(value, f"{what}[{key!r}]" if isinstance(key, (str, int)) else f"{what}[...]")

    def _find_tensor(self, tensor: Tensor, what: str) -> None:
        """Keep the layout of ``tensor``, and list it; or its inner tensors if it is a wrapper."""
        if names := inner_names(tensor):
            self._add_each((getattr(tensor, name) for name in names), what)
            return
        dispatch = "__torch_dispatch__"
        special = getattr(type(tensor), dispatch) is not getattr(Tensor, dispatch)
        if special or tensor.layout != torch.strided:  # not one storage that can be copied
            self.hidden_object = (
                self.hidden_object or f"{what}, a {type(tensor).__name__} of {tensor.layout}"
            )
            return
        self.tensors.append(tensor)
        # An assignment to ``tensor.data`` keeps the object but replaces its memory.
        alias = tensor.detach()
        self._keep(what, lambda: _layout(tensor), lambda _: setattr(tensor, "data", alias))

    def _find_spread(self, tensor: Any, what: str) -> None:
        """Add the local shard of a ``DTensor``: the wrapper around it has no memory of its own."""
        part = functools.partial(setattr, tensor, LOCAL_TENSOR)
        self._keep(what, lambda: dtensor.local(tensor), part)
        self._add(dtensor.local(tensor), what)

    def _find_attributes(self, owner: Any, attributes: dict[str, Any], what: str) -> None:
        """Keep the attributes of ``owner``, and visit their values later.

        Attributes of an optimizer that describe its last attempt are left out.
        """
        skip_attempt = isinstance(owner, torch.optim.Optimizer)

        def read() -> dict[str, Any]:
            if not skip_attempt:
                return dict(attributes)
            return {name: value for name, value in attributes.items() if name not in _ATTEMPT}

        def write(was: dict[str, Any]) -> None:
            for name in read():
                if name not in was:
                    del attributes[name]
            attributes.update(was)

        self._keep(what, read, write, grows=True)
        for name, value in read().items():
            if not isinstance(value, _ATOMS):
                self._add(value, f"{what}.{name}")

    def _find_slots(self, owner: Any, slots: list[str], what: str) -> None:
        """Record the ``__slots__`` of ``owner``, whose values are visited later."""

        def read() -> dict[str, Any]:
            return {name: getattr(owner, name) for name in slots if hasattr(owner, name)}

        def write(was: dict[str, Any]) -> None:
            for name in read():
                if name not in was:
                    object.__delattr__(owner, name)
            for name, value in was.items():
                object.__setattr__(owner, name, value)

        self._keep(what, read, write, grows=True)
        for name, value in read().items():
            self._add(value, f"{what}.{name}")

    def _keep(
        self, what: str, read: Callable[[], Any], write: Callable[[Any], Any], grows: bool = False
    ) -> None:
        """Keep the present value of one object, and the functions that read and write it."""
        self._saved_objects.append(_SavedObject(what, read, write, read(), grows))


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one object, or equal immutable values (containers: elementwise)."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and _same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)  # 0.0 is not -0.0, and NaN is NaN
    if isinstance(a, (set, frozenset, *_PLAIN)):
        return bool(a == b)
    if isinstance(a, _Bytes):
        return a.data == b.data
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return False


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """The memory, shape, strides and dtype of ``tensor``."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _refill(container: Any, was: Any) -> None:
    """Make a mapping or a set equal to ``was``, in place."""
    container.clear()
    container.update(was)


def _replace(container: Any, was: Any) -> None:
    """Make a list or a deque equal to ``was``, in place."""
    container.clear()
    container.extend(was)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    """The value in ``cell`` as a tuple of one, or an empty tuple if the cell is empty."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _fill(cell: types.CellType, was: tuple[Any, ...]) -> None:
    """Set ``cell`` to what :func:`_contents` returned."""
    if was:
        (cell.cell_contents,) = was
    else:
        del cell.cell_contents


def _slots(value: Any) -> list[str]:
    """The names in the ``__slots__`` of the class of ``value`` and of its bases."""
    return copyreg._slotnames(type(value))  # type: ignore[attr-defined]


# --- random generators ---------------------------------------------------------------------------


@dataclass
class _Bytes:
    """The state of a ``torch.Generator``, and its bytes, which are faster to compare."""

    state: Tensor
    data: bytes


def _accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Functions that get and set the state of ``generator``."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate

    def get() -> _Bytes:
        state = generator.get_state()
        return _Bytes(state, ctypes.string_at(state.data_ptr(), state.numel()))

    return get, lambda was: generator.set_state(was.state)


def _generators(devices: Iterable[torch.device]) -> Iterator[tuple[str, Any]]:
    """The global random generators that a step on ``devices`` may draw from, with their names."""
    yield "Python's random state", random._inst  # type: ignore[attr-defined]
    yield "torch's random state", torch.default_generator
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "NumPy's random state", numpy.random.mtrand._rand
    for device in sorted({d for d in devices if d.type != "cpu"}, key=str):
        generators = getattr(torch.get_device_module(device), "default_generators", ())
        if generators and not captures(device):  # during capture a CUDA graph owns the generator
            yield f"the random state of {device}", generators[device.index]
