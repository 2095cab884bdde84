"""Checks the gradients of one or several optimizers of any class for inf/NaN; unscales them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients, ranks
from ampopt._step.all_reduce import FlagAllReduce, flag_all_reduce
from ampopt.backend import backend_for
from ampopt_kernels.decision import Decision, Partials, Request
from ampopt_kernels.devices import to_device
from ampopt_kernels.rule import Rule
from ampopt_kernels.skip_checks import CheckSettings, SkipChecks
from ampopt_kernels.step import run
from ampopt_kernels.tensors import dense_like, overlaps_itself, sharing_memory, widest
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import ParamRow, Work

__all__ = [
    "Check",
    "SkipCauses",
    "check_and_unscale",
    "check_and_unscale_params",
    "decide",
    "decided_elsewhere",
    "device_of",
    "works_of",
]


def check_and_unscale(
    optimizers: Sequence[Any],
    request: Request,
    *,
    write: bool = False,
    uploads: dict[torch.device, Uploads] | None = None,
    process_group: Any = None,
) -> Decision | None:
    """Check all gradients for inf/NaN, and make one decision. Does not synchronize.

    Args:
        optimizers: one or several optimizers of any class.
        request: the scale and what else to check; nothing is stepped.
        write: whether to unscale the gradients in place.
        uploads: the constants cached on each device by earlier calls.
        process_group: the ranks that all-reduce the flag; see :func:`ampopt._step.ranks.agreement`.

    Returns:
        The decision; ``None`` if there are no gradients.

    Raises:
        RuntimeError, TypeError, ValueError: see :func:`ampopt._step.gradients.params_with_grads`.
            Nothing has changed then.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    with_grads, decision_device = gradients.params_with_grads(groups), device_of(groups)
    agreement = ranks.agreement(groups, process_group, optimizers=optimizers)
    all_reduce = flag_all_reduce(agreement, request, len(with_grads))
    uploads = {} if uploads is None else uploads
    return check_and_unscale_params(
        with_grads, request, all_reduce, decision_device, write=write, uploads=uploads
    )


def decided_elsewhere(
    request: Request, all_reduce: FlagAllReduce | None, device: torch.device | None
) -> Decision | None:
    """The decision from the all-reduced flags, on a rank with no gradients to check.

    The scale stays as it is if no rank has gradients.

    Args:
        request: the request of the call.
        all_reduce: what :func:`~ampopt._step.all_reduce.flag_all_reduce` returned.
        device: the device of the decision; ``None`` if there are no parameters.

    Returns:
        The decision; ``None`` if there are no other ranks.
    """
    if all_reduce is None or device is None:
        return None
    check_request = replace(request, write=False, apply=False, agree=all_reduce)
    decision = decide([Work(device, [])], check_request)
    return decision.with_schedule_where(all_reduce.ranks > 0, request)


@torch.no_grad()
def check_and_unscale_params(
    with_grads: Sequence[gradients.ParamWithGrad],
    request: Request,
    all_reduce: FlagAllReduce | None,
    decision_device: torch.device | None,
    *,
    write: bool,
    uploads: dict[torch.device, Uploads],
) -> Decision | None:
    """Do what :func:`check_and_unscale` does, for the result of ``gradients.params_with_grads``.

    Args:
        with_grads: the parameters with gradients.
        request: see :func:`check_and_unscale`.
        all_reduce: what :func:`~ampopt._step.all_reduce.flag_all_reduce` returned.
        decision_device: the device of the decision if there are no gradients on this rank.
        write: see :func:`check_and_unscale`.
        uploads: see :func:`check_and_unscale`.

    Returns:
        The decision; ``None`` if there are no gradients.
    """
    if not with_grads:
        return decided_elsewhere(request, all_reduce, decision_device)
    rows, grads, copies = [], [], []
    each = [gradients.values_of(tensor) for _, tensor, _ in with_grads]
    shared = sharing_memory(each) if write else set()
    for place, (group, tensor, owner) in enumerate(with_grads):
        values = each[place]
        if write and (place in shared or overlaps_itself(values)):
            # Elements of an expand()ed gradient share memory, so it cannot be written in place.
            # Elements that two gradients have would be divided twice.
            tensor.grad = tensor.grad.clone(memory_format=torch.contiguous_format)
            values = gradients.values_of(tensor)
        grad = dense_like(values, values)
        if write and grad is not values:
            copies.append((values, grad))
        grads.append(grad)
        in_norm = all_reduce is None or all_reduce.agreement.in_norm(tensor, group, owner.key)
        rows.append(ParamRow(grad.dtype, group=group, in_norm=in_norm, owner=owner))
    check_request = replace(request, write=write, apply=False, agree=all_reduce)
    decision = decide(works_of(rows, grads, uploads), check_request)
    for values, unscaled_values in copies:
        values.copy_(unscaled_values)
    return decision


