"""Checks that all ranks have gradients of the same parameters, in steps that need them whole."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ampopt.backend import backend_for
from ampopt_kernels.devices import captures

__all__ = ["SameGradients"]


class SameGradients:
    """Checks that all ranks have gradients of the same parameters, by counts to be all-reduced.

    Attributes:
        size: the number of counts: the ranks with a gradient of each parameter, then all ranks.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        """Number the parameters.

        Args:
            params: the parameters to check, the same ones in the same order on each rank.
        """
        self._numbers = {id(param): number for number, param in enumerate(params)}
        self.size = len(params) + 1
        self._known: set[tuple[int, ...]] = set()

    def write_counts(self, counts: Tensor, keys: Iterable[int]) -> None:
        """Write the counts of this rank into ``counts``, which is zeros.

        Args:
            counts: a tensor of :attr:`size` elements.
            keys: the ``id`` of each parameter with a gradient.
        """
        for number in (*self._present(keys), self.size - 1):
            counts[number].fill_(1.0)

    def check(self, counts: Tensor, keys: Iterable[int]) -> None:
        """Check the all-reduced counts. Synchronizes once for each set of gradients.

        Args:
            counts: the sums of the counts of all ranks.
            keys: the ``id`` of each parameter with a gradient on this rank.

        Raises:
            RuntimeError: some ranks have gradients that others have not. Raised on every rank.
        """
        present = self._present(keys)
        host_sees = backend_for(counts.device).host_sees
        if not host_sees and (present in self._known or captures(counts.device)):
            return
        self._known.add(present)
        *having, ranks = counts.tolist()
        if any(n not in (0, ranks) for n in having):
            raise RuntimeError(
                "some ranks have gradients that others have not, but this step makes collectives "
                "for DTensor gradients: give every rank gradients of the same parameters, zeros "
                "if need be, or none; nothing has been stepped"
            )

    def _present(self, keys: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._numbers[key] for key in keys if key in self._numbers)
