"""Judge, and unscale, the gradients of optimizers of any class, of one or several at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients, ranks
from ampopt._step.rank_messages import Call
from ampopt.backend import backend_for
from ampopt_kernels.decision import Decision, Partials, Request
from ampopt_kernels.devices import to_device
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import run
from ampopt_kernels.tensors import dense_like, overlaps_itself, widest
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Row, Work

__all__ = [
    "SkipCauses",
    "check_and_unscale",
    "check_and_unscale_held",
    "decide",
    "decided_elsewhere",
    "device_of",
    "works_of",
]


def check_and_unscale(
    param_groups: list[dict[str, Any]],
    request: Request,
    *,
    write: bool = False,
    uploads: dict[torch.device, Uploads] | None = None,
    process_group: Any = None,
) -> Decision | None:
    """Judge all gradients under one decision. Does not synchronize.

    Args:
        param_groups: of one or several optimizers.
        request: what is asked; nothing is stepped.
        write: unscale the gradients in place.
        uploads: what the devices hold of earlier calls.
        process_group: of the ranks that decide together; see :func:`ampopt._step.ranks.agreement`.

    Returns:
        The decision; ``None`` if there are no gradients.

    Raises:
        RuntimeError: see :func:`ampopt._step.gradients.held`; nothing has changed then.
        TypeError: likewise.
    """
    held, decision_device = gradients.held(param_groups), device_of(param_groups)
    agreement = ranks.agreement(param_groups, process_group)
    uploads = {} if uploads is None else uploads
    return check_and_unscale_held(
        held, request, agreement, decision_device, write=write, uploads=uploads
    )


def decided_elsewhere(
    request: Request,
    agreement: ranks.Agreement | None,
    device: torch.device | None,
    *,
    present: bool = False,
    call: Call = Call.JUDGES,
) -> Decision | None:
    """The decision of other ranks, on one without gradients; ``None`` if there are no others.

    The scale learns nothing if no rank has gradients; nor is this one without, if ``present`` says
    that those were judged already. For ``call`` see :class:`ampopt._step.rank_messages.Call`.
    """
    if agreement is None or device is None or not request.needs_agreement:
        return None
    vote = ranks.FlagAllReduce(agreement, request, present, call)
    asked = replace(request, write=False, apply=False, agree=vote)
    decision = decide([Work(device, [])], asked)
    if decision.scale is None:
        return decision
    assert vote.ranks is not None
    return decision.with_schedule_where(vote.ranks.reshape(()) > 0, request)


@torch.no_grad()
def check_and_unscale_held(
    held: Sequence[gradients.ParamWithGrad],
    request: Request,
    agreement: ranks.Agreement | None,
    decision_device: torch.device | None,
    *,
    write: bool,
    uploads: dict[torch.device, Uploads],
    call: Call = Call.JUDGES,
) -> Decision | None:
    """As :func:`check_and_unscale`, of gradients that were checked.

    Args:
        held: those gradients.
        request: as for :func:`check_and_unscale`.
        agreement: of the ranks that decide together.
        decision_device: where the decision is made if there are no gradients here.
        write: likewise.
        uploads: likewise.
        call: what this rank was called for.
    """
    if not held:
        return decided_elsewhere(request, agreement, decision_device, call=call)
    rows, grads, copies = [], [], []
    for group, tensor, owner in held:
        values = gradients.values_of(tensor)
        if write and overlaps_itself(values):
            # An expanded gradient has one element in several places: it cannot be written.
            tensor.grad = tensor.grad.clone(memory_format=torch.contiguous_format)
            values = gradients.values_of(tensor)
        grad = dense_like(values, values)
        if write and grad is not values:
            copies.append((values, grad))
        grads.append(grad)
        in_norm = agreement is None or agreement.in_norm(tensor, group, owner.key)
        rows.append(Row(grad.dtype, group=group, in_norm=in_norm, owner=owner))
    vote = None
    if agreement is not None and request.needs_agreement:
        vote = ranks.FlagAllReduce(agreement, request, len(held), call)
    asked = replace(request, write=write, apply=False, agree=vote)
    decision = decide(works_of(rows, grads, uploads), asked)
    for values, unscaled in copies:
        values.copy_(unscaled)
    return decision


def decide(works: list[Work], request: Request) -> Decision:
    """The decision on ``works``, for overflow and for what else ``request`` says.

    Whoever measures gradients of many ranks is told the norm of all of them, which the all-reduce
    brings.
    """
    if request.measure and request.agree is not None and request.max_norm is None:
        request = replace(request, max_norm=float("inf"))  # which clips nothing
    if request.causes and request.check:
        return SkipCauses(request).run(works)
    return run(backend_for, works, request)


def works_of(
    rows: Sequence[Row],
    grads: Sequence[Tensor],
    uploads: dict[torch.device, Uploads],
    rule: Rule | None = None,
) -> list[Work]:
    """The rows and their gradients by device, the first parameter's first."""
    works: dict[torch.device, Work] = {}
    for row, grad in zip(rows, grads, strict=True):
        device = grad.device
        if device not in works:
            if device not in uploads:
                uploads[device] = Uploads()
            works[device] = Work(device, [], [], rule, uploads=uploads[device])
        works[device].rows.append(row)
        works[device].grads.append(grad)
    return list(works.values())


