"""Checks on hundreds of Python objects in one call: identity, layout, addresses.

A step has to know whether it works on the same objects as the step before. To compare them in
Python takes longer than to update the parameters of a small network. Once the loops of
``objects.cpp`` have been compiled, each check is one call of them. They include a header of torch,
which takes a compiler two seconds, so they are compiled in the background. Until they are loaded,
and where they cannot be compiled, each check runs in Python.
"""

import contextlib
import ctypes
import functools
import operator
import sysconfig
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.native.build import Library
from ampopt_kernels.tensors import was_freed

__all__ = ["EMPTY", "MISFIT", "IdentityGuard", "LayoutGuard", "addresses", "bump_versions", "loops"]

EMPTY = 16
"""The address of a tensor without elements, as 0 stands for no tensor."""

MISFIT = 2
"""What :meth:`LayoutGuard.read` finds of a tensor that has another layout."""

CHECKS = 200
"""Calls of :meth:`IdentityGuard.unchanged` that run in Python before the compiler is started: about
a hundred steps."""
_ROOM = 1 << 8
"""Numbers for which there is room in an array of layouts, before it is known how many there are."""
_LOWEST = 19
"""Niceness of a compiler that takes idle processor time alone. Where torch has a thread on every
core, one that takes its share of a core makes all of them wait."""


class Loops:
    """The loops over objects: a library that is compiled in the background and then loaded.

    Attributes:
        loaded: the library; ``None`` until it is loaded.
    """

    def __init__(self) -> None:
        """Load and compile nothing until :meth:`want` is called."""
        self.loaded: ctypes.PyDLL | None = None
        self._library: Library | None = None
        self._checks = 0

    def want(self) -> None:
        """Enable the loops, if they can be compiled.

        Those that an earlier program has compiled are loaded now; else the compiler starts after
        :data:`CHECKS` checks.
        """
        if self._library is not None:
            return
        with contextlib.suppress(Exception):  # there is no compiler, or no cache, or another torch
            self._library = _library()
            if self._library.is_compiled():
                self.load()

    def note_check_in_python(self) -> None:
        """Count a check that ran in Python; start the compiler after :data:`CHECKS` of them."""
        if self._library is None:  # nobody wants the loops yet
            return
        self._checks += 1
        if self._checks == CHECKS:
            name = "ampopt: compile checks"
            threading.Thread(target=self.load, args=(_LOWEST,), name=name, daemon=True).start()

    def load(self, niceness: int = 0) -> None:
        """Load the loops; compile them first if necessary, which takes two seconds.

        Args:
            niceness: that of the compiler.
        """
        # Headers of torch or Python may be missing, or need another compiler.
        with contextlib.suppress(Exception):
            if self._library is not None:
                self.loaded = _with_types(self._library.load(niceness))


loops = Loops()


@functools.cache
def _library() -> Library:
    """The library of ``objects.cpp``, compiled against this torch and this Python."""
    root = Path(torch.__file__).parent
    options = (
        "-std=c++20",  # newer headers of torch need it
        "-O2",  # -O3 takes the compiler a third longer, and makes no loop faster
        f"-DCDATA={_pointer_to_tensor()}",
        f"-DEMPTY={EMPTY}",
        *(f"-I{folder}" for folder in (root / "include", sysconfig.get_paths()["include"])),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{root / 'lib'}",
        "-lc10",
        f"-DTORCH_VERSION={torch.__version__}",  # compile again for another torch
    )
    source = Path(__file__).with_name("objects.cpp").read_text(encoding="utf-8")
    return Library(source, options)


def _pointer_to_tensor() -> int:
    """Where, in the Python object of a tensor, the pointer to the C++ tensor is.

    Raises:
        RuntimeError: the pointer is not found.
    """
    tensors = [torch.empty(n, device="cpu") for n in range(3)]
    for offset in range(object.__basicsize__, 64, ctypes.sizeof(ctypes.c_void_p)):
        pointers = [ctypes.c_void_p.from_address(id(tensor) + offset).value for tensor in tensors]
        if pointers == [tensor._cdata for tensor in tensors]:
            return offset
    raise RuntimeError("this torch has other Python objects")


