"""``python -m ampopt.bench``: ampopt against torch's for-loop, foreach and fused optimizers.

Every contender steps under a loss scale, with and without clipping: torch's optimizers under
``torch.amp.GradScaler`` (``step`` and ``update``), ampopt's by ``unscale_and_step`` with a
``DynamicLossScale``. For optimizers that torch lacks, such as LAMB, for-loop and foreach are
pytorch_optimizer's.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import ampopt
from ampopt.bench import contenders, report, rows, small, workloads
from ampopt.bench.measure import CLOCKS
from ampopt.bench.memory_bandwidth import bandwidth
from ampopt.bench.plot import plot
from ampopt_kernels.native.build import cpp_compiler

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_NOT_OF_SMALL = (
    *("optimizer", "contender", "workload", "dtype", "threads", "clock"),
    *("plot", "elements", "sizes", "masters", "changing"),
)
"""Options that ``--small`` would ignore, and refuses."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the arguments select, and print it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device
    if options.clock == "cpu" and (device.type != "cpu" or torch.get_num_threads() != 1):
        parser.error("--clock cpu reads the time of one thread: add --device cpu --threads 1")
    if options.clock == "busiest" and (device.type != "cpu" or sys.platform != "linux"):
        parser.error("--clock busiest reads the times of threads on Linux: add --device cpu")
    given = (name for name in _NOT_OF_SMALL if getattr(options, name) != parser.get_default(name))
    if options.small and (name := next(given, None)):
        parser.error(f"--small has its own steps, on one thread: leave out --{name}")
    if options.masters and options.dtype not in ("bfloat16", "float16"):
        parser.error("--masters: master weights are of half precision; add --dtype bfloat16")
    names = contenders.names(device, options.masters)
    if unknown := set(options.contender or ()) - set(names):
        parser.error(f"--contender: {min(unknown)} is not measured; choose from {', '.join(names)}")
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


def _run(options: argparse.Namespace, device: torch.device) -> None:
    """Measure and print what the other options select: the small table, or rows."""
    dtype = getattr(torch, options.dtype)
    optimizers = options.optimizer or contenders.optimizers()
    settings = {"clock": options.clock, "dtype": options.dtype}
    settings["masters"] = "float32" if options.masters else None
    settings["changing"] = workloads.CHANGING if options.changing else None
    about = {**report.environment(device), **settings}
    if options.small:
        about |= {"threads": 1, "clock": "cpu" if device.type == "cpu" else "wall"}
    print(", ".join(f"{key} {value}" for key, value in about.items() if value is not None))
    if options.small:
        time = "of CPU time on one thread" if device.type == "cpu" else "until a step returns"
        print(f"\nmicroseconds {time}, medians; float32 tensors of 64 elements:")
        small_rows = small.measure(device, rounds=options.repeats, seconds=options.seconds)
        print(small.table(small_rows))
        figures = {"environment": about, "rows": [asdict(row) for row in small_rows]}
        report.write_json(options.json, figures)
        return
    speed = bandwidth(device, options.clock)
    what = "memory streams" if device.type == "cpu" else "copies on the device run"
    print(f"{what} at {speed / 1e9:.1f} GB/s" if speed else "memory was not measured", flush=True)
    others = options.elements or options.sizes
    names = options.workload or ([] if others else workloads.WORKLOADS)
    sizes = [workloads.make(name, device, _room(device, dtype)) for name in names]
    sizes += [workloads.of(elements) for elements in options.elements or ()]
    sizes += workloads.powers_of_two() if options.sizes else []
    measure = functools.partial(
        rows.measure,
        dtype=dtype,
        device=device,
        rounds=options.repeats,
        clock=options.clock,
        masters=options.masters,
        changing=options.changing,
        only=options.contender or (),
    )
    bench_rows = rows.measure_all(measure, sizes, optimizers, device, options.seconds)
    _print(bench_rows, device)
    rows_as_dicts = [row.as_dict() for row in bench_rows]
    figures = {"environment": about, "bandwidth": speed, "rows": rows_as_dicts}
    report.write_json(options.json, figures)
    if options.plot:
        plot(bench_rows, options.plot)


