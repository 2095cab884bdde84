"""``profile``: a report in plain words of what steps cost and how they run."""

import contextlib
import inspect
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch

import ampopt_kernels
from ampopt import _synchronization
from ampopt._step import gradients
from ampopt._step.rule_step import FIRST, RuleStep
from ampopt._step.step_rollback import Mode, SkipPolicy
from ampopt.backend import backend_for
from ampopt.optimizer import Optimizer, check_optimizer
from ampopt_kernels.step_data import Decision

__all__ = ["Look", "Profile", "profile"]


class Look(NamedTuple):
    """A place in the code where the host read a tensor.

    Attributes:
        where: file and line, or the operation of the optimizer.
        line: the line of source; ``"?"`` if unknown.
        waits: whether this waits on a GPU.
    """

    where: str
    line: str
    waits: bool = True


@dataclass
class Profile:
    """The report on a ``with profile(...)`` block; print it.

    Attributes:
        steps: the number of steps that each optimizer attempted, by name.
        paths: how each parameter was stepped in the last step, by optimizer and parameter name.
        plans: how often each optimizer made a new plan of its steps, by name and reason. Only an
            optimizer with an update rule has a plan. It makes the plan in its first step, which is
            not counted, and later steps use it as long as nothing changes.
        launches: the number of launches of each of ampopt's kernels, by name, over all steps.
        kernels: the names of all kernels launched on CUDA devices, by any library; ``None`` without
            a CUDA device.
        looks: the places where the host read a tensor, which synchronizes on a CUDA device, and how
            often.
    """

    steps: Counter[str] = field(default_factory=Counter)
    paths: dict[str, dict[str, str]] = field(default_factory=dict)
    plans: dict[str, Counter[str]] = field(default_factory=dict)
    launches: Counter[str] = field(default_factory=Counter)
    kernels: list[str] | None = None
    looks: Counter[Look] = field(default_factory=Counter)

    def __str__(self) -> str:
        """The report."""
        return "\n".join([*self._on_steps(), *self._on_launches(), *self._on_looks()])

    def _on_steps(self) -> Iterator[str]:
        """The lines on how each optimizer stepped its parameters, and why its plan was changed."""
        for name, paths in self.paths.items():
            n = self.steps[name]
            yield f"{name}: {_count(n, 'step')}" + (". In the last one:" if n else "")
            by_path: dict[str, list[str]] = {}
            for parameter, path in paths.items():
                by_path.setdefault(path, []).append(parameter)
            for path, parameters in by_path.items():
                names = ", ".join(parameters[:3]) + (", ..." if len(parameters) > 3 else "")
                yield f"  {_count(len(parameters), 'parameter')} ({names}): {path}"
            for reason, times in self.plans.get(name, {}).items():
                yield f"  plan of its steps made again {_count(times, 'time')}: {reason}"

    def _on_launches(self) -> Iterator[str]:
        """The lines on the number of kernels that were launched."""
        total, steps = self.launches.total(), self.steps.total()
        if total:
            parts = ", ".join(f"{n} {name}" for name, n in sorted(self.launches.items()))
            each = f", {total / steps:g} a step" if steps else ""
            yield f"ampopt launched {_count(total, 'kernel')}{each}: {parts}."
        if self.kernels is not None:
            yield f"{_count(len(self.kernels), 'kernel')} ran in all, whoever launched them."

    def _on_looks(self) -> Iterator[str]:
        """The lines on where the host read tensors, or waited for the device."""
        n, on_cuda = self.looks.total(), self.kernels is not None
        waits = sum(times for look, times in self.looks.items() if look.waits)
        if not n and on_cuda:
            yield "The host never waited for the device."
        elif not n:
            yield "The host looked at no tensor, so on a GPU it would wait for nothing."
        elif on_cuda:
            yield f"The host waited for the device {_count(n, 'time')}:"
        else:
            how_often = (
                "each time" if waits == n else _count(waits, "time") if waits else "for none"
            )
            yield (
                f"The host looked at tensors {_count(n, 'time')}. That costs nothing on the CPU; "
                f"on a GPU it would wait {how_often}:"
            )
        for (where, line, _), times in self.looks.items():
            yield f"  {where}" + (f", {_count(times, 'time')}" * (times > 1)) + f": {line}"