def _with_types(library: ctypes.CDLL) -> ctypes.PyDLL:
    """The loaded library, which holds Python's lock in calls, with the types of its functions."""
    functions = ctypes.PyDLL(library._name, handle=library._handle)
    pointer, count, objects = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    functions.hold.argtypes = (objects, count, pointer, objects, objects)
    functions.read_tensors.argtypes = (objects, ctypes.c_int, pointer, pointer, pointer, objects)
    for of_tensors in (functions.bump_versions, functions.all_have_memory, functions.are_apart):
        of_tensors.argtypes = (objects,)
    functions.describe.argtypes = (objects, pointer, pointer, count)
    functions.describe.restype = count
    _check_gradients(functions)
    return functions


def _check_gradients(functions: ctypes.PyDLL) -> None:
    """Raise if C++ does not find the gradients that Python finds."""
    tensors = [torch.ones(2, device="cpu"), torch.nn.Parameter(torch.ones(2, device="cpu"))]
    tensors.append(torch.nn.Parameter(tensors[0]))
    tensors[1].grad = gradient = torch.ones(2, device="cpu")
    found, fits = array("q", bytes(24)), bytearray(3)
    functions.read_tensors(tensors, True, None, None, found.buffer_info()[0], fits)
    if found.tolist() != [0, gradient.data_ptr(), 0]:
        raise RuntimeError("this torch has other tensors")


def addresses(tensors: list[Any]) -> array:
    """The addresses of strided tensors as 64-bit integers: of the first element of each.

    Args:
        tensors: strided tensors, or ``None``, whose address is 0. That of a tensor without elements
            is :data:`EMPTY`.
    """
    library = loops.loaded
    if library is not None:
        numbers, fits = array("q", bytes(8 * len(tensors))), bytearray(len(tensors))
        if library.read_tensors(tensors, False, None, None, numbers.buffer_info()[0], fits):
            return numbers
    return array("q", list(map(_address, tensors)))  # from a map, array() would be slower


def _address(tensor: Any) -> int:
    """The address of one tensor; see :func:`addresses`."""
    if tensor is None:
        return 0
    return tensor.data_ptr() if tensor.numel() else EMPTY


def bump_versions(tensors: list[Tensor]) -> None:
    """Increment the version counter of each tensor, for autograd, after a write by a kernel."""
    library = loops.loaded
    if library is None or not library.bump_versions(tensors):
        torch.autograd.graph.increment_version(tensors)


class IdentityGuard:
    """The identities of the elements of some lists, and of some entries of dicts."""

    def __init__(
        self, lists: Sequence[Sequence[Any]], dicts: Sequence[tuple[Mapping[Any, Any], Any]]
    ) -> None:
        """Store the elements and entries.

        Args:
            lists: the lists, or tuples.
            dicts: dicts, each with the keys of the entries to compare, which it has; ``None`` for
                all entries, so that none may be added, nor their order change.
        """
        self._containers: list[Any] = [*lists, *(container for container, _ in dicts)]
        self._n_lists = len(lists)
        self._members: list[Any] = list(chain.from_iterable(lists))
        sizes = list(map(len, lists))
        for container, keys in dicts:
            before = len(self._members)
            for entry in container.items():  # in the order in which C++ meets them
                if keys is None or entry[0] in keys:
                    self._members += entry
            n = (len(self._members) - before) // 2
            sizes.append(~n if keys is None else n)
        self._sizes = array("q", sizes)
        sizes_at = self._sizes.buffer_info()[0]
        self._arguments = self._containers, self._n_lists, sizes_at, self._members  # for C++

    def unchanged(self) -> bool:
        """Return whether the containers still have the same objects."""
        library = loops.loaded
        if library is not None:
            return bool(library.hold(*self._arguments, None))
        loops.note_check_in_python()
        return next(self._changed(), None) is None

    def changed(self) -> list[Any]:
        """Return the containers that have other members now."""
        library = loops.loaded
        if library is None:
            return list(self._changed())
        changed = bytearray(len(self._containers))
        library.hold(*self._arguments, changed)
        return list(compress(self._containers, changed))

    def _changed(self) -> Iterator[Any]:
        """Yield the containers that have other members now."""
        at = 0
        for index, (container, n) in enumerate(zip(self._containers, self._sizes, strict=True)):
            end = at + (n if index < self._n_lists else 2 * max(n, ~n))
            before, now = self._members[at:end], container
            if n < 0:
                now = list(chain.from_iterable(container.items()))
            elif index >= self._n_lists:
                before, now = before[1::2], list(map(container.get, before[::2]))
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                yield container
            at = end


