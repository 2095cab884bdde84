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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.sharding import dtensor
from ampopt._step.tensor_subclasses import inner_names
from ampopt._step.torch_private import CALLED, HOOKS, LOCAL_TENSOR
from ampopt_kernels.devices import captures
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard

__all__ = ["PythonState"]

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
    types.ModuleType,
    weakref.ref,
    *([torch.distributed.ProcessGroup] if torch.distributed.is_available() else []),
)
"""Types of objects that are immutable, or have no state that a step depends on."""
_GUARDED = frozenset({list, dict, defaultdict})
"""Types of containers whose elements an :class:`IdentityGuard` compares."""
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors whose attributes no class of a user's own holds or replaces."""
_POINTER = ctypes.sizeof(ctypes.c_void_p)


@dataclass
class _SavedObject:
    """One mutable object of the snapshot.

    Attributes:
        what: its name for messages, such as ``AdamW.state[...]``.
        read: returns its value now.
        write: sets its value.
        was: its value when the snapshot was taken.
        grows: whether it is a mapping, to which a first step may add keys.
        has_parts: whether its value may have mutable objects in it, which are then saved, too.
    """

    what: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    was: Any
    grows: bool
    has_parts: bool

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

    def retake(self) -> bool:
        """Save the present value, unless it has other mutable objects in it. Returns whether."""
        now = self.read()
        if isinstance(now, (dict, list, tuple)) and self.has_parts:
            fits = _has_same_objects(self.was, now)
        else:
            fits = not self.has_parts or _same(self.was, now)
        if fits:
            self.was = now
        return fits

    def only_grew(self) -> bool:
        """Whether nothing has changed except that a mapping has new keys, which are allowed."""
        now = self.read()
        return _same(self.was, now) or (
            self.grows and _same(self.was, {k: v for k, v in now.items() if k in self.was})
        )


