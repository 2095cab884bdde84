"""Row and column statistics (as Adafactor's) of sharded parameters.

Sums over rows and columns are all-reduced; every rank keeps those of the whole parameter.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step.all_reduce import Agreement
from ampopt._step.sharding.dtensor import is_spread
from ampopt._step.sharding.same_gradients import SameGradients
from ampopt._step.sharding.shards import Run, boxes, runs_of
from ampopt_kernels.marginals import LineSums
from ampopt_kernels.state import State
from ampopt_kernels.tensors import widest
from ampopt_kernels.work import Work

__all__ = ["LinesOfRanks", "SpreadMarginals", "on_each_rank", "replicated"]


def on_each_rank(state: Any) -> Any:
    """``state`` replicated, as a step makes it: a loaded one may be sharded."""
    if not is_spread(state) or all(p.is_replicate() for p in state.placements):
        return state
    from torch.distributed.tensor import Replicate

    return state.redistribute(placements=[Replicate()] * state.device_mesh.ndim)


def replicated(tensor: Tensor, param: Any) -> Any:
    """``tensor``, equal on all ranks, as a replicated ``DTensor`` on the mesh of ``param``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


class SpreadMarginals:
    """The place of a local shard's rows and columns in the whole ``DTensor``.

    Attributes:
        shape: the shape of the whole ``DTensor``.
    """

    def __init__(self, param: Any) -> None:
        """Find the local rows and columns.

        Args:
            param: a ``DTensor`` of two dimensions or more.
        """
        self.shape = tuple(param.shape)
        self._runs = runs_of(param) or [[] for _ in param.shape]
        self._here = [sum(run.length for run in runs) for runs in self._runs]

    def here(self, part: State, factors: Tensor) -> Tensor:
        """The elements of ``factors``, of all rows or columns, for those of the local shard."""
        made = factors.new_empty(part.beside(tuple(self._here)))
        for here, whole in self._boxes(part):
            made[here] = factors[whole]
        return made

    def put(self, part: State, sums: Tensor, into: Tensor) -> None:
        """Write ``sums`` over the local shard to its places in ``into``, flat, for the whole."""
        whole_of = into.view(part.beside(self.shape))
        for here, whole in self._boxes(part):
            whole_of[whole] = sums[here]

    def _boxes(self, part: State) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """As :func:`~ampopt._step.sharding.shards.boxes`, with one dimension summed over."""
        runs = list(self._runs)
        averaged = len(runs) - (1 if part.shape == "rows" else 2)
        if runs[averaged]:
            runs[averaged] = [Run(0, 1)]
        return boxes(runs)


class LinesOfRanks:
    """Adds up, by one all-reduce, sums over rows and columns of local shards.

    A rank without gradients takes part. Every rank checks that all have the same gradients.
    """

    def __init__(
        self, agreement: Agreement, param_groups: Sequence[dict[str, Any]], parts: Sequence[State]
    ) -> None:
        """Lay out the sums of all parameters, one after another, in one tensor.

        Args:
            agreement: the ranks to all-reduce over.
            param_groups: the param groups of the optimizer, with the same ``DTensor`` parameters on
                each rank.
            parts: the states that the rule declares.
        """
        self._agreement = agreement
        params = [p for group in param_groups for p in group["params"] if is_spread(p)]
        params = [param for param in params if param.ndim > 1]
        self._same = SameGradients(params)
        self._size = self._same.size  # the counts come first, the sums after them
        self._slices: dict[tuple[int, str], slice] = {}
        for param in params:
            for part in parts:
                if part.shape is not None:
                    n = math.prod(part.beside(tuple(param.shape)))
                    self._slices[id(param), part.name] = slice(self._size, self._size + n)
                    self._size += n

    def __call__(self, works: Sequence[Work], lines: Sequence[LineSums]) -> list[LineSums]:
        """See :data:`ampopt_kernels.marginals.AgreeOnLines`.

        Raises:
            RuntimeError: see :meth:`SameGradients.check`; nothing has changed then.
        """
        keys = [row.owner.key for work in works for row in work.rows]
        decision_device = next(
            (work.device for work, own in zip(works, lines, strict=True) if own), None
        )
        said = self._said(keys, works[0].device if decision_device is None else decision_device)
        for row, sums in _rows_with(works, lines):
            for part, own in zip(row.marginals.parts, sums, strict=True):
                if row.in_norm:
                    into = said[self._slices[row.owner.key, part.name]]
                    row.marginals.spread.put(part, own[0], into)
        self._add_up(said, keys)
        for row, sums in _rows_with(works, lines):
            shape = row.marginals.spread.shape
            for i, part in enumerate(row.marginals.parts):
                whole = said[self._slices[row.owner.key, part.name]]
                sums[i] = whole.view(1, *part.beside(shape))
        return list(lines)

    def join_without_gradients(self, device: torch.device) -> None:
        """Take part in the all-reduce of other ranks, without gradients on this one.

        Raises:
            RuntimeError: see :meth:`SameGradients.check`.
        """
        self._add_up(self._said([], device), [])

    def _said(self, keys: Sequence[int], device: torch.device) -> Tensor:
        """The tensor to all-reduce: counts of the gradients with these keys, then zeros."""
        said = torch.zeros(self._size, dtype=widest(device), device=device)
        self._same.say(said[: self._same.size], keys)
        return said

    def _add_up(self, said: Tensor, keys: Sequence[int]) -> None:
        """All-reduce ``said`` in place, and check the counts."""
        if not self._slices:  # no parameter is a DTensor with rows and columns
            return
        self._agreement.add_up_parameters(said)
        self._same.check(said[: self._same.size], keys)


def _rows_with(works: Sequence[Work], lines: Sequence[LineSums]) -> Iterator[tuple[Any, list[Any]]]:
    """The rows of ``DTensor`` parameters that have sums in ``lines``, with these sums."""
    for work, own in zip(works, lines, strict=True):
        for index, sums in own.items():
            row = work.rows[index]
            if row.marginals is not None and row.marginals.spread is not None:
                yield row, sums
