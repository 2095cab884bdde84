"""The backends for CPU tensors: what both share, and the one that runs torch operations.

Rules are applied to the bundles of ``cpu.bundles``: one large tensor, or several small ones at a
time. The host reads a CPU tensor without a synchronization, so a skipped step returns at once.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.cpu.blocks import Block, Bundles
from ampopt_kernels.cpu.bundles import Bundle, Numbers, Slices
from ampopt_kernels.cpu.scalars import ScalarRows, scalars_on_host
from ampopt_kernels.cpu.sums import sum_of_squares
from ampopt_kernels.cpu.torch_functions import torch_functions
from ampopt_kernels.cpu.watch import found_in
from ampopt_kernels.decision import Decision, Partials, Request
from ampopt_kernels.eager import accumulate_gradients, overflows
from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.row_column_states import LineSums, advance
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Backend, reciprocal
from ampopt_kernels.tensors import arithmetic
from ampopt_kernels.work import ParamRow, Work

__all__ = ["Cpu", "CpuBackend", "LargeRow", "sums_are_finite"]


class LargeRow(NamedTuple):
    """A bundle of a single row.

    Attributes:
        bundle: the bundle.
        h: its numbers.
        tensors: the tensors of its functions.
        rows: the row, if ``update`` computes random numbers; else empty.
    """

    bundle: Bundle
    h: Sequence[float]
    tensors: Sequence[Tensor]
    rows: Sequence[ParamRow]


class CpuBackend(Backend):
    """CPU tensors, a bundle of small ones at a time.

    :class:`Cpu` runs torch operations, :class:`~ampopt_kernels.cpu.compiled.Compiled` C++. They
    implement the methods that are abstract here.
    """

    host_sees = True
    accumulate = accumulate_gradients

    @abstractmethod
    def _prepare_functions(self, work: Work, bundles: list[tuple[Block, Bundle]]) -> bool:
        """Set :attr:`Bundle.functions` of ``bundles``; append these to ``update_bundles``.

        Args:
            work: the rows.
            bundles: some of ``work.backend_rows.bundles``.

        Returns:
            Whether they are final. If not, the next step prepares them again.
        """

    @abstractmethod
    def _scalars(
        self, rule: Rule, flags: tuple[bool, ...], rows: ScalarRows, h: Sequence[float]
    ) -> Numbers:
        """Compute the numbers of rows, as :func:`scalars_on_host` does."""

    @abstractmethod
    def _sums_of_squares(self, grads: list[Tensor]) -> list[float]:
        """Return the sum of squares of each gradient, in float64."""

    @abstractmethod
    def _surely_finite(self, grads: list[Tensor]) -> bool:
        """Return whether every gradient is finite; ``False`` where only a slower test can tell."""

    def prepare(self, work: Work, *, decides: bool) -> None:
        """See :meth:`Backend.prepare`."""
        if not isinstance(work.backend_rows, Bundles):
            work.backend_rows = Bundles()
            work.backend_rows.take(work)
        rows = work.backend_rows
        if rows.prepared_by is not self:
            rows.update_bundles = []
            rows.prepared_by = self if self._prepare_functions(work, rows.bundles) else None

    def _detect(self, work: Work, request: Request) -> Partials:
        """Return what :meth:`Backend.detect` does."""
        rows = work.backend_rows if isinstance(work.backend_rows, Bundles) else None
        inverse = 1.0 if request.scale is None else reciprocal(request.scale.item())
        grads = work.present_grads if rows is None else rows.gather(work)
        only_tests = not request.measure and request.max_norm is None
        # Unscaling by 1 or less makes nothing larger: finite before means finite after.
        if only_tests and 0 <= inverse <= 1 and self._surely_finite(grads):
            partials = Partials([], None)
        else:
            partials = self._partials_of_chunks(work, request, inverse)
        if request.write:
            bundles = [] if rows is None else [bundle for _, bundle in rows.bundles]
            gathered_grads = [bundle.grad for bundle in bundles if bundle.grad is not None]
            _multiply(work.present_grads + gathered_grads, inverse)
        return partials

    def _partials_of_chunks(self, work: Work, request: Request, inverse: float) -> Partials:
        """Test and measure each chunk: a bundle, or a row where no bundles were prepared."""
        if isinstance(work.backend_rows, Bundles):
            bundles = [bundle for _, bundle in work.backend_rows.bundles]
            chunks = [_Chunk(b, b.dtype, b.rows[0].in_norm, b.among) for b in bundles]
        else:
            chunks = [
                _Chunk(None, row.compute_dtype, row.in_norm, (place,))
                for place, row, _ in work.present_rows()
            ]
        chunks = [chunk for chunk in chunks if chunk.has_elements(work)]
        reports, sums, squares = (), {}, None
        if request.measure:
            report, sums = found_in(work, inverse)
            reports = (report,)
        if request.max_norm is not None:
            # The measures of a row that is not bundled include its sum of squares.
            unread = {
                chunk.rows[0]: chunk.grad(work)
                for chunk in chunks
                if len(chunk.rows) > 1 or chunk.rows[0] not in sums
            }
            sums |= zip(unread, self._sums_of_squares(list(unread.values())), strict=True)
            squares = [sums[chunk.rows[0]] for chunk in chunks]
        if reports:
            flags = [bool(flag) for flag in reports[0].flags]
        else:
            finite = 0 <= inverse <= 1 and squares is not None and all(map(math.isfinite, squares))
            flags = [not finite and bool(overflows(p.grad(work), inverse, p.dtype)) for p in chunks]
            if any(flags):
                among = [
                    row
                    for flag, chunk in zip(flags, chunks, strict=True)
                    if flag
                    for row in chunk.rows
                ]
                reports = (_report(work, among, inverse),)
        if squares is not None:
            squares = [
                x if chunk.in_norm else 0.0 for x, chunk in zip(squares, chunks, strict=True)
            ]
            squares = torch.tensor(squares, dtype=torch.float64, device=work.device)
            squares = squares * inverse * inverse
        return Partials(flags, squares, reports)

    def line_sums(self, work: Work, decision: Decision) -> LineSums:
        """See :meth:`Backend.line_sums`."""
        skip, inverse, clip = decision.coefficients_on_host
        rule = work.rule
        assert rule is not None
        sums: LineSums = {}
        for block, bundle in () if skip > 0 else work.backend_rows.bundles:
            states = bundle.row_column_states
            if states and states[0].shard is not None:  # never bundled
                if (grad := bundle.gather(work)) is None:
                    continue
                arguments = rule, work.hyper, (inverse, clip), work.present
                numbers = block.before_reduce(*arguments, self._scalars)
                tensors = (grad, bundle.param, *bundle.inputs)
                slices = bundle.slices(numbers)
                sums[bundle.among[0]] = bundle.functions["averages"](slices, tensors)
        return sums

    def reduce(self, work: Work, decision: Decision) -> Tensor:
        """See :meth:`Backend.reduce`."""
        skip, inverse, clip = decision.coefficients_on_host
        rule = work.rule
        assert rule is not None
        n_terms = rule.widths(len(work.hyper[0])).terms
        sums = torch.zeros(len(work.rows), n_terms, dtype=torch.float64, device="cpu")
        if skip > 0:
            return sums
        order, row_sums = [], []
        last: Any = None
        numbers: Any = None
        for block, bundle in work.backend_rows.bundles:
            if (grad := bundle.gather(work)) is None:
                continue
            if block is not last:
                last = block
                arguments = rule, work.hyper, (inverse, clip), work.present
                numbers = block.before_reduce(*arguments, self._scalars)
            bundle.load()
            tensors = (grad, bundle.param, *bundle.inputs)
            slices = bundle.slices(numbers)
            parts = list(slices.each())
            if bundle.row_column_states:
                of_lines = decision.lines.get(bundle.among[0])
                if of_lines is None:
                    of_lines = bundle.functions["averages"](slices, tensors)
                states = [bundle.row_column_states[part.row] for part in parts]
                advance(rule, states, bundle.flags, of_lines, [part.h for part in parts])
            order += [bundle.among[part.row] for part in parts]
            row_sums.append(bundle.functions["reduce"](slices, tensors))
        if row_sums:
            sums[order] = torch.cat(row_sums)  # one indexing takes as long as that of one bundle
        return sums

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        skip, inverse, clip = decision.coefficients_on_host
        rule = work.rule
        assert rule is not None
        last: Any = None
        numbers: Any = None
        h: list[list[float]] = []
        large: list[LargeRow] = []
        for block, bundle in () if skip > 0 else work.backend_rows.update_bundles:
            if (grad := bundle.gather(work)) is None:
                continue
            if block is not last:
                last, coefficients = block, (inverse, clip)
                arguments = rule, work.hyper, coefficients, decision.sums, work.present
                numbers = block.advance(*arguments, self._scalars)
                h = []
            tensors = (grad, bundle.param, *bundle.rest)
            rows = bundle.rows if rule.draws or bundle.rows[0].keys is not None else ()
            if bundle.copies is None:
                h = h or numbers.of_each(len(block.rows))
                own = h[bundle.among[0] - block.start]
                large.append(LargeRow(bundle, own, tensors, rows))
                continue
            bundle.load()
            bundle.functions["update"](bundle.slices(numbers, rows), tensors)
            bundle.store()
        if large:
            self._update_large(large)
        for _, bundle in work.backend_rows.bundles:
            bundle.gathered_at = None

    def _update_large(self, large: list[LargeRow]) -> None:
        """Update parameters that are not bundled with others."""
        for bundle, h, tensors, rows in large:
            slices = Slices.of_one(tensors[0].numel(), h, rows)
            bundle.functions["update"](slices, tensors)


class Cpu(CpuBackend):
    """CPU tensors, with rules run as torch operations."""

    name = "eager"
    detect = CpuBackend._detect

    def _prepare_functions(self, work: Work, bundles: list[tuple[Block, Bundle]]) -> bool:
        """Give each bundle torch functions. Returns whether the functions are final: they are."""
        assert work.rule is not None
        for _, bundle in bundles:
            bundle.functions = torch_functions(work.rule, bundle)
        work.backend_rows.update_bundles += bundles
        return True

    def _scalars(
        self, rule: Rule, flags: tuple[bool, ...], rows: ScalarRows, h: Sequence[float]
    ) -> Numbers:
        """See :func:`scalars_on_host`."""
        return scalars_on_host(rule, flags, rows, h)

    def _sums_of_squares(self, grads: list[Tensor]) -> list[float]:
        """The sum of squares of each gradient."""
        return list(map(sum_of_squares, grads))

    def _surely_finite(self, grads: list[Tensor]) -> bool:
        """Whether the sums of all gradients are finite: then all elements are."""
        return sums_are_finite(grads)


def sums_are_finite(grads: list[Tensor]) -> bool:
    """Return :meth:`CpuBackend._surely_finite`; ``False`` for half precision, without a test."""
    # A sum is finite only if all elements are, and it takes two thirds of the time of the
    # extremes. That of a half-precision tensor would be half-precision.
    return all(
        grad.dtype in (torch.float32, torch.float64) and math.isfinite(grad.sum().item())
        for grad in grads
    )


class _Chunk(NamedTuple):
    """The unit that detect reads: the gradient of one row, or those of all rows of a bundle.

    Attributes:
        bundle: the bundle; ``None`` for a row, where no bundles were prepared.
        dtype: the arithmetic dtype, in which it is unscaled.
        in_norm: whether the gradient norm counts it; the same for all rows of a bundle.
        rows: the indices of its rows in ``work.rows``.
    """

    bundle: Bundle | None
    dtype: torch.dtype
    in_norm: bool
    rows: Sequence[int]

    def has_elements(self, work: Work) -> bool:
        """Return whether any row has a gradient with elements."""
        grads = (work.grads[row] for row in self.rows)
        return any(grad is not None and grad.numel() for grad in grads)

    def grad(self, work: Work) -> Any:
        """Return the gradient; flat if it is that of several rows, which is copied on first use."""
        return work.grads[self.rows[0]] if self.bundle is None else self.bundle.gather(work)


def _multiply(grads: list[Tensor], factor: float) -> None:
    """Multiply all of ``grads`` in place, in their arithmetic dtypes."""
    alike = [grad for grad in grads if grad.dtype == arithmetic(grad.dtype)]
    if alike:
        torch._foreach_mul_(alike, factor)  # pyright: ignore[reportPrivateImportUsage]
    for grad in grads:
        # torch would round the factor to half precision first.
        if grad.dtype != arithmetic(grad.dtype):
            grad.copy_(grad.to(arithmetic(grad.dtype)) * factor)


def _report(work: Work, among: Sequence[int], inverse: float) -> GradientReport:
    """Test each row in ``among`` by itself, where at least one of them is known to overflow."""
    rows = [row for row in among if work.is_present(row) and work.grads[row].numel()]
    dtypes = work.compute_dtypes
    flags = [bool(overflows(work.grads[r], inverse, dtypes[r])) for r in rows]
    return GradientReport(flags, rows, work.owners)