def device_of(param_groups: list[dict[str, Any]]) -> torch.device | None:
    """Where the decisions about these parameters are made; ``None`` if there are none."""
    first = None
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return param.device
            first = param if first is None else first
    return None if first is None else first.device


class SkipCauses:
    """Joins further causes to the flag of a step, and keeps them from the loss scale."""

    def __init__(self, request: Request) -> None:
        """Have the causes of ``request``."""
        self._request = request
        self._cause: Tensor | None = None

    def run(self, works: Sequence[Work]) -> Decision:
        """As :func:`ampopt_kernels.step.run`, but that the scale learns nothing of a cause."""
        request = self._request
        measures = any(cause.needs_norm for cause, _ in request.causes)
        max_norm = float("inf") if request.max_norm is None and measures else request.max_norm
        decision = run(backend_for, works, replace(request, agree=self, max_norm=max_norm))
        cause = self._cause
        assert cause is not None
        return replace(decision, cause=cause).with_schedule_where(cause == 0, request)

    def __call__(self, found: Partials, flag: Tensor | None, device: torch.device) -> Partials:
        """What all ranks have found, with a flag for whatever the step is to be skipped for."""
        vote: Any = self._request.agree  # a ranks.Vote
        loss_of_all = None
        if vote is not None:
            found, flag = vote(found, flag, device), None
            loss_of_all = vote.loss
        flags = found.flags_on(device)
        bad = flags.amax() > 0 if flags.numel() else torch.zeros((), device=device) > 0
        if flag is not None:
            bad = bad | (flag.reshape(()) > 0)
        values: dict[str, Tensor] = {}
        if found.squares is not None:
            values["norm"] = found.squares.sum().sqrt()
        total: Any = torch.zeros((), dtype=widest(device), device=device)
        said = []
        for cause, loss in self._request.causes:
            if loss_of_all is not None:
                values["loss"] = loss_of_all
            elif loss is not None:
                values["loss"] = to_device(loss.detach().reshape(()), device, widest(device))
            why, judged = cause.evaluate(values)
            said.append((cause, dict(values), judged))
            total = torch.where(total > 0, total, why)
        self._cause = torch.where(bad, 0.0, total)
        for cause, its_values, judged in said:
            cause.update_from(its_values, judged, self._cause, bad)
        joined, squares = (bad | (self._cause > 0)).to(torch.float32).reshape(1), found.squares
        if squares is not None:  # a flag for each part, of which there may be none
            squares = squares if squares.numel() else squares.new_zeros(1)
            joined = joined.repeat(squares.numel())
        return Partials(joined, squares, found.found)