class PythonState:
    """A snapshot of what a select on the device cannot restore.

    It covers all objects that are reachable from the optimizer through its state, param groups and
    attributes, and the random generators of Python, NumPy and torch; of tensors, their identity and
    layout, not their contents or ``requires_grad``. It does not cover globals, class attributes,
    attributes of numbers and strings, and objects that are reachable only by weak references.

    Attributes:
        tensors: the strided tensors that were found, ``DTensor``s as their local shards.
        hidden_object: the name of the first object that cannot be inspected; ``None`` if there is
            none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the snapshot."""
        self._optimizer = weakref.ref(optimizer)
        self.tensors: list[Tensor] = []
        self.hidden_object: str | None = None
        self._saved_objects: list[_SavedObject] = []
        self._unguarded: list[_SavedObject] = []  # those that no guard compares
        self._lists: list[Any] = []
        self._dicts: list[Any] = []
        self._objects: dict[int, Any] = {}  # by id; keeps objects alive, so that no id is reused
        self._queue: list[tuple[Any, str]] = []
        self._add(optimizer, type(optimizer).__name__)
        self._find()
        self._devices = {tensor.device for tensor in self.tensors}
        self._generators = _generators(self._devices)
        for generator, name in self._generators.items():
            self._add(generator, name)
        self._find()
        self._objects = {}
        self._identities = IdentityGuard(self._lists, [(entries, None) for entries in self._dicts])
        self._layouts = LayoutGuard(self.tensors)
        self._addresses = self._layouts.read(self.tensors)[0]

    def is_current(self) -> bool:
        """Whether the objects that guards compare are the same, tensors and their memory too."""
        if not self._identities.unchanged():
            return False
        addresses, fits = self._layouts.read(self.tensors)
        return set(fits) <= {1} and addresses == self._addresses

    def retake(self) -> bool:
        """Take the snapshot again, if only numbers and the like have changed since.

        That is faster than a new snapshot, which visits every object.

        Returns:
            Whether it was taken. If not, this snapshot is of no further use.
        """
        return (
            self.is_current()
            and _generators(self._devices) == self._generators
            and all(saved.retake() for saved in self._unguarded)
        )

    def changed_object(self) -> str | None:
        """The name of an object that has changed, or ``None`` if none has.

        An object whose entries have changed is preferred to one that only gained keys.
        """
        if self.is_current() and not any(saved.differs() for saved in self._unguarded):
            return None
        differences = [
            (saved.only_grew(), saved.difference())
            for saved in self._saved_objects
            if saved.differs()
        ]
        return min(differences, key=operator.itemgetter(0))[1] if differences else None

    def only_grew(self) -> bool:
        """Whether the only changes are new keys in mappings."""
        return all(saved.only_grew() for saved in self._saved_objects)

    def restore(self) -> None:
        """Restore everything but the contents of tensors."""
        for saved in self._saved_objects:
            if saved.differs():
                saved.write(saved.was)

    def _add(self, value: Any, what: str) -> None:
        """Visit ``value``, which is no atom, later, unless it is already to be visited."""
        if id(value) not in self._objects:
            self._objects[id(value)] = value
            self._queue.append((value, what))

    def _find(self) -> None:
        """Add all objects that are reachable from those in ``_queue`` to the snapshot."""
        while self._queue:
            value, what = self._queue.pop()
            kind = _kind_of(type(value))
            if dtensor.is_dtensor(value):
                self._find_spread(value, what)
                continue
            if isinstance(value, Tensor):
                self._find_tensor(value, what)
            elif kind is not None:
                if kind.read is not None and kind.write is not None:
                    read, write = (functools.partial(f, value) for f in (kind.read, kind.write))
                    guarded = self._guards(value)
                    has_parts = kind.parts is not _no_parts
                    self._keep(what, read, write, isinstance(value, dict), has_parts, guarded)
                for key, part in kind.parts(value):
                    self._add_named(part, what, key)
            attributes = _attributes(value)
            if attributes is not None:
                read, write = (self._bound(f, value) for f in (_attributes, _set_attributes))
                guarded = type(value) in _TENSORS and self._guards(vars(value))
                self._keep(what, read, write, grows=True, guarded=guarded)
                for name, part in attributes.items():
                    if not isinstance(part, _ATOMS):
                        self._add(part, f"{what}.{name}")
            is_open = kind is not None or isinstance(value, Tensor)
            if not is_open and (attributes is None or _hides_memory(type(value))):
                self.hidden_object = self.hidden_object or f"{what}, a {type(value).__name__}"

    def _bound(self, function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        """``function`` with ``owner`` as first argument: the optimizer by a weak reference.

        It keeps the snapshot, and a cycle would keep its tensors until garbage is collected.
        """
        if owner is self._optimizer():
            return lambda *arguments: function(self._optimizer(), *arguments)
        return functools.partial(function, owner)

    def _add_each(self, values: Iterable[Any], what: str) -> None:
        """Visit each of ``values`` later; ``what`` is the name of their container."""
        for index, value in enumerate(values):
            self._add_named(value, what, index)

    def _add_named(self, value: Any, what: str, key: Any) -> None:
        """Visit ``value``, the entry ``key`` of ``what``, later; and ``key``."""
        if not isinstance(value, _ATOMS):
            self._add(value, f"{what}[{key!r}]" if isinstance(key, (str, int)) else f"{what}[...]")
        if not isinstance(key, _ATOMS):
            self._add(key, what)

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
        restore = functools.partial(setattr, tensor, "data")
        self._keep(what, lambda: _layout(tensor), lambda _: restore(alias), guarded=True)

    def _find_spread(self, tensor: Any, what: str) -> None:
        """Add the local shard of a ``DTensor``: the wrapper around it has no memory of its own."""
        part = functools.partial(setattr, tensor, LOCAL_TENSOR)
        self._keep(what, lambda: dtensor.local(tensor), part)
        self._add(dtensor.local(tensor), what)

    def _guards(self, container: Any) -> bool:
        """Whether a guard compares ``container``: a list or dict without numbers and the like.

        Numbers may be other objects and equal, and may change from step to step.
        """
        if type(container) not in _GUARDED:
            return False
        is_list = type(container) is list
        if any(isinstance(x, _ATOMS) for x in (container if is_list else container.values())):
            return False
        (self._lists if is_list else self._dicts).append(container)
        return True

    def _keep(
        self,
        what: str,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        grows: bool = False,
        has_parts: bool = True,
        guarded: bool = False,
    ) -> None:
        """Keep the present value of one object, and the functions that read and write it."""
        saved = _SavedObject(what, read, write, read(), grows, has_parts)
        self._saved_objects.append(saved)
        if not guarded:
            self._unguarded.append(saved)


def _has_same_objects(was: Any, now: Any) -> bool:
    """Whether two containers of one type have the same mutable objects at the same places."""
    if len(was) != len(now):
        return False
    if isinstance(was, dict):
        if not _same([*was], [*now]):
            return False
        was, now = was.values(), now.values()
    return all(a is b or (_is_plain(a) and _is_plain(b)) for a, b in zip(was, now, strict=True))


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is immutable, as is a tuple of numbers such as ``betas``."""
    if type(value) is tuple:
        return all(isinstance(part, _ATOMS) for part in value)
    return isinstance(value, _ATOMS)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one object, or equal immutable values (containers: elementwise).

    The order of a dict counts: an ``OrderedDict`` may be a queue.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return _same([*a], [*b]) and _same([*a.values()], [*b.values()])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)  # 0.0 is not -0.0, and NaN is NaN
    if isinstance(a, (set, frozenset, *_PLAIN)):
        return bool(a == b)
    if isinstance(a, _GeneratorState):
        return a.numbers == b.numbers
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return False


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """The memory, shape, strides and dtype of ``tensor``."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


# --- attributes -----------------------------------------------------------------------------------


def _slots(value: Any) -> list[str]:
    """The names in the ``__slots__`` of the class of ``value`` and of its bases."""
    return copyreg._slotnames(type(value))  # type: ignore[attr-defined]


def _attributes(owner: Any) -> dict[str, Any] | None:
    """The attributes of ``owner``; ``None`` if its class has neither ``__dict__`` nor slots.

    Those of an optimizer that describe its last attempt are left out, and those of a bound method,
    which are its function's.
    """
    own, slots = getattr(owner, "__dict__", None), _slots(owner)
    if isinstance(owner, types.MethodType) or not (isinstance(own, dict) or slots):
        return None
    left_out = _ATTEMPT if isinstance(owner, torch.optim.Optimizer) else ()
    attributes = {name: value for name, value in (own or {}).items() if name not in left_out}
    return attributes | {name: getattr(owner, name) for name in slots if hasattr(owner, name)}


@functools.lru_cache(maxsize=256)
def _hides_memory(cls: type) -> bool:
    """Whether objects of ``cls`` hold more than attributes, as those of types written in C do.

    ``copyreg`` refuses to pickle the same objects, also because of their size.
    """
    pointers = len(copyreg._slotnames(cls))  # type: ignore[attr-defined]
    pointers += (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__basicsize__ > object.__basicsize__ + pointers * _POINTER or cls.__itemsize__ > 0


def _set_attributes(owner: Any, was: dict[str, Any]) -> None:
    """Set the attributes of ``owner`` to what :func:`_attributes` returned."""
    own, slots = getattr(owner, "__dict__", {}), _slots(owner)
    for name in (_attributes(owner) or {}).keys() - was.keys():
        if name in slots:
            object.__delattr__(owner, name)
        else:
            del own[name]
    for name, value in was.items():
        if name in slots:
            object.__setattr__(owner, name, value)
        else:
            own.pop(name, None)  # so that the order is restored, too
            own[name] = value


# --- contents -------------------------------------------------------------------------------------


def _parts_of_function(function: types.FunctionType) -> Iterable[tuple[Any, Any]]:
    """The cells of the closure of ``function``, and the defaults of its arguments."""
    defaults = function.__defaults__ or (), (function.__kwdefaults__ or {}).values()
    return enumerate(chain(function.__closure__ or (), *defaults))


def _owner(function: Any) -> Iterable[tuple[Any, Any]]:
    """The object whose method the built-in ``function`` is, unless pybind11 made that object."""
    owner = function.__self__
    is_made = type(owner).__name__.startswith(("PyCapsule", "pybind11_"))
    return () if is_made else enumerate((owner,))


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


@dataclass
class _GeneratorState:
    """The state of a random generator, and the same as numbers that are fast to compare."""

    state: Any
    numbers: Any


def _torch_state(generator: torch.Generator) -> _GeneratorState:
    """The state of a generator of torch."""
    state = generator.get_state()
    return _GeneratorState(state, ctypes.string_at(state.data_ptr(), state.numel()))


def _python_state(generator: random.Random) -> _GeneratorState:
    """The state of a generator of Python."""
    state = generator.getstate()
    return _GeneratorState(state, (state[1], repr(state[2])))


def _no_parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """The parts of an object that has none."""
    return ()


class _Kind(NamedTuple):
    """What objects of some types contain.

    Attributes:
        types: the types.
        parts: returns ``(key, part)`` for each object in one of them.
        read: returns a copy of the contents, to compare; ``None`` if they cannot change.
        write: ``write(object, copy)`` restores the contents.
    """

    types: tuple[Any, ...]
    parts: Callable[[Any], Iterable[tuple[Any, Any]]] = _no_parts
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any, Any], Any] | None = None


