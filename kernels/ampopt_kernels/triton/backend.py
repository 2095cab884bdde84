"""The Triton backend: each pass of a step is one multi-tensor launch over a table of addresses."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.language import INTERPRETED
from ampopt_kernels.native import objects
from ampopt_kernels.step import Backend
from ampopt_kernels.step_data import Decision, Partials, Request
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.sums import Sums
from ampopt_kernels.triton.control import control_launch
from ampopt_kernels.triton.launch import Launcher, launch
from ampopt_kernels.triton.param_sums import sum_launch
from ampopt_kernels.triton.passes import (
    ACCUMULATE,
    Pass,
    detect,
    pass_launches,
    reduce,
    update,
)
from ampopt_kernels.triton.row_column_sums import Tiles
from ampopt_kernels.triton.table import Table, hyper_table

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
        # By kind, as rows of gradients alone, and so their tables, may be new in every call.
        self._prepared_decisions: set[Any] = set()
        if launcher is None and not INTERPRETED:
            objects.loops.want()  # C++ that reads hundreds of addresses in one call

    def prepare(self, work: Work, request: Request, *, decides: bool) -> None:
        """See :meth:`Backend.prepare`. Compiles by launching 0 programs."""
        if self._compiles and work.rule is not None:
            self._prepare_update(work, decides=decides)
        if self._compiles and (request.write or request.accumulate or request.causes):
            self._prepare_decision(work, request, decides=decides)

    def _prepare_update(self, work: Work, *, decides: bool) -> None:
        """Compile what follows control."""
        table = Table.of(work)
        if decides in table.prepared_updates:
            return
        h = _h_table(work, to_reduce=True)  # uninitialized, as nothing reads it
        decision, compiling = Decision(found_inf=h, coefficients=h, h=h), self._compiling()
        if not decides:
            decision = compiling.taken_over(work, decision)
        if work.rule is not None and work.rule.averages is not None:
            compiling.sum_lines(work, decision)
        if _reduces(work):
            sums = compiling.reduce(work, decision)
            decision = replace(decision, sums=Sums(sums, sums.new_empty(sums.shape[1])))
        compiling.update(work, decision)
        table.prepared_updates.add(decides)

    def _prepare_decision(self, work: Work, request: Request, *, decides: bool) -> None:
        """Compile detect, and control if it is called with this work."""
        table = Table.of(work)
        tensors = (request.scale, request.found_inf, request.scheduled_by, request.loss)
        statistics = (check.statistics for check in request.checks(work.device))
        kind = (
            *(work.device, decides, table.columns, work.float64),
            *((group.like.kind, group.align) for group in table.launches),
            request.max_norm is None,
            *(request.accumulate, request.write, request.unscaled, request.measure),
            *(request.check, request.drop, request.policy is None, request.agree is None),
            *(None if tensor is None else tensor.dtype for tensor in tensors),
            tuple(None if tensor is None else tensor.numel() for tensor in statistics),
            work.rule and (work.rule, table.flag_sets, work.scalar_dtypes, len(work.hyper[0])),
        )
        if kind in self._prepared_decisions:
            return
        compiling = self._compiling()
        partials = compiling.detect(work, request)
        if decides:
            if request.agree is not None and request.check:  # the flag of the ranks includes it
                request = replace(request, found_inf=None)
            compiling.control(work, request, partials)
        self._prepared_decisions.add(kind)

    def _compiling(self) -> "Triton":
        """This backend, which compiles kernels in place of launching them."""
        return Triton(lambda on, variant, _, arguments: self._launch(on, variant, 0, arguments))

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`. There is one flag for each chunk."""
        table, squares, measures = Table.of(work), None, None
        flags = torch.empty(table.n_chunks, dtype=torch.float32, device=work.device)
        if request.accumulate:
            self._run(work, ACCUMULATE, request.scale, request.found_inf, flags)
        else:
            norm = request.max_norm is not None
            of = detect(norm=norm, measure=request.measure, writes=request.write)
            found = self._run(work, of, request.grad_scale, None, flags)
            squares, measures = found[0] if norm else None, found if request.measure else None
        report = GradientReport(flags, table.row_of_chunk, work.owners, measures)
        return Partials(flags, squares, (report,))

    def _run(
        self,
        work: Work,
        of: Pass,
        coefficients: Tensor | None,
        h: Tensor | None,
        flags: Tensor | None = None,
    ) -> Any:
        """Run a pass; see ``pass_launches``. Returns ``parts``."""
        parts, n = None, sum(how != "any" for how in of.terms)
        if n:
            shape = n, Table.of(work).n_chunks
            parts = torch.empty(shape, dtype=torch.float64, device=work.device)
        for launched in pass_launches(work, of, coefficients, h, flags, parts):
            self._launch(work.device, *launched)
        return parts

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
            h=_h_table(work, to_reduce=_reduces(work)) if work.rule is not None else None,
            reports=() if partials is None else partials.reports,
            scaled_by=request.scale,
            earlier_decision=request.earlier_decision,
            cause=torch.empty((), dtype=torch.float64, device=device) if request.causes else None,
        )
        self._launch(device, *control_launch(work, decision, request, partials))
        return decision

    def taken_over(self, work: Work, decision: Decision) -> Decision:
        """See :meth:`Backend.taken_over`. Scalar states that need no sums advance here."""
        decision = replace(decision, h=_h_table(work, to_reduce=_reduces(work)))
        self._launch(work.device, *control_launch(work, decision))
        return decision

    def sum_lines(self, work: Work, decision: Decision) -> Tensor:
        """See :meth:`Backend.sum_lines`. One launch for each term and kind of rows."""
        tiles, h = Tiles.of(work), decision.h
        assert h is not None
        sums = torch.zeros(tiles.size, dtype=torch.float64, device=work.device)
        given = {"table": Table.of(work).addresses, "h_table": h, "sums": sums}
        given["coefficients"] = decision.coefficients_on_device
        for variant, programs, on_device in tiles.launches:
            self._launch(work.device, variant, programs, {**given, "tiles": on_device})
        tiles.add_up(sums, work)
        return h

    def reduce(self, work: Work, decision: Decision) -> Tensor:
        """See :meth:`Backend.reduce`. A launch over all chunks, then one over all rows."""
        parts = self._run(work, reduce(work), decision.coefficients_on_device, decision.h)
        sums = torch.empty((len(work.rows), len(parts)), dtype=torch.float64, device=work.device)
        self._launch(work.device, *sum_launch(work, parts, sums))
        return sums

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        h = decision.h
        if decision.sums is not None:
            h = _h_table(work)
            advanced = replace(decision, norm=None, scale=None, counters=None, h=h)
            self._launch(work.device, *control_launch(work, advanced))
        self._run(work, update(work), decision.coefficients_on_device, h)

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
