"""Whether all ranks have the gradients of the same parameters, where a step needs all of them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ampopt.backend import backend_for
from ampopt_kernels.devices import captures

__all__ = ["SameGradients"]


class SameGradients:
    """What each rank says of its gradients, in numbers that are added up over ranks.

    Attributes:
        size: how many numbers those are.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        """Number the parameters.

        Args:
            params: those that the step needs of all ranks, the same ones on each.
        """
        # One number for each, of ranks that have its gradient, and behind them that of all ranks.
        self._numbers = {id(param): number for number, param in enumerate(params)}
        self.size = len(params) + 1
        self._known: set[tuple[int, ...]] = set()

    def say(self, said: Tensor, keys: Iterable[int]) -> None:
        """Write what this rank has to say into ``said``, which is zeros.

        Args:
            said: of :attr:`size` elements.
            keys: the ``id`` of each parameter with a gradient.
        """
        for number in (*self._present(keys), self.size - 1):
            said[number].fill_(1.0)

    def check(self, said: Tensor, keys: Iterable[int]) -> None:
        """Refuse to go on if some ranks have gradients that others have not.

        Where the host would have to wait to see that, only the first time that this rank has these
        gradients.

        Args:
            said: of all ranks.
            keys: as for :meth:`say`.

        Raises:
            RuntimeError: they have; on every rank.
        """
        present = self._present(keys)
        seen = backend_for(said.device).host_sees
        if not seen and (present in self._known or captures(said.device)):
            return
        self._known.add(present)
        *having, ranks = said.tolist()
        if any(n not in (0, ranks) for n in having):
            raise RuntimeError(
                "some ranks have gradients that others have not, and all have to take part in this "
                "step, which works on whole DTensors: give every rank the same ones, zeros where "
                "need be, or none; nothing has been stepped"
            )

    def _present(self, keys: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._numbers[key] for key in keys if key in self._numbers)
