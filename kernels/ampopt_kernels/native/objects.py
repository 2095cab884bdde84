"""Questions about hundreds of Python objects, asked in one call.

A step has to know whether it works on the very objects of the step before. Python asks that of
each, which for the parameters and states of a small network takes longer than its update. Where
the loops of ``objects.cpp`` have been compiled, each question is one call of them: for 300 tensors,
3 microseconds instead of 47 for their addresses. They need torch's headers, which take a compiler
most of ten seconds, so nobody waits for them, nor for their compiler: until they are there, and
where they cannot be made, Python answers.
"""

import contextlib
import ctypes
import functools
import operator
import sysconfig
from array import array
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.native.build import Library

__all__ = ["IdentityGuard", "LayoutGuard", "addresses", "bump_versions", "loops"]

QUESTIONS = 1000
"""Those that Python answers before the loops are compiled: some hundred steps."""
LOOKS = 100
"""Questions from one look whether they have been compiled to the next: a file may be far away."""


class Loops:
    """The loops over objects, from when they are wanted to when they are there.

    Attributes:
        there: the loops, once they have been loaded.
    """

    def __init__(self) -> None:
        """Begin without, and with nobody who wants them."""
        self.there: ctypes.PyDLL | None = None
        self._library: Library | None = None
        self._questions = 0

    def want(self) -> None:
        """Have them compiled beside the program once they pay, if that is possible.

        Those that have been compiled before are there at once.
        """
        if self._library is None:
            with contextlib.suppress(FileNotFoundError):  # there is no compiler
                self._library = _library()

    def asked(self, wait: bool = False) -> ctypes.PyDLL | None:
        """The loops; ``None`` while there are none, and where nobody wants them.

        Args:
            wait: for the compiler.
        """
        if self.there is not None or self._library is None:
            return self.there
        looks = self._questions % LOOKS == 0
        self._questions += 1
        if not (looks or wait):
            return None
        try:
            if wait or self._library.ready():
                self.there = _declared(self._library.load())
            elif self._questions > QUESTIONS:
                self._library.start()
        except Exception:  # torch's headers or Python's may be missing, or want another compiler
            self._library = None
        return self.there


loops = Loops()


@functools.cache
def _library() -> Library:
    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include/torch/csrc/api/include")
    options = (
        "-std=c++20",  # which torch's headers are written in, of late
        "-O1",  # there is nothing to make vectors of
        "-DAT_PER_OPERATOR_HEADERS",  # those of torch's operators are half of the headers
        *(f"-I{folder}" for folder in (*includes, sysconfig.get_paths()["include"])),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{root / 'lib'}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
        f"-DTORCH_VERSION={torch.__version__}",  # whose headers they are
    )
    source = Path(__file__).with_name("objects.cpp").read_text(encoding="utf-8")
    return Library(source, options, can_wait=True)


def _declared(made: ctypes.CDLL) -> ctypes.PyDLL:
    library = ctypes.PyDLL(made._name, handle=made._handle)
    pointer, count, objects = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    library.hold.argtypes = (objects, pointer, objects, objects)
    library.addresses.argtypes = library.laid_out.argtypes = (objects, pointer)
    library.bump_versions.argtypes = (objects,)
    library.layouts.argtypes, library.layouts.restype = (objects, pointer, count), count
    return library


def addresses(tensors: list[Tensor]) -> array:
    """Where the first elements of strided tensors are, as 64-bit integers."""
    library = loops.asked()
    if library is not None:
        found = array("q", bytes(8 * len(tensors)))
        if library.addresses(tensors, found.buffer_info()[0]):
            return found
    return array("q", map(Tensor.data_ptr, tensors))


def bump_versions(tensors: list[Tensor]) -> None:
    """Tell autograd of a write to each of ``tensors`` that it has not seen."""
    library = loops.asked()
    if library is None or not library.bump_versions(tensors):
        torch.autograd.graph.increment_version(tensors)


class IdentityGuard:
    """What some lists and dicts hold."""

    def __init__(self, containers: Iterable[list[Any] | dict[Any, Any]]) -> None:
        """Remember the members of ``containers``: of a dict, its keys and values."""
        self._containers = list(containers)
        self._views = [c.values() for c in self._containers if isinstance(c, dict)]
        self._sizes = array("q", map(len, self._containers))
        self._members = list(chain.from_iterable(self._containers))
        self._values = list(chain.from_iterable(self._views))

    def unchanged(self) -> bool:
        """Whether they hold the very same objects as then, in the same order."""
        library = loops.asked()
        if library is not None:
            sizes = self._sizes.buffer_info()[0]
            return bool(library.hold(self._containers, sizes, self._members, self._values))
        return (
            array("q", map(len, self._containers)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._containers), self._members))
            and all(map(operator.is_, chain.from_iterable(self._views), self._values))
        )


class LayoutGuard:
    """The layouts of some strided tensors: what may take their places in a flat kernel.

    That is class, device, dtype, shape, strides, and no lazy negation or conjugation that they have
    not.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        """Remember how ``tensors`` are laid out, and not the tensors."""
        self._n = len(tensors)
        self._classes = set(map(type, tensors))  # by whose addresses they are known
        self._numbers = _numbers(tensors)
        told = self._numbers is not None
        self._told = None if told else [list(map(of, tensors)) for of in _TOLD]

    def fit(self, tensors: list[Any]) -> bool:
        """Whether ``tensors`` are laid out so, each as the one that was in its place.

        ``None`` is like no tensor.
        """
        if len(tensors) != self._n:
            return False
        if self._numbers is not None:
            library = loops.asked()
            assert library is not None
            return bool(library.laid_out(tensors, self._numbers.buffer_info()[0]))
        assert self._told is not None
        if any(list(map(of, tensors)) != told for of, told in zip(_TOLD, self._told, strict=True)):
            return False
        self._numbers = _numbers(tensors)  # the loops may have been compiled since
        return True


_TOLD: tuple[Callable[[Any], Any], ...] = (
    type,
    *map(operator.attrgetter, ("layout", "dtype", "device", "shape")),
    Tensor.stride,  # which sparse tensors, told apart before it, do not have
    Tensor.is_neg,
    Tensor.is_conj,
)
"""Each is a function of C, so that mapping it over all tensors runs no Python."""


def _numbers(tensors: list[Tensor]) -> array | None:
    """The layouts of ``tensors`` as C++ tells them; ``None`` while there is none that could."""
    library = loops.asked()
    if library is None or (n := library.layouts(tensors, None, 0)) < 0:
        return None
    found = array("q", bytes(8 * n))
    library.layouts(tensors, found.buffer_info()[0], n)
    return found
