"""Gathers each sharded matrix on one rank, and scatters the result.

Matrices are distributed over ranks, so that work and memory are balanced. All matrices together
take two collectives.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.sharding.meshes import ranks_of
from ampopt._step.sharding.shards import Run, boxes, runs_at

__all__ = ["WholeMatrices"]


class _Shard(NamedTuple):
    """The shard of one matrix on one rank.

    Attributes:
        matrix: the number of the matrix.
        rank: the rank in the process group.
        runs: the indices of its rows and of its columns.
        is_copy: whether another rank sends the same shard.
    """

    matrix: int
    rank: int
    runs: list[list[Run]]
    is_copy: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        """The number of elements of the shard."""
        return torch.Size(self.shape).numel()


class WholeMatrices:
    """Assigns each matrix to the rank that gathers it, its owner, and moves the shards.

    Attributes:
        params: the sharded matrices.
        owned_matrices: the numbers of the matrices that this rank gathers.
    """

    def __init__(self, params: list[Any], group: Any) -> None:
        """Assign the matrices to ranks, balancing the estimated time of products with them.

        Args:
            params: ``DTensor``s of two dimensions, the same on each rank.
            group: a process group of all ranks of their meshes.
        """
        self.params, self._group = params, group
        number_of = {r: i for i, r in enumerate(torch.distributed.get_process_group_ranks(group))}
        self._n_ranks, here = len(number_of), torch.distributed.get_rank()
        self._shapes = [tuple(param.shape) for param in params]
        self.owned_matrices: list[int] = []
        self._gathered_shards: list[_Shard] = []
        self._ours: list[tuple[int, _Shard]] = []  # shards of this rank, with the owner
        loads: dict[Any, list[int]] = {}
        costs = [param.numel() * min(param.shape) for param in params]
        for matrix in sorted(range(len(params)), key=costs.__getitem__, reverse=True):
            mesh, placements = params[matrix].device_mesh, params[matrix].placements
            load = loads.setdefault(mesh, [0] * mesh.size())
            owner = load.index(min(load))
            load[owner] += max(costs[matrix], 1)
            ranks = ranks_of(mesh)
            coordinates = list(product(*map(range, mesh.shape)))
            copied_dims = [
                dim for dim, placement in enumerate(placements) if placement.is_replicate()
            ]
            is_owner = ranks[owner] == here
            if is_owner:
                self.owned_matrices.append(matrix)
            for rank, at in zip(ranks, coordinates, strict=True):
                if is_owner or rank == here:
                    runs = runs_at(params[matrix].shape, mesh.shape, at, placements)
                    is_copy = any(at[dim] != coordinates[owner][dim] for dim in copied_dims)
                    shard = _Shard(matrix, number_of[rank], runs, is_copy)
                    if is_owner:
                        self._gathered_shards.append(shard)
                    if rank == here:
                        self._ours.append((number_of[ranks[owner]], shard))
        # Sender and receiver have to agree on the order of shards in one message.
        self._gathered_shards.sort(key=lambda shard: (shard.rank, shard.matrix))
        self._ours.sort(key=lambda entry: (entry[0], entry[1].matrix))

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Gather the matrices that this rank owns, by one collective.

        Args:
            parts: the local shard of each matrix, all of one dtype.

        Returns:
            Whole matrices by number.
        """
        if self._n_ranks == 1:
            return dict(enumerate(parts))
        outgoing = [(owner, shard) for owner, shard in self._ours if not shard.is_copy]
        incoming = [shard for shard in self._gathered_shards if not shard.is_copy]
        messages = self._exchange(
            parts[0],
            [(owner, parts[shard.matrix]) for owner, shard in outgoing],
            [(shard.rank, shard) for shard in incoming],
        )
        whole = {matrix: parts[0].new_empty(self._shapes[matrix]) for matrix in self.owned_matrices}
        for shard, message in zip(incoming, messages, strict=True):
            for here, there in boxes(shard.runs):
                whole[shard.matrix][there] = message[here]
        return whole

    def scatter(self, whole: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Scatter the matrices to their shards, by one collective: undoes :meth:`gather`.

        Args:
            whole: the matrices that this rank owns, by number.
            like: a tensor of their dtype and device.

        Returns:
            The local shard of each matrix.
        """
        if self._n_ranks == 1:
            return [whole[matrix] for matrix in range(len(self._shapes))]
        pieces = []
        for shard in self._gathered_shards:
            piece = like.new_empty(shard.shape)
            for here, there in boxes(shard.runs):
                piece[here] = whole[shard.matrix][there]
            pieces.append((shard.rank, piece))
        messages = self._exchange(like, pieces, self._ours)
        own = {shard.matrix: m for (_, shard), m in zip(self._ours, messages, strict=True)}
        return [own[matrix] for matrix in range(len(self._shapes))]

    def _exchange(
        self,
        like: Tensor,
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Iterable[tuple[int, _Shard]],
    ) -> list[Tensor]:
        """Send tensors to ranks, in order; return the shards received from ranks, in order."""
        incoming = list(incoming)
        to: Counter[int] = Counter()
        of: Counter[int] = Counter()
        for rank, tensor in outgoing:
            to[rank] += tensor.numel() * like.element_size()
        for rank, shard in incoming:
            of[rank] += shard.numel * like.element_size()
        flat = [like.new_empty(0), *(tensor.reshape(-1) for _, tensor in outgoing)]
        out = like.new_empty(sum(shard.numel for _, shard in incoming))
        # As bytes, since not every backend of torch.distributed accepts every dtype.
        torch.distributed.all_to_all_single(
            out.view(torch.uint8),
            torch.cat(flat).view(torch.uint8),
            [of[rank] for rank in range(self._n_ranks)],
            [to[rank] for rank in range(self._n_ranks)],
            group=self._group,
        )
        messages = out.split([shard.numel for _, shard in incoming])
        return [m.view(shard.shape) for m, (_, shard) in zip(messages, incoming, strict=True)]
