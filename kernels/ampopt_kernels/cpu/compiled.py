"""The compiled backend: update rules as C++ for the CPU, over a table of addresses.

Each pass is one call for all rows of a kind, whatever their number; large rows are shared by
threads. The host reads a CPU tensor without a synchronization, so a skipped step returns at once.
"""

import math
from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from ampopt_kernels.cpu.gradients import GradientTable
from ampopt_kernels.cpu.table import Table
from ampopt_kernels.eager import accumulate_gradients
from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.gradient_terms import ACCUMULATION, MEASURES
from ampopt_kernels.native import objects
from ampopt_kernels.native.cache import CacheError
from ampopt_kernels.step import Backend, reciprocal
from ampopt_kernels.step_data import Decision, Partials, Request
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.uploads import on_host

__all__ = ["Compiled"]


class Compiled(Backend):
    """CPU tensors, with each rule compiled once for its flags and dtypes.

    Sizes, learning rates and all other scalars are arguments of the compiled functions, so nothing
    is ever compiled again for them.

    Results have the bits of the eager backend, but for what ``cpp`` names. One is a NaN that
    arithmetic makes or passes on: its sign, and which of two NaNs is kept, depend on the order of
    operands, which C++ compilers choose. Conversions keep the bits of a NaN as torch's do.
    """

    name = "compiled"
    host_sees = True

    def __init__(self, *, warn: Callable[[str, type[Warning]], None] | None = None) -> None:
        """Compile what every step needs.

        Args:
            warn: is called with a message if something cannot be compiled, and
                :attr:`can_compile` becomes false; ``None`` to raise an error.
        """
        objects.loops.want()
        self._warn = warn
        self._try(GradientTable(torch.float32, torch.float32, array("q")).compile)

    def unscales_in_update(self, work: Work, request: Request) -> bool:
        """See :meth:`Backend.unscales_in_update`. This reads and writes gradients once less."""
        return request.write and work.rule is not None

    def prepare(self, work: Work, request: Request, *, decides: bool) -> None:
        """See :meth:`Backend.prepare`. Waits for the compiler at the first use of a rule."""
        table, squares = Table.of(work), request.write or request.max_norm is not None
        step = request.accumulate, squares, request.measure
        if step in table.prepared:
            return

        def compiles() -> None:
            rule = None if table.kinds else ACCUMULATION if request.accumulate else work.rule
            table.compile(work, rule, squares=squares, measures=request.measure)
            table.prepared.add(step)

        self._try(compiles)

    def _try(self, compiles: Callable[[], None]) -> None:
        """Call ``compiles``.

        Raises:
            RuntimeError: the compiler failed, or its output cannot be kept, and that is an error.
        """
        try:
            compiles()
        except Exception as error:
            if self._warn is None:
                raise RuntimeError(f"the compiled backend {_needed(error)}") from error
            self.can_compile = False  # the compiler would fail for the next rule too
            message = str(error)
            if not isinstance(error, CacheError):
                message = f"compiling a rule failed, {type(error).__name__}: {error}"
            self._warn(f"{message}; staying on the eager backend", RuntimeWarning)

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`. The chunks are the rows of ``work``."""
        if request.accumulate:
            if request.found_inf is not None and request.found_inf.item() > 0:  # all are rejected
                return accumulate_gradients(work, request)
            return self._accumulate(work, request)
        scale = request.grad_scale
        inverse = 1.0 if scale is None else reciprocal(scale.item())
        table, n, flags = Table.of(work), len(work.rows), bytearray(len(work.rows))
        measures = squares = None
        finite, tests = True, request.check  # whether they are; whether that has to be tested
        if request.measure:
            measures = torch.zeros(n, MEASURES, dtype=torch.float64, device="cpu")
            for rows in table.gradients:
                rows.measure(table.grads_at, inverse, flags, measures)
            finite, tests = not any(flags), False
            measures[:, 0] = squares = table.counted(measures[:, 0]) * inverse * inverse
        elif request.max_norm is not None:
            squares = torch.zeros(n, dtype=torch.float64, device="cpu")
            for rows in table.gradients:
                rows.add_squares(table.grads_at, squares)
            # Unscaling by 1 or less makes nothing larger: finite before means finite after.
            tests = not (0 <= inverse <= 1 and math.isfinite(squares.sum().item()))
            squares = table.counted(squares) * inverse * inverse
        if request.write and not self.unscales_in_update(work, request):
            finite = _unscale(work, inverse, flags)
        elif tests:  # all rows, to have the flag of each
            finite = all([r.all_finite(table.grads_at, inverse, flags) for r in table.gradients])
        reports = ()
        if measures is not None or not finite:
            places = table.with_elements()
            own = measures if measures is None or len(places) == n else measures[places]
            overflows = [bool(flags[place]) for place in places]
            own = None if own is None else own.T
            reports = (GradientReport(overflows, places, work.owners, own),)
        no_flags = finite and squares is None
        return Partials([] if no_flags else list(map(bool, flags)), squares, reports)

    def _accumulate(self, work: Work, request: Request) -> Partials:
        """Add the unscaled gradients to their sums; see :meth:`Backend.detect`."""
        table, n = Table.of(work), len(work.rows)
        coefficients = 1.0 if request.scale is None else reciprocal(request.scale.item()), 1.0
        overflows = torch.zeros(n, 1, dtype=torch.float64, device="cpu")
        for rows in table.kinds:
            rows.before_sums(table, coefficients)
            rows.reduce(table, overflows)
            at = overflows.data_ptr()
            rows.update(table, coefficients, (at, at), unscales=False)
        flags = [count > 0 for count in overflows.view(-1).tolist()]
        reports = (GradientReport(flags, range(n), work.owners),) if any(flags) else ()
        return Partials(flags, None, reports)

    def sum_lines(self, work: Work, decision: Decision) -> Tensor | None:
        """See :meth:`Backend.sum_lines`."""
        skip, inverse, clip = decision.coefficients_on_host
        rule = work.rule
        assert rule is not None
        if skip > 0:
            return None
        table, n_h = Table.of(work), rule.widths(len(work.hyper[0])).reduce
        h = array("d", bytes(8 * n_h * len(work.rows)))
        work.clear_line_sums()
        for rows in table.kinds:
            if "averages" in rows.kind.roles:
                rows.before_sums(table, (inverse, clip))
                rows.sum_lines(table, h)
        return on_host(h, torch.float64).view(len(work.rows), n_h)

    def reduce(self, work: Work, decision: Decision) -> Tensor:
        """See :meth:`Backend.reduce`."""
        skip, inverse, clip = decision.coefficients_on_host
        rule = work.rule
        assert rule is not None
        n_terms = rule.widths(len(work.hyper[0])).terms
        sums = torch.zeros(len(work.rows), n_terms, dtype=torch.float64, device="cpu")
        if skip > 0:
            return sums
        table = Table.of(work)
        for rows in table.kinds:
            rows.before_sums(table, (inverse, clip))
            rows.reduce(table, sums)
        return sums

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        skip, inverse, clip = decision.coefficients_on_host
        if skip > 0:
            if decision.unscales:
                _unscale(work, inverse, bytearray(len(work.rows)))
            return
        sums = () if decision.sums is None else tuple(map(Tensor.contiguous, decision.sums))
        table, addresses = Table.of(work), tuple(map(Tensor.data_ptr, sums)) or (None, None)
        for rows in table.kinds:
            rows.update(table, (inverse, clip), addresses, unscales=decision.unscales)
        if decision.unscales:
            objects.bump_versions(work.present_grads)


def _unscale(work: Work, inverse: float, flags: bytearray) -> bool:
    """Multiply the gradients of ``work`` in place by ``inverse``, the reciprocal of their scale.

    Returns:
        Whether all are finite. Else sets the flags of rows to 1.
    """
    table = Table.of(work)
    finite = all([rows.unscale(table.grads_at, inverse, flags) for rows in table.gradients])
    objects.bump_versions(work.present_grads)
    return finite


def _needed(error: Exception) -> str:
    """The rest of a message that begins with the compiled backend: what it lacks."""
    if isinstance(error, CacheError):
        return f"needs a place on disk: {error}, or choose 'auto' or 'eager'"
    return (
        f"needs a working C++ compiler: {error}. Install g++ or clang++ (or point CXX at one), "
        "or choose 'auto' or 'eager'"
    )
