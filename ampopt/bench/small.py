"""The table of ``--small``: what steps of small tensors cost the host, beside torch's fused step.

AdamW under a dynamic loss scale, torch's under ``torch.amp.GradScaler``, float32; in one row, a
hand-written optimizer. On the CPU, the CPU time of one thread; else the time until a step returns.
The medians are of rounds in which both take turns.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.benchmark import set_torch_threads

import ampopt
from ampopt.backend import ENVIRONMENT
from ampopt.bench import contenders, workloads
from ampopt.bench.measure import interleaved, warmed
from ampopt.bench.report import as_columns

__all__ = ["COUNTS", "SmallRow", "first_step", "measure", "table"]

COUNTS = (1, 20, 300, 2000)
"""The numbers of tensors; the steps in which something changes are those of the third."""
_ELEMENTS = 64
_TORCHS = "fused"
_MOST_PROCESSES = 3


@dataclass(frozen=True)
class SmallRow:
    """One line of the table.

    Attributes:
        what: what is special about the step; empty for a plain one.
        tensors: number of tensors, of 64 elements each.
        torchs: median time of torch's fused step in seconds.
        ours: median time of ampopt's step in seconds.
    """

    what: str
    tensors: int
    torchs: float
    ours: float


class _Descent(torch.optim.Optimizer):
    """Gradient descent with one torch operation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move the parameters."""
        (group,) = self.param_groups
        grads = [param.grad for param in group["params"]]
        torch._foreach_add_(group["params"], grads, alpha=-1e-3)  # pyright: ignore[reportPrivateImportUsage]


class _OwnDescent(ampopt.Optimizer):
    """Gradient descent with one torch operation, as an ``ampopt.Optimizer``."""

    step: Any = _Descent.step


def _adamw(name: str, params: list[Tensor]) -> contenders.Contender:
    """AdamW; torch's under ``torch.amp.GradScaler``."""
    return contenders.enter(name, "AdamW", params)


def _adamw_under_scaler(name: str, params: list[Tensor]) -> contenders.Contender:
    """AdamW, ampopt's under ``ampopt.GradScaler``."""
    if name == _TORCHS:
        return _adamw(name, params)
    return contenders.under_scaler(name, ampopt.AdamW(params), params, ampopt.GradScaler)


def _written(name: str, params: list[Tensor]) -> contenders.Contender:
    """A hand-written optimizer."""
    if name == _TORCHS:
        return contenders.under_scaler(name, _Descent(params, {}), params)
    return contenders.by_control_point(name, _OwnDescent(params, {}))


def _change_rate(optimizer: Optimizer) -> None:
    """Set another learning rate."""
    for group in optimizer.param_groups:
        group["lr"] *= 1 - 1e-6


def _replace_state(optimizer: Optimizer) -> None:
    """Replace one state by a copy, which a plan does not know."""
    for state in list(optimizer.state.values())[:1]:
        state["exp_avg"] = state["exp_avg"].clone()


@dataclass(frozen=True)
class _Case:
    """A kind of step.

    Attributes:
        what: what is special about it; empty for a plain one.
        enter: makes the contender of a name.
        clips: whether gradients are clipped.
        absent: the share of parameters without a gradient.
        change: what changes before each step, outside of its time.
    """

    what: str
    enter: Callable[[str, list[Tensor]], contenders.Contender] = _adamw
    clips: bool = False
    absent: float = 0.0
    change: Callable[[Optimizer], None] = lambda _: None


_PLAIN = _Case("")
_CASES = (
    _Case("a random quarter absent", absent=workloads.CHANGING),
    _Case("clipped", clips=True),
    _Case(
        "unscale_, clip_grad_norm_, step under GradScaler", enter=_adamw_under_scaler, clips=True
    ),
    _Case("a hand-written step of one torch operation", enter=_written),
    _Case("another learning rate", change=_change_rate),
    _Case("a new plan", change=_replace_state),
)


