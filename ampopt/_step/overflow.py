"""Checks gradients for inf/NaN, and unscales them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ampopt._step import gradients
from ampopt._step.gradient_rows import GradientRows
from ampopt._step.rank_agreement import Agreement, DecisionAllReduce, decision_all_reduce
from ampopt._step.ranks import AgreementCache
from ampopt.backend import backend_for
from ampopt_kernels.memory import overlaps_itself, turns_of
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.uploads import Uploads

__all__ = ["OverflowCheck", "check_and_unscale", "decided_elsewhere", "make_writable"]


def decided_elsewhere(
    request: Request, all_reduce: DecisionAllReduce | None, device: torch.device
) -> Decision | None:
    """The decision from the all-reduced flags, on a rank with no gradients to check.

    If no rank has gradients, nothing is skipped, and the scale and the statistics of skip
    conditions stay as they are.

    Args:
        request: the request of the call.
        all_reduce: what :func:`~ampopt._step.rank_agreement.decision_all_reduce` returned.
        device: the device of the decision.

    Returns:
        The decision; ``None`` if there are no other ranks.
    """
    if all_reduce is None:
        return None
    check_request = replace(request, write=False, agree=all_reduce)
    known = [check.statistics for check in request.checks(device) if check.statistics is not None]
    before = [statistics.clone() for statistics in known]
    decision = run(backend_for, [Work(device, [])], check_request)
    any_gradients = all_reduce.any_gradients
    for statistics, old in zip(known, before, strict=True):
        statistics.copy_(torch.where(any_gradients, statistics, old))
    found_inf = torch.where(any_gradients, decision.found_inf, 0.0)
    coefficients = torch.where(any_gradients, decision.coefficients_on_device, 0.0)
    decision = replace(decision, found_inf=found_inf, coefficients=coefficients)
    return decision.with_schedule_where(any_gradients, request)


def check_and_unscale(
    rows: GradientRows,
    request: Request,
    all_reduce: DecisionAllReduce | None,
    device: torch.device,
    *,
    write: bool = False,
) -> Decision | None:
    """Check gradients for inf/NaN, and make one decision, without autograd. Does not synchronize.

    Args:
        rows: the rows of the gradients, of one optimizer or of several.
        request: the scale, and what else to check. Nothing is stepped.
        all_reduce: what :func:`~ampopt._step.rank_agreement.decision_all_reduce` returned.
        device: the device of the decision if there are no gradients on this rank.
        write: whether to unscale the gradients in place; see :func:`make_writable`.

    Returns:
        The decision; ``None`` if no rank has gradients.
    """
    if not rows.present:
        return decided_elsewhere(request, all_reduce, device)
    request = replace(request, write=write, agree=all_reduce)
    try:
        decision = run(backend_for, rows.works, request)
    finally:
        rows.release()
    if write:
        for values, unscaled_values in rows.copies:
            values.copy_(unscaled_values)
    return decision


class OverflowCheck:
    """Checks the gradients of the same optimizers, which make one decision, call after call."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._agreement = AgreementCache()
        self._rows: GradientRows | None = None
        self._uploads: dict[torch.device, Uploads] = {}

    def agreement(self, optimizers: Sequence[Any], process_group: Any) -> Agreement | None:
        """The ranks that all-reduce the overflow flag; see :func:`ampopt._step.ranks.agreement`."""
        return self._agreement.get(optimizers, process_group)

    @torch.no_grad()
    def check(
        self, optimizers: Sequence[Any], request: Request, agreement: Agreement | None
    ) -> Decision | None:
        """Check the present gradients.

        Args:
            optimizers: the same ones in every call.
            request: see :func:`check_and_unscale`; its ``write`` is the argument there.
            agreement: what :meth:`agreement` returned.

        Returns:
            The decision; ``None`` if no rank has gradients.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rows = self._rows
        if rows is None or not rows.take_gradients(groups, agreement, are_written=request.write):
            present = gradients.params_with_grads(groups)
            if request.write:
                make_writable(present)
            rows = GradientRows.of(present, present, agreement, self._uploads)
            self._rows = rows.kept(groups)
        all_reduce = decision_all_reduce(agreement, request, bool(rows.present))
        device = gradients.device_of(groups)
        return check_and_unscale(rows, request, all_reduce, device, write=request.write)


@torch.no_grad()
def make_writable(with_grads: Sequence[gradients.ParamWithGrad]) -> None:
    """Replace gradients that cannot be unscaled or clipped in place by copies that can.

    Elements of an ``expand()``ed gradient share memory, so it cannot be written in place. Elements
    that two gradients have would be multiplied twice.
    """
    each = [gradients.values_of(tensor) for _, tensor, _ in with_grads]
    for (_, tensor, _), values, turn in zip(with_grads, each, turns_of(each), strict=True):
        if turn or overlaps_itself(values):
            tensor.grad = tensor.grad.clone(memory_format=torch.contiguous_format)
