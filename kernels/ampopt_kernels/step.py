"""The passes of one step, and their order.

A step has three passes, each one launch on an accelerator. *detect* reads the gradients once, for
overflow flags and norms. *control* decides whether to skip, and computes the next scale. *update*
advances the scalar states (on an accelerator, control has) and applies the rule, or returns at
once. Two more passes run before update for rules that need them: *sum_lines* for means over rows
and columns, *reduce* for sums over whole parameters. :func:`run` calls the passes in order; a
:class:`Backend` carries them out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.devices import to_device
from ampopt_kernels.row_column_means import advance
from ampopt_kernels.step_data import Coefficients, Decision, Partials, Request
from ampopt_kernels.step_decision import RUNNING, Check, decide
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.stochastic import advance_keys
from ampopt_kernels.sums import over_all
from ampopt_kernels.tensors import widest
from ampopt_kernels.uploads import on_host

__all__ = ["Backend", "as_tensor", "reciprocal", "run", "widened"]

_decide = torch_language.bind(decide, torch_language.in_widest)
_decide_on_numbers = torch_language.bind(decide, torch_language.on_numbers)


class Backend(ABC):
    """How the passes of a step are carried out: ``eager``, ``compiled`` or ``triton``."""

    name: ClassVar[str]
    host_sees: bool = False
    """Whether tensors are on the host, so that reading one does not synchronize."""
    can_compile: bool = True
    """Whether everything that :meth:`prepare` was called for could be compiled."""

    def unscales_in_update(self, work: Work, request: Request) -> bool:
        """Whether update, and not detect, stores the unscaled gradients of ``work``.

        All works of a step that stores them have backends of one kind.
        """
        return False

    def prepare(self, work: Work, request: Request, *, decides: bool) -> None:  # noqa: B027
        """Run the part of the passes of a step that may fail, before the first of them.

        At least of what follows a change: update, which follows control; and all passes of a step
        that writes before control has decided: gradients, their sums, or the statistics of skip
        conditions.

        Args:
            work: the rows and gradients of one device.
            request: of the step, with tensors on this device.
            decides: whether :meth:`control` is called with this work. Otherwise the decision comes
                from another device.
        """

    @abstractmethod
    def detect(self, work: Work, request: Request) -> Partials:
        """Read every gradient once: test it for inf/NaN, sum its squares, measure it.

        Stores it unscaled if ``request.write``. If ``request.accumulate``, neither sums squares nor
        measures, but adds it unscaled to ``row.param``, and tests that sum, too. A sum whose flag
        says that it is empty is overwritten without being read. If ``request.found_inf`` is more
        than 0, no sum changes, but empty ones become 0.
        """

    def control(self, work: Work, request: Request, partials: Partials | None) -> Decision:
        """Decide whether to skip, the clip coefficient and the next scale: see :func:`decide`.

        By torch operations on 0-d tensors of the device, or on Python numbers if :attr:`host_sees`.
        Updates the statistics of the skip conditions of ``request``.
        A backend that overrides this may advance the scalar states of ``work``, too.
        """
        device = work.device
        in_numbers = self.host_sees
        checks, inputs = [], []  # of the skip conditions
        if request.causes:
            checks = request.checks(device)
            # A window of values is a tensor, and so are then all other numbers.
            in_numbers = in_numbers and not any(check.window for check in checks)
            inputs = [_read(check, in_numbers) for check in checks]
        read: Any = Tensor.item if in_numbers else widened

        flag: Any = 0.0
        if request.check and partials is not None:
            flags = partials.flags
            if isinstance(flags, list):
                flag = float(any(flags))
            elif flags.numel():
                flag = read(flags.max())
        external = None if request.found_inf is None else read(request.found_inf)
        scale = None if request.scale is None else read(request.scale)
        growth = budget = None
        if request.counters is not None:
            read_all = Tensor.tolist if in_numbers else _unbound  # one copy for both counters
            growth, budget = read_all(request.counters)
        norm = wide_norm = None
        if request.max_norm is not None and partials is not None:
            assert partials.squares is not None
            wide_norm = partials.squares.sum().sqrt()
            norm = wide_norm.to(torch.float64 if work.float64 else torch.float32)
            wide_norm = read(wide_norm)
        scheduled_by = None if request.scheduled_by is None else read(request.scheduled_by)
        loss = None if request.loss is None else read(request.loss)
        decides = _decide_on_numbers if in_numbers else _decide
        found_inf, skip, clip, cause, scheduled, statistics = decides(
            *(flag, external, scale, growth, budget, request.policy, scheduled_by),
            *(wide_norm, request.max_norm, loss, inputs),
            *(request.check, request.drop),
        )
        for check, new in zip(checks, statistics, strict=True):
            _write(check, new)

        unscales = self.unscales_in_update(work, request)
        inverse: Any = 1.0  # if detect has stored the gradients unscaled
        if request.grad_scale is not None and (unscales or not request.write):
            inverse = reciprocal(scale)
        coefficients: Any = skip, inverse, clip
        if self.host_sees:
            coefficients = Coefficients(*map(float, coefficients))
        else:
            coefficients = as_tensor(coefficients, widest(device), device)
        next_scale = counters = None
        if scheduled:
            assert request.scale is not None
            next_scale = as_tensor(scheduled[0], request.scale.dtype, device)
            if request.scale.ndim:
                next_scale = next_scale.reshape(request.scale.shape)
            counters = as_tensor(scheduled[1:], torch.int32, device)
        return Decision(
            found_inf=as_tensor(found_inf, torch.float32, device),
            coefficients=coefficients,
            norm=norm,
            scale=next_scale,
            counters=counters,
            reports=() if partials is None else partials.reports,
            scaled_by=request.scale,
            earlier_decision=request.earlier_decision,
            unscales=unscales,
            cause=as_tensor(cause, widest(device), device) if checks else None,
        )

    def taken_over(self, work: Work, decision: Decision) -> Decision:
        """The ``decision`` of another device, with what :meth:`control` computes for ``work``."""
        return decision

    @abstractmethod
    def sum_lines(self, work: Work, decision: Decision) -> Tensor | None:
        """Write the sums of the terms of ``rule.averages`` to the ``sums`` of all line stacks.

        Returns:
            The numbers that ``averages`` gets for each row: ``widest``, shape (rows, numbers);
            those of a row without a gradient are undefined. ``None``, and the sums are undefined,
            if the host knows that the step is skipped.
        """

    @abstractmethod
    def reduce(self, work: Work, decision: Decision) -> Tensor:
        """Sum the terms of ``rule.reduce`` over each parameter. Changes no parameter or state.

        Returns:
            ``widest``, shape (rows, terms); the same bits in each run.
        """

    @abstractmethod
    def update(self, work: Work, decision: Decision) -> None:
        """Apply the rule to every row, or change nothing if the decision is to skip.

        Stores the gradients unscaled, also if it skips, if ``decision.unscales``.
        Advances the scalar states first, unless the backend's control has (``decision.h``).
        """


def run(
    backend_for: Callable[[torch.device], Backend], works: Sequence[Work], request: Request
) -> Decision:
    """Run one step over the works of all devices, with one decision for all of them.

    The first device decides, from the flags and norms of all devices. Does not synchronize, unless
    the CPU is one of several devices.

    Args:
        backend_for: returns the backend for a device.
        works: one or more for each device.
        request: options of the step.

    Returns:
        The decision, on the device of the first work.
    """
    if request.max_norm is None and (request.causes or request.measure):
        request = request.with_norm()
    backends = [backend_for(work.device) for work in works]
    requests = [_on(work.device, request) for work in works]
    for backend, work, on_device in zip(backends, works, requests, strict=True):
        backend.prepare(work, on_device, decides=work is works[0])
    if not all([backend.can_compile for backend in backends]):  # then "auto" has another one
        backends = [backend_for(work.device) for work in works]
    first_request, partials = requests[0], None
    writes = request.write and not backends[0].unscales_in_update(works[0], request)
    if request.needs_agreement or writes or request.measure or request.accumulate:
        first_request, partials = _detected(backends, works, requests)
    decision = backends[0].control(works[0], first_request, partials)
    rule = works[0].rule
    if rule is not None:
        decisions = [decision] + [
            backend.taken_over(work, _on_device(decision, work.device))
            for backend, work in zip(backends[1:], works[1:], strict=True)
        ]
        if rule.averages is not None:
            _average_lines(backends, works, decisions, request)
        if rule.reduces:
            parts = zip(backends, works, decisions, strict=True)
            own = [backend.reduce(work, decided) for backend, work, decided in parts]
            sums = over_all(works, own, request.agree_on_sums)
            decisions = [replace(d, sums=s) for d, s in zip(decisions, sums, strict=True)]
        for backend, work, decided in zip(backends, works, decisions, strict=True):
            if work.keyed_rows:
                advance_keys(work.random_keys, decided.skip)
            backend.update(work, decided)
    for backend, work in zip(backends, works, strict=True):
        if not backend.host_sees:  # then a graph of the device may be capturing this step
            work.uploads.keep_while_captured(work.device, work.of_lines)
    return decision


def _detected(
    backends: Sequence[Backend], works: Sequence[Work], requests: Sequence[Request]
) -> tuple[Request, Partials]:
    """Run detect on every device, and combine what it found on all devices and ranks.

    Args:
        backends: one for each work.
        works: as for :func:`run`.
        requests: the request of the step, with tensors on each device.

    Returns:
        The first request, with what the ranks have agreed on; and the partials on that device.
    """
    each = zip(backends, works, requests, strict=True)
    results = [backend.detect(work, on_device) for backend, work, on_device in each]
    request = requests[0]
    device = works[0].device
    partials = results[0] if len(results) == 1 else _joined(results, device)
    if request.agree is not None:
        reduced = request.agree(partials, request.found_inf, device)
        partials = replace(reduced, reports=(*partials.reports, *reduced.reports))
        if request.check:  # if not, it was not all-reduced: every rank has the same flag
            request = replace(request, found_inf=None)
        if reduced.loss is not None:
            request = replace(request, loss=reduced.loss)
    return request, partials


def _on_device(decision: Decision, device: torch.device) -> Decision:
    """What update needs of the ``decision`` of another device."""
    coefficients = to_device(decision.coefficients_on_device, device, widest(device))
    return Decision(decision.found_inf, coefficients, unscales=decision.unscales)


def _average_lines(
    backends: Sequence[Backend],
    works: Sequence[Work],
    decisions: Sequence[Decision],
    request: Request,
) -> None:
    """Compute the means over rows and columns of this step; see ``row_column_means``."""
    each = list(zip(backends, works, decisions, strict=True))
    numbers = [backend.sum_lines(work, decision) for backend, work, decision in each]
    if request.agree_on_lines is not None:
        request.agree_on_lines(works)
    for (backend, work, decision), h in zip(each, numbers, strict=True):
        if h is not None:
            advance(work, h, None if backend.host_sees else decision.skip > 0)


def _on(device: torch.device, request: Request) -> Request:
    """``request`` with scale, flags and loss copied to ``device``."""
    for name in ("scale", "found_inf", "scheduled_by", "loss"):
        tensor = getattr(request, name)
        if tensor is not None and tensor.device != device:
            request = replace(request, **{name: to_device(tensor, device)})
    return request


def _joined(parts: list[Partials], device: torch.device) -> Partials:
    """The partials of several devices as one, on ``device``."""
    flags = torch.cat([p.flags_on(device) for p in parts])
    wide = widest(device)
    squares = [to_device(p.squares, device, wide) for p in parts if p.squares is not None]
    reports = tuple(report for p in parts for report in p.reports)
    return Partials(flags, torch.cat(squares) if squares else None, reports)


def reciprocal(value: Any) -> Any:
    """1 / ``value``, of a scale that is a number or a tensor; infinity for 0."""
    if isinstance(value, Tensor):
        return value.reciprocal()
    return 1.0 / value if value else float("inf")


def widened(tensor: Tensor) -> Tensor:
    """``tensor``, of one element, as a 0-d tensor of the widest dtype of its device."""
    return tensor.detach().reshape(()).to(widest(tensor.device))


def _read(check: Check, in_numbers: bool) -> tuple[Any, ...]:
    """Settings and statistics of ``check``, as :func:`decide` takes them."""
    numbers = check.statistics
    if numbers is None:
        return check.settings, ()
    if len(numbers) == RUNNING:
        return check.settings, tuple(numbers.tolist() if in_numbers else numbers.unbind())
    ring = numbers[2:]
    places = torch.arange(len(ring), dtype=ring.dtype, device=ring.device)
    return check.settings, (numbers[0], numbers[1], ring, places)


def _write(check: Check, statistics: tuple[Any, ...]) -> None:
    """Replace the statistics of ``check`` by those that :func:`decide` has returned."""
    if check.statistics is not None:
        dtype, device = check.statistics.dtype, check.statistics.device
        parts = (as_tensor(part, dtype, device) for part in statistics[:RUNNING])
        check.statistics.copy_(torch.cat([part.reshape(-1) for part in parts]))


def _unbound(tensor: Tensor) -> tuple[Tensor, ...]:
    """The elements of ``tensor`` as 0-d tensors of the widest dtype of its device."""
    return tensor.to(widest(tensor.device)).unbind()


def as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor on ``device`` of numbers or of 0-d tensors that are on it already."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype, copy=True)
    if not isinstance(value, (list, tuple)):
        return torch.full((), value, dtype=dtype, device=device)  # half the time of torch.tensor
    if any(map(torch.is_tensor, value)):
        return torch.stack([as_tensor(v, dtype, device) for v in value])
    values = value if dtype.is_floating_point else tuple(map(int, value))
    return on_host(values, dtype).to(device)
