"""Whether tensors are laid out as others were, for hundreds of them at the price of a few."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ampopt_kernels.cpu.objects import laid_out, layouts

try:
    # What compiled code checks its inputs with: 300 tensors in one call, 25 microseconds. The
    # functions below, which serve where a version of torch does not have it, take 160.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

__all__ = ["Alike"]

_FUNCTIONS: tuple[Callable[[Any], Any], ...] = (
    type,
    *map(operator.attrgetter, ("layout", "dtype", "device", "shape")),
    Tensor.stride,  # which sparse tensors, told apart above, do not have
    Tensor.is_neg,
    Tensor.is_conj,
)
"""Each is a function of C, so that mapping it over all tensors runs no Python."""


class Alike:
    """The layouts of some strided tensors: what may take their places in a flat kernel.

    That is class, device, dtype, shape, strides, and no lazy negation or conjugation that they have
    not.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Remember how ``tensors`` are laid out, and not the tensors."""
        self._n = len(tensors)
        self._classes = set(map(type, tensors))  # by whose addresses they are known
        self._layouts = layouts(list(tensors))
        guarded = self._layouts is None and TensorGuards is not None
        self._guards = _guards(tensors) if guarded else None
        told = self._layouts is not None or self._guards is not None
        self._known = None if told else [list(map(of, tensors)) for of in _FUNCTIONS]

    def to(self, tensors: list[Any]) -> bool:
        """Whether ``tensors`` are laid out so, each as the one that was in its place.

        ``None`` is like no tensor.
        May be ``False`` where nothing but how autograd sees them differs.
        """
        if len(tensors) != self._n:
            return False
        if self._layouts is not None:
            return laid_out(tensors, self._layouts)
        if self._guards is not None:
            alike = self._guards.check(*tensors)
        else:
            assert self._known is not None
            known = zip(_FUNCTIONS, self._known, strict=True)
            alike = all(list(map(of, tensors)) == old for of, old in known)
        if alike:
            self._layouts = layouts(tensors)  # C++ may have been compiled since
        return alike


def _guards(tensors: Sequence[Tensor]) -> Any:
    make: Any = TensorGuards
    try:
        return make(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        )
    except TypeError:  # it is torch's own, and may come to take something else
        return None