def _print(bench_rows: list[rows.BenchRow], device: torch.device) -> None:
    """Print the tables of the rows, and what was not measured."""
    whose = "" if device.type == "cpu" else " of device time; host time is in the table below"
    print(f"\nmilliseconds a step{whose}:")
    print("each cell: median, and half of the interquartile range, of all rounds;")
    print("/best: ampopt's median over that of torch's fastest; fastest: the same of the minima;")
    print("/floor: ampopt's median over the time to move its bytes at the measured bandwidth")
    if any(contenders.FLOAT32 in row.times for row in bench_rows):
        print("/float32: ampopt's fastest round over that of its step of float32 parameters")
    print("ampopt:16 and ampopt:8 are ampopt with state_bits=16 and 8; of ampopt:8, any master")
    print("weights have master_bits=24")
    print(report.table(bench_rows))
    if any(row.allocated for row in bench_rows):
        print("\nbytes of parameters, gradients, states and master weights, for each element of a")
        print("parameter; time: that of a step with small states, divided by ampopt's with 32 bits")
        print(report.memory(bench_rows))
    if device.type == "cuda":
        print("\nbesides time, for one step")
        print(report.costs(bench_rows))
    if notes := set().union(*(row.notes for row in bench_rows)):
        print("\nnot measured:", *sorted(notes), sep="\n  ")


def _room(device: torch.device, dtype: torch.dtype) -> int | None:
    """How many elements fit a GPU with the states of all contenders; ``None`` on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # Parameters, two sets of gradients, two states of each contender, and copies made by foreach.
    # The 1 GiB is for the buffers that flush the cache and measure bandwidth.
    copies = 3 + 2 * len(contenders.names(device)) + 4
    return max(0, int(0.9 * free) - (1 << 30)) // (copies * dtype.itemsize)


def _parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m ampopt.bench", description=__doc__)
    names, others = contenders.optimizers(), contenders.others()
    parser.add_argument(
        "--optimizer",
        action="append",
        choices=[*names, *others],
        metavar="NAME",
        help=f"repeatable; default: all of {', '.join(names)}; also possible: {', '.join(others)}",
    )
    parser.add_argument(
        "--contender",
        action="append",
        metavar="NAME",
        help="repeatable; a column of the table, such as fused or ampopt; default: all",
    )
    parser.add_argument(
        "--workload",
        action="append",
        choices=[*workloads.WORKLOADS, *workloads.ASKED_FOR],
        metavar="NAME",
        help=f"repeatable; default: all of {', '.join(workloads.WORKLOADS)}; also possible: "
        f"{', '.join(workloads.ASKED_FOR)}, which is for Muon",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "triton", "compiled", "eager"),
        help="ampopt's backend; default: compiled on a CPU with a C++ compiler, else auto",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="float32", help="dtype of the parameters"
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device",
        type=_device,
        default=default,
        help="cpu or cuda; default here: %(default)s",
    )
    parser.add_argument(
        "--repeats", type=_positive(int), default=200, help="maximum number of rounds"
    )
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        default=240.0,
        help="time for all rows; default: %(default)s",
    )
    parser.add_argument("--threads", type=_positive(int), help="number of torch's CPU threads")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: CPU time of the thread, for a busy machine; busiest: that of the busiest of "
        "several threads, on Linux, with OMP_WAIT_POLICY=PASSIVE; default: wall",
    )
    parser.add_argument("--json", type=_file, metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help="draw the ratios to this file; needs matplotlib",
    )
    parser.add_argument(
        "--elements",
        action="append",
        type=_positive(int),
        metavar="N",
        help="repeatable; 16 tensors with N elements in total, instead of the workloads",
    )
    parser.add_argument(
        "--sizes",
        action="store_true",
        help="instead of the workloads, tensors of 64 elements, of 128, and so on to 16 Mi: 300 "
        "tensors of each size, or fewer where 300 would have more than 16 Mi elements in total",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="only show the host's time for AdamW's steps of 1 to 2,000 tensors of 64 elements, on "
        "one thread: of a step like the last one, of steps with something changed, of a first step",
    )
    parser.add_argument(
        "--masters",
        action="store_true",
        help="step float32 master weights of parameters and gradients in half precision, as for "
        "parameters on the host; torch's optimizers, and DeepSpeed's if it is installed, "
        "step float32 copies between casts; the column float32 is ampopt with float32 parameters",
    )
    parser.add_argument(
        "--changing",
        action="store_true",
        help="in each step, a random quarter of the parameters has no gradient, as with routed "
        "experts or stochastic depth",
    )
    return parser


def _device(text: str) -> torch.device:
    """The device of that name, on which steps can be timed."""
    kind = text.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text} cannot be timed; choose cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"torch finds no device for {text}; choose cpu")
    return torch.device(text)


def _file(text: str) -> str:
    """The path of a file that can be written once everything is measured."""
    if not (folder := Path(text).parent).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}: make it first")
    return text


def _picture(text: str) -> str:
    """The path of a file that can be drawn once everything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise argparse.ArgumentTypeError(
            "needs matplotlib, which cannot be imported: install it, or omit --plot and use --json"
        ) from error
    return _file(text)


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for ``argparse``: a number of type ``kind`` above 0."""

    def number(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
        return value

    return number


if __name__ == "__main__":
    main()
