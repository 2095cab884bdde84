"""Which elements of a parameter a rank has, for every placement, compared with torch's division."""

import itertools
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ampopt._step.sharding import shards
from ampopt_kernels.element_indices import ElementIndices

CPU = torch.device("cpu")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[Any]]:
    """The shapes of a tensor and of a mesh, and a placement for each dimension of the mesh."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, st.integers(1, 3))
    placement = st.just(Replicate()) | st.builds(Shard, dims) | strided
    placements = [draw(placement) for _ in mesh]
    # ``fully_shard`` makes a strided shard of a dimension before a plain one, not before another.
    strided_dims = [p.dim for p in placements if getattr(p, "split_factor", 1) > 1]
    assume(len(set(strided_dims)) == len(strided_dims))
    return shape, mesh, placements


def part_of(whole: torch.Tensor, mesh: list[int], here: Any, placements: list[Any]) -> Any:
    """The shard that torch gives the rank at the coordinates ``here`` of the mesh."""
    from torch.distributed.tensor import Shard

    if len(mesh) == 2:
        first, second = placements
        split = getattr(first, "split_factor", None)
        if split == mesh[1] and second == Shard(first.dim):
            # ``fully_shard`` after tensor parallelism cuts the local shard.
            mesh, here, placements = mesh[::-1], here[::-1], [second, second]
    for n, rank, placement in zip(mesh, here, placements, strict=True):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(whole, n, with_padding=False, contiguous=False)
            whole = parts[rank]
    return whole


def inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


@given(layout=layouts(), order=st.permutations(range(3)), part_order=st.permutations(range(3)))
def test_indices_are_those_of_the_elements_in_the_whole(layout, order, part_order):
    """For any memory layout of the whole tensor and of the shard."""
    shape, mesh, placements = layout
    n = torch.Size(shape).numel()
    order, part_order = ([d for d in o if d < len(shape)] for o in (order, part_order))
    whole = torch.arange(n).view([shape[d] for d in order]).permute(inverse(order))
    for here in itertools.product(*map(range, mesh)):
        part = part_of(whole, mesh, here, placements)
        laid_out = part.permute(part_order).contiguous()
        expected = laid_out.flatten()
        runs = shards.runs_at(shape, mesh, here, placements)
        assert [sum(run.length for run in runs_of_dim) for runs_of_dim in runs] == list(part.shape)
        if part.numel():
            indices = shards._indices(
                runs, laid_out.permute(inverse(part_order)).stride(), whole.stride()
            )
            assert torch.equal(indices.of(len(expected), CPU), expected)
            middle = len(expected) // 2
            assert torch.equal(
                indices.after(middle).of(len(expected) - middle, CPU), expected[middle:]
            )


def test_uneven_shards_of_tensor_parallelism_are_cut_by_fully_shard():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    runs = {here: shards.runs_at((9,), (4, 2), here, placements)[0] for here in ((2, 0), (3, 0))}
    assert runs == {(2, 0): [shards.Run(4, 1)], (3, 0): []}
    assert shards.runs_at((9,), (4, 2), (3, 1), placements) == [[shards.Run(8, 1)]]


def test_what_is_whole_or_begins_with_whole_rows_has_no_jumps():
    from torch.distributed.tensor import Replicate, Shard

    for placements, first, jumps in (
        ([Replicate(), Replicate()], 0, 0),
        ([Shard(0), Replicate()], 12, 0),
        ([Shard(0), Shard(0)], 18, 0),
        ([Replicate(), Shard(1)], 3, 1),
        ([Shard(0), Shard(1)], 15, 1),
    ):
        runs = shards.runs_at((4, 6), (2, 2), (1, 1), placements)
        stride = sum(run.length for run in runs[1]), 1
        indices = shards._indices(runs, stride, (6, 1))
        assert (indices.first, len(indices.jumps)) == (first, jumps)
    assert ElementIndices().of(3, CPU).tolist() == [0, 1, 2]
