"""Host time and device time of each kernel launch in a step."""

import functools
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import ampopt
from ampopt.backend import backend_for
from ampopt.bench.byte_counts import bytes_by_kernel
from ampopt.bench.measure import device_seconds, host_seconds, warmed
from ampopt.bench.workloads import SCALE, Gradients, Workload

__all__ = ["measure"]

_ROUNDS = 20


@dataclass(frozen=True)
class LaunchTimes:
    """Times of one launch, or of the whole step.

    Attributes:
        name: name of the kernel, or ``"step"``.
        host: median seconds of host time.
        device: median seconds of device time, measured after a kernel that spins; see
            :func:`ampopt.bench.measure.device_seconds`.
        bytes: bytes that the launch reads and writes.
    """

    name: str
    host: float
    device: float
    bytes: int


def measure(
    optimizer: str,
    workload: Workload,
    *,
    dtype: torch.dtype,
    device: torch.device,
    master_weights: bool,
    max_norm: float | None,
) -> list[LaunchTimes]:
    """Measure a step, and its launches in order.

    Each launch is repeated alone, on the tables and tensors of one step, so its data may be in
    caches.

    Raises:
        RuntimeError: another backend than ``triton`` steps on ``device``; it launches no kernels.
    """
    backend: Any = backend_for(device)
    if backend.name != "triton":
        raise RuntimeError(
            f"on {device} the {backend.name} backend steps, which launches no kernels; choose the "
            "triton backend"
        )
    params = workload.parameters(dtype, device)
    gradients = Gradients(params)
    instance = getattr(ampopt, optimizer)(params, master_weights=master_weights)
    scale: Any = ampopt.DynamicLossScale(init_scale=SCALE)

    def step() -> None:
        nonlocal scale
        scale = instance.unscale_and_step(grads_scaled_by=scale, max_norm=max_norm).scale

    warmed(step, gradients.restore)

    calls: list[tuple[Any, ...]] = []
    launch = backend._launch

    def record(*arguments: Any) -> None:
        calls.append(arguments)
        launch(*arguments)

    gradients.restore()
    with mock.patch.object(backend, "_launch", record):
        step()
    kernel_bytes = bytes_by_kernel(instance)
    rows = [_time_launch("step", step, device, sum(kernel_bytes.values()), gradients.restore)]
    programs: Counter[str] = Counter()
    for _, variant, n, _ in calls:
        programs[variant.name] += n
    for arguments in calls:
        _, variant, n, _ = arguments
        name = variant.name
        # Each kind of parameter has its own launch, so split the bytes by number of programs.
        share = kernel_bytes[name] * n // programs[name]
        rows.append(_time_launch(name, functools.partial(launch, *arguments), device, share))
    return rows


def _time_launch(
    name: str,
    call: Callable[[], object],
    device: torch.device,
    n_bytes: int,
    restore: Callable[[], None] = lambda: None,
) -> LaunchTimes:
    """Time a launch, host and device, in :data:`_ROUNDS` rounds; ``restore`` is not timed."""
    hosts, devices = [], []
    for _ in range(_ROUNDS):
        restore()
        hosts.append(host_seconds(call, device))
        restore()
        devices.append(device_seconds(call, device, hosts[-1]))
    return LaunchTimes(name, statistics.median(hosts), statistics.median(devices), n_bytes)
