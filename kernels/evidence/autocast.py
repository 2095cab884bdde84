"""``python -m evidence.autocast``: the host time that ``ampopt.autocast`` adds to an operator."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

import ampopt

__all__ = ["measure", "table"]

_CALLS = 200
"""Calls in a row under one context."""
_OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "not listed": lambda x: x.add(1),
    "in Python": F.softsign,
    "listed": lambda x: x.exp(),
}
_CONTEXTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "torch.autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "without lists": lambda: ampopt.autocast("cpu", torch.bfloat16),
    "ampopt.autocast": lambda: ampopt.autocast("cpu", torch.bfloat16, deny=["exp"]),
}


def measure(seconds: float = 1.0) -> dict[str, dict[str, float]]:
    """Median host seconds of a call, by operator and by context.

    Inputs are float32, and a listed operator computes in float32 in every context, so nothing is
    cast.

    Args:
        seconds: how long each of them runs.
    """
    code = "with context():\n    for _ in range(calls):\n        operator(x)"
    known: dict[str, Any] = {"x": torch.ones(16), "calls": _CALLS}
    timings: dict[str, dict[str, float]] = {}
    for what, operator in _OPERATORS.items():
        timings[what] = {}
        for name, context in _CONTEXTS.items():
            timer = Timer(code, globals={**known, "operator": operator, "context": context})
            timings[what][name] = timer.blocked_autorange(min_run_time=seconds).median / _CALLS
    return timings


def table(timings: Mapping[str, Mapping[str, float]]) -> str:
    """Format the results as lines, in microseconds."""
    lines = [f"{'an operator':12}" + "".join(f"{name:>17}" for name in _CONTEXTS)]
    for what, times in timings.items():
        lines.append(f"{what:12}" + "".join(f"{1e6 * seconds:17.2f}" for seconds in times.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    print("microseconds of host time for each call of an operator, by the context around it:")
    print(table(measure()))
