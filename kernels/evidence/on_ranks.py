"""``python -m evidence.on_ranks N``: DTensors over processes of this machine, one decision.

The ranks use gloo. All take the same steps in the same order, because a step is a collective for
every contender. All start each step at the same moment, for which they spin: otherwise the time
that the system takes to wake the last rank would count as time of the step.
"""

import argparse
import functools
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

import ampopt
from ampopt.bench import contenders, report, rows, workloads
from ampopt.bench.measure import interleaved, warmed
from ampopt.bench.rows import BenchRow

__all__ = ["NAMES", "SHARDED", "Processes", "main", "measure"]

NAMES = ("foreach", "fused", contenders.AMPOPT)
"""The contenders measured; torch's for-loop is omitted, it handles DTensors slowly in Python."""

SHARDED = [workloads.Workload(f"50 x {n}^2", ((n, n),) * 50) for n in (64, 512)]
"""The matrices of a small sharded model, and of a large one."""

_PATIENCE = timedelta(seconds=60)
"""Timeout of collectives."""

_UNTIL_ALL_KNOW = 2e-3
"""Seconds between the moment when the last rank is ready and the common start of a step."""

_ENOUGH_ROUNDS = 5
"""Minimum number of rounds for a median to be compared with a target."""

_CALM = 0.1
"""Maximum share of time that a rank may wait for a core for its times to be compared."""

_OUT_OF_TIME = "no time was left for it: raise --seconds, or select less"


class Processes:
    """The ranks, as new processes for each measurement, and the time left for measurements."""

    def __init__(self, ranks: int, seconds: float) -> None:
        """Start no process yet.

        Args:
            ranks: number of processes.
            seconds: time after which no measurement starts.
        """
        self.ranks = ranks
        self._until = time.perf_counter() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds left for measurements."""
        return self._until - time.perf_counter()

    def times(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run :func:`_times` with ``options`` on all ranks, and return the first rank's result.

        Raises:
            RuntimeError: a rank ended with an error; the message has the last line of it.
        """
        # The fork server imports torch once, which takes seconds, and is forked for each rank.
        multiprocessing.set_forkserver_preload(["ampopt.bench.rows", "torch.distributed.tensor"])
        with tempfile.TemporaryDirectory(prefix="ampopt-bench-") as folder:
            arguments = (self.ranks, folder, options)
            try:
                start_processes(_run_rank, arguments, self.ranks, start_method="forkserver")
            except ProcessException as error:
                why = error.msg.strip().splitlines()[-1]
                raise RuntimeError(f"rank {error.error_index} has ended: {why}") from error
            return pickle.loads(Path(folder, "results").read_bytes())


