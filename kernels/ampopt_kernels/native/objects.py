"""Checks on hundreds of Python objects in one call: identity, layout, addresses.

A step has to know whether it works on the same objects as the step before. To compare them in
Python takes longer than to update the parameters of a small network. Once the loops of
``objects.cpp`` have been compiled, each check is one call of them. They include torch's headers,
which take a compiler about ten seconds, so they are compiled in the background. Until they are
loaded, and where they cannot be compiled, each check runs in Python.
"""

import contextlib
import ctypes
import functools
import operator
import sysconfig
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.native.build import Library

__all__ = ["IdentityGuard", "LayoutGuard", "addresses", "bump_versions", "loops"]

QUESTIONS = 1000
"""Checks that run in Python before the compiler is started: about a hundred steps."""
LOOKS = 100
"""Checks between two tests whether the compiler is done, which may read a slow file system."""


class Loops:
    """The loops over objects: a library that is compiled in the background and then loaded.

    Attributes:
        loaded: the library; ``None`` until it is loaded.
    """

    def __init__(self) -> None:
        """Load and compile nothing until :meth:`want` is called."""
        self.loaded: ctypes.PyDLL | None = None
        self._library: Library | None = None
        self._questions = 0

    def want(self) -> None:
        """Enable the loops, if there is a compiler.

        The compiler starts after :data:`QUESTIONS` checks. Loops that an earlier program has
        compiled are loaded at the first check.
        """
        if self._library is None:
            with contextlib.suppress(FileNotFoundError):  # there is no compiler
                self._library = _library()

    def get(self, wait: bool = False) -> ctypes.PyDLL | None:
        """Return the loops; ``None`` while they are not loaded or not enabled.

        Args:
            wait: whether to wait for the compiler.
        """
        if self.loaded is not None or self._library is None:
            return self.loaded
        looks = self._questions % LOOKS == 0
        self._questions += 1
        if not (looks or wait):
            return None
        try:
            if wait or self._library.ready():
                self.loaded = _with_types(self._library.load())
            elif self._questions > QUESTIONS:
                self._library.start()
        except Exception:  # headers of torch or Python may be missing, or need another compiler
            self._library = None
        return self.loaded


loops = Loops()


@functools.cache
def _library() -> Library:
    """The library of ``objects.cpp``, compiled against this torch and this Python."""
    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include/torch/csrc/api/include")
    options = (
        "-std=c++20",  # newer headers of torch need it
        "-O1",  # nothing to vectorize
        "-DAT_PER_OPERATOR_HEADERS",  # leaves out half of the headers: those of operators
        *(f"-I{folder}" for folder in (*includes, sysconfig.get_paths()["include"])),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{root / 'lib'}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
        f"-DTORCH_VERSION={torch.__version__}",  # compile again for another torch
    )
    source = Path(__file__).with_name("objects.cpp").read_text(encoding="utf-8")
    return Library(source, options, can_wait=True)


def _with_types(library: ctypes.CDLL) -> ctypes.PyDLL:
    """The loaded library, which holds Python's lock in calls, with the types of its functions."""
    functions = ctypes.PyDLL(library._name, handle=library._handle)
    pointer, count, objects = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    functions.hold.argtypes = (objects, pointer, objects, objects, objects)
    functions.addresses.argtypes = (objects, pointer)
    functions.laid_out.argtypes = (objects, pointer, objects)
    functions.bump_versions.argtypes = (objects,)
    functions.layouts.argtypes, functions.layouts.restype = (objects, pointer, count), count
    return functions


def addresses(tensors: list[Any]) -> array:
    """Return the addresses of strided tensors as 64-bit integers: of the first element of each.

    Args:
        tensors: strided tensors, or ``None``, whose address is 0.
    """
    library = loops.get()
    if library is not None:
        numbers = array("q", bytes(8 * len(tensors)))
        if library.addresses(tensors, numbers.buffer_info()[0]):
            return numbers
    try:
        return array(
            "q", list(map(Tensor.data_ptr, tensors))
        )  # from a map, array() would be slower
    except TypeError:  # a tensor is None
        return array("q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def bump_versions(tensors: list[Tensor]) -> None:
    """Increment the version counter of each tensor, for autograd, after a write by a kernel."""
    library = loops.get()
    if library is None or not library.bump_versions(tensors):
        torch.autograd.graph.increment_version(tensors)


class IdentityGuard:
    """The identities of the members of some lists and dicts."""

    def __init__(self, containers: Iterable[list[Any] | dict[Any, Any]]) -> None:
        """Store the members of ``containers``: of a dict, its keys and values."""
        self._containers = list(containers)
        self._dicts = [c for c in self._containers if isinstance(c, dict)]
        self._sizes = array("q", map(len, self._containers))
        self._members = list(chain.from_iterable(self._containers))
        self._values = list(self._values_now())

    def _values_now(self) -> Iterator[Any]:
        """The values of the dicts."""
        # No list of views: so many new objects would start the garbage collector.
        return chain.from_iterable(map(dict.values, self._dicts))

    def unchanged(self) -> bool:
        """Return whether the containers still have the same objects in the same order."""
        library = loops.get()
        if library is not None:
            sizes = self._sizes.buffer_info()[0]
            return bool(library.hold(self._containers, sizes, self._members, self._values, None))
        return (
            array("q", map(len, self._containers)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._containers), self._members))
            and all(map(operator.is_, self._values_now(), self._values))
        )

    def changed(self) -> list[list[Any] | dict[Any, Any]]:
        """Return the containers that have other members now."""
        library = loops.get()
        if library is not None:
            sizes, changed = self._sizes.buffer_info()[0], bytearray(len(self._containers))
            library.hold(self._containers, sizes, self._members, self._values, changed)
            return list(compress(self._containers, changed))
        changes, members, values = [], iter(self._members), iter(self._values)
        for container, size in zip(self._containers, self._sizes, strict=True):
            before = list(islice(members, size))
            now = list(container)
            if isinstance(container, dict):
                before += islice(values, size)
                now += container.values()
            if len(before) != len(now) or not all(map(operator.is_, before, now)):
                changes.append(container)
        return changes


