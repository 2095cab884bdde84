"""Gathers each sharded matrix on one rank, and scatters the result.

Matrices are distributed over ranks, so that work and memory are balanced. All matrices together
take two collectives.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.sharding.meshes import ranks_of
from ampopt._step.sharding.shards import Run, boxes, runs_at

__all__ = ["WholeMatrices"]


class _Shard(NamedTuple):
    """The shard of one matrix that two ranks exchange: its holder, and the owner of the matrix.

    Attributes:
        param: the matrix.
        peer: the other one of the two ranks, as a rank in the process group.
        runs: the indices of its rows and of its columns.
        is_copy: whether another rank sends the same shard.
    """

    param: Any
    peer: int
    runs: list[list[Run]]
    is_copy: bool

    @property
    def shape(self) -> torch.Size:
        """The shape of the shard."""
        return torch.Size(sum(run.length for run in runs) for runs in self.runs)


class WholeMatrices:
    """Assigns each matrix to the rank that gathers it, its owner, and moves the shards.

    Every rank sends and receives shards of all matrices, those without a value as zeros. So no rank
    waits in vain for another one that has values of other matrices.

    Attributes:
        params: the sharded matrices.
        group: the process group.
        n_ranks: the number of ranks in it.
    """

    def __init__(self, params: list[Any], group: Any, dtype: torch.dtype) -> None:
        """Assign the matrices to ranks, balancing the estimated time of products with them.

        Args:
            params: ``DTensor``s of two dimensions, the same on each rank.
            group: a process group of all ranks of their meshes.
            dtype: the dtype of what is gathered and scattered.
        """
        self.params, self.group = params, group
        rank_in_group = {
            rank: i for i, rank in enumerate(torch.distributed.get_process_group_ranks(group))
        }
        self.n_ranks, here = len(rank_in_group), torch.distributed.get_rank()
        self._like = torch.empty(0, dtype=dtype, device=params[0].device)
        self._held: list[_Shard] = []  # by this rank
        self._owned: list[_Shard] = []  # shards of the matrices that this rank owns
        loads: dict[Any, list[int]] = {}
        costs = {param: param.numel() * min(param.shape) for param in params}
        for param in sorted(params, key=costs.__getitem__, reverse=True):
            mesh, placements = param.device_mesh, param.placements
            load = loads.setdefault(mesh, [0] * mesh.size())
            owner = load.index(min(load))
            load[owner] += costs[param]
            ranks, coordinates = ranks_of(mesh), list(product(*map(range, mesh.shape)))
            copied_dims = [dim for dim, place in enumerate(placements) if place.is_replicate()]
            for rank, at in zip(ranks, coordinates, strict=True):
                if here not in (rank, ranks[owner]):
                    continue
                runs = runs_at(param.shape, mesh.shape, at, placements)
                is_copy = any(at[dim] != coordinates[owner][dim] for dim in copied_dims)
                if rank == here:
                    peer = rank_in_group[ranks[owner]]
                    self._held.append(_Shard(param, peer, runs, is_copy))
                if ranks[owner] == here:
                    self._owned.append(_Shard(param, rank_in_group[rank], runs, is_copy))
        for shards in (self._held, self._owned):  # in each message, in the order of the loop above
            shards.sort(key=lambda shard: shard.peer)

    def gather(self, parts: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Gather the matrices that this rank owns, by one collective.

        Args:
            parts: the local shard of each matrix that has a value.

        Returns:
            The whole matrices that this rank owns.
        """
        if self.n_ranks == 1:
            return dict(parts)
        sent = [shard for shard in self._held if not shard.is_copy]
        received = [shard for shard in self._owned if not shard.is_copy]
        pieces = (
            parts[s.param] if s.param in parts else self._like.new_zeros(s.shape) for s in sent
        )
        owned = dict.fromkeys(shard.param for shard in self._owned)
        whole = {param: self._like.new_empty(param.shape) for param in owned}
        for shard, message in self._exchange(sent, pieces, received):
            for here, there in boxes(shard.runs):
                whole[shard.param][there] = message[here]
        return whole

    def scatter(self, whole: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Scatter the matrices to their shards, by one collective: undoes :meth:`gather`.

        Args:
            whole: the matrices that this rank owns.

        Returns:
            The local shard of each matrix.
        """
        if self.n_ranks == 1:
            return dict(whole)
        pieces = []
        for shard in self._owned:
            pieces.append(self._like.new_empty(shard.shape))
            for here, there in boxes(shard.runs):
                pieces[-1][here] = whole[shard.param][there]
        messages = self._exchange(self._owned, pieces, self._held)
        return {shard.param: message for shard, message in messages}

    def _exchange(
        self, sent: Sequence[_Shard], pieces: Iterable[Tensor], received: Sequence[_Shard]
    ) -> list[tuple[_Shard, Tensor]]:
        """Send a piece for each shard ``sent``; return what each shard ``received`` is."""
        sizes = [shard.shape.numel() for shard in received]
        out = self._like.new_empty(sum(sizes))
        # As bytes, since not every backend of torch.distributed accepts every dtype.
        torch.distributed.all_to_all_single(
            out.view(torch.uint8),
            torch.cat([self._like, *(piece.reshape(-1) for piece in pieces)]).view(torch.uint8),
            self._bytes_by_rank(received),
            self._bytes_by_rank(sent),
            group=self.group,
        )
        messages = zip(received, out.split(sizes), strict=True)
        return [(shard, message.view(shard.shape)) for shard, message in messages]

    def _bytes_by_rank(self, shards: Iterable[_Shard]) -> list[int]:
        """The number of bytes that are exchanged with each rank."""
        sizes = [0] * self.n_ranks
        for shard in shards:
            sizes[shard.peer] += shard.shape.numel() * self._like.element_size()
        return sizes