def measure(
    processes: Processes,
    optimizer: str,
    workload: workloads.Workload,
    *,
    dtype: torch.dtype,
    rounds: int,
    seconds: float,
) -> list[BenchRow]:
    """The rows of ``optimizer`` on ``workload``, sharded: without clipping, and with.

    Times are the first rank's. They are not compared with targets if there are few rounds, or if
    the machine was busy. Contenders for which no time is left are listed as missing.

    Args:
        processes: the processes of the ranks.
        optimizer: name of the optimizer.
        workload: the tensors, each of which is sharded.
        dtype: dtype of the parameters.
        rounds: maximum number of rounds.
        seconds: time for rounds. One round runs in any case, if the processes have time left.

    Raises:
        TimeoutError: no time is left.
        RuntimeError: a rank ended with an error; the message has the last line of it.
    """
    if processes.seconds_left <= 0:
        raise TimeoutError(_OUT_OF_TIME)
    options = {
        "optimizer": optimizer,
        "workload": workload,
        "dtype": dtype,
        "rounds": rounds,
        "seconds": seconds,
        "seconds_left": processes.seconds_left,
        "backend": ampopt.get_backend(),
        "threads": max(1, torch.get_num_threads() // processes.ranks),
    }
    results = processes.times(options)
    return [
        BenchRow.of(
            optimizer,
            workload,
            clip,
            torch.device("cpu"),
            times=result["times"],
            missing=result["missing"],
            unknown=_doubts(result),
        )
        for clip, result in zip((False, True), results, strict=True)
    ]


def _doubts(result: Mapping[str, Any]) -> dict[str, str]:
    """Why the times must not be relied on; empty if they may be."""
    rounds = min((len(times.times) for times in result["times"].values()), default=0)
    if rounds < _ENOUGH_ROUNDS:
        return {"times": f"{rounds} of {_ENOUGH_ROUNDS} rounds"}
    if result["waited"] > _CALM:
        return {"times": f"{result['waited']:.0%} of the time without a core"}
    return {}


def _times(
    *,
    optimizer: str,
    workload: workloads.Workload,
    dtype: torch.dtype,
    rounds: int,
    seconds: float,
    seconds_left: float,
    backend: str,
    threads: int,
) -> list[dict[str, Any]]:
    """Measure on one rank, without clipping and with.

    Returns:
        For each of the two, the times, the contenders that are missing, and the share of time that
        the slowest rank waited for a core.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    until = time.perf_counter() + seconds_left
    torch.set_num_threads(threads)
    ampopt.set_backend(backend)
    device, world = torch.device("cpu"), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    params: list[Any] = [
        torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
        for param in workload.parameters(dtype, device)
    ]
    parts = [param.detach().to_local() for param in params]
    gradients = workloads.Gradients(parts)

    def restore() -> None:
        gradients.restore()
        for param, part in zip(params, parts, strict=True):
            laid_out = {"shape": param.shape, "stride": param.stride()}
            param.grad = DTensor.from_local(part.grad, mesh, [Shard(0)], **laid_out)
        _begin_together()

    def warm(step: Callable[[], object]) -> None:
        if _least(until - time.perf_counter()) <= 0:
            raise TimeoutError(_OUT_OF_TIME)
        warmed(step, restore)

    contestants, missing = [], {}
    for name in NAMES:
        try:
            contender = contenders.enter(name, optimizer, params)
            warm(contender.step)
            warm(contender.clipped_step)
        except (NotImplementedError, TimeoutError) as error:  # all ranks raise the same
            missing[name] = str(error)
            continue
        contestants.append(contender)
    results = []
    for clip in (False, True):
        start, before = time.perf_counter(), _seconds_without_a_core()
        end = min(until, start + seconds / 2)
        times = interleaved(
            {c.name: c.clipped_step if clip else c.step for c in contestants},
            lambda _: restore(),
            device,
            rounds=rounds,
            goes_on=lambda end=end: _least(end - time.perf_counter()) > 0,
        )
        wait = (_seconds_without_a_core() - before) / (time.perf_counter() - start)
        results.append({"times": times, "missing": missing, "waited": -_least(-wait)})
    return results


def _begin_together() -> None:
    """Return at the same moment on all ranks, by the clock of the machine that they share."""
    begin = torch.tensor(time.perf_counter() + _UNTIL_ALL_KNOW, dtype=torch.float64)
    torch.distributed.all_reduce(begin, torch.distributed.ReduceOp.MAX)
    moment = begin.item()
    while time.perf_counter() < moment:
        pass


def _least(number: float) -> float:
    """All-reduce the minimum of ``number``, so that all ranks take the same decision."""
    minimum = torch.tensor(number, dtype=torch.float64)
    torch.distributed.all_reduce(minimum, torch.distributed.ReduceOp.MIN)
    return minimum.item()


def _seconds_without_a_core() -> float:
    """Seconds so far in which this thread could run and did not; 0 if the system cannot tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _run_rank(rank: int, ranks: int, folder: str, options: Mapping[str, Any]) -> None:
    """Join the process group as ``rank``, and measure; the first rank writes the results."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{folder}/meet"
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=_PATIENCE
    )
    results = _times(**options)
    if rank == 0:
        Path(folder, "results").write_bytes(pickle.dumps(results))
    torch.distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, for all optimizers or those named, without clipping and with."""
    parser = argparse.ArgumentParser(prog="python -m evidence.on_ranks", description=__doc__)
    names = contenders.optimizers()
    parser.add_argument("ranks", type=int, help="the number of processes")
    parser.add_argument("--optimizer", action="append", choices=names, metavar="NAME")
    parser.add_argument(
        "--elements",
        action="append",
        type=int,
        metavar="N",
        help="repeatable; 16 tensors with N elements in total; by default 50 small matrices, and "
        "50 large ones",
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=200, help="maximum number of rounds")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all rows")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    cpu, dtype = torch.device("cpu"), getattr(torch, options.dtype)
    about = {**report.environment(cpu), "dtype": options.dtype, "ranks": options.ranks}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    sizes = [workloads.of(n) for n in options.elements or ()] or SHARDED
    processes = Processes(options.ranks, options.seconds)
    measured = functools.partial(measure, processes, dtype=dtype, rounds=options.repeats)
    selected = options.optimizer or names
    bench_rows = rows.measure_all(measured, sizes, selected, cpu, options.seconds)
    print(f"\nmilliseconds a step:\n{report.table(bench_rows)}")
    for line in sorted(set().union(*(row.notes for row in bench_rows))):
        print(line)
    figures = {"environment": about, "rows": [row.as_dict() for row in bench_rows]}
    report.write_json(options.json, figures)


if __name__ == "__main__":
    main()