class LayoutGuard:
    """The layouts of some strided tensors, on which a plan for a flat kernel depends.

    A layout is the class, device, dtype, shape and strides of a tensor, and whether it is lazily
    negated or conjugated.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        """Store the layouts of ``tensors``, and no reference to the tensors."""
        self._n = len(tensors)
        self._classes = set(map(type, tensors))  # keeps them alive: C++ compares their addresses
        self._numbers = _numbers(tensors)
        self._numbers_of: dict[int, array] = {}  # of single tensors, until all are known
        self._properties: list[tuple[Callable[[Any], Any], list[Any]]] | None = None
        if self._numbers is None:
            self._properties = [(of, list(map(of, tensors))) for of in _properties_of(tensors)]

    def present(self, tensors: list[Any]) -> bytearray | None:
        """Compare the layout of each of ``tensors`` with that of the stored tensor at its index.

        Args:
            tensors: tensors, or ``None``, which fits any layout.

        Returns:
            For each 0 if it is ``None``, else 1; ``None`` if a tensor has another layout.
        """
        if len(tensors) != self._n:
            return None
        if self._numbers is not None:
            library = loops.get()
            assert library is not None
            present, layouts = bytearray(self._n), self._numbers.buffer_info()[0]
            return present if library.laid_out(tensors, layouts, present) else None
        assert self._properties is not None
        if all(list(map(of, tensors)) == stored for of, stored in self._properties):
            self._numbers = _numbers(tensors)  # the loops may have been compiled since
            return bytearray(b"\1" * self._n)
        present = bytearray(tensor is not None for tensor in tensors)
        there = list(compress(tensors, present))
        if any(
            list(map(of, there)) != list(compress(stored, present))
            for of, stored in self._properties
        ):
            return None
        self._encode(tensors)
        return present

    def _encode(self, tensors: list[Any]) -> None:
        """Keep the numbers of those that are not ``None``, for when those of all are known."""
        for index, tensor in enumerate(tensors if loops.get() is not None else ()):
            if tensor is not None and index not in self._numbers_of:
                self._numbers_of[index] = _numbers([tensor]) or array("q")
        if len(self._numbers_of) == self._n:
            each = (self._numbers_of[index] for index in range(self._n))
            self._numbers = array("q", chain.from_iterable(each))

    def changed(self, tensors: list[Any]) -> list[int]:
        """Return the index of each of ``tensors``, as many as are stored, with another layout."""
        if self._numbers is not None:
            library, present = loops.get(), bytearray(b"\2") * self._n
            assert library is not None
            library.laid_out(tensors, self._numbers.buffer_info()[0], present)
            return [index for index, byte in enumerate(present) if byte == 2]
        properties = self._properties or []
        return [
            index
            for index, tensor in enumerate(tensors)
            if tensor is not None and any(of(tensor) != stored[index] for of, stored in properties)
        ]


# Made once, as lists of properties are compared.
_BASIC = (type, *map(operator.attrgetter, ("layout", "dtype", "device", "shape")))


def _properties_of(tensors: list[Tensor]) -> Iterator[Callable[[Any], Any]]:
    """Yield the properties that make the layouts of ``tensors``, those first that tell most apart.

    Each is a C function, so that ``map`` runs no Python for a tensor. For contiguous tensors the
    strides, and for real ones the conjugate bit, need no comparison of their own.
    """
    yield from _BASIC
    # Both fail for sparse tensors, whose layouts differ already.
    yield Tensor.is_contiguous if all(map(Tensor.is_contiguous, tensors)) else Tensor.stride
    yield Tensor.is_neg
    if any(map(Tensor.is_complex, tensors)):
        yield Tensor.is_conj


def _numbers(tensors: list[Tensor]) -> array | None:
    """Return the layouts of ``tensors`` as the loops encode them; ``None`` without loops."""
    library = loops.get()
    if library is None or (n := library.layouts(tensors, None, 0)) < 0:
        return None
    numbers = array("q", bytes(8 * n))
    library.layouts(tensors, numbers.buffer_info()[0], n)
    return numbers
