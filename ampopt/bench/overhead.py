"""Where the host's time goes in one of our steps."""

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
    """The functions that take most of a step, as lines to print.

    The profiler slows Python functions down more than others: shares are a guide, and the time
    without it, which is given as well, is the one to lower.
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
        lines.append(f"{own / steps * 1e6:8.1f} {calls / steps:8.1f}  {_named(*place)}")
    return "\n".join(lines)


def _named(path: str, line: int, name: str) -> str:
    if path == "~":
        return name
    return f"{'/'.join(path.split('/')[-2:])}:{line} {name}"
