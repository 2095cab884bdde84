"""Time of the first steps of ``auto``, before and after rules are compiled, against torch's.

Each measurement is a new process with nothing loaded. Its cache of compiled rules is a folder of
its own, either empty (cold) or with all rules that the steps need (warm).
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ampopt
from ampopt.bench import contenders, workloads
from ampopt_kernels.native.build import cpp_compiler

__all__ = ["STEPS", "FirstSteps", "main", "measure", "table"]

STEPS = 20
_TORCHS = ("for-loop", "foreach")


@dataclass(frozen=True)
class FirstSteps:
    """Seconds that :data:`STEPS` steps took in total.

    Attributes:
        optimizer: name of the optimizer.
        workload: name of the workload.
        torchs: by torch contender, the faster of two runs.
        cold: ampopt's time with an empty cache.
        warm: ampopt's time with a full cache.
    """

    optimizer: str
    workload: str
    torchs: Mapping[str, float]
    cold: float
    warm: float

    @property
    def best(self) -> float:
        """The fastest of torch's."""
        return min(self.torchs.values())


def measure(optimizer: str, workload: workloads.Workload, *, dtype: str) -> FirstSteps:
    """Measure on the CPU, in three processes with as many threads as this one has."""
    options = {
        "optimizer": optimizer,
        "shapes": workload.shapes,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory(prefix="ampopt-bench-") as cache:
        cold = _in_a_process({**options, "backend": "auto"}, cache)
        _in_a_process({**options, "backend": "compiled", "steps": 1}, cache)
        warm = _in_a_process({**options, "backend": "auto"}, cache)
    torchs = {name: min(cold[name], warm[name]) for name in _TORCHS}
    ours = contenders.AMPOPT
    return FirstSteps(optimizer, workload.name, torchs, cold[ours], warm[ours])


def table(results: Sequence[FirstSteps]) -> str:
    """Format the results as lines, in milliseconds."""
    columns = (*_TORCHS, "cold", "warm", "cold/best", "warm/best")
    lines = [f"{'optimizer':12} {'workload':16}" + "".join(f"{name:>11}" for name in columns)]
    for row in results:
        times = [1e3 * x for x in (*row.torchs.values(), row.cold, row.warm)]
        ratios = [row.cold / row.best, row.warm / row.best]
        numbers = [f"{x:11.1f}" for x in times] + [f"{x:11.2f}" for x in ratios]
        lines.append(f"{row.optimizer:12} {row.workload:16}" + "".join(numbers))
    return "\n".join(lines)


def times(
    *,
    optimizer: str,
    shapes: Sequence[Sequence[int]],
    dtype: str,
    threads: int,
    backend: str,
    steps: int = STEPS,
) -> dict[str, float]:
    """Seconds that the first steps take in this process, by contender; torch's run first."""
    torch.set_num_threads(threads)
    ampopt.set_backend(backend)
    workload = workloads.Workload("", tuple(map(tuple, shapes)))
    seconds = {}
    for name in (*_TORCHS, contenders.AMPOPT):
        params = workload.parameters(getattr(torch, dtype), torch.device("cpu"))
        gradients = workloads.Gradients(params)
        step, total = contenders.enter(name, optimizer, params).step, 0.0
        for _ in range(steps):
            gradients.restore()
            start = time.perf_counter()
            step()
            total += time.perf_counter() - start
        seconds[name] = total
    return seconds


def _in_a_process(options: Mapping[str, Any], cache: str) -> dict[str, float]:
    """Return what :func:`times` returns in a new process with ``cache`` as cache folder."""
    process = subprocess.run(
        [sys.executable, "-m", "evidence.first_steps", "--times", json.dumps(options)],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, for all optimizers and workloads or those named."""
    parser = argparse.ArgumentParser(prog="python -m evidence.first_steps", description=__doc__)
    names, workload_names = contenders.optimizers(), list(workloads.WORKLOADS)
    parser.add_argument("--optimizer", action="append", choices=names, metavar="NAME")
    parser.add_argument("--workload", action="append", choices=workload_names, metavar="NAME")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="number of torch's CPU threads")
    parser.add_argument("--times", help=argparse.SUPPRESS)  # of a process of measure()
    options = parser.parse_args(arguments)
    if options.times:
        print(json.dumps(times(**json.loads(options.times))))
        return
    if cpp_compiler() is None:
        parser.error("rules are compiled with a C++ compiler, and there is none")
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = [
        workloads.make(name, torch.device("cpu"), None)
        for name in options.workload or workload_names
    ]
    results = [
        measure(optimizer, workload, dtype=options.dtype)
        for workload, optimizer in itertools.product(sizes, options.optimizer or names)
    ]
    print(f"milliseconds for the first {STEPS} steps in all, by auto:")
    print("cold: nothing compiled before; warm: all compiled; best: the faster of torch's two")
    print(table(results))


if __name__ == "__main__":
    main()
