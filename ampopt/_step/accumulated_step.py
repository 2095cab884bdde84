"""The step that ends accumulation cycles, of one optimizer or of several that step together.

If several optimizers step together and one of them has accumulated, all get a cycle: the others'
``p.grad`` is unscaled into sums of its own. So the gradients to check and to clip are unscaled sums
in every optimizer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.accumulation import Accumulation, ClosedCycle, refuse_sparse
from ampopt._step.all_reduce import Agreement
from ampopt._step.overflow import check_and_unscale_params, decided_elsewhere
from ampopt._step.rank_messages import ControlPoint
from ampopt.backend import backend_for
from ampopt_kernels.decision import Decision, Request
from ampopt_kernels.devices import to_device
from ampopt_kernels.step import run
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Work

__all__ = ["end_cycles"]


@torch.no_grad()
def end_cycles(
    sums: Sequence[Accumulation],
    request: Request,
    agreement: Agreement | None,
    decision_device: torch.device,
    *,
    wide: Sequence[bool],
) -> Decision | None:
    """Add ``p.grad`` to the sums, end the cycles, and swap the sums in for the gradients.

    They stay there until :meth:`Accumulation.restore_gradients`. Does not synchronize.

    Args:
        sums: the accumulation of each optimizer, at least one with an open cycle.
        request: the request of the step. Without a scale nothing is checked. Its skip conditions
            (``causes``) are evaluated on the sums; such a skip leaves the scale as it is, while an
            overflow lowers it.
        agreement: the all-reduce over the ranks of the process group; ``None`` on one rank.
        decision_device: the device on which the decision is made.
        wide: whether the step accepts gradients of another dtype than the parameters', one for
            each optimizer.

    Returns:
        The decision on all cycles; ``None`` if there is nothing to decide.

    Raises:
        RuntimeError: a parameter was resized or moved since its cycle began.
        TypeError: a gradient is sparse. Nothing has changed then.
    """
    groups = [group for each in sums for group in each.groups]
    refuse_sparse(groups)
    uploads, causes = sums[0].uploads, request.causes
    # The step measures the norm of the sums, and the skip conditions are evaluated below.
    request = replace(request, max_norm=None, write=False, apply=False, measure=False, causes=())
    closed_cycles = [each.close(request, agreement) for each in sums]
    overflow_decision = None
    if request.scale is not None:
        overflow_decision = _decide_cycles(
            closed_cycles, request, agreement, decision_device, uploads["decide"]
        )
    skip = (
        None
        if overflow_decision is None
        else _skip(closed_cycles, overflow_decision.found_inf, agreement, decision_device)
    )
    for each, reads_wide in zip(sums, wide, strict=True):
        each.swap_in_sums(wide=reads_wide)
    if overflow_decision is None or skip is None:
        return None
    overflow = overflow_decision.found_inf  # the flag from which the next scale is computed
    reports = [part for each in closed_cycles for part in each.cycle.reports]
    if any(each.skip is None for each in closed_cycles):
        # Else the flags of each micro-batch were all-reduced already.
        reports += overflow_decision.reports
    decision = replace(overflow_decision, found_inf=skip, reports=tuple(reports))
    if not causes:
        return decision
    causes_decision: Any = check_and_unscale_params(  # of the sums, which are in p.grad by now
        gradients.params_with_grads(groups),
        Request(found_inf=skip, causes=causes),
        agreement,
        decision_device,
        write=False,
        uploads=uploads["causes"],
        call=ControlPoint.CAUSES_OF_CYCLE,
    )
    decision = decision.with_schedule_where((causes_decision.cause == 0) | (overflow > 0), request)
    return replace(decision, found_inf=causes_decision.found_inf, cause=causes_decision.cause)


def _decide_cycles(
    closed_cycles: list[ClosedCycle],
    request: Request,
    agreement: Agreement | None,
    decision_device: torch.device,
    uploads: dict[torch.device, Uploads],
) -> Decision | None:
    """The decision from the flags of all cycles, which updates the scale."""
    flag_request = replace(
        request, found_inf=_any_of([each.cycle.flag for each in closed_cycles], decision_device)
    )
    present = any(each.cycle.params for each in closed_cycles)
    if agreement is not None:
        return decided_elsewhere(
            flag_request, agreement, decision_device, present=present, call=ControlPoint.CYCLE
        )
    if not present:
        return None
    work = Work(decision_device, [], uploads=uploads.setdefault(decision_device, Uploads()))
    return run(backend_for, [work], replace(flag_request, check=False))


def _skip(
    closed_cycles: list[ClosedCycle],
    found_inf: Tensor,
    agreement: Agreement | None,
    decision_device: torch.device,
) -> Tensor:
    """A tensor, more than 0 if an overflow skips the step.

    Args:
        closed_cycles: the cycle of each optimizer.
        found_inf: more than 0 after an overflow in any cycle, on any rank.
        agreement: the all-reduce over the ranks of the process group; ``None`` on one rank.
        decision_device: the device of the result.
    """
    skips = [each.skip for each in closed_cycles if each.skip is not None]
    whole = [each.cycle.flag for each in closed_cycles if each.skip is None]
    if not skips:
        return found_inf
    overflow = _any_of(whole, decision_device)
    # found_inf also counts the rejected micro-batches of the other cycles, so it cannot be used.
    if whole and agreement is not None:
        overflow = agreement.flag(0 if overflow is None else overflow, decision_device)
    skip = _any_of([*skips, overflow], decision_device)
    assert skip is not None
    return skip


def _any_of(flags: Sequence[Tensor | None], decision_device: torch.device) -> Tensor | None:
    """More than 0 if one of ``flags`` is; ``None`` if there are none."""
    moved_flags = [to_device(flag, decision_device) for flag in flags if flag is not None]
    if len(moved_flags) < 2:
        return moved_flags[0] if moved_flags else None
    return torch.stack([flag.reshape(()) for flag in moved_flags]).amax()
