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
from ampopt._step.accumulation import Accumulation, AccumulationCycle, refuse_sparse
from ampopt._step.all_reduce import Agreement, flag_all_reduce
from ampopt._step.overflow import check_and_unscale_params
from ampopt._step.rank_messages import ControlPoint
from ampopt.backend import backend_for
from ampopt_kernels.decision import Decision, Partials, Request
from ampopt_kernels.devices import to_device
from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.step import run
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Work

__all__ = ["end_cycles"]


@torch.no_grad()
def end_cycles(
    strategies: Sequence[Any],
    request: Request,
    agreement: Agreement | None,
    decision_device: torch.device,
) -> Decision | None:
    """Add ``p.grad`` to the sums, end the cycles, and swap the sums in for the gradients.

    They stay there until :meth:`Accumulation.restore_gradients`. Does not synchronize.

    Args:
        strategies: the strategy of each optimizer, at least one with an open cycle.
        request: the request of the step. Without a scale nothing is checked, unless a cycle
            ``is_checked``. Its skip conditions (``causes``) are evaluated on the sums; such a skip
            leaves the scale as it is, while an overflow lowers it. With ``max_norm``, the norm of
            all sums is computed; one optimizer alone does so in its step.
        agreement: the all-reduce over the ranks of the process group; ``None`` on one rank.
        decision_device: the device on which the decision is made.

    Returns:
        The decision on all cycles; ``None`` if there is nothing to decide.

    Raises:
        RuntimeError: a parameter was resized or moved since its cycle began.
        TypeError: a gradient is sparse. Nothing has changed then.
    """
    sums: list[Accumulation] = [ours.accumulation for ours in strategies]
    # A rule accepts gradients of another dtype than the parameters'. Raises before any change.
    reads_wide = [not ours.needs_torch() for ours in strategies]
    groups = [group for each in sums for group in each.groups]
    refuse_sparse(groups)
    uploads, whole = sums[0].uploads, request
    request = replace(
        request, max_norm=None, write=False, apply=False, measure=False, causes=(), loss=None
    )
    if any(each.cycle is not None and each.cycle.is_checked for each in sums):
        request = replace(request, check=True)
    cycles = [each.close(request, agreement) for each in sums]
    decision = overflow = None
    if request.check:
        decision, overflow = _decide_cycles(
            cycles, request, agreement, decision_device, uploads["decide"]
        )
    for each, wide in zip(sums, reads_wide, strict=True):
        each.swap_in_sums(wide=wide)
    causes = () if decision is None else whole.causes
    if not causes and whole.max_norm is None:
        return decision
    with_grads = gradients.params_with_grads(groups)  # the sums, which are in p.grad by now
    sums_request = Request(
        check=bool(causes),
        found_inf=None if decision is None else decision.found_inf,
        drop=request.drop,
        causes=causes,
        loss=whole.loss,
        max_norm=whole.max_norm,
        measure=whole.measure and whole.max_norm is not None,  # else the step does, unclipped
    )
    of_sums = check_and_unscale_params(
        with_grads,
        sums_request,
        flag_all_reduce(agreement, sums_request, len(with_grads), ControlPoint.SUMS_OF_CYCLE),
        decision_device,
        write=False,
        uploads=uploads["sums"],
    )
    if decision is None or overflow is None or of_sums is None:
        return of_sums
    if of_sums.cause is not None:
        decision = decision.with_schedule_where((of_sums.cause == 0) | (overflow > 0), request)
        decision = replace(decision, found_inf=of_sums.found_inf, cause=of_sums.cause)
    if whole.max_norm is not None:
        measured = tuple(r for r in of_sums.reports if isinstance(r, GradientReport))
        decision = replace(
            decision,
            coefficients=of_sums.coefficients,
            norm=of_sums.norm,
            reports=(*decision.reports, *measured),
        )
    return decision


def _decide_cycles(
    cycles: list[AccumulationCycle],
    request: Request,
    agreement: Agreement | None,
    decision_device: torch.device,
    uploads: dict[torch.device, Uploads],
) -> tuple[Decision | None, Tensor | None]:
    """The decision on all cycles, and the overflow flag from which the next scale is computed.

    Both flags are all-reduced together. A cycle with ``drop="micro_batch"`` may step although a
    micro-batch has overflowed. Both are ``None`` if no rank has gradients to decide on.
    """
    overflow = _any_of([cycle.flag for cycle in cycles], decision_device)
    skip = _any_of([cycle.skip for cycle in cycles], decision_device)
    reports: list[Any] = [part for cycle in cycles for part in cycle.reports]
    present = any(cycle.params for cycle in cycles)
    all_reduce = flag_all_reduce(agreement, request, present, ControlPoint.CYCLE)
    if all_reduce is not None:
        no_skip = torch.zeros((), dtype=torch.float32, device=decision_device)
        skips = (no_skip if skip is None else skip).reshape(1)
        partials = all_reduce(Partials([], squares=skips), overflow, decision_device)
        overflow = partials.flags_on(decision_device).amax()
        assert partials.squares is not None
        skip = partials.squares.clamp(max=1.0)
        reports += partials.reports
    elif not present:
        return None, None
    assert skip is not None
    work = Work(decision_device, [], uploads=uploads.setdefault(decision_device, Uploads()))
    decision = run(backend_for, [work], replace(request, found_inf=overflow, check=False))
    if all_reduce is not None:
        decision = decision.with_schedule_where(all_reduce.ranks > 0, request)
    skip = skip.reshape(()).to(decision.found_inf.dtype)
    return replace(decision, found_inf=skip, reports=tuple(reports)), decision.found_inf


def _any_of(flags: Sequence[Tensor | None], decision_device: torch.device) -> Tensor | None:
    """More than 0 if one of ``flags`` is; ``None`` if there are none."""
    moved_flags = [to_device(flag, decision_device) for flag in flags if flag is not None]
    if len(moved_flags) < 2:
        return moved_flags[0] if moved_flags else None
    return torch.stack([flag.reshape(()) for flag in moved_flags]).amax()
