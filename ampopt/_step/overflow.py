"""Checks gradients for inf/NaN, and unscales them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ampopt._step import gradients
from ampopt._step.rank_agreement import Agreement, DecisionAllReduce
from ampopt.backend import backend_for
from ampopt_kernels.memory import overlaps_itself, sharing_memory
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.tensors import dense_like
from ampopt_kernels.uploads import Uploads

__all__ = [
    "GradientWorks",
    "check_and_unscale",
    "decided_elsewhere",
    "device_of",
    "make_writable",
    "works_of",
]


def decided_elsewhere(
    request: Request, all_reduce: DecisionAllReduce | None, device: torch.device | None
) -> Decision | None:
    """The decision from the all-reduced flags, on a rank with no gradients to check.

    If no rank has gradients, the scale and the statistics of skip conditions stay as they are.

    Args:
        request: the request of the call.
        all_reduce: what :func:`~ampopt._step.rank_agreement.decision_all_reduce` returned.
        device: the device of the decision; ``None`` if there are no parameters.

    Returns:
        The decision; ``None`` if there are no other ranks.
    """
    if all_reduce is None or device is None:
        return None
    check_request = replace(request, write=False, apply=False, agree=all_reduce)
    known = [check.statistics for check in request.checks(device) if check.statistics is not None]
    before = [statistics.clone() for statistics in known]
    decision = run(backend_for, [Work(device, [])], check_request)
    for statistics, old in zip(known, before, strict=True):
        statistics.copy_(torch.where(all_reduce.any_gradients, statistics, old))
    return decision.with_schedule_where(all_reduce.any_gradients, request)


@torch.no_grad()
def check_and_unscale(
    with_grads: Sequence[gradients.ParamWithGrad],
    request: Request,
    all_reduce: DecisionAllReduce | None,
    decision_device: torch.device | None,
    *,
    write: bool,
    uploads: dict[torch.device, Uploads],
) -> Decision | None:
    """Check gradients for inf/NaN, and make one decision. Does not synchronize.

    Args:
        with_grads: the parameters with gradients, of one optimizer or of several.
        request: the scale and what else to check; nothing is stepped.
        all_reduce: what :func:`~ampopt._step.rank_agreement.decision_all_reduce` returned.
        decision_device: the device of the decision if there are no gradients on this rank.
        write: whether to unscale the gradients in place; see :func:`make_writable`.
        uploads: constants that earlier calls have copied to a device, by device.

    Returns:
        The decision; ``None`` if there are no gradients.
    """
    if not with_grads:
        return decided_elsewhere(request, all_reduce, decision_device)
    agreement = None if all_reduce is None else all_reduce.agreement
    return GradientWorks.of(with_grads, agreement, uploads).check(request, all_reduce, write=write)


class GradientWorks(NamedTuple):
    """The rows of gradients that are only checked and unscaled.

    Attributes:
        works: the rows, by device.
        copies: original and copy of each gradient that is not dense in memory: its row has the
            copy.
    """

    works: list[Work]
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    @staticmethod
    def of(
        with_grads: Sequence[gradients.ParamWithGrad],
        agreement: Agreement | None,
        uploads: dict[torch.device, Uploads],
    ) -> "GradientWorks":
        """Make the rows.

        Args:
            with_grads: as for :func:`check_and_unscale`.
            agreement: the ranks whose norm counts replicated gradients once; ``None`` for one rank.
            uploads: as for :func:`check_and_unscale`.
        """
        rows, grads, copies = [], [], []
        for group, tensor, owner in with_grads:
            values = gradients.values_of(tensor)
            grad = dense_like(values, values)
            if grad is not values:
                copies.append((values, grad))
            grads.append(grad)
            in_norm = agreement is None or agreement.in_norm(tensor, group, owner.key)
            rows.append(ParamRow(grad.dtype, in_norm=in_norm, owner=owner))
        return GradientWorks(works_of(rows, grads, uploads), copies)

    def check(
        self, request: Request, all_reduce: DecisionAllReduce | None, *, write: bool
    ) -> Decision:
        """Check the gradients; see :func:`check_and_unscale`."""
        check_request = replace(request, write=write, apply=False, agree=all_reduce)
        decision = run(backend_for, self.works, check_request)
        if write:
            for values, unscaled_values in self.copies:
                values.copy_(unscaled_values)
        for work in self.works:
            work.release()
        return decision


@torch.no_grad()
def make_writable(with_grads: Sequence[gradients.ParamWithGrad]) -> None:
    """Replace gradients that cannot be unscaled or clipped in place by copies that can.

    Elements of an ``expand()``ed gradient share memory, so it cannot be written in place. Elements
    that two gradients have would be multiplied twice.
    """
    each = [gradients.values_of(tensor) for _, tensor, _ in with_grads]
    shared = sharing_memory(each)
    for place, (_, tensor, _) in enumerate(with_grads):
        if place in shared or overlaps_itself(each[place]):
            tensor.grad = tensor.grad.clone(memory_format=torch.contiguous_format)


def works_of(
    rows: Sequence[ParamRow],
    grads: Sequence[Any],
    uploads: dict[torch.device, Uploads],
    rule: Rule | None = None,
) -> list[Work]:
    """Group rows and their gradients by device, the device of the first parameter first."""
    works: dict[torch.device, Work] = {}
    work = None
    for row, grad in zip(rows, grads, strict=True):
        device = (grad if row.param is None else row.param).device
        if work is None or work.device != device:
            if device not in works:
                if device not in uploads:
                    uploads[device] = Uploads()
                works[device] = Work(device, [], [], rule, uploads=uploads[device])
            work = works[device]
        work.rows.append(row)
        work.grads.append(grad)
    return list(works.values())


def device_of(param_groups: list[dict[str, Any]]) -> torch.device | None:
    """The device for decisions about these parameters; ``None`` if there are no parameters.

    It is the device of the first parameter with a gradient, else of the first parameter.
    """
    first = None
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return param.device
            first = param if first is None else first
    return None if first is None else first.device