_KINDS = (
    _Kind((dict,), dict.items, dict, _refill),
    _Kind((list, deque), enumerate, list, _replace),
    _Kind((set,), enumerate, set, _refill),
    _Kind((tuple, frozenset), enumerate),
    _Kind((bytearray,), read=bytes, write=_replace),
    _Kind((random.Random,), read=_python_state, write=lambda g, was: g.setstate(was.state)),
    _Kind((torch.Generator,), read=_torch_state, write=lambda g, was: g.set_state(was.state)),
    _Kind((types.MethodType,), lambda method: enumerate((method.__func__, method.__self__))),
    _Kind((types.BuiltinFunctionType,), _owner),
    _Kind((types.FunctionType,), _parts_of_function),
    _Kind((types.CellType,), lambda cell: enumerate(_contents(cell)), _contents, _fill),
    _Kind((functools.partial,), lambda p: enumerate((p.func, p.args, p.keywords))),
)


def _copy_to_array(array: Any, was: Any) -> None:
    """Make a NumPy array equal to ``was``, in place, its shape too."""
    if array.shape != was.shape:
        array.resize(was.shape, refcheck=False)
    array[...] = was


def _kinds_of_numpy(numpy: Any) -> tuple[_Kind, ...]:
    """The kinds of NumPy's objects."""
    states = numpy.random.RandomState
    return (
        _Kind((numpy.generic,)),
        _Kind(
            (numpy.ndarray,),
            lambda array: enumerate(array.ravel().tolist() if array.dtype.hasobject else ()),
            numpy.copy,
            _copy_to_array,
        ),
        _Kind((states,), read=lambda s: s.get_state(legacy=False), write=states.set_state),
        _Kind(
            (numpy.random.Generator,),
            read=lambda generator: generator.bit_generator.state,
            write=lambda generator, was: setattr(generator.bit_generator, "state", was),
        ),
    )


@functools.lru_cache(maxsize=256)
def _kind_of(cls: type) -> _Kind | None:
    """What objects of the type ``cls`` contain; ``None`` if that is not known."""
    numpy = sys.modules.get("numpy")
    kinds = _KINDS if numpy is None else (*_KINDS, *_kinds_of_numpy(numpy))
    return next((kind for kind in kinds if issubclass(cls, kind.types)), None)


# --- random generators ---------------------------------------------------------------------------


def _generators(devices: Iterable[torch.device]) -> dict[Any, str]:
    """The global random generators that a step on ``devices`` may draw from, with their names."""
    found = {
        random._inst: "Python's random state",  # type: ignore[attr-defined]
        torch.default_generator: "torch's random state",
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found[numpy.random.mtrand._rand] = "NumPy's random state"
    for device in sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str):
        generators = getattr(torch.get_device_module(device), "default_generators", ())
        if generators and not captures(device):  # during capture a CUDA graph owns the generator
            found[generators[device.index]] = f"the random state of {device}"
    return found