class LayoutGuard:
    """The layouts of some strided tensors, on which a plan for a kernel depends.

    A layout is the device, dtype, shape and strides of a tensor, whether it is lazily negated or
    conjugated, and whether its memory was freed.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        """Store the layouts of ``tensors``, and no reference to the tensors."""
        self._n = len(tensors)
        self._described: tuple[int, int] | None = None
        self._describe(tensors)
        self._layouts = [] if self._described is not None else list(map(_layout, tensors))

    def _describe(self, tensors: list[Tensor]) -> None:
        """Keep the layouts of ``tensors`` as the loops describe them, if there are loops.

        That is two arrays: where the layout of each tensor begins, and the numbers of all layouts.
        """
        library = loops.loaded
        self._begins, self._numbers = array("q", bytes(8 * self._n)), array("q")
        begins, n = self._begins.buffer_info()[0], _ROOM
        while library is not None and len(self._numbers) < n:
            self._numbers = array("q", bytes(8 * n))
            to = begins, self._numbers.buffer_info()[0]
            n = library.describe(tensors, *to, n)
            self._described = to if n >= 0 else None

    def read(self, tensors: list[Any], *, of_gradients: bool = False) -> tuple[array, bytearray]:
        """Compare the layout of each of ``tensors`` with that of the stored tensor at its index.

        Args:
            tensors: tensors, as many as are stored, or ``None``, which fits any layout.
            of_gradients: whether to read the gradients of ``tensors`` in their place.

        Returns:
            The addresses, as :func:`addresses` returns them; and for each of ``tensors`` 0 if it is
            ``None`` or has no gradient, 1 if it fits, and :data:`MISFIT` if it has another layout.
            Then the address is 0.
        """
        library = loops.loaded
        if library is not None and self._described is not None:
            found, fits = array("q", bytes(8 * self._n)), bytearray([MISFIT]) * self._n
            to = found.buffer_info()[0], fits
            library.read_tensors(tensors, of_gradients, *self._described, *to)
            return found, fits
        if of_gradients:
            tensors = [tensor.grad for tensor in tensors]
        pairs = list(zip(tensors, self._layouts, strict=True))
        fits = bytearray(
            0 if t is None else 1 if _layout(t) == known else MISFIT for t, known in pairs
        )
        if library is not None and MISFIT not in fits:  # the loops have been compiled meanwhile
            absent = {known: _example(known) for tensor, known in pairs if tensor is None}
            self._describe([absent[k] if t is None else t for t, k in pairs])
        fitting = [t if fit == 1 else None for t, fit in zip(tensors, fits, strict=True)]
        return addresses(fitting), fits


def _layout(tensor: Any) -> tuple[Any, ...]:
    """What makes up the layout of a strided tensor."""
    if tensor.layout != torch.strided:
        return (tensor.layout,)
    basic = tensor.dtype, tensor.device, tensor.shape
    return *basic, tensor.stride(), tensor.is_neg(), tensor.is_conj(), was_freed(tensor)


def _example(layout: tuple[Any, ...]) -> Tensor:
    """A tensor of a layout that :func:`_layout` has returned."""
    dtype, device, shape, strides, *_ = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
