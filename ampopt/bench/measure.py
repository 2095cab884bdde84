"""How times are taken: interleaved, warm, each step on fresh gradients, nothing else running."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from ampopt import _synchronization
from ampopt._step.torch_private import spin

__all__ = [
    "CLOCKS",
    "DeviceCost",
    "Times",
    "device_cost",
    "device_seconds",
    "host_seconds",
    "interleaved",
    "warmed",
]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
"""What the host reads. On a busy machine, the processor's time of the one thread that steps is
less disturbed than the time that passes; of several threads it says nothing."""

_WARM_STEPS = 3
_L2 = 1 << 28
"""Bytes that are written before a step on a GPU, so that no one finds tensors in its cache."""
_CYCLES = 3e9
"""More than a GPU's clock ticks in a second: so many cycles last a second at least."""


@dataclass(frozen=True)
class Times:
    """The times of one contender in one row, in seconds.

    On a GPU they are the device's, which the host does not delay, and ``host`` is the host's, which
    does not wait for the device, unless the step makes it: a loop takes the longer of the two.

    Attributes:
        median: of all rounds.
        low: the first quartile.
        high: the third quartile.
        least: the fastest round.
        rounds: how many there were.
        host: median time after which the host could go on; the same as ``median`` on the CPU.
    """

    median: float
    low: float
    high: float
    least: float
    rounds: int
    host: float

    @staticmethod
    def of(times: list[float], hosts: list[float]) -> "Times":
        """The summary of what every round took."""
        low, median, high = _quartiles(times)
        return Times(median, low, high, min(times), len(times), statistics.median(hosts))

    @property
    def spread(self) -> float:
        """Half of the range that the middle half of the rounds lies in."""
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def _quartiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, median, high


def warmed(step: Callable[[], object], restore: Callable[[], None]) -> None:
    """Step until states exist and what is compiled has been compiled."""
    for _ in range(_WARM_STEPS):
        restore()
        step()


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    restore: Callable[[], None],
    device: torch.device,
    *,
    rounds: int,
    seconds: float = 0.0,
    clock: str = "wall",
    failed: dict[str, str] | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> dict[str, Times]:
    """Time ``steps`` in turn, so that what slows the machine down slows all of them.

    Each round times each step once, beginning with another one; before each, outside of the time,
    gradients are restored. So whatever a step finds in a cache, the others have found as well.

    Args:
        steps: what to time, warm.
        restore: puts the gradients back.
        device: where they run.
        rounds: how many at most.
        seconds: after which no round begins; there are three in any case, if ``rounds`` allows.
        clock: one of :data:`CLOCKS`, on the CPU.
        failed: gets the name of each step that raises, and why; the others go on without it.
            Without, the error is the caller's.
        goes_on: asked after each round whether there is another one, in place of ``seconds``.
    """
    order = list(steps)
    times: dict[str, list[float]] = {name: [] for name in order}
    hosts: dict[str, list[float]] = {name: [] for name in order}
    timed = _on_cpu(CLOCKS[clock]) if device.type == "cpu" else _on_cuda(device, restore)
    with _no_collection():
        end = time.perf_counter() + seconds
        for done in range(rounds):
            if done >= 3 and goes_on is None and time.perf_counter() > end:
                break
            if done and goes_on is not None and not goes_on():
                break
            first = done % max(1, len(order))
            for name in order[first:] + order[:first]:
                restore()
                try:
                    taken, host = timed(steps[name])
                except Exception as error:
                    if failed is None:
                        raise
                    failed[name] = reason(error)
                    order.remove(name)
                    continue
                times[name].append(taken)
                hosts[name].append(host)
    return {name: Times.of(times[name], hosts[name]) for name in steps if name in order}


def reason(error: Exception) -> str:
    """What a table says of ``error``: one line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, NotImplementedError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def _on_cpu(clock: Callable[[], float]) -> Callable[[Callable[[], object]], tuple[float, float]]:
    def timed(step: Callable[[], object]) -> tuple[float, float]:
        start = clock()
        step()
        taken = clock() - start
        return taken, taken

    return timed


def _on_cuda(
    device: torch.device, restore: Callable[[], None]
) -> Callable[[Callable[[], object]], tuple[float, float]]:
    """A clock of two steps: of the first it takes the host's time, of the second the device's."""
    flush = torch.empty(_L2, dtype=torch.int8, device=device)

    def timed(step: Callable[[], object]) -> tuple[float, float]:
        host = host_seconds(step, device)
        restore()
        flush.zero_()
        return device_seconds(step, device, host), host

    return timed


def host_seconds(step: Callable[[], object], device: torch.device) -> float:
    """What the host takes for ``step``, with nothing queued on a GPU. Synchronizes, before."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def device_seconds(step: Callable[[], object], device: torch.device, host: float) -> float:
    """What a GPU takes for what ``step`` queues, and a CPU for ``step``. Synchronizes.

    The clock starts behind a kernel that spins until the host has queued all of it, so that no
    launch is waited for. A step that waits for the device waits for that, too, and the device then
    for the host: as it would in a loop.

    Args:
        step: what to time.
        device: where.
        host: how long the host takes for it, in seconds.
    """
    if device.type == "cpu":
        return host_seconds(step, device)
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        spin(int((1.5 * host + 1e-3) * _CYCLES))
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@contextmanager
def _no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class DeviceCost:
    """What one step costs a GPU besides time.

    Attributes:
        launches: kernels launched.
        synchronizations: times the host waited for the device.
        extra_bytes: memory allocated at the peak, beyond what was there before.
    """

    launches: int
    synchronizations: int
    extra_bytes: int


def device_cost(
    step: Callable[[], object], restore: Callable[[], None], device: torch.device
) -> DeviceCost:
    """Count what a warm ``step`` does on a GPU; three steps are taken for it. Synchronizes."""
    restore()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    extra = torch.cuda.max_memory_allocated(device) - before
    restore()
    with _synchronization.synchronizations() as waits:
        step()
    restore()
    torch.cuda.synchronize(device)
    with _synchronization.kernels(device) as launches:
        step()
    return DeviceCost(len(launches), len(waits), extra)
