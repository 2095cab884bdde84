"""One row of the table: an optimizer on a workload, with all contenders."""

import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

import ampopt
from ampopt.bench import contenders, workloads
from ampopt.bench.byte_counts import bytes_allocated, bytes_by_kernel
from ampopt.bench.device_cost import DeviceCost, device_cost
from ampopt.bench.measure import Times, interleaved, reason, warmed
from ampopt.bench.memory_bandwidth import Streams

__all__ = ["BenchRow", "measure", "measure_all"]

_CACHES = 1 << 26
"""Size in bytes up to which caches may hold everything."""


@dataclass
class BenchRow:
    """The result for an optimizer on a workload.

    Attributes:
        optimizer: name of the optimizer.
        workload: name of the workload.
        clip: whether gradients were clipped by global norm.
        device: ``"cpu"`` or ``"cuda"``.
        tensors: number of tensors.
        elements: number of elements of all tensors.
        bytes: bytes that ampopt's step reads and writes; see
            :func:`ampopt.bench.byte_counts.bytes_by_kernel`. 0 if ampopt failed or has no rule for
            the optimizer.
        bandwidth: bytes per second of memory in the same rounds; ``None`` if the data may fit the
            caches, so that memory sets no floor, or if it could not be measured.
        times: times of each contender that ran.
        missing: for each contender that did not run, the reason.
        costs: on a GPU, the costs of each contender that ran.
        unknown: other quantities that could not be measured, and the reason.
        allocated: bytes of parameters, gradients and states with each contender; see
            :func:`ampopt.bench.byte_counts.bytes_allocated`.
    """

    optimizer: str
    workload: str
    clip: bool
    device: str
    tensors: int
    elements: int
    bytes: int = 0
    bandwidth: float | None = None
    times: dict[str, Times] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    costs: dict[str, DeviceCost] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    allocated: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        optimizer: str,
        workload: workloads.Workload,
        clip: bool,
        device: torch.device,
        **figures: Any,
    ) -> "BenchRow":
        """The row of ``optimizer`` on ``workload``; ``figures`` are the other attributes."""
        size = len(workload.shapes), workload.elements
        return cls(optimizer, workload.name, clip, device.type, *size, **figures)

    @property
    def ampopt(self) -> Times | None:
        """Times of ampopt; ``None`` if it failed, with the reason in ``missing``."""
        return self.times.get(contenders.AMPOPT)

    @property
    def best(self) -> str | None:
        """Name of torch's fastest contender, by median."""
        there = [name for name in contenders.TORCH if name in self.times]
        return min(there, key=lambda name: self.times[name].median, default=None)

    @property
    def ratio(self) -> float | None:
        """Median time of ampopt divided by that of torch's best."""
        return self.ratio_to(self.best)

    def ratio_to(self, name: str | None) -> float | None:
        """Median time of ampopt divided by that of ``name``; ``None`` if either did not run."""
        if self.ampopt is None or name not in self.times:
            return None
        return self.ampopt.median / self.times[name].median

    @property
    def ratio_of_least(self) -> float | None:
        """Fastest round of ampopt divided by torch's fastest; less disturbed by a busy machine."""
        there = [self.times[name].least for name in contenders.TORCH if name in self.times]
        return self.ampopt.least / min(there) if there and self.ampopt is not None else None

    @property
    def ratio_to_float32(self) -> float | None:
        """Fastest round of ampopt divided by that of ampopt's float32 step, if it ran beside."""
        wide = self.times.get(contenders.FLOAT32)
        return None if wide is None or self.ampopt is None else self.ampopt.least / wide.least

    @property
    def floor(self) -> float | None:
        """Seconds that it takes to move the bytes at the measured bandwidth."""
        return None if self.bandwidth is None else self.bytes / self.bandwidth

    @property
    def to_floor(self) -> float | None:
        """Median time of ampopt divided by the floor."""
        if self.floor is None or self.ampopt is None:
            return None
        return self.ampopt.median / self.floor

    @property
    def notes(self) -> set[str]:
        """What was not measured, and why, in a line each."""
        why = {**self.unknown, **self.missing}
        return {f"{self.optimizer}, {name}: {reason}" for name, reason in why.items()}

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON; times in seconds."""
        ran = {
            name: {**times.as_dict(), **(asdict(self.costs[name]) if name in self.costs else {})}
            for name, times in self.times.items()
        }
        missing = {name: {"missing": why} for name, why in self.missing.items()}
        in_contenders = ("device", "times", "missing", "costs")
        return {
            **{name: value for name, value in vars(self).items() if name not in in_contenders},
            **{name: getattr(self, name) for name in _DERIVED},
            "contenders": {**ran, **missing},
        }


_DERIVED = ("floor", "to_floor", "best", "ratio", "ratio_of_least", "ratio_to_float32")
"""The properties of a :class:`BenchRow` that are in its JSON."""


def measure(
    optimizer: str,
    workload: workloads.Workload,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    seconds: float,
    clock: str = "wall",
    masters: bool = False,
    changing: bool = False,
    only: Sequence[str] = (),
) -> list[BenchRow]:
    """The rows of ``optimizer`` on ``workload``: without clipping, and with.

    All contenders share parameters and gradients, so that all of them fit in memory, and none has
    warmer caches. A contender that raises is dropped, and the row has the reason. ``only`` names
    the contenders to measure; if it is empty, all are.
    """
    gc.collect()  # optimizers of the row before may be kept alive by reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    params = workload.parameters(dtype, device)
    absent = workloads.CHANGING if changing else 0.0
    gradients = workloads.Gradients(params, absent)
    wide = workload.parameters(torch.float32, device) if masters else []
    wide_gradients = workloads.Gradients(wide, absent)

    def restore(name: str) -> None:
        (wide_gradients if name == contenders.FLOAT32 else gradients).restore()

    contestants: list[contenders.Contender] = []
    failures: dict[str, str] = {}
    allocated: dict[str, int] = {}
    n_bytes = 0
    for name in only or contenders.names(device, masters):
        own_params = wide if name == contenders.FLOAT32 else params
        own_restore = functools.partial(restore, name)
        try:
            contender = contenders.enter(name, optimizer, own_params, masters)
            warmed(contender.step, own_restore)
            warmed(contender.clipped_step, own_restore)
        except Exception as error:  # a third-party optimizer may raise anything
            failures[name] = reason(error)
            continue
        contestants.append(contender)
        allocated[name] = bytes_allocated(own_params, contender.optimizer)
        if name == contenders.AMPOPT and isinstance(
            contender.optimizer, ampopt.ElementwiseOptimizer
        ):
            # Those of this step, whose gradients may be of few or of many elements; then the mean.
            present = sum(p.numel() for p in params if p.grad is not None) / workload.elements
            counted = sum(bytes_by_kernel(contender.optimizer).values())
            n_bytes = round(counted * (1 - absent) / present)
    gradients.restore()
    without_floor: dict[str, str] = {}
    streams = _streams(n_bytes, device, without_floor)
    workload = replace(workload, name=workload.name + ", changing" * changing)
    rows = []
    for clip in (False, True):
        missing, unknown = dict(failures), dict(without_floor)
        steps = {c.name: c.clipped_step if clip else c.step for c in contestants}
        times = interleaved(
            {**steps, **streams.steps},
            restore,
            device,
            rounds=rounds,
            seconds=seconds / 2,
            clock=clock,
            failures=missing,
        )
        unknown |= {name: missing.pop(name) for name in streams.steps if name in missing}
        costs = {}
        for name in [n for n in steps if n in times] if device.type == "cuda" else ():
            try:
                own_restore = functools.partial(restore, name)
                costs[name] = device_cost(steps[name], own_restore, device)
            except Exception as error:
                unknown[f"costs of {name}"] = reason(error)
        rows.append(
            BenchRow.of(
                optimizer,
                workload,
                clip,
                device,
                bytes=n_bytes,
                bandwidth=streams.bandwidth(times),
                times={name: times[name] for name in steps if name in times},
                missing=missing,
                allocated=allocated,
                costs=costs,
                unknown=unknown,
            )
        )
    return rows


def measure_all(
    measure: Callable[..., list[BenchRow]],
    sizes: Sequence[workloads.Workload],
    optimizers: Sequence[str],
    device: torch.device,
    seconds: float,
) -> list[BenchRow]:
    """The rows of every optimizer on every workload, in ``seconds`` if that is enough.

    Args:
        measure: ``measure(optimizer, workload, seconds=...)`` returns the rows of one of them.
        sizes: the workloads.
        optimizers: names of optimizers.
        device: the device of the parameters.
        seconds: time for all rows.
    """
    end, bench_rows = time.perf_counter() + seconds, []
    jobs = [(optimizer, workload) for workload in sizes for optimizer in optimizers]
    for n_done, (optimizer, workload) in enumerate(jobs):
        _note(f"{n_done + 1}/{len(jobs)} {optimizer} {workload.name}")
        seconds_left = max(0.0, end - time.perf_counter())
        try:
            bench_rows += measure(optimizer, workload, seconds=seconds_left / (len(jobs) - n_done))
        except Exception as error:  # say, parameters do not fit; keep the rows measured so far
            missing = dict.fromkeys(contenders.names(device), reason(error))
            bench_rows += [
                BenchRow.of(optimizer, workload, clip, device, missing=missing)
                for clip in (False, True)
            ]
    _note("")
    return bench_rows


def _note(text: str) -> None:
    """Show the progress on a terminal, in place of the last note."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _streams(n_bytes: int, device: torch.device, unknown: dict[str, str]) -> Streams:
    """The passes that measure the bandwidth; none if caches may hold ``n_bytes``."""
    if n_bytes > _CACHES:
        try:
            return Streams.on(device)
        except RuntimeError as error:
            unknown["the floor"] = reason(error)
    return Streams({}, {})
