"""Questions about hundreds of Python objects, asked in one call.

A step has to know whether it works on the very objects of the step before. Python asks that of
each, which for the parameters and states of a small network takes longer than its update. Where
the loops of C++ have been compiled (see ``native``), each question is one call of them: for 300
tensors, 3 microseconds instead of 47 for their addresses.
"""

import ctypes
import functools
import operator
from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.native import object_loops

__all__ = ["Contents", "addresses", "bump_versions", "laid_out", "layouts", "same"]


def same(found: list[Any], known: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    library = object_loops()
    if library is not None:
        return bool(library.same(found, known))
    return len(found) == len(known) and all(map(operator.is_, found, known))


def addresses(tensors: list[Tensor]) -> array:
    """Where the first elements of strided tensors are, as 64-bit integers."""
    library = _tensor_loops()
    if library is not None:
        found = array("q", bytes(8 * len(tensors)))
        if library.addresses(tensors, found.buffer_info()[0]):
            return found
    return array("q", map(Tensor.data_ptr, tensors))


def bump_versions(tensors: list[Tensor]) -> None:
    """Tell autograd of a write to each of ``tensors`` that it has not seen."""
    library = _tensor_loops()
    if library is None or not library.bump_versions(tensors):
        torch.autograd.graph.increment_version(tensors)


def layouts(tensors: list[Tensor]) -> array | None:
    """What a kernel takes for granted of ``tensors``, as numbers: see :func:`laid_out`.

    That is class, device, dtype, shape, strides, and no lazy negation or conjugation. ``None``
    where no C++ is compiled that could tell.
    """
    library = _tensor_loops()
    if library is None:
        return None
    n = library.layouts(tensors, None, 0)
    if n < 0:
        return None
    found = array("q", bytes(8 * n))
    library.layouts(tensors, found.buffer_info()[0], n)
    return found


def laid_out(tensors: list[Any], known: array) -> bool:
    """Whether as many ``tensors``, or other objects, have the layouts ``known``."""
    library = _tensor_loops()
    assert library is not None
    return bool(library.laid_out(tensors, known.buffer_info()[0]))


class Contents:
    """What some dicts hold."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        """Remember the keys and values of ``dicts``."""
        self._dicts = list(dicts)
        self._views = list(map(dict.values, self._dicts))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(self._views))

    def unchanged(self) -> bool:
        """Whether they hold the very same objects as then, in the same order."""
        library = object_loops()
        if library is not None:
            return bool(library.hold(self._dicts, self._keys, self._values))
        return same(list(chain.from_iterable(self._views)), self._values) and same(
            list(chain.from_iterable(self._dicts)), self._keys
        )


def _tensor_loops() -> ctypes.PyDLL | None:
    """The loops over tensors; ``None`` unless they are compiled, and know where a tensor is."""
    library = object_loops()
    return library if library is not None and _tensors_follow_heads() else None


@functools.cache
def _tensors_follow_heads() -> bool:
    """Whether a Python object of torch's has the pointer to its tensor right behind its head.

    So it is in all versions known; in one where it is not, Python asks each tensor.
    """
    tensor = torch.empty(1, device="cpu")
    behind = ctypes.c_void_p.from_address(id(tensor) + object.__basicsize__)
    return behind.value is not None and behind.value == getattr(tensor, "_cdata", None)
