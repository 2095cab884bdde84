"""Questions about hundreds of Python objects, asked in one call.

A step has to know whether it works on the very objects of the step before. Python asks that of
each, which for the parameters and states of a small network takes longer than its update. Where
the loops of ``objects.cpp`` have been compiled (see ``native``), each question is one call of them:
for 300 tensors, 3 microseconds instead of 47 for their addresses.
"""

import operator
from array import array
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.native import object_loops

__all__ = ["Contents", "Layouts", "addresses", "bump_versions"]


def addresses(tensors: list[Tensor]) -> array:
    """Where the first elements of strided tensors are, as 64-bit integers."""
    library = object_loops()
    if library is not None:
        found = array("q", bytes(8 * len(tensors)))
        if library.addresses(tensors, found.buffer_info()[0]):
            return found
    return array("q", map(Tensor.data_ptr, tensors))


def bump_versions(tensors: list[Tensor]) -> None:
    """Tell autograd of a write to each of ``tensors`` that it has not seen."""
    library = object_loops()
    if library is None or not library.bump_versions(tensors):
        torch.autograd.graph.increment_version(tensors)


class Contents:
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
        library = object_loops()
        if library is not None:
            sizes = self._sizes.buffer_info()[0]
            return bool(library.hold(self._containers, sizes, self._members, self._values))
        return (
            array("q", map(len, self._containers)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._containers), self._members))
            and all(map(operator.is_, chain.from_iterable(self._views), self._values))
        )


class Layouts:
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
            library = object_loops()
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
    library = object_loops()
    if library is None or (n := library.layouts(tensors, None, 0)) < 0:
        return None
    found = array("q", bytes(8 * n))
    library.layouts(tensors, found.buffer_info()[0], n)
    return found
