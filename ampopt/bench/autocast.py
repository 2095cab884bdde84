"""Host time of ``ampopt.autocast`` per operator call, compared with ``torch.autocast``."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ampopt
from ampopt.bench.measure import interleaved

__all__ = ["measure", "table"]

_CALLS = 200
"""Calls in a row under one context."""
_OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "not listed": lambda x: x.add(1),
    "in Python": F.softsign,
    "listed": lambda x: x.exp(),
}


def measure(
    device: torch.device, *, rounds: int, seconds: float, clock: str
) -> dict[str, dict[str, float]]:
    """Median host seconds of a call, by operator and by context. Synchronizes.

    Inputs are float32, and a listed operator computes in float32 in every context, so nothing is
    cast.
    """
    x = torch.ones(16, device=device)
    timings = {}
    for what, call in _OPERATORS.items():
        times = interleaved(
            {name: _calls(call, x, make) for name, make in _contexts(device).items()},
            lambda: None,
            device,
            rounds=rounds,
            seconds=seconds / len(_OPERATORS),
            clock=clock,
        )
        timings[what] = {name: its.host / _CALLS for name, its in times.items()}
    return timings


def table(timings: Mapping[str, Mapping[str, float]]) -> str:
    """Format the results as lines, in microseconds."""
    names = next(iter(timings.values()))
    lines = [f"{'an operator':12}" + "".join(f"{name:>17}" for name in names)]
    for what, times in timings.items():
        lines.append(f"{what:12}" + "".join(f"{1e6 * seconds:17.2f}" for seconds in times.values()))
    return "\n".join(lines)


def _contexts(device: torch.device) -> dict[str, Callable[[], Any]]:
    """The contexts to compare: for each name, a function that makes one."""
    half = torch.bfloat16
    return {
        "none": contextlib.nullcontext,
        "torch.autocast": lambda: torch.autocast(device.type, half),
        "without lists": lambda: ampopt.autocast(device.type, half),
        "ampopt.autocast": lambda: ampopt.autocast(device.type, half, deny=["exp"]),
    }


def _calls(call: Callable[[Tensor], object], x: Tensor, make: Callable[[], Any]) -> Any:
    """A step to time: :data:`_CALLS` calls of an operator within one context."""

    def step() -> None:
        with make():
            for _ in range(_CALLS):
                call(x)

    return step
