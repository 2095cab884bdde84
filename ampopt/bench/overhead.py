"""Which functions take the host's time in a step."""

import cProfile
import pstats
import time

import torch

from ampopt.bench import contenders, workloads
from ampopt.bench.measure import warmed

__all__ = ["overhead"]


def overhead(
    optimizer: str,
    workload: workloads.Workload,
    *,
    dtype: torch.dtype,
    device: torch.device,
    steps: int = 200,
    entries: int = 20,
) -> str:
    """Profile a step, and list the functions that take most of its time, as lines to print.

    The profiler slows Python functions down more than C functions, so the shares are only a guide.
    The step's time without the profiler is printed too.
    """
    params = workload.parameters(dtype, device)
    gradients = workloads.Gradients(params)
    ours = contenders.enter(contenders.AMPOPT, optimizer, params)
    warmed(ours.step, gradients.restore)
    plain = []
    for _ in range(steps):
        gradients.restore()
        start = time.perf_counter()
        ours.step()
        plain.append(time.perf_counter() - start)
    profiler = cProfile.Profile()
    for _ in range(steps):
        gradients.restore()
        profiler.enable()
        ours.step()
        profiler.disable()
    stats: dict = pstats.Stats(profiler).stats  # pyright: ignore[reportAttributeAccessIssue]
    lines = [
        f"{optimizer}, {workload.name}: {sorted(plain)[steps // 2] * 1e6:.0f} us a step on the "
        "host; under the profiler, each function by itself:",
        f"{'us':>8} {'calls':>8}  function",
    ]
    for place, (_, calls, own, *_) in sorted(stats.items(), key=lambda s: -s[1][2])[:entries]:
        lines.append(f"{own / steps * 1e6:8.1f} {calls / steps:8.1f}  {_name_of(*place)}")
    return "\n".join(lines)


def _name_of(path: str, line: int, name: str) -> str:
    """A function of the profile: two folders of its path, line and name."""
    if path == "~":
        return name
    return f"{'/'.join(path.split('/')[-2:])}:{line} {name}"
