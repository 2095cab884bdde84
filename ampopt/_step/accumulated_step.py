"""The step that ends accumulation cycles, of one optimizer or of several that step together.

If several optimizers step together and one of them has accumulated, the gradients of the others are
unscaled into sums, too. So every optimizer has unscaled sums to check and to clip.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.accumulation import Accumulation, AccumulationCycle, refuse_sparse
from ampopt._step.gradient_rows import GradientRows
from ampopt._step.overflow import check_and_unscale
from ampopt._step.rank_agreement import Agreement, decision_all_reduce
from ampopt._step.rank_messages import ControlPoint
from ampopt.backend import backend_for
from ampopt_kernels.devices import to_device
from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Decision, Partials, Request
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.uploads import Uploads

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
        RuntimeError: a parameter was resized or moved since its cycle began. Nothing has changed
            then.
        TypeError: a gradient is sparse. Nothing has changed then.
    """
    sums: list[Accumulation] = [ours.accumulation for ours in strategies]
    # A rule accepts gradients of another dtype than the parameters'. Raises before any change.
    reads_wide = [not ours.needs_torch() for ours in strategies]
    groups = [group for each in sums for group in each.groups]
    refuse_sparse(groups)
    for each in sums:  # before a cycle is closed
        each.check_sums()
    begun = [each.cycle for each in sums if each.cycle is not None]
    is_checked = request.check or any(cycle.is_checked for cycle in begun)
    closing = replace(
        request,
        check=is_checked,
        max_norm=None,
        write=False,
        measure=False,
        causes=(),
        loss=None,
    )
    cycles = [each.close(closing, agreement) for each in sums]
    flags = _flags_of(cycles, closing, agreement, decision_device) if is_checked else None
    for each, wide in zip(sums, reads_wide, strict=True):
        each.swap_in_sums(wide=wide)
    clips = request.max_norm is not None
    deciding = replace(request, unscaled=True, check=flags is not None, write=False)
    if flags is None:
        deciding = replace(deciding, scale=None, policy=None, counters=None, causes=())
    else:
        deciding = replace(deciding, found_inf=flags.skip, scheduled_by=flags.overflow)
    uploads, decision = sums[0].uploads["decide"], None
    if deciding.causes or clips:
        with_grads = gradients.params_with_grads(groups)  # the sums, which are in p.grad by now
        call = ControlPoint.SUMS_OF_CYCLE
        rows = GradientRows.of(with_grads, with_grads, agreement, uploads)
        all_reduce = decision_all_reduce(agreement, deciding, bool(with_grads), call)
        decision = check_and_unscale(rows, deciding, all_reduce, decision_device)
    elif flags is not None:
        constants = uploads.setdefault(decision_device, Uploads())
        decision = run(backend_for, [Work(decision_device, [], uploads=constants)], deciding)
        if flags.any_sums is not None:
            decision = decision.with_schedule_where(flags.any_sums, deciding)
    if decision is None or flags is None:
        return decision
    if not clips:
        return replace(decision, norm=None, reports=flags.reports)
    measured = tuple(r for r in decision.reports if isinstance(r, GradientReport))
    return replace(decision, reports=(*flags.reports, *measured))


class _CycleFlags(NamedTuple):
    """What the micro-batches of all cycles found, on all ranks.

    Attributes:
        skip: more than 0 to skip the step.
        overflow: more than 0 if a micro-batch overflowed, after which the scale is lowered. With
            ``drop="micro_batch"`` the step may be applied nevertheless.
        reports: the records that tell which parameters, and ranks, overflowed.
        any_sums: whether any rank has sums: bool, 0-d; ``None`` on one rank.
    """

    skip: Tensor
    overflow: Tensor | None
    reports: tuple[Any, ...]
    any_sums: Tensor | None


def _flags_of(
    cycles: list[AccumulationCycle],
    request: Request,
    agreement: Agreement | None,
    decision_device: torch.device,
) -> _CycleFlags | None:
    """The flags of all cycles, all-reduced together; ``None`` if there are no sums on one rank."""
    overflow = _any_of([cycle.flag for cycle in cycles], decision_device)
    skip = _any_of([cycle.skip for cycle in cycles], decision_device)
    reports = tuple(part for cycle in cycles for part in cycle.reports)
    present = any(cycle.params for cycle in cycles)
    all_reduce = decision_all_reduce(agreement, request, present, ControlPoint.CYCLE)
    if all_reduce is None:
        return None if skip is None else _CycleFlags(skip, overflow, reports, None)
    partials = all_reduce(Partials([], None), overflow, decision_device, must_skip=skip)
    overflow, reports = partials.flags_on(decision_device), (*reports, *partials.reports)
    return _CycleFlags(all_reduce.any_must_skip, overflow, reports, all_reduce.any_gradients)


def _any_of(flags: Sequence[Tensor | None], decision_device: torch.device) -> Tensor | None:
    """More than 0 if one of ``flags`` is; ``None`` if there are none."""
    moved_flags = [to_device(flag, decision_device) for flag in flags if flag is not None]
    if len(moved_flags) < 2:
        return moved_flags[0] if moved_flags else None
    return torch.stack([flag.reshape(()) for flag in moved_flags]).amax()
