"""Host time of AdamW on 300 tensors of 64 elements, compared with torch's fused optimizer."""

import time
from contextlib import nullcontext

import torch

import ampopt
from ampopt._synchronization import sync_debug_mode
from ampopt.bench import contenders, workloads
from ampopt.bench.measure import warmed
from ampopt_kernels.native import objects
from evidence.first_hour.record import PartRecord
from evidence.host import alone

__all__ = ["run"]

_ROUNDS = 100


def run(record: PartRecord, device: torch.device) -> None:
    """Measure with Python loops and with the compiled C++ loops, and then torch's optimizers.

    With gradients at the same addresses in each step, and at other addresses.
    """
    ampopt.set_backend("triton")
    loops, objects.loops = objects.loops, objects.Loops()
    objects.loops.want = lambda: None  # else the compiler would start, and end, meanwhile
    _ours(record, device, "loops in Python")
    objects.loops = loops
    objects.loops.want()
    start = time.perf_counter()
    objects.loops.load()
    there = objects.loops.loaded is not None
    record.check("the C++ loops compile", there)
    record.figure("compiling the C++ loops", time.perf_counter() - start, "s")
    _ours(record, device, "loops in C++")
    if device.type == "cpu":
        return
    params = workloads.make("small", device).parameters(torch.float32, device)
    gradients = workloads.Gradients(params)
    for name in ("fused", "foreach"):
        contender = contenders.enter(name, "AdamW", params)
        for how, step in (("", contender.step), (", clipped", contender.clipped_step)):
            times = alone(step, gradients.restore, device, rounds=_ROUNDS)
            record.figure(f"torch {name}, GradScaler{how}", times.host * 1e6, "us")


def _ours(record: PartRecord, device: torch.device, how: str) -> None:
    """Measure ampopt, with gradients at the same and at other addresses in each step."""
    params = workloads.make("small", device).parameters(torch.float32, device)
    gradients = workloads.Gradients(params)
    contender = contenders.enter(contenders.AMPOPT, "AdamW", params)
    warmed(contender.step, gradients.restore)
    with sync_debug_mode("error") if device.type == "cuda" else nullcontext():
        contender.step()
    record.check(f"a step does not synchronize, {how}", True)
    sets = [[torch.ones_like(p) for p in params] for _ in range(2)]

    def move() -> None:
        sets.reverse()
        for p, grad in zip(params, sets[0], strict=True):
            p.grad = grad

    for what, step, before in (
        ("", contender.step, gradients.restore),
        (", clipped", contender.clipped_step, gradients.restore),
        (", gradients at other addresses in each step", contender.step, move),
    ):
        times = alone(step, before, device, rounds=_ROUNDS)
        record.figure(f"ampopt{what}, {how}", times.host * 1e6, "us")
