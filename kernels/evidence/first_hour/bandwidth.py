"""The bandwidth of each launch of AdamW, compared with a device copy and with predictions."""

import torch

import ampopt
from ampopt.bench import workloads
from ampopt.bench.measure import device_seconds
from ampopt.bench.memory_bandwidth import bandwidth
from evidence.first_hour import launches
from evidence.first_hour.record import PartRecord

__all__ = ["STORAGES", "prediction_of", "run"]

STORAGES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "with masters": (torch.bfloat16, True),
}
"""The storages of the table in ``kernels/PREDICTIONS.md``: the dtype of the parameters, and whether
there are master weights."""

_SHARES = {
    (24, "float32"): (0.83, 0.79, 0.97, 0.89, 0.89),
    (24, "bfloat16"): (0.71, 0.71, 0.95, 0.81, 0.81),
    (24, "with masters"): (0.71, 0.71, 0.95, 0.87, 0.87),
    (27, "float32"): (0.98, 0.96, 1.00, 0.98, 0.98),
    (27, "bfloat16"): (0.95, 0.95, 0.99, 0.97, 0.97),
    (27, "with masters"): (0.95, 0.95, 1.00, 0.98, 0.98),
    (30, "float32"): (1.00, 0.98, 1.00, 1.00, 1.00),
    (30, "bfloat16"): (0.99, 0.99, 1.00, 1.00, 1.00),
    (30, "with masters"): (0.99, 0.99, 1.00, 1.00, 1.00),
}
"""The predictions of that table, shares of the bandwidth of a copy, by (log2 of elements,
storage): detect, detect with norm, update, step, step with clipping."""


def run(record: PartRecord, device: torch.device) -> None:
    """Measure each launch; report its bandwidth as a share of that of the fastest copy."""
    ampopt.set_backend("triton")
    speeds = [_copies(mib, device) for mib in ((16,) if device.type == "cpu" else (64, 512, 4096))]
    speed = max([bandwidth(device) or 0.0, *speeds])
    record.figure("copy on the device", speed / 1e12, "TB/s")
    for storage, (dtype, masters) in STORAGES.items():
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
                    prediction = prediction_of(power, storage, name, clipped=clip is not None)
                    if row.bytes:
                        record.figure(f"{what}: {name}", share, "of copy", prediction)
                    record.figure(f"{what}: {name}, device", row.device * 1e6, "us")


def _copies(mib: int, device: torch.device) -> float:
    """The bandwidth of the fastest of ten device copies of ``mib`` MiB, in bytes per second."""
    a, b = (torch.ones(mib << 18, device=device) for _ in range(2))
    times = [device_seconds(lambda: b.copy_(a), device, host=1e-4) for _ in range(10)]
    return 2 * a.nbytes / min(times)


def prediction_of(power: int, storage: str, launch: str, *, clipped: bool) -> float | None:
    """The predicted bandwidth of a launch, as a share of a copy's; ``None`` if not predicted.

    Args:
        power: log2 of the number of elements.
        storage: a key of :data:`STORAGES`.
        launch: ``"detect"``, ``"update"``, or ``"step"`` for all launches.
        clipped: whether gradients are clipped to a norm.
    """
    shares = _SHARES.get((power, storage))
    places = {"detect": 0 + clipped, "update": 2, "step": 3 + clipped}
    return None if shares is None or launch not in places else shares[places[launch]]
