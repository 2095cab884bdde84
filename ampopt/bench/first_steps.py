"""The first steps of ``auto``, some of them before rules are compiled, beside those of torch.

Each measurement is a process of its own, where nothing is loaded yet, with a folder for compiled
rules of its own, which is empty (cold) or has all that the steps need (warm).
"""

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

__all__ = ["STEPS", "FirstSteps", "measure", "table"]

STEPS = 20
_TORCHS = ("for-loop", "foreach")


@dataclass(frozen=True)
class FirstSteps:
    """Seconds that :data:`STEPS` steps took in all.

    Attributes:
        optimizer: whose steps.
        workload: its name.
        torchs: of torch's contenders, by name; the faster of two runs.
        cold: of ours, with nothing compiled at an earlier time.
        warm: of ours, with all of it.
    """

    optimizer: str
    workload: str
    torchs: Mapping[str, float]
    cold: float
    warm: float

    @property
    def best(self) -> float:
        """Of torch's."""
        return min(self.torchs.values())


def measure(optimizer: str, workload: workloads.Workload, *, dtype: str) -> FirstSteps:
    """On the CPU, in three processes, with as many threads as this one."""
    asked = {
        "optimizer": optimizer,
        "shapes": workload.shapes,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory(prefix="ampopt-bench-") as cache:
        cold = _in_a_process({**asked, "backend": "auto"}, cache)
        _in_a_process({**asked, "backend": "compiled", "steps": 1}, cache)
        warm = _in_a_process({**asked, "backend": "auto"}, cache)
    torchs = {name: min(cold[name], warm[name]) for name in _TORCHS}
    ours = contenders.AMPOPT
    return FirstSteps(optimizer, workload.name, torchs, cold[ours], warm[ours])


def table(found: Sequence[FirstSteps]) -> str:
    """All of them as lines to print."""
    columns = (*_TORCHS, "cold", "warm", "cold/best", "warm/best")
    lines = [f"{'optimizer':12} {'workload':16}" + "".join(f"{name:>11}" for name in columns)]
    for row in found:
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
    """Seconds that the first steps take here, torch's first, by contender."""
    torch.set_num_threads(threads)
    ampopt.set_backend(backend)
    workload = workloads.Workload("", tuple(map(tuple, shapes)))
    found = {}
    for name in (*_TORCHS, contenders.AMPOPT):
        params = workload.parameters(getattr(torch, dtype), torch.device("cpu"))
        gradients = workloads.Gradients(params)
        step, total = contenders.enter(name, optimizer, params).step, 0.0
        for _ in range(steps):
            gradients.restore()
            start = time.perf_counter()
            step()
            total += time.perf_counter() - start
        found[name] = total
    return found


def _in_a_process(asked: Mapping[str, Any], cache: str) -> dict[str, float]:
    """What :func:`times` finds in a new process that keeps what it compiles in ``cache``."""
    done = subprocess.run(
        [sys.executable, "-m", "ampopt.bench.first_steps", json.dumps(asked)],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(times(**json.loads(sys.argv[1]))))