def measure(device: torch.device, *, rounds: int, seconds: float) -> list[SmallRow]:
    """Measure all rows on one thread; those of first steps on the CPU only.

    Args:
        device: device of the tensors.
        rounds: maximum number of rounds of a row. First steps take at most 3, each two processes.
        seconds: about the time for all rows but those of first steps.
    """
    cases = [(_PLAIN, count) for count in COUNTS] + [(case, COUNTS[2]) for case in _CASES]
    with set_torch_threads(1):
        rows = [
            _steps(device, *case, rounds=rounds, seconds=seconds / len(cases)) for case in cases
        ]
    if device.type == "cpu":
        rows += _first_steps(min(rounds, _MOST_PROCESSES))
    return rows


def table(rows: Sequence[SmallRow]) -> str:
    """Format the rows as lines, in microseconds."""
    lines = [["tensors", "torch fused", "ampopt", "ratio", "a tensor", "what"]]
    for row in rows:
        times = [f"{1e6 * row.torchs:.1f}", f"{1e6 * row.ours:.1f}"]
        shares = [f"{row.ours / row.torchs:.3f}", f"{1e6 * row.ours / row.tensors:.2f}"]
        lines.append([str(row.tensors), *times, *shares, row.what])
    return as_columns(lines, left=(5,))


def _steps(
    device: torch.device, case: _Case, count: int, *, rounds: int, seconds: float
) -> SmallRow:
    """The row of warm steps of ``count`` tensors."""
    params = _workload(count).parameters(torch.float32, device)
    gradients = workloads.Gradients(params, case.absent)
    entered = {name: case.enter(name, params) for name in (_TORCHS, contenders.AMPOPT)}

    def restore(name: str) -> None:
        gradients.restore()
        case.change(entered[name].optimizer)

    steps = {name: c.clipped_step if case.clips else c.step for name, c in entered.items()}
    for name, step in steps.items():
        warmed(step, functools.partial(restore, name))
    times = interleaved(steps, restore, device, rounds=rounds, seconds=seconds, clock="cpu")
    return SmallRow(case.what, count, times[_TORCHS].host, times[contenders.AMPOPT].host)


def _first_steps(rounds: int) -> list[SmallRow]:
    """The rows of first steps, of the third of :data:`COUNTS`, by processes in turn."""
    results: dict[str, list[dict[str, float]]] = {
        "first step, nothing compiled": [],
        "first step, all compiled": [],
    }
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="ampopt-bench-") as cache:
            for seconds in results.values():  # the first one fills the cache
                seconds.append(_in_a_process(COUNTS[2], cache))
    return [
        SmallRow(
            what,
            COUNTS[2],
            *(statistics.median(x[name] for x in seconds) for name in (_TORCHS, contenders.AMPOPT)),
        )
        for what, seconds in results.items()
    ]


def _in_a_process(count: int, cache: str) -> dict[str, float]:
    """Return what :func:`first_step` returns in a new process with ``cache`` as cache folder."""
    code = "import json; from ampopt.bench.small import first_step; "
    code += f"print(json.dumps(first_step({count})))"
    environment = {"XDG_CACHE_HOME": cache, ENVIRONMENT: ampopt.get_backend()}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


def first_step(count: int) -> dict[str, float]:
    """The CPU time of a first step in seconds, by contender, torch's first.

    It is that of all threads of this process and of the compilers that the step waits for. Making
    the optimizer is not part of it.
    """
    torch.set_num_threads(1)
    params = _workload(count).parameters(torch.float32, torch.device("cpu"))
    gradients, seconds = workloads.Gradients(params), {}
    for name in (_TORCHS, contenders.AMPOPT):
        step = contenders.enter(name, "AdamW", params).step
        gradients.restore()
        start = _cpu_seconds()
        step()
        seconds[name] = _cpu_seconds() - start
    return seconds


def _cpu_seconds() -> float:
    """CPU time of this process, and of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _workload(count: int) -> workloads.Workload:
    """``count`` tensors of 64 elements."""
    return workloads.Workload(f"{count} x {_ELEMENTS}", ((_ELEMENTS,),) * count)
