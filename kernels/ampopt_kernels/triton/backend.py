"""The Triton backend: each pass of a step is one multi-tensor launch over a table of addresses."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.decision import Decision, Partials, Request
from ampopt_kernels.gradient_reports import MEASURES, GradientReport
from ampopt_kernels.language import INTERPRETED
from ampopt_kernels.native import objects
from ampopt_kernels.row_column_means import LineSums
from ampopt_kernels.step import Backend
from ampopt_kernels.sums import Sums
from ampopt_kernels.triton.control import control_arguments, control_kernel
from ampopt_kernels.triton.detect import detect_kernel, detect_launches
from ampopt_kernels.triton.launch import Launcher, launch
from ampopt_kernels.triton.lines import line_kernel, line_launches, lines_of
from ampopt_kernels.triton.reduce import (
    count_terms,
    reduce_kernel,
    reduce_launches,
    sum_arguments,
    sum_kernel,
)
from ampopt_kernels.triton.table import Table, hyper_table
from ampopt_kernels.triton.update import update_kernel, update_launches
from ampopt_kernels.work import Work

__all__ = ["Triton"]


class Triton(Backend):
    """Run the passes by Triton kernels; on CPU tensors, by Triton's interpreter."""

    name = "triton"

    def __init__(self, launcher: Launcher | None = None) -> None:
        """Store the launcher.

        Args:
            launcher: called in place of launching a kernel, to record launches.
        """
        self._launch = launch if launcher is None else launcher
        self._compiles = launcher is None
        self._prepared: set[Any] = set()  # which kernels were compiled before a decision
        if launcher is None and not INTERPRETED:
            objects.loops.want()  # C++ that reads hundreds of addresses in one call

    def prepare(self, work: Work, *, decides: bool) -> None:
        """See :meth:`Backend.prepare`. Compiles what follows control, by launching 0 programs."""
        table = Table.of(work)
        if not self._compiles or table.prepared:
            return
        numbers = _h_table(work)  # passed for every argument of float64 numbers
        decision = Decision(found_inf=numbers, coefficients=numbers, h=numbers)
        launch = functools.partial(self._launch, work.device)
        h = _h_table(work, to_reduce=True)
        for _, arguments in line_launches(work, numbers, h, numbers):
            launch(line_kernel, 0, arguments)
        if _reduces(work):
            if not decides:
                launch(control_kernel, 0, control_arguments(work, decision))
            for _, arguments in reduce_launches(work, numbers, h, numbers):
                launch(reduce_kernel, 0, arguments)
            launch(sum_kernel, 0, sum_arguments(work, numbers, numbers))
            sums = Sums(numbers, numbers.new_empty(count_terms(work)))
            decision = replace(decision, sums=sums)
        if decision.sums is not None or not decides:
            launch(control_kernel, 0, control_arguments(work, decision))
        for _, arguments in update_launches(work, numbers, numbers):
            launch(update_kernel, 0, arguments)
        table.prepared = True

    def prepare_decision(self, work: Work, request: Request, *, decides: bool) -> None:
        """See :meth:`Backend.prepare_decision`. Compiles by launching 0 programs."""
        if not self._compiles:
            return
        table = Table.of(work)
        tensors = (request.scale, request.found_inf, request.loss)
        statistics = (check.statistics for check in request.checks(work.device))
        kind = (
            *(work.device, decides, table.columns, work.float64),
            *((group.like.kind, group.align) for group in table.launches),
            *(request.accumulate, request.write, request.measure, request.max_norm is None),
            *(request.check, request.drop, request.policy is None, request.agree is None),
            *(None if tensor is None else tensor.dtype for tensor in tensors),
            tuple(None if tensor is None else tensor.numel() for tensor in statistics),
            request.apply and (work.rule, table.flag_sets, work.scalar_dtypes, len(work.hyper[0])),
        )
        if kind in self._prepared:
            return
        compiling = self._compiling()
        partials = compiling.detect(work, request)
        if decides:
            if request.agree is not None and request.check:
                request = replace(
                    request, found_inf=None
                )  # the ranks' common flag includes this one
            compiling.control(work, request, partials)
        self._prepared.add(kind)

    def _compiling(self) -> "Triton":
        """This backend, which compiles kernels in place of launching them."""
        return Triton(lambda on, kernel, _, by_name: self._launch(on, kernel, 0, by_name))

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`. There is one flag for each chunk."""
        table = Table.of(work)
        flags = torch.empty(table.n_blocks, dtype=torch.float32, device=work.device)
        norm = request.max_norm is not None
        squares = measures = flags  # a pointer that is not written may be any
        if norm:
            squares = torch.empty(table.n_blocks, dtype=torch.float64, device=work.device)
        if request.measure:
            shape = table.n_blocks, MEASURES
            measures = torch.empty(shape, dtype=torch.float64, device=work.device)
        for programs, arguments in detect_launches(table, request, flags, squares, measures):
            self._launch(work.device, detect_kernel, programs, arguments)
        measured = measures if request.measure else None
        report = GradientReport(flags, table.row_of_block, work.owners, measured)
        return Partials(flags, squares if norm else None, (report,))

    def control(self, work: Work, request: Request, partials: Partials | None) -> Decision:
        """See :meth:`Backend.control`. Scalar states that need no sums advance here too."""
        device, scale = work.device, request.scale
        has_policy = request.policy is not None
        norm = partials is not None and partials.squares is not None
        decision = Decision(
            found_inf=torch.empty((), dtype=torch.float32, device=device),
            coefficients=torch.empty(3, dtype=torch.float64, device=device),
            norm=torch.empty(
                (), dtype=torch.float64 if work.float64 else torch.float32, device=device
            )
            if norm
            else None,
            scale=torch.empty_like(scale) if has_policy and scale is not None else None,
            counters=torch.empty(2, dtype=torch.int32, device=device) if has_policy else None,
            h=_h_table(work, to_reduce=_reduces(work)) if request.apply else None,
            reports=() if partials is None else partials.reports,
            scaled_by=request.scale,
            earlier_decision=request.earlier_decision,
            cause=torch.empty((), dtype=torch.float64, device=device) if request.causes else None,
        )
        arguments = control_arguments(work, decision, request, partials)
        self._launch(device, control_kernel, 1, arguments)
        return decision

    def sum_lines(self, work: Work, decision: Decision) -> LineSums:
        """See :meth:`Backend.sum_lines`. One launch for each term and kind of rows."""
        lines, h = lines_of(work), self._h_to_reduce(work, decision)
        sums = torch.zeros(lines.size, dtype=torch.float64, device=work.device)
        coefficients = decision.coefficients_on_device
        for programs, arguments in line_launches(work, coefficients, h, sums):
            self._launch(work.device, line_kernel, programs, arguments)
        return LineSums(lines.by_stack(work, sums), h)

    def _h_to_reduce(self, work: Work, decision: Decision) -> Tensor:
        """The numbers of each row for ``reduce`` and ``averages``: float64, shape (rows, width)."""
        if decision.h is not None:
            return decision.h
        h = _h_table(work, to_reduce=True)
        arguments = control_arguments(work, replace(decision, h=h))
        self._launch(work.device, control_kernel, 1, arguments)
        return h

    def reduce(self, work: Work, decision: Decision) -> Tensor:
        """See :meth:`Backend.reduce`. A launch over all chunks, then one over all rows."""
        rule, table = work.rule, Table.of(work)
        assert rule is not None
        h = self._h_to_reduce(work, decision)
        n_terms = count_terms(work)
        parts = torch.empty((table.n_blocks, n_terms), dtype=torch.float64, device=work.device)
        coefficients = decision.coefficients_on_device
        for programs, arguments in reduce_launches(work, coefficients, h, parts):
            self._launch(work.device, reduce_kernel, programs, arguments)
        sums = torch.empty((len(work.rows), n_terms), dtype=torch.float64, device=work.device)
        arguments = sum_arguments(work, parts, sums)
        self._launch(work.device, sum_kernel, len(work.rows), arguments)
        return sums

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        h = decision.h
        if h is None or decision.sums is not None:
            h = _h_table(work)
            advanced = replace(decision, norm=None, scale=None, counters=None, h=h)
            self._launch(work.device, control_kernel, 1, control_arguments(work, advanced))
        for programs, arguments in update_launches(work, decision.coefficients_on_device, h):
            self._launch(work.device, update_kernel, programs, arguments)

    def send_hyper(self, work: Work) -> None:
        """Copy changed hyperparameters to the tensor that a captured step reads."""
        hyper_table(work)


def _reduces(work: Work) -> bool:
    """Whether the rule of ``work`` sums terms before its ``scalars``."""
    return work.rule is not None and work.rule.reduces


def _h_table(work: Work, *, to_reduce: bool = False) -> Tensor:
    """An uninitialized table of each row's numbers for ``update``, or for ``reduce``."""
    assert work.rule is not None
    widths = work.rule.widths(len(work.hyper[0]))
    width = widths.reduce if to_reduce else widths.update
    return torch.empty((len(work.rows), width), dtype=torch.float64, device=work.device)
