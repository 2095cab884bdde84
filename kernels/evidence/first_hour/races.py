"""Races: tables that are copied on one stream and read on another, or replaced too early."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import ampopt
from ampopt._step.torch_private import spin
from evidence.first_hour.record import PartRecord

__all__ = ["run"]

_LATE = 2_000_000_000
"""Cycles for which a stream is kept busy: about a second, in which the host runs far ahead."""


def run(record: PartRecord, device: torch.device) -> None:
    """Keep one stream busy, and step on it and on another. On the CPU there is no delay."""
    ampopt.set_backend("triton")
    with record.trying("constants"):
        _constants_of_two_optimizers(record, device)
    with record.trying("tables"):
        _tables_replaced_behind_a_busy_stream(record, device)


def _constants_of_two_optimizers(record: PartRecord, device: torch.device) -> None:
    """Check that a constant sent on a busy stream is not read on another before it arrives."""
    on_a, on_b = _streams(device)
    first, second, other = (_optimizer(device, seed) for seed in range(3))
    for optimizer in (second, other):  # compile the kernels
        optimizer.unscale_and_step(grads_scaled_by=ampopt.DynamicLossScale())
    with on_a():  # the allocator reuses this memory for constants
        poison = [torch.full((64,), 0.5, dtype=torch.float64, device=device) for _ in range(64)]
        del poison
    _wait(device)
    with on_a():
        _delay(device)
        first.unscale_and_step(grads_scaled_by=2.0)
    with on_b():
        scale: Any = second.unscale_and_step(grads_scaled_by=2.0).scale
        number = float(scale)
    record.check("constants sent on one stream are not read on another", number == 2.0, number)
    _wait(device)


def _tables_replaced_behind_a_busy_stream(record: PartRecord, device: torch.device) -> None:
    """The host replaces the table three times before the busy stream reads the first."""
    late, in_time = _optimizer(device, seed=3), _optimizer(device, seed=3)
    on_a, _ = _streams(device)
    for optimizer in (late, in_time):
        with on_a():
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        _wait(device)
        if optimizer is late:
            with on_a():
                _delay(device)
        for factor in (1.0, -2.0, 4.0):
            with on_a():
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.full_like(p, factor)
                optimizer.unscale_and_step(grads_scaled_by=2.0)
            if optimizer is in_time:
                _wait(device)
        _wait(device)
    ends = [[p.detach() for p in o.param_groups[0]["params"]] for o in (late, in_time)]
    same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    record.check("tables that are replaced are kept for the launches that read them", same)


def _optimizer(device: torch.device, seed: int) -> Any:
    """An SGD of three parameters with gradients, drawn from ``seed``."""
    generator = torch.Generator(device).manual_seed(seed)
    params: list[Tensor] = []
    for size in (5000, 7, 64):
        value = torch.randn(size, generator=generator, device=device)
        params.append(torch.nn.Parameter(value))
        params[-1].grad = torch.randn(size, generator=generator, device=device)
    return ampopt.SGD(params, lr=1e-3)


def _streams(device: torch.device) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Two functions, each of which makes a stream of its own current; without effect on the CPU."""
    if device.type == "cpu":
        return [contextlib.nullcontext] * 2
    module = torch.get_device_module(device)
    streams = [module.Stream(device) for _ in range(2)]
    return [lambda stream=stream: module.stream(stream) for stream in streams]


def _delay(device: torch.device) -> None:
    """Keep the current stream busy for about a second."""
    if device.type == "cuda":
        spin(_LATE)


def _wait(device: torch.device) -> None:
    """Wait for all work on ``device``."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