@contextlib.contextmanager
def profile(*optimizers: Optimizer) -> Iterator[Profile]:
    """Profile a block of training, and report in plain words what its steps cost.

    The report answers three questions: where the host waits for the device, how many kernels a step
    launches, and how each parameter was stepped. Profile one or two steps, after the first few,
    which create states and compile::

        with ampopt.profile(optimizer) as report:
            train_one_step()
        print(report)

    On a CUDA device, the waits are those that torch detects (``set_sync_debug_mode``), and all
    kernels are counted; the block synchronizes at its end. On the CPU nothing waits: the report
    lists where Python read a tensor, which would wait on a GPU. The report omits reads that ampopt
    makes only because the tensors are on the CPU. It lists the read of the overflow flag before a
    hand-written step, because that read happens on a GPU, too. Exception: a step that the GPU can
    undo (a *transaction*) needs no read, and the report says so. Steps are slower in the block. Do
    not use it from several threads at once, nor for a model that is compiled in the block.

    Args:
        optimizers: the optimizers to report on.

    Yields:
        A :class:`Profile`, complete after the block.

    Raises:
        TypeError: an argument is not an ampopt optimizer.
        ValueError: there are no arguments.
    """
    if not optimizers:
        raise ValueError("profile() needs one or more optimizers: profile(optimizer)")
    for optimizer in optimizers:
        check_optimizer(optimizer)
    report = Profile()
    devices = {p.device for o in optimizers for group in o.param_groups for p in group["params"]}
    on_cuda = next((device for device in devices if device.type == "cuda"), None)
    with contextlib.ExitStack() as stack:
        for name, optimizer in zip(_names(optimizers), optimizers, strict=True):
            paths = _paths_of(optimizer, name, report, counts_flags=on_cuda is None)
            stack.enter_context(paths)
        for backend in {backend_for(device) for device in devices}:
            if backend.name == "triton":
                launch = _counting(backend._launch, report.launches)  # type: ignore[attr-defined]
                stack.enter_context(mock.patch.object(backend, "_launch", launch))
        if on_cuda is None:
            stack.enter_context(_synchronization.watching(lambda look: _note(report)))
            yield report
            return
        kernels = stack.enter_context(_synchronization.kernels(on_cuda))
        waits = stack.enter_context(_synchronization.synchronizations())
        yield report
    report.kernels = kernels
    for wait in waits:
        report.looks[_look(wait.filename, wait.lineno)] += 1


def _names(optimizers: tuple[Optimizer, ...]) -> list[str]:
    """The class names of the optimizers, numbered where several have one class."""
    names = [type(optimizer).__name__ for optimizer in optimizers]
    return [f"{n} {i + 1}" if names.count(n) > 1 else n for i, n in enumerate(names)]


def _counting(launch: Callable[..., None], launches: Counter[str]) -> Callable[..., None]:
    """``launch`` of the Triton backend, which also counts each kernel in ``launches``."""

    def launch_counted(device: Any, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
        if programs:  # a launch of 0 programs only compiles
            launches[variant.name.removesuffix("_kernel")] += 1
        launch(device, variant, programs, arguments)

    return launch_counted


# --- paths ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _paths_of(
    optimizer: Optimizer, name: str, report: Profile, *, counts_flags: bool
) -> Iterator[None]:
    """Within the block, record in ``report`` how ``optimizer`` steps each parameter.

    With ``counts_flags``, count the readings of its overflow flag, which nothing else detects.
    """
    paths = report.paths[name] = {}
    modes: list[Mode] = []  # how the running step is skipped after an overflow

    def noting(
        skip_policy: SkipPolicy, stepped_optimizer: Any, step: Any, decision: Decision
    ) -> Any:
        if stepped_optimizer is not optimizer:
            return skipper_step(skip_policy, stepped_optimizer, step, decision)
        modes.append(skip_policy.mode)
        tried = skip_policy.on_accelerator or skip_policy
        outcome = skipper_step(tried, optimizer, step, decision)
        if counts_flags and (skip_policy.mode == "host" or tried.has_read_flag):
            report.looks[_flag_of(name, waits=tried.has_read_flag)] += 1
        return outcome

    def after(*_: Any) -> None:
        if optimizer._ampopt.is_stepping:
            return
        path = _path(optimizer, modes.pop() if modes else None)
        report.steps[name] += 1
        for _group, p, parameter in gradients.named_params(optimizer.param_groups):
            paths[parameter] = path if p.grad is not None else "not stepped, without a gradient"

    plans_before = _plans_of(optimizer)
    hook, skipper_step = optimizer.register_step_post_hook(after), SkipPolicy.step
    try:
        with mock.patch.object(SkipPolicy, "step", noting):
            yield
    finally:
        hook.remove()
        report.plans[name] = _plans_of(optimizer) - plans_before