def decide(works: list[Work], request: Request) -> Decision:
    """Run ``request`` on ``works``, with its skip conditions if it has any.

    With several ranks, a ``measure`` of the norm is of the gradients of all ranks.
    """
    if request.measure and request.agree is not None and request.max_norm is None:
        request = replace(request, max_norm=float("inf"))  # which clips nothing
    if request.causes and request.check:
        return SkipCauses(request).run(works)
    return run(backend_for, works, request)


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


class Check(NamedTuple):
    """One check of a step by an :class:`ampopt.skip_when`.

    Attributes:
        settings: the cause that is reported, and the limits.
        value: the value to check, a 0-d tensor of the device's ``widest`` dtype; ``None`` for the
            norm of the gradients.
        statistics: the running statistics, of shape (3,) and the same dtype; see
            :class:`ampopt_kernels.skip_checks.SkipChecks`. ``None`` if the check has none.
        then: called after the decision with a 0-d bool tensor: whether no gradient overflowed.
    """

    settings: CheckSettings
    value: Tensor | None = None
    statistics: Tensor | None = None
    then: Callable[[Tensor], None] | None = None


class SkipCauses:
    """Evaluates skip conditions (``skip_when``) between the check for inf/NaN and the decision.

    A condition that holds skips the step; the scale is updated from overflows alone.
    """

    def __init__(self, request: Request) -> None:
        """Store ``request``, whose ``causes`` are the skip conditions."""
        self._request = request
        self._works: Sequence[Work] = ()
        self._cause: Tensor | None = None

    def run(self, works: Sequence[Work]) -> Decision:
        """Run ``works``; where a skip condition held, leave the scale as it was."""
        request, self._works = self._request, works
        measures = any(cause.needs_norm for cause, _ in request.causes)
        max_norm = float("inf") if request.max_norm is None and measures else request.max_norm
        device = works[0].device
        backend_for(device).prepare_checks(
            device,
            request.found_inf if request.agree is None else None,  # the all-reduce includes it
            norm=max_norm is not None,
            values=any(cause.needs_values for cause, _ in request.causes),
            statistics=any(cause.needs_statistics for cause, _ in request.causes),
        )
        decision = run(backend_for, works, replace(request, agree=self, max_norm=max_norm))
        cause = self._cause
        assert cause is not None
        return replace(decision, cause=cause).with_schedule_where(cause == 0, request)

    def __call__(self, partials: Partials, flag: Tensor | None, device: torch.device) -> Partials:
        """All-reduce ``partials`` and raise its flags if a skip condition holds.

        ``ampopt_kernels.step`` calls this between the check and the decision.

        Args:
            partials: the flags and squared norms of this rank.
            flag: a flag from an earlier check; ``None`` without one.
            device: the device of the decision.
        """
        all_reduce: Any = self._request.agree  # a FlagAllReduce
        loss_of_all = None
        if all_reduce is not None:
            partials, flag = all_reduce(partials, flag, device), None
            loss_of_all = all_reduce.loss
        checks: list[Check] = []
        for cause, loss in self._request.causes:
            if loss_of_all is not None:
                loss = loss_of_all
            elif loss is not None:
                loss = to_device(loss.detach().reshape(()), device, widest(device))
            checks += cause.checks(partials.squares, loss, device)
        old_statistics = [check.statistics for check in checks]
        together = self._together(checks, device)
        result = backend_for(device).find_cause(partials, flag, together)
        if together.statistics is not None and len(checks) > 1:
            pairs = zip(old_statistics, together.statistics.unbind(), strict=True)
            rows = [(old, new) for old, new in pairs if old is not None]
            copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
            copy([old for old, _ in rows], [new for _, new in rows])
        then = [check.then for check in checks if check.then is not None]
        if then:
            finite = (result.flag.reshape(()) <= 0) | (result.cause > 0)
            for update in then:
                update(finite)
        self._cause = result.cause
        return Partials(result.flag, result.squares, partials.reports)

    def _together(self, checks: Sequence[Check], device: torch.device) -> SkipChecks:
        """All of ``checks``, each a row of the tensors."""
        numbers = [number for check in checks for number in check.settings]
        uploads = self._works[0].uploads
        settings = uploads.get("skip checks", numbers, widest(device), device)
        return SkipChecks(
            settings.view(len(checks), -1),
            _stack_rows([check.value for check in checks]),
            _stack_rows([check.statistics for check in checks]),
        )


def _stack_rows(rows: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as rows of one, with some other row where there is none; a view if of one."""
    anything = next((row for row in rows if row is not None), None)
    if anything is None:
        return None
    if len(rows) == 1:
        return anything.unsqueeze(0)
    return torch.stack([anything if row is None else row for row in rows])
