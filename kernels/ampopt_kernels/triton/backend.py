"""The triton backend: three multi-tensor launches over a table of addresses.

The table has one int64 row for each parameter::

    grad | param | states ... copy | scalar states ... | counted | group | numel

with 0 for what a row has not, and for ``counted`` where it does not count towards the norm. A
launch takes those of its programs' (row, chunk) pairs that share dtypes, flags and alignment, so
the number of launches does not depend on the number of tensors or groups.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu.native import want_object_loops
from ampopt_kernels.devices import ACCELERATORS, current
from ampopt_kernels.language import INTERPRETED, tl
from ampopt_kernels.rule import Rule, keep
from ampopt_kernels.step import Backend, Decision, Partials, Request, Row, Work
from ampopt_kernels.triton.control import control_kernel
from ampopt_kernels.triton.detect import detect_kernel
from ampopt_kernels.triton.launch import launch
from ampopt_kernels.triton.update import update_kernel

__all__ = ["BLOCK", "CHUNK", "THREADS", "Launcher", "Triton", "options"]

CHUNK = 1 << 12
"""Elements for each program at least: enough to hide the loads of the table behind the data's."""
PROGRAMS = 1 << 13
"""Programs of a pass at most, but for a chunk begun in each tensor; then chunks are larger.

A device runs one or two thousand at a time, and those of the last round leave part of it idle: one
round and a tenth take nearly as long as two. Fewer programs leave control fewer parts to reduce.
"""
THREADS = 1 << 7
"""Threads of each program, in however many warps that is."""
BLOCK = 1 << 10
"""Elements at a time: eight for each thread, so that two-byte ones are read 16 bytes at a time.

Sixteen took Adam from 70 registers to 167, which leaves room for a third as many programs.
"""
AHEAD = 1 << 6
"""Bytes of gradients that each thread of detect has on their way at once.

Memory with 5 terabytes a second that answers after 0.8 microseconds has 30 KB on their way to each
of 132 multiprocessors, of which each has room for 1500 threads or so.
"""
PARTS = 1 << 10
"""Parts that control reduces at a time."""
ROWS = 1 << 7
"""Rows that control advances at a time."""

Launcher = Callable[[torch.device, Any, int, dict[str, Any]], None]
"""``launcher(device, kernel, programs, arguments)``; arguments by name, compile-time ones too."""


