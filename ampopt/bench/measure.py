"""How steps are timed: interleaved, warm, each on fresh gradients, with garbage collection off."""

import functools
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch.utils.benchmark import Measurement, TaskSpec

from ampopt._step.torch_private import spin

__all__ = [
    "CLOCKS",
    "Times",
    "device_seconds",
    "host_seconds",
    "interleaved",
    "warmed",
]


def _since(clock: Callable[[], float]) -> Callable[[], Callable[[], float]]:
    """A clock of :data:`CLOCKS`, from a function that returns a time in seconds."""

    def begin() -> Callable[[], float]:
        start = clock()
        return lambda: clock() - start

    return begin


def _of_each_thread() -> dict[str, float]:
    """Return the CPU time of each thread of the process but this one, by its id. Linux only."""
    threads = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
    return {thread: time.clock_gettime(~int(thread) << 3 | 6) for thread in threads}


def _busiest() -> Callable[[], float]:
    """Start the clock ``busiest``; see :data:`CLOCKS`."""
    others, own = _of_each_thread(), time.thread_time()

    def elapsed() -> float:
        mine = time.thread_time() - own  # read first, because the next line takes time
        return max([mine, *(x - others.get(t, 0.0) for t, x in _of_each_thread().items())])

    return elapsed


CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "wall": _since(time.perf_counter),
    "cpu": _since(time.thread_time),
    "busiest": _busiest,
}
"""Host clocks. A call of one starts it, and returns a function that returns the seconds since.

On a busy machine, the CPU time of the thread is disturbed less than wall time. It says nothing
about steps that use several threads: for these, ``busiest`` is the CPU time of the thread that took
most, if the others sleep while they wait (``OMP_WAIT_POLICY=PASSIVE``).
"""

_WARM_STEPS = 3
_L2 = 1 << 28
"""Bytes written before a step on a GPU, so that no contender finds its tensors in the L2 cache."""
_CYCLES = 3e9
"""More cycles than a GPU's clock makes in a second: spinning for as many takes a second or more."""


class Times(Measurement):
    """The times of one contender in one row, in seconds, with torch's statistics of them.

    On a GPU these are device times, which the host does not delay. ``host`` is the host time, which
    does not include waiting for the device unless the step synchronizes. A training loop takes the
    longer of the two.

    Attributes:
        host: median host time; the same as ``median`` on the CPU.
    """

    def __init__(self, times: list[float], hosts: list[float]) -> None:
        """Store the times of all rounds."""
        super().__init__(number_per_run=1, raw_times=times, task_spec=TaskSpec("step", ""))
        self.host = statistics.median(hosts)

    @property
    def least(self) -> float:
        """Fastest round."""
        return min(self.raw_times)

    def as_dict(self) -> dict[str, float]:
        """The figures for JSON: ``iqr`` is the interquartile range."""
        figures = {name: getattr(self, name) for name in ("median", "iqr", "least", "host")}
        return {**figures, "rounds": len(self.raw_times)}


def warmed(step: Callable[[], object], restore: Callable[[], object]) -> None:
    """Step until all states exist and everything is compiled."""
    for _ in range(_WARM_STEPS):
        restore()
        step()


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    restore: Callable[[str], object],
    device: torch.device,
    *,
    rounds: int,
    seconds: float = 0.0,
    clock: str = "wall",
    failures: dict[str, str] | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> dict[str, Times]:
    """Time ``steps`` in turn, so that what slows the machine down slows all of them.

    Each round times each step once, and each round starts with another step. Before each step,
    outside of its time, gradients are restored, so all steps find the same caches.

    Args:
        steps: warm steps, by name.
        restore: function that restores the gradients of the step of a name.
        device: device of the tensors.
        rounds: maximum number of rounds.
        seconds: time after which no round starts, except that the first three always run, if
            ``rounds`` allows. Ignored with ``goes_on``.
        clock: a key of :data:`CLOCKS`, used on the CPU.
        failures: dict that gets the reason for each step that raises; the other steps continue.
            ``None`` lets the exception through.
        goes_on: function called after each round; it returns whether another round starts.

    Returns:
        The times of each step that did not raise.
    """
    order = list(steps)
    times: dict[str, list[float]] = {name: [] for name in order}
    hosts: dict[str, list[float]] = {name: [] for name in order}
    timer = _on_cpu(CLOCKS[clock]) if device.type == "cpu" else _on_cuda(device)
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for n_done in range(rounds):
            if n_done >= 3 and goes_on is None and time.perf_counter() > end:
                break
            if n_done and goes_on is not None and not goes_on():
                break
            first = n_done % max(1, len(order))
            for name in order[first:] + order[:first]:
                own_restore = functools.partial(restore, name)
                own_restore()
                try:
                    seconds_taken, host = timer(steps[name], own_restore)
                except Exception as error:
                    if failures is None:
                        raise
                    failures[name] = reason(error)
                    order.remove(name)
                    continue
                times[name].append(seconds_taken)
                hosts[name].append(host)
    finally:
        gc.enable()
    return {name: Times(times[name], hosts[name]) for name in steps if name in order}


def reason(error: Exception) -> str:
    """Summarize ``error`` in one line, for a table."""
    lines = str(error).strip().splitlines()
    if isinstance(error, NotImplementedError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


_Timer = Callable[[Callable[[], object], Callable[[], object]], tuple[float, float]]
"""Function of a step and of what restores its gradients; returns device time and host time."""


def _on_cpu(clock: Callable[[], Callable[[], float]]) -> _Timer:
    """A timer by ``clock``, whose device time is the host time."""

    def timer(step: Callable[[], object], restore: Callable[[], object]) -> tuple[float, float]:
        since = clock()
        step()
        elapsed = since()
        return elapsed, elapsed

    return timer


def _on_cuda(device: torch.device) -> _Timer:
    """Return a timer that runs a step twice: once for host time, once for device time."""
    flush = torch.empty(_L2, dtype=torch.int8, device=device)

    def timer(step: Callable[[], object], restore: Callable[[], object]) -> tuple[float, float]:
        host = host_seconds(step, device)
        restore()
        flush.zero_()
        return device_seconds(step, device, host), host

    return timer


def host_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Host time of ``step``, with nothing queued on the GPU. Synchronizes before the step."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def device_seconds(step: Callable[[], object], device: torch.device, host: float) -> float:
    """Device time of the work that ``step`` queues; on the CPU the time of ``step``. Synchronizes.

    The GPU clock starts after a kernel that spins until the host has queued everything, so that no
    launch is waited for. A step that synchronizes waits for this kernel too, and the device then
    waits for the host, as it would in a training loop.

    Args:
        step: the step to time.
        device: device of the tensors.
        host: host time of the step in seconds.
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
