"""Compile the Triton kernels of all rules without a GPU, and report on their machine code.

    python -m evidence.aot [--dump DIR] [--target sm_90 ...] [--rule adam ...] [--quick]

prints one line for each kernel, rule, dtype and target::

    update adam float32 sm_90 ok registers=70 spills=0 vectorized=yes barriers=0 bytes=28

``registers`` and ``spills`` are those of a thread; spills are bytes of stack on NVIDIA, registers
on AMD. The other numbers are of the loop over whole blocks: it is ``vectorized`` if every access is
16 bytes wide (for a tensor of a narrower dtype, as many elements as the widest one's 16 bytes
hold); ``barriers`` are points where threads wait for each other; ``bytes`` are read and written for
each element. The kernels are those that the triton backend launches for a step of a small
:class:`Work`; the launches are recorded instead of run.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ampopt_kernels import rules
from ampopt_kernels.check_rule.by_triton import TARGETS, gpu_target
from ampopt_kernels.element_indices import ElementIndices, Jump
from ampopt_kernels.language import HAS_TRITON, INTERPRETED
from ampopt_kernels.low_bits import LOW_BITS
from ampopt_kernels.next_scale import PolicyConstants
from ampopt_kernels.row_column_means import RowColumnMeans
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_decision import LONGEST_WINDOW, RUNNING, Check, Window
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.tensors import arithmetic
from evidence import machine_code

__all__ = ["Case", "RecordedLaunch", "Report", "cases", "count_hyper", "launches", "main"]

DTYPES = ("float32", "float64", "float16", "bfloat16")


class _Checks:
    """A skip condition with a check of every kind, in place of an ``ampopt.skip_when``."""

    def checks(self, device: torch.device) -> list[Check]:
        """One check of each kind; see :attr:`Request.causes`."""
        running, window = (
            torch.zeros(n, dtype=torch.float64, device=device)
            for n in (RUNNING, 2 + LONGEST_WINDOW)
        )
        last = Window(LONGEST_WINDOW, latest=0, correction=1, leaves_out=0)
        return [
            Check(2.0, of_norm=1.0, limit=1.0),
            Check(2.0, of_norm=1.0, deviations=1.0, warmup=2.0, statistics=running),
            Check(3.0, of_norm=0.0, deviations=1.0, window=last, statistics=window),
        ]


_SCALE, _POLICY = torch.ones(()), PolicyConstants(*[0.5] * len(PolicyConstants._fields))
_SCALED = Request(scale=_SCALE, policy=_POLICY, counters=torch.zeros(2, dtype=torch.int32))
_ACCUMULATE = Request(scale=_SCALE, accumulate=True)
REQUESTS = {
    "scaled": _SCALED,
    "plain": Request(check=False),
    "flag given": Request(scale=_SCALE, found_inf=torch.zeros(())),
    "norm": Request(check=False, max_norm=1.0),
    "scaled norm": Request(scale=_SCALE, max_norm=1.0),
    "unscale": Request(scale=_SCALE, write=True),
    "unaligned": Request(scale=_SCALE),
    "watched": Request(scale=_SCALE, measure=True),
    "accumulate": _ACCUMULATE,
    "accumulate anew": _ACCUMULATE,
    "accumulate or reject": replace(_ACCUMULATE, found_inf=torch.zeros(())),
    "by chance": Request(check=False),
    "by chance in columns": Request(check=False),
    "skip checks": replace(_SCALED, max_norm=1.0, causes=(_Checks(),), loss=torch.zeros(())),
}
"""Kinds of steps; see :func:`launches`. The first is compiled for all rules, the others for one."""
SMALL_STATES = ("8 bits", "16 bits", "8 bits in columns")
"""Further kinds of steps, whose states have codecs."""
LOW_MASTERS = ("24-bit masters", "24-bit masters and 8 bits")
"""Further kinds of steps, of half-precision parameters with low bits."""
IN_16_BITS = ("float16", "bfloat16", "masters", LOW_MASTERS[-1])
"""Ways to keep 16-bit parameters: in that dtype alone, or bfloat16 with masters."""
IN_EVERY_WAY = ("adam", "sgd")
"""The rules that are compiled in all of these ways if few variants are."""
OPTIONAL = "flags", "external", "scale", "constants", "scheduled_by", "norm_out", "loss", "h_out"
"""Arguments of control that are ``None`` in some steps."""
QUICK = "compile fewer variants: flags all off or all on, and each kernel for one target in turn"


@dataclass(frozen=True)
class Case:
    """A step of one parameter.

    Attributes:
        rule: name of the rule in ``ampopt_kernels.rules``.
        flags: values of the rule's flags.
        dtype: dtype of the parameter.
        request: one of ``REQUESTS``, ``SMALL_STATES`` or ``LOW_MASTERS``.
        masters: whether the parameter has a float32 master weight.
    """

    rule: str
    flags: tuple[bool, ...]
    dtype: str
    request: str = "scaled"
    masters: bool = False


@dataclass(frozen=True)
class RecordedLaunch:
    """A recorded launch: the kernel, its name, and all of its arguments by name."""

    kernel: Any
    name: str
    arguments: dict[str, Any]

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument, or ``"constexpr"``."""
        from triton.runtime.jit import mangle_type

        constants = self.constants
        return {
            name: "constexpr" if name in constants else mangle_type(value)
            for name, value in self._by_order.items()
        }

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments, and those that are ``None``."""
        compile_time = {p.name for p in self.kernel.params if p.is_constexpr}
        return {k: v for k, v in self._by_order.items() if v is None or k in compile_time}

    @property
    def row(self) -> Any:
        """The :class:`RowLayout` of a kernel that reads rows; else ``None``."""
        return self.arguments.get("ROW")

    @property
    def _by_order(self) -> dict[str, Any]:
        """The arguments, in the order in which the kernel takes them."""
        return {p.name: self.arguments[p.name] for p in self.kernel.params}

    def variant(self, case: Case) -> str:
        """The compile-time options of the kernel in one word, for the report."""
        constants, row, names = self.constants, self.row, getattr(rules, case.rule).flags
        on = [k.lower() for k, v in constants.items() if v is True]
        has_scale = ["scale"] * (self.arguments.get("coefficients") is not None)
        if self.name in ("update", "reduce", "line"):
            on = [case.rule, *itertools.compress(names, row.flags)]
            on += ["masters"] if case.masters else []
            if self.name == "line":
                on.append("rows" if row.over[constants["TERM"]] == "rows" else "columns")
        elif self.name in ("control", "sum"):
            advance = constants.get("ADVANCE")
            flags = () if advance is None else advance.flag_sets[0]
            on += ["preview"] * (advance is not None and not advance.stores)
            given = [k for k in OPTIONAL if self.arguments.get(k) is not None]
            on = [case.rule, *itertools.compress(names, flags), *given, *on]
        elif self.name == "detect":
            on = has_scale + ["write"] * constants["PASS"].writes
            on += {1: [], 2: ["norm"]}.get(len(constants["PASS"].terms), ["measure"])
        else:  # accumulate
            on = has_scale + ["empty"] * row.flags[0] + ["reject"] * constants["N_H"]
        if row is not None:
            coded = itertools.compress(row.dtypes, row.codecs)
            on += ["stochastic"] * row.rounds
            if bits := {dtype.primitive_bitwidth for dtype in coded}:
                on.append(f"{min(bits)}_bits")
            on += ["24_bit_masters"] * row.has_low_bits + ["columns"] * bool(row.jumps)
            on += ["unaligned"] * (row.aligns[0] == 1)
        return "+".join(on) or "plain"


@dataclass(frozen=True)
class Task:
    """A compilation: launch number ``index`` of ``case``, for ``target``."""

    case: Case
    index: int
    target: str


@dataclass(frozen=True)
class Report:
    """The result of one compilation.

    Attributes:
        kernel: as :attr:`RecordedLaunch.name`.
        variant: as :meth:`RecordedLaunch.variant`.
        dtype: dtype of the parameter.
        target: ``sm_NN`` or ``gfxNNN``.
        assembly: PTX, or AMD's assembly.
        registers: registers of a thread.
        spills: bytes (NVIDIA) or registers (AMD) of a thread that are spilled to memory.
        accesses: width in bytes of each access to tensors in the loop.
        wide: the least width that counts as vectorized, in bytes.
        barriers: number of barriers in the loop.
        bytes: bytes that the loop reads and writes for each element.
        error: the error message if the compilation failed, else ``""``.
    """

    kernel: str
    variant: str
    dtype: str
    target: str
    assembly: str = ""
    registers: int = 0
    spills: int = 0
    accesses: tuple[int, ...] = ()
    wide: int = 16
    barriers: int = 0
    bytes: float = 0.0
    error: str = ""

    @property
    def vectorized(self) -> bool:
        """Whether every access in the loop is wide; ``False`` without a loop."""
        return bool(self.accesses) and min(self.accesses) >= self.wide

    def __str__(self) -> str:
        """The line of the report."""
        line = f"{self.kernel} {self.variant} {self.dtype} {self.target}"
        if self.error:
            return f"{line} failed {self.error}"
        line += f" ok registers={self.registers} spills={self.spills}"
        if self.kernel in ("control", "sum"):
            return (
                line  # these read a few numbers for each parameter, and have no loop to report on
            )
        vectorized = "yes" if self.vectorized else "no"
        return f"{line} vectorized={vectorized} barriers={self.barriers} bytes={self.bytes:g}"


def launches(case: Case) -> list[RecordedLaunch]:
    """The launches of the step that ``case`` describes, in order."""
    from ampopt_kernels.triton.backend import Triton

    rule: Rule = getattr(rules, case.rule)
    low = getattr(torch, case.dtype)
    has_low_bits = case.request in LOW_MASTERS
    state_dtype = torch.float32 if case.masters or has_low_bits else low

    bits = 8 if "8 bits" in case.request else 16 if case.request == "16 bits" else 32
    codecs = rule.codecs_for(case.flags, bits)

    def tensor(dtype: torch.dtype) -> torch.Tensor:
        elements = torch.zeros(65, dtype=dtype)
        return elements[1:] if case.request == "unaligned" else elements[:64]

    by_chance = case.request.startswith("by chance")
    draws = by_chance or any(codecs) or has_low_bits
    row = ParamRow(
        low,
        param=tensor(low if has_low_bits else state_dtype),
        state=tuple(
            tensor(part.dtype or state_dtype if codec is None else codec.dtype)
            for part, codec in zip(rule.state_for(case.flags), codecs, strict=True)
        ),
        copy=tensor(low) if case.masters else None,
        low=tensor(LOW_BITS) if has_low_bits else None,
        scalars=tuple(
            torch.zeros((), dtype=part.dtype) if part in rule.scalar_state_for(case.flags) else None
            for part in rule.scalar_state
        ),
        flags=case.flags,
        random_key=torch.zeros((), dtype=torch.int64) if draws else None,
        rounds=by_chance,
        indices=ElementIndices(0, (Jump(128, 0, 128),) * case.request.endswith("in columns")),
        codecs=codecs,
        scales=tuple(
            torch.zeros(1) if codec is not None and codec.has_scales else None for codec in codecs
        ),
    )
    if over := rule.averages_for(case.flags):
        parts = rule.row_column_states_for(case.flags)
        states = [torch.zeros(part.beside((1, 64))) for part in parts]
        row.row_column_means = RowColumnMeans(over, states, (1, 64))
    hyper = [[0.5] * count_hyper(rule, case.flags)]
    steps_by = None if case.request == "unscale" else rule
    work = Work(torch.device("cpu"), [row], [tensor(low)], steps_by, hyper)
    if case.request.startswith("accumulate"):
        row = ParamRow(low, tensor(arithmetic(low)), flags=(case.request == "accumulate anew",))
        work = Work(torch.device("cpu"), [row], [tensor(low)])
    is_scaled = case.request in (*SMALL_STATES, *LOW_MASTERS)
    request = _SCALED if is_scaled else REQUESTS[case.request]
    recordings: list[RecordedLaunch] = []

    def record(device: Any, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
        name, every = variant.name.removesuffix("_kernel"), {**arguments, **variant.constants}
        recordings.append(RecordedLaunch(variant.kernel, name, every))

    backend = Triton(record)
    run(lambda _: backend, [work], request)
    return recordings


def cases(names: Iterable[str], dtypes: Iterable[str], quick: bool = False) -> Iterator[Case]:
    """The cases to compile.

    Args:
        names: names of rules.
        dtypes: names of dtypes.
        quick: whether to try fewer flags. If not, all combinations with float32, and all off and
            all on with other dtypes. If so, all off and all on with float32, all on with float64
            (which needs the most registers), all off with 16-bit dtypes, of whose ways
            (``IN_16_BITS``) the rules take turns. Small states and 24-bit masters are tried with
            the flags that have most of them: in every way for Adam, and if ``quick``, only both
            together for the other rules.
    """
    names = list(names)

    def has(name: str, way: str) -> bool:
        turn = IN_16_BITS[names.index(name) % len(IN_16_BITS)]
        return not quick or name in IN_EVERY_WAY or way == turn or way not in IN_16_BITS

    for name, dtype in itertools.product(names, dtypes):
        n = len(getattr(rules, name).flags)
        every = list(itertools.product((False, True), repeat=n))
        extremes = list(dict.fromkeys((every[0], every[-1])))
        if quick and dtype != "float32":
            extremes = extremes[-1:] if dtype == "float64" else extremes[:1]
        for flags in every if dtype == "float32" and not quick else extremes:
            if has(name, dtype):
                yield Case(name, flags, dtype)
            if (dtype == "bfloat16" and has(name, "masters")) or (dtype == "float16" and not quick):
                yield Case(name, flags, dtype, masters=True)
        if name == names[0]:
            for request in list(REQUESTS)[1:]:
                if request.startswith("by chance") and dtype != "bfloat16":
                    continue  # only bfloat16 is rounded stochastically
                yield Case(name, every[0], dtype, request)
        small = max(every, key=functools.partial(_count_small_states, getattr(rules, name)))
        more = name == "adam" or not quick
        if more and dtype in ("float32", "bfloat16"):
            for request in SMALL_STATES[: None if name == "adam" else 1]:
                yield Case(name, small, dtype, request, masters=dtype == "bfloat16")
        low = dtype == "bfloat16" and has(name, LOW_MASTERS[-1])
        if low or (more and dtype == "float16"):
            for request in LOW_MASTERS[None if name == "adam" else -1 :]:
                yield Case(name, small, dtype, request)


def _count_small_states(rule: Rule, flags: tuple[bool, ...]) -> int:
    """The number of states of ``rule`` under ``flags`` that are kept in 8 bits."""
    return sum(codec is not None for codec in rule.codecs_for(flags, 8))


def tasks(all_cases: Iterable[Case], targets: Sequence[str], quick: bool = False) -> list[Task]:
    """The compilations: each different launch of the cases once, for each target.

    If ``quick``, each launch for one target. Targets take turns, and each rule starts with another
    one, so that every target gets every rule and every dtype, but not each rule in each dtype.
    """
    different: dict[Any, tuple[Case, int]] = {}
    for case in all_cases:
        for index, launch in enumerate(launches(case)):
            # Columns of a table change a number of the code.
            columns = ("COLUMNS", "FIRST")
            constants = {k: v for k, v in launch.constants.items() if k not in columns}
            key = (launch.name, *launch.signature.items(), *constants.items())
            different.setdefault(key, (case, index))
    if not quick:
        return [Task(case, index, t) for case, index in different.values() for t in targets]
    tasks: list[Task] = []
    numbers: dict[str, int] = {}
    turns: Counter[tuple[str, str]] = Counter()
    for (kernel, *_), (case, index) in different.items():
        turn = numbers.setdefault(case.rule, len(numbers)) + turns[case.rule, kernel]
        turns[case.rule, kernel] += 1
        tasks.append(Task(case, index, targets[turn % len(targets)]))
    return tasks


def compile_task(task: Task) -> Report:
    """Compile one launch, and read its machine code."""
    import triton
    from triton.compiler import ASTSource

    from ampopt_kernels.triton.launch import THREADS, options

    launch = launches(task.case)[task.index]
    names = (launch.name, launch.variant(task.case), task.case.dtype, task.target)
    target = gpu_target(task.target)
    try:
        kernel = triton.compile(
            ASTSource(launch.kernel, launch.signature, launch.constants),
            target=target,
            options=options(target.warp_size),
        )
    except Exception as error:  # any compiler error becomes a line of the report
        last = str(error).strip().splitlines()[-1:]
        return Report(*names, error=f"{type(error).__name__}: {''.join(last)}")
    assembly = machine_code.assembly_of(kernel.asm)
    registers, spills = machine_code.registers_and_spills(kernel.asm)
    loop = machine_code.main_loop(assembly)
    accesses = tuple(machine_code.access_widths(loop))
    constants = launch.constants
    elements = constants.get("BLOCK", 1) * constants.get("AHEAD", 1)
    if launch.name == "line":
        elements = constants["LINES"] * constants["ALONG"]
    sizes = [d.primitive_bitwidth // 8 for d in launch.row.dtypes] if launch.row else []
    return Report(
        *names,
        assembly=assembly,
        registers=registers,
        spills=spills,
        accesses=accesses,
        wide=16 // max(sizes) * min(sizes) if sizes else 16,
        barriers=machine_code.count_barriers(loop),
        bytes=sum(accesses) * THREADS / elements,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; see the module. Returns the exit status."""
    rule_names = [name for name in rules.__all__ if isinstance(getattr(rules, name), Rule)]
    parser = argparse.ArgumentParser(prog="python -m evidence.aot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dump", type=Path, help="write assembly and report to this directory")
    parser.add_argument("--target", nargs="+", default=TARGETS, help="sm_NN or gfxNNN")
    parser.add_argument("--rule", nargs="+", default=rule_names, choices=rule_names)
    parser.add_argument("--dtype", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--quick", action="store_true", help=QUICK)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(arguments)
    for target in args.target:
        if not re.fullmatch(r"sm_\d+|gfx\w+", target):
            parser.error(f"--target must be like sm_90 or gfx942, got {target!r}")
    if not HAS_TRITON:
        parser.error("Triton cannot be imported: install it, as it is the compiler")
    if INTERPRETED:
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter: unset it")

    todo = tasks(cases(args.rule, args.dtype, args.quick), args.target, args.quick)
    lines, failures = [], 0
    for report in _compiled(todo, args.jobs):
        lines.append(str(report))
        failures += bool(report.error)
        print(report, flush=True)
        if args.dump is not None and report.assembly:
            args.dump.mkdir(parents=True, exist_ok=True)
            suffix = "ptx" if report.target.startswith("sm_") else "amdgcn"
            name = f"{report.kernel}-{report.variant}-{report.dtype}-{report.target}.{suffix}"
            (args.dump / name).write_text(report.assembly)
    print(f"{len(lines)} compiled, {failures} failed")
    if args.dump is not None:
        args.dump.mkdir(parents=True, exist_ok=True)
        (args.dump / "report.txt").write_text("".join(f"{line}\n" for line in lines))
    return 1 if failures else 0


def _compiled(todo: list[Task], jobs: int) -> Iterator[Report]:
    """The reports of all tasks, compiled by up to ``jobs`` processes."""
    if jobs <= 1:
        yield from map(compile_task, todo)
        return
    # A fork of this process may hang, as torch has started threads. The fork server only imports
    # torch, once, which takes seconds; it is forked for each worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ampopt_kernels.rules", "triton.compiler"])
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context) as pool:
        yield from pool.map(compile_task, todo, chunksize=4)


def count_hyper(rule: Rule, flags: tuple[bool, ...]) -> int:
    """Number of hyperparameters of a rule, tuples flattened, found by trying lengths of ``h``."""
    one = torch.ones((), dtype=torch.float64)
    states = (one,) * len(rule.inputs_for(flags))
    for n in range(len(rule.hyper), len(rule.hyper) + 9):
        try:
            s, h, sums = (one,) * len(rule.scalar_state), (one * 0.5,) * n, ()
            if rule.reduces:
                s, h = rule.torch_before_sums(s, h, flags)
                sums = rule.on_tensors("reduce", torch.float64)(one, one, states, h, flags)
            _, h = rule.on_tensors("scalars", torch.float64)(s, h, flags, sums, sums)
            update = rule.on_tensors("update", torch.float32)
            update(one, one, states, h, flags, (one.long(), one))
        except (ValueError, IndexError):
            continue
        return n
    raise ValueError(f"no number of hyperparameters fits the rule with hyper={rule.hyper}")


if __name__ == "__main__":
    sys.exit(main())