def _plans_of(optimizer: Optimizer) -> Counter[str]:
    """How often the optimizer has made a new plan, by the reason."""
    ours = optimizer._ampopt
    plans = ours.runner.reasons.copy() if isinstance(ours, RuleStep) else Counter()
    plans.pop(FIRST, None)
    return plans


def _path(optimizer: Optimizer, mode: Mode | None) -> str:
    """How the last step treated the parameters that have gradients."""
    which = "a hand-written step"
    ours = optimizer._ampopt
    if isinstance(ours, RuleStep):
        if not ours.needs_torch():
            return f"by the rule, on the {backend_for(ours.decision_device).name} backend"
        which = "torch's own step"
    if mode is None:
        # Without a scale there is no decision. With one, the closure's evaluations were checked.
        checked = ours.decision_of_step is not None
        if checked and ours.skip_by == "step":
            return f"{which}, which skips by itself"
        return f"{which}, {'checked after each evaluation' if checked else 'unchecked'}"
    skip_policy: Any = ours.skip_policy
    if skip_policy.mode == "transaction":
        added = ". It added state, so the host looked at the overflow flag"
        return (
            f"{which}, as a transaction: taken, and undone on the device if it overflowed"
            f"{added if skip_policy.has_read_flag else ''}"
        )
    description = f"{which}, after the host looked at the overflow flag"
    if skip_policy.reason is not None:
        return f"{description}, as the step {skip_policy.reason}"
    if ours.skip_by == "host":
        return f"{description}, as skip_by='host' says"
    on_gpu = skip_policy.on_accelerator
    if on_gpu.mode == "host":
        return f"{description}; on a GPU too, as the step {on_gpu.reason}"
    can = (
        "profile one more step to see whether it can be a transaction on a GPU"
        if on_gpu.has_read_flag
        else "on a GPU it can be a transaction, if all its states are there"
    )
    return f"{description}, which costs nothing on the CPU; {can}"


# --- looks ------------------------------------------------------------------------------------

_HERE = Path(__file__).parent
_AMPOPT = (str(_HERE), str(Path(ampopt_kernels.__file__ or "").parent))
_TORCH = (str(Path(torch.__file__).parent), contextlib.__file__, "<")
_WATCH = tuple(str(_HERE / f"{name}.py") for name in ("_synchronization", "profiling"))
_STEPPING = tuple(str(_HERE / f"{name}.py") for name in ("optimizer", "elementwise"))
_REPLAY = Look("a closure's replay", "is the loss finite, did a gradient overflow?")
_LBFGS_FILE = inspect.getfile(torch.optim.LBFGS)
_LBFGS = Look("torch's LBFGS", "its line search, and whether it has converged")


def _flag_of(name: str, *, waits: bool) -> Look:
    """The reading of the overflow flag before a step of the optimizer ``name``."""
    said = "skip this step?" + ("" if waits else " (a transaction on a GPU does not look)")
    return Look(f"{name}'s overflow flag", said, waits)


def _note(report: Profile) -> None:
    """Count a read of a tensor at the line of the user's code that made it.

    A read within a step of ampopt is not counted: it is made only because the device is the CPU.
    """
    own: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_AMPOPT):
            if file not in _WATCH:
                own.append(frame)
        elif not file.startswith(_TORCH):
            break
        elif not own and file == _LBFGS_FILE:
            report.looks[_LBFGS] += 1
            return
        frame = frame.f_back
    if own and own[0].f_code.co_filename == str(_HERE / "_step" / "closure_replay.py"):
        report.looks[_REPLAY] += 1
        return
    stepping = any(
        f.f_code.co_filename in _STEPPING or f.f_code.co_name == "next"  # LossScale.next
        for f in own
    )
    if frame is not None and not stepping:
        report.looks[_look(frame.f_code.co_filename, frame.f_lineno)] += 1


def _look(file: str, line: int) -> Look:
    """The line ``line`` of ``file``, as a :class:`Look`."""
    return Look(f"{Path(file).name}:{line}", linecache.getline(file, line).strip() or "?")


def _count(n: int, noun: str) -> str:
    """``n`` and ``noun``, in the plural unless ``n`` is 1."""
    return f"{n} {noun}" + "s" * (n != 1)
