"""``python -m ampopt.bench``: ampopt beside torch's for-loop, foreach and fused optimizers.

Every contender steps under a loss scale, torch's under ``torch.amp.GradScaler`` (step and update)
and ampopt's by ``unscale_and_step`` with a ``DynamicLossScale``, without clipping and with. Of
optimizers that torch lacks, such as LAMB, for-loop and foreach are pytorch_optimizer's.
"""

import argparse
import contextlib
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import ampopt
from ampopt.backend import backend_for
from ampopt.bench import (
    autocast,
    contenders,
    first_steps,
    launches,
    on_ranks,
    report,
    rows,
    workloads,
)
from ampopt.bench.first_hour import hour
from ampopt.bench.first_hour.parts import PARTS
from ampopt.bench.measure import CLOCKS, reason
from ampopt.bench.memory import bandwidth
from ampopt.bench.overhead import overhead
from ampopt.bench.plot import plot, require_matplotlib
from ampopt_kernels.cpu.build import cpp_compiler

_DTYPES = ("float32", "float64", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for and print it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plot:
        try:
            require_matplotlib()
        except ImportError as error:
            parser.error(str(error))
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device: {device} has no clock here; choose cpu or cuda")
    if options.launches and (backend := options.backend or "auto") != "triton":
        if device.type == "cpu" or backend != "auto":
            parser.error(f"--launches: the {backend} backend launches no kernels on {device}")
    if options.clock == "cpu" and (device.type != "cpu" or torch.get_num_threads() != 1):
        parser.error("--clock cpu reads the time of one thread: add --device cpu --threads 1")
    if options.first_steps and (device.type != "cpu" or cpp_compiler() is None):
        parser.error("--first-steps: rules are compiled on a CPU, with a C++ compiler")
    if options.ranks and (device.type != "cpu" or options.clock != "wall"):
        parser.error("--ranks: they are processes of this machine's CPU, by the wall clock")
    if options.ranks and (options.profile or options.launches or options.first_steps):
        parser.error("--ranks: times steps, and shows nothing else of them")
    if options.ranks and not torch.distributed.is_available():
        parser.error("--ranks: this build of torch has no torch.distributed")
    if options.part and not options.first_hour:
        parser.error("--part: names parts of --first-hour DIR, which is missing")
    if options.first_hour:
        _first_hour(parser, options, device)
        return
    if options.backend is None:
        options.backend = "compiled" if device.type == "cpu" and cpp_compiler() else "auto"
    before = ampopt.get_backend()
    try:
        ampopt.set_backend(options.backend)
        _run(options, device)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        ampopt.set_backend(before)


def _first_hour(
    parser: argparse.ArgumentParser, options: argparse.Namespace, device: torch.device
) -> None:
    before = ampopt.get_backend()
    try:
        ampopt.set_backend("triton")
        backend_for(device)
    except RuntimeError as error:
        parser.error(f"--first-hour: {error}")
    finally:
        ampopt.set_backend(before)
    parts = [part for part in PARTS if part.name in (options.part or [part.name])]
    about = report.environment(device)
    outcomes = hour.run(parts, Path(options.first_hour), options.device, about)
    print(f"written to {options.first_hour}; begin with summary.md there")
    if not all(outcome.passed for outcome in outcomes):
        sys.exit(1)


def _run(options: argparse.Namespace, device: torch.device) -> None:
    begun = time.perf_counter()
    dtype = getattr(torch, options.dtype)
    chosen = options.optimizer or contenders.optimizers()
    asked = {"clock": options.clock, "dtype": options.dtype, "ranks": options.ranks}
    about = {**report.environment(device), **asked}
    print(", ".join(f"{key} {value}" for key, value in about.items() if value is not None))
    if options.autocast:
        given = {"rounds": options.repeats, "seconds": options.seconds, "clock": options.clock}
        print("\nmicroseconds of the host for each call of an operator, by what is around it:")
        print(autocast.table(autocast.measure(device, **given)))
        return
    speed = bandwidth(device, options.clock)
    what = "memory streams" if device.type == "cpu" else "copies on the device run"
    print(f"{what} at {speed / 1e9:.1f} GB/s" if speed else "memory was not measured", flush=True)
    others = options.elements or options.ranks
    named = options.workload or ([] if others else workloads.WORKLOADS)
    sizes = [workloads.make(name, device, _room(device, dtype)) for name in named]
    sizes += [workloads.of(elements) for elements in options.elements or ()]
    sizes = sizes or list(workloads.SHARDED)
    if options.launches:
        _print_launches(chosen, sizes, dtype, device, speed)
        return
    if options.first_steps:
        found = [
            first_steps.measure(optimizer, workload, dtype=options.dtype)
            for workload, optimizer in itertools.product(sizes, chosen)
        ]
        print(f"\nmilliseconds for the first {first_steps.STEPS} steps in all, by auto:")
        print("cold, with nothing compiled before, and warm; best: of for-loop and foreach")
        print(first_steps.table(found))
        return
    with contextlib.ExitStack() as stack:
        measure = functools.partial(rows.measure, device=device, clock=options.clock)
        left = options.seconds
        if options.ranks:
            left -= time.perf_counter() - begun
            processes = stack.enter_context(on_ranks.Processes(options.ranks, left))
            measure, left = functools.partial(on_ranks.measure, processes), processes.left
        measured = _measured(measure, options, sizes, chosen, device, left)
    if options.profile:
        return
    _note("")
    _print(measured, device)
    if options.json:
        text = json.dumps(report.as_json(measured, about, speed), indent=1)
        Path(options.json).write_text(text + "\n")
    if options.plot:
        plot(measured, options.plot)


def _measured(
    measure: Callable[..., list[rows.Row]],
    options: argparse.Namespace,
    sizes: Sequence[workloads.Workload],
    chosen: Sequence[str],
    device: torch.device,
    left: float,
) -> list[rows.Row]:
    """The rows of every optimizer on every workload, in ``left`` seconds if that is enough."""
    dtype, measured = getattr(torch, options.dtype), []
    jobs = [(optimizer, workload) for workload in sizes for optimizer in chosen]
    for done, (optimizer, workload) in enumerate(jobs):
        start = time.perf_counter()
        if options.profile:
            print(f"\n{overhead(optimizer, workload, dtype=dtype, device=device)}", flush=True)
            continue
        _note(f"{done + 1}/{len(jobs)} {optimizer} {workload.name}")
        try:
            new = measure(
                optimizer,
                workload,
                dtype=dtype,
                rounds=options.repeats,
                seconds=max(0.0, left) / (len(jobs) - done),
            )
        except Exception as error:  # the rows that there are, are not lost
            new = rows.unmeasured(optimizer, workload, device, error)
        left = max(0.0, left - (time.perf_counter() - start))
        measured += new
    return measured


def _print_launches(
    chosen: Sequence[str],
    sizes: Sequence[workloads.Workload],
    dtype: torch.dtype,
    device: torch.device,
    speed: float | None,
) -> None:
    """Each launch, with masters where parameters may have some, without clipping and with."""
    masters = (False,) if dtype in (torch.float32, torch.float64) else (False, True)
    for workload, optimizer, master_weights, clip in itertools.product(
        sizes, chosen, masters, (None, 1.0)
    ):
        title = f"{optimizer}, {workload.name}, {dtype}"
        title += ", masters" * master_weights + ", clipped" * (clip is not None)
        try:
            rows = launches.measure(
                optimizer,
                workload,
                dtype=dtype,
                device=device,
                master_weights=master_weights,
                max_norm=clip,
            )
        except torch.OutOfMemoryError as error:
            print(f"\n{title}: {reason(error)}", flush=True)
        else:
            print(f"\n{title}\n{launches.table(rows, speed)}", flush=True)


def _print(measured: list[rows.Row], device: torch.device) -> None:
    whose = "" if device.type == "cpu" else " of the device, the host's apart below"
    print(f"\nmilliseconds a step{whose}:")
    print("median, and half the range of the middle half of the rounds;")
    print("ampopt to torch's best: medians, and fastest rounds; ampopt to the floor: medians,")
    print("the floor being the fastest stream through memory in the same rounds")
    print(report.table(measured))
    if device.type == "cuda":
        print("\nbesides time, for one step")
        print(report.costs(measured))
    missing = {
        f"{row.optimizer}, {name}: {reason}"
        for row in measured
        for name, reason in (*row.missing.items(), *row.unknown.items())
    }
    if missing:
        print("\nleft out:", *sorted(missing), sep="\n  ")


def _room(device: torch.device, dtype: torch.dtype) -> int | None:
    """Elements for which parameters, gradients and everyone's states fit a GPU; else ``None``."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # Parameters, two sets of gradients, two states of each contender, and foreach's copies; and
    # what caches are flushed with and memory is measured by.
    copies = 3 + 2 * len(contenders.names(device)) + 4
    return max(0, int(0.9 * free) - (1 << 30)) // (copies * dtype.itemsize)


def _note(text: str) -> None:
    """Say on a terminal what is going on, over what was said before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ampopt.bench", description=__doc__)
    known, others = contenders.optimizers(), contenders.others()
    parser.add_argument(
        "--optimizer",
        action="append",
        choices=[*known, *others],
        metavar="NAME",
        help=f"repeatable; default: all of {', '.join(known)}; or {', '.join(others)}",
    )
    parser.add_argument(
        "--workload",
        action="append",
        choices=[*workloads.WORKLOADS, *workloads.ASKED_FOR],
        metavar="NAME",
        help=f"repeatable; default: all of {', '.join(workloads.WORKLOADS)}; or "
        f"{', '.join(workloads.ASKED_FOR)}, which is for Muon",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "triton", "compiled", "eager"),
        help="of ampopt; default: compiled on a CPU with a C++ compiler, else auto",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the parameters")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda; default here: %(default)s")
    parser.add_argument("--repeats", type=_positive(int), default=200, help="rounds at most")
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        default=240.0,
        help="to spend on all rows, however little remains for each (with --ranks, those for "
        "which nothing remains are left out); default: %(default)s",
    )
    parser.add_argument("--threads", type=_positive(int), help="for torch on the CPU")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: the processor's time, for a machine that is busy otherwise; default: wall",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios; needs matplotlib")
    parser.add_argument(
        "--profile", action="store_true", help="show where the host's time goes, nothing else"
    )
    parser.add_argument(
        "--launches",
        action="store_true",
        help="show what each launch takes of the host and of the device, nothing else",
    )
    parser.add_argument(
        "--autocast",
        action="store_true",
        help="measure what ampopt.autocast costs the host for an operator, nothing else",
    )
    parser.add_argument(
        "--first-steps",
        action="store_true",
        help="measure the first steps of auto, some of them not compiled yet, nothing else",
    )
    parser.add_argument(
        "--first-hour",
        metavar="DIR",
        help="find out what a new GPU does, in order of what would end it, each part in a process "
        "of its own under a timeout, and leave all results in DIR; nothing else",
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=[part.name for part in PARTS],
        help=f"repeatable; of --first-hour, by default all of "
        f"{', '.join(part.name for part in PARTS)}",
    )
    parser.add_argument(
        "--ranks",
        type=_positive(int),
        metavar="N",
        help="shard the tensors over N processes, which decide together; without --workload or "
        "--elements, 50 matrices, small ones and large ones",
    )
    parser.add_argument(
        "--elements",
        action="append",
        type=_positive(int),
        metavar="N",
        help="repeatable; 16 tensors of N elements in all, in place of the workloads",
    )
    return parser


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
        return value

    return number


if __name__ == "__main__":
    main()
