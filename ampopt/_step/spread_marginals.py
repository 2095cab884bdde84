"""Marginals of a parameter that is spread over ranks: added up over all, and its part of them."""

from typing import Any

import torch
from torch import Tensor

from ampopt._step.dtensor import is_spread, local
from ampopt_kernels.state import State

__all__ = ["SpreadMarginals", "on_each_rank"]


def on_each_rank(state: Any) -> Any:
    """``state``, a loaded one perhaps, so that every rank has all of it, as it is made."""
    if not is_spread(state) or all(p.is_replicate() for p in state.placements):
        return state
    from torch.distributed.tensor import Replicate

    return state.redistribute(placements=[Replicate()] * state.device_mesh.ndim)


class SpreadMarginals:
    """Of one ``DTensor``: every rank has all of its marginals, and factors for what is there."""

    def __init__(self, param: Any) -> None:
        """Begin."""
        from torch.distributed.tensor import Partial, Replicate

        self._mesh, self._shape = param.device_mesh, param.shape
        self._placements, self._partial = param.placements, Partial()
        self._whole = [Replicate()] * param.device_mesh.ndim

    def whole(self, part: State, sums: Tensor) -> Tensor:
        """Sums over what each rank has, made those over the whole."""
        placed = self._placed(part, self._partial)
        return self._from(part, sums, placed, self._whole)

    def here(self, part: State, factors: Tensor) -> Tensor:
        """The factors of the rows, or columns, that this rank has."""
        placed = self._placed(part, self._whole[0])
        return self._from(part, factors, self._whole, placed)

    def replicated(self, part: State, tensor: Tensor) -> Any:
        """A tensor that all ranks have, as a state of the parameter."""
        return self._made(part, tensor, self._whole)

    def _placed(self, part: State, averaged: Any) -> list[Any]:
        """As the parameter is, but ``averaged`` where that is divided within rows, or columns."""
        dim = len(self._shape) - (1 if part.shape == "rows" else 2)
        return [averaged if p.is_shard(dim) else p for p in self._placements]

    def _from(self, part: State, tensor: Tensor, placed: list[Any], to: list[Any]) -> Tensor:
        return local(self._made(part, tensor, placed).redistribute(placements=to))

    def _made(self, part: State, tensor: Tensor, placed: list[Any]) -> Any:
        from torch.distributed.tensor import DTensor

        shape = torch.Size(part.beside(self._shape))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, self._mesh, placed, run_check=False, shape=shape, stride=stride
        )
