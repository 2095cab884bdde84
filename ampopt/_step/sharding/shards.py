"""Which elements, rows and columns of a ``DTensor`` are in the local shard."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.sharding.dtensor import is_dtensor
from ampopt_kernels.element_indices import ElementIndices, Jump

__all__ = ["Run", "ShardedMatrix", "boxes", "indices_in", "indices_of", "runs_at", "runs_of"]


class Run(NamedTuple):
    """Consecutive indices, in one dimension of the whole tensor, of a local shard."""

    start: int
    length: int


def runs_of(tensor: Any, shape: Sequence[int] | None = None) -> list[list[Run]]:
    """The indices of the local shard in each dimension; empty lists on a rank outside of the mesh.

    Args:
        tensor: a ``DTensor``.
        shape: the shape of another tensor that is sharded as ``tensor``.
    """
    own, mesh = tensor.shape if shape is None else shape, tensor.device_mesh
    if (here := mesh.get_coordinate()) is None:
        return [[] for _ in own]
    return runs_at(own, mesh.shape, here, tensor.placements)


def runs_at(
    shape: Sequence[int], mesh: Sequence[int], here: Sequence[int], placements: Sequence[Any]
) -> list[list[Run]]:
    """The indices, in each dimension, of the shard at the coordinates ``here`` of a mesh.

    In the order in which the shard stores them. There are several runs for a ``_StridedShard``
    whose pieces no later dimension of the mesh divides among ranks.
    """
    runs = [[Run(0, size)] for size in shape]
    # ``is_shard()`` of a strided shard is False.
    dims = [getattr(placement, "dim", None) for placement in placements]
    cuts: list[tuple[int, int]] = []  # dimensions of the mesh, with the number of pieces to cut
    for place in reversed([place for place, dim in enumerate(dims) if dim is not None]):
        pieces = getattr(placements[place], "split_factor", 1)
        later = [mesh[i] for i in range(place + 1, len(mesh)) if dims[i] == dims[place]]
        if pieces > 1 and pieces == math.prod(later):
            # ``fully_shard`` cuts what tensor parallelism, a later dimension, has cut before. If
            # the numbers do not divide, the other order gives other shards.
            cuts.append((place, 1))
        else:
            cuts.insert(0, (place, pieces))
    for place, pieces in cuts:
        dim: Any = dims[place]
        parts = (_chunk(runs[dim], piece, pieces) for piece in range(pieces))
        runs[dim] = [run for part in parts for run in _chunk(part, here[place], mesh[place])]
    return runs


def _chunk(runs: Sequence[Run], which: int, of: int) -> list[Run]:
    """The chunk number ``which`` of ``of`` chunks of ``runs``, as ``torch.chunk`` cuts them."""
    size = sum(run.length for run in runs)
    share = -(-size // of)
    start, stop = min(which * share, size), min((which + 1) * share, size)
    chunk, at = [], 0
    for run in runs:
        first, last = max(start - at, 0), min(stop - at, run.length)
        if first < last:
            chunk.append(Run(run.start + first, last - first))
        at += run.length
    return chunk


def boxes(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Slices of the local shard, each with the slices of the same elements in the whole tensor.

    One pair, unless a shard is strided.
    """
    slices = []
    for of_dim in runs:
        ends = accumulate(run.length for run in of_dim)
        slices.append(
            [
                (slice(end - length, end), slice(start, start + length))
                for (start, length), end in zip(of_dim, ends, strict=True)
            ]
        )
    for box in product(*slices):
        yield tuple(here for here, _ in box), tuple(whole for _, whole in box)


def indices_of(param: Any, local: Tensor, *, contiguous: bool = False) -> ElementIndices:
    """The offset of each local element in the memory of a process that had all of ``param``.

    Random numbers depend on that offset, so that they do not depend on the number of ranks.

    Args:
        param: the parameter.
        local: its local shard, real and dense, as it is stepped.
        contiguous: whether one process would step a contiguous copy.
    """
    if not (is_dtensor(param) and local.numel()):
        return ElementIndices()
    runs = runs_of(param)
    whole = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
    whole = torch.empty_like(whole)  # dense where ``param`` is not
    if contiguous:
        whole = torch.empty(param.shape, dtype=param.dtype, device="meta")
    if param.is_complex():
        whole = torch.view_as_real(whole)
        runs.append([Run(0, 2)])
    return _indices(runs, local.stride(), whole.stride())


def indices_in(shape: Sequence[int], runs: list[list[Run]]) -> ElementIndices:
    """The offsets of the elements of a shard in a contiguous tensor of ``shape``.

    Args:
        shape: the shape of the whole tensor.
        runs: the indices of the shard in each dimension; see :func:`runs_at`.
    """
    lengths = [sum(run.length for run in of_dim) for of_dim in runs]
    local, whole = (torch.empty(s, device="meta") for s in (lengths, shape))
    return _indices(runs, local.stride(), whole.stride())


def _indices(runs: list[list[Run]], local: Sequence[int], whole: Sequence[int]) -> ElementIndices:
    """Indices of a dense tensor with these runs and strides, in one with the strides ``whole``.

    The element ``i`` has the index ``i // stride % length`` in a dimension, and
    ``i // stride % length == i // stride - i // (stride * length) * length``: the index in memory
    is a sum of quotients of ``i``, each a :class:`~ampopt_kernels.element_indices.Jump`.
    """
    # By period and phase; (1, 0) is already in the index of the element.
    sizes: Counter[tuple[int, int]] = Counter({(1, 0): -1})
    lengths = [sum(run.length for run in of_dim) for of_dim in runs]
    stride = 1
    for dim in sorted(range(len(runs)), key=lambda dim: local[dim]):
        of_dim, length, size = runs[dim], lengths[dim], whole[dim]
        end = stride * length
        sizes[stride, 0] += size
        sizes[end, 0] -= size * length
        length_before = 0
        for run, after in pairwise(of_dim):
            length_before += run.length
            gap = size * (after.start - sum(run))
            sizes[end, end - stride * length_before] += gap
            sizes[end, 0] -= gap
        stride = end
    first = sum(of_dim[0].start * size for of_dim, size in zip(runs, whole, strict=True))
    jumps = [Jump(*at, size) for at, size in sizes.items() if size and stride > at[0] - at[1]]
    return ElementIndices(first, tuple(sorted(jumps)))


class ShardedMatrix:
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
        self._runs = runs_of(param)

    def take(self, over: str, factors: Tensor, into: Tensor) -> None:
        """Write to ``into`` the ``factors``, of all ``"rows"`` or ``"columns"``, of local ones."""
        for here, whole in self._boxes(over):
            into[here] = factors[whole]

    def put(self, over: str, sums: Tensor, into: Tensor) -> None:
        """Write the ``sums`` of local lines to their places in ``into``, of the whole parameter."""
        for here, whole in self._boxes(over):
            into[whole] = sums[here]

    def _boxes(self, over: str) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Like :func:`boxes`, for a tensor that was summed over one dimension."""
        runs = list(self._runs)
        summed_dim = len(runs) - (1 if over == "rows" else 2)
        if runs[summed_dim]:
            runs[summed_dim] = [Run(0, 1)]
        return boxes(runs)
