"""The step that ends windows of ``accumulate``: of one optimizer, or of several that step together.

Where several step together and one of them has accumulated, all have windows: the others' are what
is in ``p.grad``. So what is decided and clipped are sums everywhere, which carry no scale.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients, ranks
from ampopt._step.accumulation import Accumulation, ClosedCycle, refuse_sparse
from ampopt._step.overflow import check_and_unscale_held, decided_elsewhere
from ampopt._step.rank_messages import Call
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
    agreement: ranks.Agreement | None,
    decision_device: torch.device,
    *,
    wide: Sequence[bool],
) -> Decision | None:
    """End the windows: their sums, with the gradients that are there, take the place of those.

    Until :meth:`Accumulation.restore_gradients`. Does not synchronize.

    Args:
        sums: of each optimizer, one of which has a window.
        request: of what ends it. Without a scale nothing is judged. Its causes are judged by the
            sums, and the scale hears nothing of such a skip, but of an overflow it does.
        agreement: of the ranks that decide together.
        decision_device: where the decision is made.
        wide: of each optimizer, whether its step reads gradients of another dtype than the
            parameters'.

    Returns:
        The decision on all windows; ``None`` if there is none to make.

    Raises:
        TypeError: a gradient is sparse. Nothing has changed then.
    """
    groups = [group for each in sums for group in each.groups]
    refuse_sparse(groups)
    uploads, causes = sums[0].uploads, request.causes
    # The step measures the sums, and they are judged for other causes below.
    request = replace(request, max_norm=None, write=False, apply=False, measure=False, causes=())
    closed = [each.close(request, agreement) for each in sums]
    decided = None
    if request.scale is not None:
        decided = _decided(closed, request, agreement, decision_device, uploads["decide"])
    skip = None if decided is None else _skip(closed, decided.found_inf, agreement, decision_device)
    for each, reads_wide in zip(sums, wide, strict=True):
        each.swap_in_sums(wide=reads_wide)
    if decided is None or skip is None:
        return None
    heard = decided.found_inf  # by the scale
    found = [part for each in closed for part in each.cycle.found]
    if any(each.skip is None for each in closed):
        found += decided.found  # else ranks have said of each micro-batch whether theirs overflowed
    decision = replace(decided, found_inf=skip, found=tuple(found))
    if not causes:
        return decision
    judged: Any = check_and_unscale_held(  # the sums, which stand for the gradients by now
        gradients.held(groups),
        Request(found_inf=skip, causes=causes),
        agreement,
        decision_device,
        write=False,
        uploads=uploads["causes"],
        call=Call.CAUSES_OF_CYCLE,
    )
    decision = decision.with_schedule_where((judged.cause == 0) | (heard > 0), request)
    return replace(decision, found_inf=judged.found_inf, cause=judged.cause)


def _decided(
    closed: list[ClosedCycle],
    request: Request,
    agreement: ranks.Agreement | None,
    decision_device: torch.device,
    uploads: dict[torch.device, Uploads],
) -> Decision | None:
    """What is found in all of the windows, of which the scale is told."""
    asked = replace(
        request, found_inf=_any_of([each.cycle.flag for each in closed], decision_device)
    )
    present = any(each.cycle.params for each in closed)
    if agreement is not None:
        return decided_elsewhere(
            asked, agreement, decision_device, present=present, call=Call.CYCLE
        )
    if not present:
        return None
    work = Work(decision_device, [], uploads=uploads.setdefault(decision_device, Uploads()))
    return run(backend_for, [work], replace(asked, check=False))


def _skip(
    closed: list[ClosedCycle],
    heard: Tensor,
    agreement: ranks.Agreement | None,
    decision_device: torch.device,
) -> Tensor:
    """More than 0 if the step is to be skipped for an overflow, of which ``heard`` tells."""
    skips = [each.skip for each in closed if each.skip is not None]
    whole = [each.cycle.flag for each in closed if each.skip is None]
    if not skips:
        return heard
    overflow = _any_of(whole, decision_device)
    if whole and agreement is not None:  # what was agreed on is of the other windows, too
        overflow = agreement.flag(0 if overflow is None else overflow, decision_device)
    skip = _any_of([*skips, overflow], decision_device)
    assert skip is not None
    return skip


def _any_of(flags: Sequence[Tensor | None], decision_device: torch.device) -> Tensor | None:
    """More than 0 if one of ``flags`` is; ``None`` if there are none."""
    found = [to_device(flag, decision_device) for flag in flags if flag is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack([flag.reshape(()) for flag in found]).amax()
