"""DTensors on ranks of this machine: a part of each tensor on each, and one decision for all.

Ranks are processes that meet by gloo. All take the same steps in the same order, as a step of
anybody's is a collective, and all begin each at one moment, for which they wait awake: the time
that the system takes to wake up the last of them is nobody's.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

import ampopt
from ampopt.bench import contenders, workloads
from ampopt.bench.measure import Times, interleaved, reason, warmed
from ampopt.bench.rows import Row

__all__ = ["NAMES", "measure"]

NAMES = ("foreach", "fused", contenders.AMPOPT)
"""Of the contenders; torch's for-loop goes through each DTensor several times in Python."""

_PATIENCE = timedelta(seconds=60)
"""After which a rank that waits for another has lost it."""

_UNTIL_ALL_KNOW = 2e-3
"""Seconds from when the last rank is ready until all begin."""


def measure(
    optimizer: str,
    workload: workloads.Workload,
    *,
    ranks: int,
    dtype: torch.dtype,
    rounds: int,
    seconds: float,
) -> list[Row]:
    """The rows of ``optimizer`` on ``workload``, sharded: without clipping, and with.

    Times are those of the first rank.

    Raises:
        RuntimeError: a rank has ended with an error, which is shown.
    """
    asked = {
        "ranks": ranks,
        "optimizer": optimizer,
        "shapes": workload.shapes,
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": rounds,
        "seconds": seconds,
        "backend": ampopt.get_backend(),
        "threads": max(1, torch.get_num_threads() // ranks),
    }
    found = _on_ranks(asked)
    row = Row(
        optimizer=optimizer,
        workload=workload.name,
        clip=False,
        device="cpu",
        tensors=len(workload.shapes),
        elements=workload.elements,
        bytes=0,
        bandwidth=None,
        times={},
        missing={},
    )
    return [
        replace(
            row,
            clip=clip,
            times={name: Times(**times) for name, times in seen["times"].items()},
            missing=seen["missing"],
        )
        for clip, seen in zip((False, True), found, strict=True)
    ]


def _on_ranks(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What :func:`_times` finds on the first of so many new processes, all of which take part."""
    with tempfile.TemporaryDirectory(prefix="ampopt-bench-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps({**asked, "rank": rank}), folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(asked["ranks"])
        ]
        printed = [process.communicate() for process in processes]
    for rank, (process, (_, errors)) in enumerate(zip(processes, printed, strict=True)):
        if process.returncode:
            last = (errors.splitlines() or [f"exit code {process.returncode}"])[-1]
            raise RuntimeError(f"rank {rank} has ended: {last}")
    return json.loads(printed[0][0])


def _times(
    *,
    optimizer: str,
    shapes: Any,
    dtype: str,
    rounds: int,
    seconds: float,
    backend: str,
    threads: int,
) -> list[dict[str, Any]]:
    """On one rank: times and what is missing, without clipping and with."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.set_num_threads(threads)
    ampopt.set_backend(backend)
    device, world = torch.device("cpu"), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = workloads.Workload("", tuple(map(tuple, shapes)))
    params: list[Any] = [
        torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
        for param in whole.parameters(getattr(torch, dtype), device)
    ]
    parts = [param.detach().to_local() for param in params]
    gradients = workloads.Gradients(parts)

    def restore() -> None:
        gradients.restore()
        for param, part in zip(params, parts, strict=True):
            laid_out = {"shape": param.shape, "stride": param.stride()}
            param.grad = DTensor.from_local(part.grad, mesh, [Shard(0)], **laid_out)
        _begin_together()

    entered, missing = [], {}
    for name in NAMES:
        try:
            entered.append(contenders.enter(name, optimizer, params))
        except NotImplementedError as error:
            missing[name] = reason(error)
    found = []
    for clip in (False, True):
        steps = {c.name: c.clipped if clip else c.step for c in entered}
        for step in steps.values():
            warmed(step, restore)
        start = time.perf_counter()
        interleaved(steps, restore, device, rounds=1, seconds=0.0)
        affordable = seconds / 2 / (time.perf_counter() - start)
        times = interleaved(
            steps, restore, device, rounds=_least(min(rounds, affordable)), seconds=math.inf
        )
        found.append({"times": {k: t.as_dict() for k, t in times.items()}, "missing": missing})
    return found


def _begin_together() -> None:
    """Come back on all ranks at the same time, by the clock of the machine that they share."""
    begin = torch.tensor(time.perf_counter() + _UNTIL_ALL_KNOW, dtype=torch.float64)
    torch.distributed.all_reduce(begin, torch.distributed.ReduceOp.MAX)
    moment = begin.item()
    while time.perf_counter() < moment:
        pass


def _least(rounds: float) -> int:
    """Of what the ranks can afford: all have to stop at the same round. One at the least."""
    said = torch.tensor(rounds)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN)
    return max(1, int(said))


def _main(asked: str, folder: str) -> None:
    given = json.loads(asked)
    ranks, rank = given.pop("ranks"), given.pop("rank")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{folder}/meet"
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=_PATIENCE
    )
    found = _times(**given)
    if rank == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
