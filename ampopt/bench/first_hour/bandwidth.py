"""The bandwidth of each launch of AdamW, compared with a device copy and with predictions."""

import torch

import ampopt
from ampopt.bench import launches, workloads
from ampopt.bench.first_hour.predictions import AT_HAND, predicted
from ampopt.bench.first_hour.record import Record
from ampopt.bench.measure import device_seconds
from ampopt.bench.memory import bandwidth

__all__ = ["run"]


def run(record: Record, device: torch.device) -> None:
    """Measure each launch; report its bandwidth as a share of that of the fastest copy."""
    ampopt.set_backend("triton")
    speeds = [_copies(mib, device) for mib in ((16,) if device.type == "cpu" else (64, 512, 4096))]
    speed = max([bandwidth(device) or 0.0, *speeds])
    record.figure("copy on the device", speed / 1e12, "TB/s")
    for storage, (dtype, masters) in AT_HAND.items():
        for power in (14,) if device.type == "cpu" else (24, 27, 30):
            for clip in (None, 1.0):
                what = f"2^{power} {storage}" + ", clipped" * (clip is not None)
                try:
                    rows = launches.measure(
                        "AdamW",
                        workloads.of(1 << power),
                        dtype=dtype,
                        device=device,
                        master_weights=masters,
                        max_norm=clip,
                    )
                except torch.OutOfMemoryError:
                    record.skip(what, "out of memory")
                    continue
                for row in rows:
                    share = row.bytes / row.device / speed
                    name = row.name.removesuffix("_kernel")
                    expected = predicted(power, storage, name, clipped=clip is not None)
                    if row.bytes:
                        record.figure(f"{what}: {name}", share, "of copy", expected)
                    record.figure(f"{what}: {name}, device", row.device * 1e6, "us")


def _copies(mib: int, device: torch.device) -> float:
    """The bandwidth of the fastest of ten device copies of ``mib`` MiB, in bytes per second."""
    a, b = (torch.ones(mib << 18, device=device) for _ in range(2))
    times = [device_seconds(lambda: b.copy_(a), device, host=1e-4) for _ in range(10)]
    return 2 * a.nbytes / min(times)
