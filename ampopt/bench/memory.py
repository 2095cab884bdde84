"""How fast memory is, as far as a step could reach it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ampopt.bench.measure import Times, interleaved

__all__ = ["Streams", "bandwidth"]

_BEYOND_CACHES = 1 << 26
"""Float32 elements, 256 MiB, of an array that no cache holds."""


@dataclass(frozen=True)
class Streams:
    """Plain passes over memory, to time beside the steps of a row.

    What a shared machine's memory gives changes by half within minutes, so a floor that was
    measured at another time says nothing of a row.

    Attributes:
        steps: on a GPU a copy from device to device. On the CPU also passes that write what they
            have read, as a step does: a copy into other memory has to fetch it first.
        bytes: that each of them reads and writes.
    """

    steps: Mapping[str, Callable[[], object]]
    bytes: Mapping[str, int]

    @staticmethod
    def on(device: torch.device) -> "Streams":
        """Of arrays that no cache holds."""
        a, b = (torch.ones(_BEYOND_CACHES, device=device) for _ in range(2))
        steps: dict[str, Callable[[], object]] = {"stream: copy": lambda: b.copy_(a)}
        moved = {"stream: copy": 2 * a.nbytes}
        if device.type == "cpu":
            steps |= {"stream: scale": lambda: a.mul_(1.0), "stream: add": lambda: a.add_(b)}
            moved |= {"stream: scale": 2 * a.nbytes, "stream: add": 3 * a.nbytes}
        return Streams(steps, moved)

    def bandwidth(self, times: Mapping[str, Times]) -> float | None:
        """Bytes per second of the fastest, by medians as those of the steps beside it.

        ``None`` if none of them could run.
        """
        speeds = (self.bytes[k] / times[k].median for k in self.steps if k in times)
        return max(speeds, default=None)


def bandwidth(device: torch.device, clock: str = "wall") -> float | None:
    """Bytes per second that memory is read and written at now, with nothing beside it."""
    streams = Streams.on(device)
    timed = interleaved(streams.steps, lambda: None, device, rounds=20, seconds=5.0, clock=clock)
    return streams.bandwidth(timed)