class Triton(Backend):
    """Triton kernels; on CPU tensors, Triton's interpreter."""

    name = "triton"

    def __init__(self, launcher: Launcher | None = None) -> None:
        """Make the backend.

        Args:
            launcher: called for each launch in place of launching it, to see what would run.
        """
        self._launch = _launch if launcher is None else launcher
        self._compiles = launcher is None
        if launcher is None and not INTERPRETED:
            want_object_loops()  # so that a step asks for hundreds of addresses at once

    def prepare(self, work: Work) -> None:
        """See :meth:`Backend.prepare`. Compiles update, by launches of no program."""
        table = _Table.of(work)
        if self._compiles and not table.prepared:
            numbers = _h_table(work)  # in the place of factors too, which are of its dtype
            for _, arguments in _updates(work, numbers, numbers):
                self._launch(work.device, update_kernel, 0, arguments)
            work.table = replace(table, prepared=True)

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`. A part is a chunk."""
        table = _Table.of(work)
        flags = torch.empty(table.n_blocks, dtype=torch.float32, device=work.device)
        norm = request.max_norm is not None
        squares = torch.empty(
            table.n_blocks if norm else 0, dtype=torch.float64, device=work.device
        )
        for group in table.launches:
            arguments = {
                "table": table.rows,
                "blocks": table.blocks,
                "first": group.start,
                "chunk": table.chunk,
                "scale": flags if request.scale is None else request.scale,
                "flags": flags,
                "squares": squares,
                "DTYPE": _DTYPES[group.like.grad.dtype],
                "COMPUTE": _DTYPES[group.like.compute_dtype],
                "ALIGN": group.align,
                "HAS_SCALE": request.scale is not None,
                "WRITE": request.write,
                "NORM": norm,
                "COLUMNS": table.columns,
                "BLOCK": BLOCK,
                "AHEAD": AHEAD * THREADS // (group.like.grad.element_size() * BLOCK),
            }
            self._launch(work.device, detect_kernel, group.stop - group.start, arguments)
        return Partials(flags, squares if norm else None)

    def control(self, work: Work, request: Request, partials: Partials | None) -> Decision:
        """See :meth:`Backend.control`. Advances the scalars in the same launch."""
        device, scale = work.device, request.scale
        has_policy = request.policy is not None
        norm = partials is not None and partials.squares is not None
        decision = Decision(
            found_inf=torch.empty((), dtype=torch.float32, device=device),
            factors=torch.empty(3, dtype=torch.float64, device=device),
            norm=torch.empty(
                (), dtype=torch.float64 if work.float64 else torch.float32, device=device
            )
            if norm
            else None,
            scale=torch.empty_like(scale) if has_policy and scale is not None else None,
            counters=torch.empty(2, dtype=torch.int32, device=device) if has_policy else None,
            h=_h_table(work) if request.apply else None,
        )
        self._launch_control(work, request, partials, decision, decide=True)
        return decision

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        h = decision.h
        if h is None:
            h = _h_table(work)
            advanced = Decision(decision.found_inf, decision.factors, h=h)
            self._launch_control(work, Request(), None, advanced, decide=False)
        for programs, arguments in _updates(work, decision.factors_on_device, h):
            self._launch(work.device, update_kernel, programs, arguments)

    def send_hyper(self, work: Work) -> None:
        """Send the hyperparameters of ``work`` to where a captured step reads them, if changed."""
        _hyper_table(work)

    def _launch_control(
        self,
        work: Work,
        request: Request,
        partials: Partials | None,
        decision: Decision,
        decide: bool,
    ) -> None:
        rule, h, factors = work.rule, decision.h, decision.factors_on_device

        def given(tensor: Tensor | None) -> Tensor:
            return factors if tensor is None else tensor  # any address serves for one never read

        flags = None if partials is None else partials.flags_on(work.device)
        squares = None if partials is None else partials.squares
        table = None if h is None else _Table.of(work)
        hyper = None if h is None else _hyper_table(work)
        # By each optimizer, in the order of its own steps: a tensor for all of them would be read
        # on streams that do not wait for the one that it was sent on.
        constants = None
        if request.policy is not None:
            constants = work.uploads.get("policy", request.policy, torch.float64, work.device)
        max_norm = None
        if decision.norm is not None:
            assert request.max_norm is not None
            max_norm = work.uploads.get(
                "max_norm", [float(request.max_norm)], torch.float64, work.device
            )
        arguments = {
            "flags": given(flags),
            "squares": given(squares),
            "n_parts": 0 if flags is None else flags.numel(),
            "external": given(request.found_inf),
            "scale": given(request.scale),
            "constants": given(constants),
            "counters": given(request.counters),
            "max_norm": given(max_norm),
            "found_out": decision.found_inf,
            "factors": factors,
            "norm_out": given(decision.norm),
            "scale_out": given(decision.scale),
            "counters_out": given(decision.counters),
            "table": given(None if table is None else table.rows),
            "hyper": given(hyper),
            "h_out": given(h),
            "n_rows": 0 if h is None else h.shape[0],
            "DECIDE": decide,
            "CHECK": request.check and flags is not None,
            "HAS_EXTERNAL": request.found_inf is not None,
            "HAS_SCALE": request.scale is not None,
            "HAS_POLICY": decision.scale is not None,
            "UNSCALED": request.write,
            "NORM": decision.norm is not None,
            "DROP": request.drop,
            "ADVANCE": h is not None,
            "SCALARS": keep if rule is None else rule.scalars,
            "N_HYPER": 0 if hyper is None else hyper.shape[1],
            "N_STATES": _state_columns(rule),
            "N_SCALARS": 0 if rule is None else len(rule.scalar_state),
            "STORED": _DTYPES[work.scalar_dtype],
            "COLUMNS": 5 if table is None else table.columns,
            "PARTS": PARTS,
            "ROWS": ROWS,
        }
        self._launch(work.device, control_kernel, 1, arguments)


def _updates(work: Work, factors: Tensor, h: Tensor) -> Iterator[tuple[int, dict[str, Any]]]:
    """The programs and arguments of each launch of the update kernel."""
    rule, table = work.rule, _Table.of(work)
    assert rule is not None
    for group in table.launches:
        row = group.like
        yield (
            group.stop - group.start,
            {
                "table": table.rows,
                "blocks": table.blocks,
                "first": group.start,
                "CHUNK": table.chunk,
                "factors": factors,
                "h_table": h,
                "RULE": rule.update,
                "FLAGS": row.flags,
                "DTYPES": tuple(_DTYPES[t.dtype] for t in row.tensors),
                "COPIED": row.copy is not None,
                "COMPUTE": _DTYPES[row.compute_dtype],
                "ALIGNS": _aligns(row, group.align),
                "N_H": h.shape[1],
                "COLUMNS": table.columns,
                "BLOCK": BLOCK,
            },
        )


def _h_table(work: Work) -> Tensor:
    assert work.rule is not None
    width = work.rule.width(len(work.hyper[0]))
    return torch.empty((len(work.rows), width), dtype=torch.float64, device=work.device)


def _hyper_table(work: Work) -> Tensor:
    """Float64, (groups, hyperparameters). A device tensor among them is copied on the device."""
    numbers, on_device = [], []
    for group, values in enumerate(work.hyper):
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                value = value.item()  # no device to wait for
            if isinstance(value, Tensor):
                on_device.append((group, i, value))
                value = 0.0
            numbers.append(float(value))
    table = work.uploads.get("hyper", numbers, torch.float64, work.device, in_place=True)
    table = table.view(len(work.hyper), -1)
    for group, i, value in on_device:
        table[group, i].copy_(value.detach().reshape(()), non_blocking=True)
    return table


@dataclass(frozen=True)
class _Group:
    """Programs ``start`` to ``stop`` of the block table, all of the kind of the row ``like``."""

    start: int
    stop: int
    like: Row
    align: int


def _aligns(row: Row, align: int) -> tuple[int, ...]:
    """What to say of the addresses of ``row``, which ``align`` divides: no more than is of use.

    A thread reads as many elements of each tensor as make 16 bytes of the widest. Reading 16 bytes
    of a narrower one takes another arrangement of threads, and shared memory and barriers between.
    """
    sizes = [t.element_size() for t in row.tensors]
    return tuple(min(align, 16 // max(sizes) * size) for size in sizes)


def _state_columns(rule: Rule | None) -> int:
    """Columns for states, and for the copy that comes right behind those that a row has."""
    return 0 if rule is None else len(rule.state) + 1


@dataclass(frozen=True)
class _Table:
    """The table of addresses on the device, what it was made from, and the launches over it."""

    rows: Tensor
    numbers: list[int]
    columns: int
    blocks: Tensor
    n_blocks: int
    chunk: int
    launches: list[_Group]
    aligned: list[bool]
    stamp: int
    prepared: bool = False

    @staticmethod
    def of(work: Work) -> "_Table":
        """The table of ``work``, sent to the device where an address or a size changed."""
        table = work.table if isinstance(work.table, _Table) else None
        if table is not None and table.stamp != work.stamp:
            table = table._with_gradients_of(work)
        work.table = _Table._made(work) if table is None else table
        return work.table

    def _with_gradients_of(self, work: Work) -> "_Table | None":
        """This table with other gradients; ``None`` if they are not aligned as the old ones."""
        addresses = [row.grad.data_ptr() for row in work.rows]
        if any(a % 16 for a, aligned in zip(addresses, self.aligned, strict=True) if aligned):
            return None
        numbers = self.numbers.copy()
        numbers[:: self.columns] = addresses
        rows = work.uploads.get(_name("rows", work), numbers, torch.int64, work.device)
        return replace(self, rows=rows, numbers=numbers, stamp=work.stamp)

    @staticmethod
    def _made(work: Work) -> "_Table":
        n_states = _state_columns(work.rule)
        n_scalars = 0 if work.rule is None else len(work.rule.scalar_state)
        rows: list[int] = []
        kinds: dict[Any, list[int]] = {}
        for index, row in enumerate(work.rows):
            addresses = [t.data_ptr() for t in row.tensors]
            addresses += [0] * (2 + n_states - len(addresses))
            scalars = [0 if s is None else s.data_ptr() for s in row.scalars]
            scalars += [0] * (n_scalars - len(scalars))
            rows += [*addresses, *scalars, int(row.counted), row.group, row.grad.numel()]
            kinds.setdefault((row.kind, row.aligned), []).append(index)
        chunk = _chunk(sum(row.grad.numel() for row in work.rows))
        blocks: list[int] = []
        launches: list[_Group] = []
        for (_, aligned), members in kinds.items():
            start = len(blocks) // 2
            for index in members:
                for place in range(-(-work.rows[index].grad.numel() // chunk)):
                    blocks += (index, place)
            stop = len(blocks) // 2
            if stop > start:
                align = 16 if aligned else 1
                launches.append(_Group(start, stop, work.rows[members[0]], align))
        get = work.uploads.get
        return _Table(
            rows=get(_name("rows", work), rows, torch.int64, work.device),
            numbers=rows,
            columns=5 + n_states + n_scalars,
            blocks=get(_name("blocks", work), blocks, torch.int32, work.device),
            n_blocks=len(blocks) // 2,
            chunk=chunk,
            launches=launches,
            aligned=[row.aligned for row in work.rows],
            stamp=work.stamp,
        )


def _chunk(elements: int) -> int:
    """How many of so many elements each program takes. The same however they are divided."""
    chunk = CHUNK
    while chunk * PROGRAMS < elements:
        chunk *= 2
    return chunk


def _name(what: str, work: Work) -> str:
    return f"{what} of {'gradients' if work.rule is None else 'parameters'}"


_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def options(warp_size: int) -> dict[str, Any]:
    """How every kernel is compiled where a warp has so many threads: AMD has some of 64.

    A product is rounded before it is added to something, as a gradient is that was unscaled by
    itself. Fused, stepping in one call would round otherwise than in two. Triton's own default is
    about to change.
    """
    return {"num_warps": THREADS // warp_size, "enable_fp_fusion": False}


def _launch(device: torch.device, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    with _on(device):
        if INTERPRETED:
            if programs:  # the interpreter compiles nothing
                kernel[(programs,)](**arguments)
        else:
            launch(device, kernel, programs, arguments, _options_on(device))


@functools.cache
def _options_on(device: torch.device) -> dict[str, Any]:
    """:func:`options` for ``device``, the current one."""
    from triton.runtime import driver

    target: Any = driver.active.get_current_target()
    return options(target.warp_size)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launch on ``device``, which Triton takes from the current one."""
    if device.type in ACCELERATORS:
        return current(device)
    if INTERPRETED:
        import numpy

        return numpy.errstate(all="ignore")  # which warns of overflow where devices do not
    return contextlib.nullcontext()
