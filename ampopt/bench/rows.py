"""One row of the table: an optimizer on a workload, everyone beside everyone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import ampopt
from ampopt.bench import contenders, workloads
from ampopt.bench.count import bytes_moved
from ampopt.bench.measure import DeviceCost, Times, device_cost, interleaved, warmed
from ampopt.bench.memory import Streams

__all__ = ["Row", "measure"]

_CACHES = 1 << 26
"""Bytes that caches may hold."""


@dataclass
class Row:
    """What was measured.

    Attributes:
        optimizer: its name.
        workload: its name.
        clip: whether gradients were clipped by global norm.
        device: ``"cpu"`` or ``"cuda"``.
        tensors: how many.
        elements: in all of them.
        bytes: what ampopt has to read and write; see :func:`ampopt.bench.count.bytes_moved`.
        bandwidth: bytes per second that memory gave in the same rounds; ``None`` where caches could
            hold everything, so that memory sets no floor.
        times: of each contender that could run.
        missing: why each of the others could not.
        costs: on a GPU, of each contender that could run.
    """

    optimizer: str
    workload: str
    clip: bool
    device: str
    tensors: int
    elements: int
    bytes: int
    bandwidth: float | None
    times: dict[str, Times]
    missing: dict[str, str]
    costs: dict[str, DeviceCost] = field(default_factory=dict)

    @property
    def ampopt(self) -> Times:
        """Ours."""
        return self.times[contenders.AMPOPT]

    @property
    def best(self) -> str | None:
        """The fastest of torch's, by median."""
        there = [name for name in contenders.TORCH if name in self.times]
        return min(there, key=lambda name: self.times[name].median, default=None)

    @property
    def ratio(self) -> float | None:
        """Our time to that of torch's best: medians."""
        return self.ratio_to(self.best)

    def ratio_to(self, name: str | None) -> float | None:
        """Our time to that of ``name``: medians. ``None`` if it could not run."""
        if name not in self.times:
            return None
        return self.ampopt.median / self.times[name].median

    @property
    def ratio_of_least(self) -> float | None:
        """As :attr:`ratio`, of the fastest rounds: what a busy machine disturbs least."""
        there = [self.times[name].least for name in contenders.TORCH if name in self.times]
        return self.ampopt.least / min(there) if there else None

    @property
    def floor(self) -> float | None:
        """Seconds that moving the bytes takes at the measured bandwidth."""
        return None if self.bandwidth is None else self.bytes / self.bandwidth

    @property
    def to_floor(self) -> float | None:
        """Our time to the floor."""
        return None if self.floor is None else self.ampopt.median / self.floor

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            "optimizer": self.optimizer,
            "workload": self.workload,
            "clip": self.clip,
            "tensors": self.tensors,
            "elements": self.elements,
            "bytes": self.bytes,
            "bandwidth": self.bandwidth,
            "floor": self.floor,
            "to_floor": self.to_floor,
            "best": self.best,
            "ratio": self.ratio,
            "ratio_of_least": self.ratio_of_least,
            "contenders": {
                **{
                    name: {**times.as_dict(), **vars(self.costs.get(name, _NO_COST))}
                    for name, times in self.times.items()
                },
                **{name: {"missing": reason} for name, reason in self.missing.items()},
            },
        }


_NO_COST: Any = type("_NoCost", (), {})()


def measure(
    optimizer: str,
    workload: workloads.Workload,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    seconds: float,
    clock: str = "wall",
) -> list[Row]:
    """The rows of ``optimizer`` on ``workload``: without clipping, and with.

    Contenders share parameters and gradients, so that all fit and none finds its own warmer.
    Whoever fails in its first steps is left out, and the row says why; only ampopt must not.
    """
    params = workload.parameters(dtype, device)
    gradients = workloads.Gradients(params)
    entered: list[contenders.Contender] = []
    missing: dict[str, str] = {}
    for name in contenders.names(device):
        try:
            contender = contenders.enter(name, optimizer, params)
            warmed(contender.step, gradients.restore)
            warmed(contender.clipped, gradients.restore)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if name == contenders.AMPOPT:
                raise
            missing[name] = str(error).splitlines()[0]
        else:
            entered.append(contender)
    gradients.restore()
    moved = bytes_moved(_ours(entered))
    streams = Streams.on(device) if moved > _CACHES else None
    rows = []
    for clip in (False, True):
        steps = {c.name: c.clipped if clip else c.step for c in entered}
        times = interleaved(
            {**steps, **({} if streams is None else streams.steps)},
            gradients.restore,
            device,
            rounds=rounds,
            seconds=seconds / 2,
            clock=clock,
        )
        costs = {}
        if device.type == "cuda":
            costs = {n: device_cost(step, gradients.restore, device) for n, step in steps.items()}
        rows.append(
            Row(
                optimizer=optimizer,
                workload=workload.name,
                clip=clip,
                device=device.type,
                tensors=len(workload.shapes),
                elements=workload.elements,
                bytes=moved,
                bandwidth=None if streams is None else streams.bandwidth(times),
                times={name: times[name] for name in steps},
                missing=missing,
                costs=costs,
            )
        )
    return rows


def _ours(entered: Sequence[contenders.Contender]) -> ampopt.ElementwiseOptimizer:
    found = next(c.optimizer for c in entered if c.name == contenders.AMPOPT)
    assert isinstance(found, ampopt.ElementwiseOptimizer)
    return found
