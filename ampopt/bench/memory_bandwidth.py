"""Memory bandwidth, as a step could reach it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ampopt.bench.measure import Times, interleaved

__all__ = ["Streams", "bandwidth"]

_BEYOND_CACHES = 1 << 26
"""Number of float32 elements, 256 MiB, of an array that no cache holds."""


@dataclass(frozen=True)
class Streams:
    """Plain passes over memory, timed in the same rounds as the steps of a row.

    The bandwidth of a shared machine may change by half within minutes, so a floor measured at
    another time would be useless.

    Attributes:
        steps: the passes by name. On a GPU this is a device-to-device copy. On the CPU there are
            also passes that write in place what they read, as a step does: a copy to another array
            reads the destination's cache lines first.
        bytes: bytes that each pass reads and writes.
    """

    steps: Mapping[str, Callable[[], object]]
    bytes: Mapping[str, int]

    @staticmethod
    def on(device: torch.device) -> "Streams":
        """Make the passes, on arrays that no cache holds."""
        a, b = (torch.ones(_BEYOND_CACHES, device=device) for _ in range(2))
        steps: dict[str, Callable[[], object]] = {"stream: copy": lambda: b.copy_(a)}
        pass_bytes = {"stream: copy": 2 * a.nbytes}
        if device.type == "cpu":
            steps |= {"stream: scale": lambda: a.mul_(1.0), "stream: add": lambda: a.add_(b)}
            pass_bytes |= {"stream: scale": 2 * a.nbytes, "stream: add": 3 * a.nbytes}
        return Streams(steps, pass_bytes)

    def bandwidth(self, times: Mapping[str, Times]) -> float | None:
        """Bytes per second of the fastest pass, by median; ``None`` if no pass could run."""
        speeds = (self.bytes[k] / times[k].median for k in self.steps if k in times)
        return max(speeds, default=None)


def bandwidth(device: torch.device, clock: str = "wall") -> float | None:
    """Measure the memory bandwidth now, in bytes per second, with nothing else running."""
    streams = Streams.on(device)
    times = interleaved(streams.steps, lambda _: None, device, rounds=20, seconds=5.0, clock=clock)
    return streams.bandwidth(times)
