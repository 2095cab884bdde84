"""The triton backend: three multi-tensor launches over a table of addresses.

The table has one int64 row for each parameter::

    grad | param | states ... | scalar states ... | group | numel

with 0 for what a row has not. A launch takes those of its programs' (row, chunk) pairs that
share dtypes, flags and alignment, so the number of launches does not depend on the number of
tensors or groups.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.control import control_kernel
from ampopt_kernels.detect import detect_kernel
from ampopt_kernels.language import INTERPRETED, tl
from ampopt_kernels.rule import keep
from ampopt_kernels.update import update_kernel
from ampopt_kernels.work import Backend, Decision, Partials, Request, Row, Work

__all__ = ["Triton"]

CHUNK = 1 << 14
"""Elements for each program: enough to hide the loads of the table behind those of the data."""
BLOCK = 1 << 10 if INTERPRETED else 1 << 11
"""Elements at a time."""
PARTS = 1 << 10
"""Parts that control reduces at a time."""
ROWS = 1 << 7
"""Rows that control advances at a time."""


class Triton(Backend):
    """Triton kernels; on CPU tensors, Triton's interpreter."""

    name = "triton"

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`. A part is a chunk."""
        table = _Table.of(work)
        flags = torch.empty(table.n_blocks, dtype=torch.float32, device=work.device)
        norm = request.max_norm is not None
        squares = torch.empty(
            table.n_blocks if norm else 0, dtype=torch.float64, device=work.device
        )
        with _on(work.device):
            for launch in table.launches:
                detect_kernel[(launch.stop - launch.start,)](
                    table.rows,
                    table.blocks[launch.start :],
                    flags if request.scale is None else request.scale,
                    flags[launch.start :],
                    squares[launch.start :] if norm else squares,
                    DTYPE=_DTYPES[launch.like.grad.dtype],
                    COMPUTE=_DTYPES[launch.like.compute_dtype],
                    ALIGN=launch.align,
                    HAS_SCALE=request.scale is not None,
                    WRITE=request.write,
                    NORM=norm,
                    COLUMNS=table.columns,
                    CHUNK=CHUNK,
                    BLOCK=BLOCK,
                )
        return Partials(flags, squares if norm else None)

    def control(self, work: Work, request: Request, partials: Partials | None) -> Decision:
        """See :meth:`Backend.control`. Advances the scalars in the same launch."""
        device, scale = work.device, request.scale
        has_policy = request.constants is not None
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
        _launch_control(work, request, partials, decision, decide=True)
        return decision

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        h = decision.h
        if h is None:
            h = _h_table(work)
            advanced = Decision(decision.found_inf, decision.factors, h=h)
            _launch_control(work, Request(), None, advanced, decide=False)
        rule, table = work.rule, _Table.of(work)
        assert rule is not None
        with _on(work.device):
            for launch in table.launches:
                row = launch.like
                update_kernel[(launch.stop - launch.start,)](
                    table.rows,
                    table.blocks[launch.start :],
                    decision.factors,
                    h,
                    RULE=rule.update,
                    FLAGS=row.flags,
                    DTYPES=tuple(_DTYPES[t.dtype] for t in row.tensors),
                    COMPUTE=_DTYPES[row.compute_dtype],
                    ALIGN=launch.align,
                    N_H=h.shape[1],
                    COLUMNS=table.columns,
                    CHUNK=CHUNK,
                    BLOCK=BLOCK,
                )


def _launch_control(
    work: Work, request: Request, partials: Partials | None, decision: Decision, decide: bool
) -> None:
    rule, h, factors = work.rule, decision.h, decision.factors

    def given(tensor: Tensor | None) -> Tensor:
        return factors if tensor is None else tensor  # any address serves for one never read

    flags = None if partials is None else partials.flags
    squares = None if partials is None else partials.squares
    table = None if h is None else _Table.of(work)
    hyper = _hyper_table(work) if h is not None else None
    with _on(work.device):
        control_kernel[(1,)](
            given(flags),
            given(squares),
            0 if flags is None else flags.numel(),
            given(request.found_inf),
            given(request.scale),
            given(request.constants),
            given(request.counters),
            0.0 if request.max_norm is None else float(request.max_norm),
            decision.found_inf,
            factors,
            given(decision.norm),
            given(decision.scale),
            given(decision.counters),
            given(None if table is None else table.rows),
            given(hyper),
            given(h),
            0 if h is None else h.shape[0],
            DECIDE=decide,
            CHECK=request.check and flags is not None,
            HAS_EXTERNAL=request.found_inf is not None,
            HAS_SCALE=request.scale is not None,
            HAS_POLICY=decision.scale is not None,
            NORM=decision.norm is not None,
            DROP=request.drop,
            ADVANCE=h is not None,
            SCALARS=keep if rule is None else rule.scalars,
            N_HYPER=0 if hyper is None else hyper.shape[1],
            N_STATES=0 if rule is None else len(rule.state),
            N_SCALARS=0 if rule is None else len(rule.scalar_state),
            COLUMNS=4 if table is None else table.columns,
            PARTS=PARTS,
            ROWS=ROWS,
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
    table = work.uploads.get("hyper", numbers, torch.float64, work.device)
    table = table.view(len(work.hyper), -1)
    for group, i, value in on_device:
        table[group, i].copy_(value.detach().reshape(()), non_blocking=True)
    return table


@dataclass(frozen=True)
class _Launch:
    """Programs ``start`` to ``stop`` of the block table, all of the kind of the row ``like``."""

    start: int
    stop: int
    like: Row
    align: int


@dataclass(frozen=True)
class _Table:
    rows: Tensor
    columns: int
    blocks: Tensor
    n_blocks: int
    launches: list[_Launch]

    @staticmethod
    def of(work: Work) -> "_Table":
        """The table of ``work``, sent to the device where an address or a size changed."""
        if work.table is None:
            work.table = _Table._made(work)
        return work.table

    @staticmethod
    def _made(work: Work) -> "_Table":
        n_states = 0 if work.rule is None else len(work.rule.state)
        n_scalars = 0 if work.rule is None else len(work.rule.scalar_state)
        rows: list[int] = []
        kinds: dict[Any, list[int]] = {}
        for index, row in enumerate(work.rows):
            addresses = [t.data_ptr() for t in row.tensors]
            addresses += [0] * (2 + n_states - len(addresses))
            scalars = [0 if s is None else s.data_ptr() for s in row.scalars]
            scalars += [0] * (n_scalars - len(scalars))
            rows += [*addresses, *scalars, row.group, row.grad.numel()]
            kinds.setdefault((row.kind, row.aligned), []).append(index)
        blocks: list[int] = []
        launches: list[_Launch] = []
        for (_, aligned), members in kinds.items():
            start = len(blocks) // 2
            for index in members:
                for chunk in range(-(-work.rows[index].grad.numel() // CHUNK)):
                    blocks += (index, chunk)
            stop = len(blocks) // 2
            if stop > start:
                align = 16 if aligned else 1
                launches.append(_Launch(start, stop, work.rows[members[0]], align))
        kind = "gradients" if work.rule is None else "parameters"
        get = work.uploads.get
        return _Table(
            rows=get(f"rows of {kind}", rows, torch.int64, work.device),
            columns=4 + n_states + n_scalars,
            blocks=get(f"blocks of {kind}", blocks, torch.int32, work.device),
            n_blocks=len(blocks) // 2,
            launches=launches,
        )


_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Launch on ``device``, which Triton takes from the current one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield
