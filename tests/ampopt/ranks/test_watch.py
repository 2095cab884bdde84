"""Watches on several ranks, each read alone, and gathered."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from support.local_ranks import mesh_of
from torch.nn import Parameter

import ampopt
from ampopt.watching.reading import RankStatistics, merge
from ampopt_kernels.watch_statistics import (
    COLUMNS,
    COUNTS,
    Findings,
    RecordedStep,
    Statistics,
)

INF = float("inf")


def watched_by_parts() -> Any:
    """Watch a sharded part of a model and a replicated parameter; the latter overflows once."""
    rank = torch.distributed.get_rank()
    part, shared = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    groups: Any = [
        {"params": [(f"part{rank}", part)]},
        {"params": [("shared", shared)], "replicated": True},
    ]
    optimizer = ampopt.SGD(groups, process_group=torch.distributed.group.WORLD)
    watch = ampopt.Watch(optimizer)
    overflowed = []
    for step in range(3):
        part.grad = torch.full((3,), 2.0 * (rank + 1))
        shared.grad = torch.full((2,), 4.0)
        if rank and step == 1:
            part.grad[1] = INF
        overflowed += optimizer.unscale_and_step(grads_scaled_by=2.0).overflowed
    return watch.gather(), overflowed, sorted(watch.state_dict()["parameters"])


def test_names_and_counts_of_all_ranks_are_gathered(two_ranks):
    (first, none, mine), (second, one, theirs) = two_ranks.run(watched_by_parts)
    assert repr(first) == repr(second)
    assert (mine, theirs) == (["part0", "shared"], ["part1", "shared"])
    assert (none, one) == (["rank 1"], ["part1"])
    assert (first["steps"], first["skips"], first["skips_in_a_row"]) == (3, 1, 0)
    told = first["parameters"]
    assert {name: told[name]["overflows"] for name in told} == {"part0": 0, "part1": 1, "shared": 0}
    assert told["part1"]["last_overflow"] == 2
    assert [told[name]["largest"] for name in ("part0", "part1", "shared")] == [1.0, 2.0, 2.0]
    norm = math.sqrt(3 * 1.0 + 3 * 4.0 + 2 * 4.0)
    assert [step["norm"] for step in first["recent"]] == [
        pytest.approx(norm),
        INF,
        first["recent"][0]["norm"],
    ]


def shards() -> Any:
    """Watch one parameter in two shards, which overflow together, and then each alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    param = Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = ampopt.AdamW([("weight", param)])
    watch = ampopt.Watch(optimizer)
    for bad in ((0, 3), (0,), (), (3,), ()):
        whole = torch.ones(4)
        whole[list(bad)] = INF
        param.grad = distribute_tensor(whole, mesh, [Shard(0)])
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    return watch.gather()


def test_a_parameter_in_shards_is_one(two_ranks):
    for read in two_ranks.run(shards):
        assert read["skips"] == 3
        assert read["parameters"]["weight"]["overflows"] == 3
        assert read["parameters"]["weight"]["last_overflow"] == 4
        assert read["recent"][2]["norm"] == 2.0


def read_on_rank_0(clips: bool) -> Any:
    """What rank 0 reads and prints. Rank 1, whose shard overflows, makes no such call."""
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, mesh = torch.distributed.get_rank(), mesh_of(2)
    param = Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = ampopt.AdamW([("weight", param)])
    watch = ampopt.Watch(optimizer)
    with pytest.raises(RuntimeError, match="one rank alone would raise"):
        watch.alarm(zero_share_above=0.5, raises=True)
    for bad in (4, 3, 4):
        whole = torch.full((4,), 2.0)
        whole[bad:] = INF
        param.grad = distribute_tensor(whole, mesh, [Shard(0)])
        optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=9.0 if clips else None)
    if rank == 0:
        return watch.read(), str(watch), watch.report(), watch.read_later().result()
    return watch.read()["parameters"]["weight"]["overflows"]


@pytest.mark.parametrize("clips", [False, True])
def test_one_rank_may_read_its_watch_alone(two_ranks, clips):
    (read, table, report, later), overflows = two_ranks.run(read_on_rank_0, clips, timeout=10)
    assert overflows == 1
    assert later == read
    assert read["skipped_by"] == {"overflow": 1, "norm": 0, "loss": 0}
    assert read["overflows_by_rank"] == {1: 1}
    assert [step["norm"] for step in read["recent"]] == [4.0, INF, 4.0]  # of both ranks
    assert read["parameters"]["weight"] | {"underflow": 0} == {
        "overflows": 0,
        "last_overflow": None,
        "largest": 2.0,
        "underflow": 0,
        "only_zeros": False,
    }
    for text in (table, report):
        assert "Overflows: 1 on rank 1." in text
        assert "watch.gather(), called on all ranks" in text


def watched_on_rank_0() -> Any:
    """The norms that rank 0 reads; only this rank has a watch."""
    part = Parameter(torch.ones(1))
    optimizer = ampopt.SGD([part], process_group=torch.distributed.group.WORLD)
    watch = ampopt.Watch(optimizer) if torch.distributed.get_rank() == 0 else None
    for clips in (None, 9.0):
        part.grad = torch.full((1,), 2.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=clips)
    optimizer.step()
    return watch and [step["norm"] for step in watch.read()["recent"]]


def test_a_norm_that_other_ranks_did_not_compute_is_none(two_ranks):
    first, _ = two_ranks.run(watched_on_rank_0, timeout=10)
    assert first == [None, pytest.approx(8**0.5), None]


@given(st.lists(st.sets(st.integers(1, 40), max_size=30), min_size=1, max_size=3))
@example([set(range(1, 31)), {1, 2}])  # of which the first part tells no more
def test_steps_in_which_any_part_overflowed_are_counted_once(parts):
    told, measures = [], torch.zeros(4, 1, dtype=torch.float64)
    only = torch.zeros(1, dtype=torch.int64)
    for overflows in parts:
        statistics = Statistics.empty(1, torch.device("cpu"))
        statistics.grow(1)
        found = Findings(torch.ones(1), measures, only, only)
        for number in sorted(overflows):
            statistics.add(RecordedStep(number), [found], is_over=False)
        told.append(
            RankStatistics(40, {"weight": statistics.parameters[0].tolist()}, [0.0] * 4, [])
        )
    row, steps = merge(told).parameters["weight"], set().union(*parts)
    assert max(row[COUNTS:]) == max(steps, default=0)
    most = max(map(len, parts))
    if most <= COLUMNS - COUNTS or len(parts) == 1:
        assert row[1] == len(steps)
    else:
        assert most <= row[1] <= len(steps)
