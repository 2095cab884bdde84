"""``unscale_and_step`` for several optimizers: all of them step, or all skip."""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import accumulated_step, gradients
from ampopt._step.overflow import OverflowCheck
from ampopt._step.rank_agreement import Agreement
from ampopt._step.torch_private import uncompiled
from ampopt.loss_scale.arguments import check_max_norm
from ampopt.loss_scale.step_scale import as_loss_scale, next_scale_of, request_for
from ampopt.optimizer import Optimizer, check_optimizer
from ampopt.results import StepResult, as_flag
from ampopt_kernels.gradient_reports import GradientReport, Owner
from ampopt_kernels.step_data import Decision, Request

__all__ = ["unscale_and_step"]


@uncompiled
def unscale_and_step(
    optimizers: Iterable[Optimizer],
    grads_scaled_by: Any = None,
    *,
    max_norm: float | None = None,
    process_group: Any = None,
) -> StepResult:
    """Unscale the gradients of several optimizers and step all of them, or skip all.

    The effect is that of one optimizer with all their param groups: one overflow flag, one norm to
    clip by, and one next scale. If each optimizer may skip for itself, call their own
    ``unscale_and_step``, and :func:`ampopt.next_scale` on the scales that they return.

    Rules do not synchronize, and leave ``p.grad`` as it was; hand-written steps wait as ``skip_by``
    of :class:`ampopt.Optimizer` says. An optimizer without gradients only runs its step hooks. See
    :doc:`/guides/clipping`, and :doc:`/guides/accumulation` for sums of several optimizers.

    Example:
        >>> scale_outputs(loss, scale).backward()
        >>> _, found_inf, scale = ampopt.unscale_and_step(
        ...     [generator, discriminator], grads_scaled_by=scale, max_norm=1.0
        ... )

    Args:
        optimizers: one or more ampopt optimizers, on any devices, without a common parameter.
        grads_scaled_by: the scale of the loss that all gradients come from, on the device of the
            first optimizer that has gradients.
        max_norm: the 2-norm to clip all gradients to, together; ``grad_norm`` is then that of all.
        process_group: the ranks over which flag and norm are all-reduced. ``None`` for the process
            group of the optimizers.

    Returns:
        ``StepResult(None, found_inf, scale)``; ``found_inf`` is on the device of the scale.

    Raises:
        RuntimeError: an unscale is pending on an optimizer; an optimizer has already stepped with
            the scale; an optimizer cannot use its gradients.
        TypeError: an element of ``optimizers`` is not an ampopt optimizer, needs a closure, or
            defines its own ``unscale_and_step``; an argument is of the wrong type.
        ValueError: ``optimizers`` is empty; an optimizer or a parameter occurs twice; an argument
            is out of range; the process groups differ, or one is without this rank.

    An error changes nothing, unless a step or hook raised it: then earlier optimizers have stepped.
    """
    optimizers = _checked_optimizers(optimizers)
    max_norm = check_max_norm(max_norm)
    process_group = _common_group(optimizers) if process_group is None else process_group
    device = _device_of(optimizers)
    scale = as_loss_scale(grads_scaled_by, device, optimizers[0]._ampopt.uploads)
    for optimizer in optimizers:
        optimizer._ampopt.phase.refuse_stepped(scale)
    cycles = [optimizer._ampopt.accumulation.cycle for optimizer in optimizers]
    is_checked = any(cycle is not None and cycle.is_checked for cycle in cycles)
    if scale is None and max_norm is None and not is_checked:
        for optimizer in optimizers:
            optimizer.step()
        return StepResult(None, as_flag(torch.zeros((), device=device)), None)

    for optimizer in optimizers:
        optimizer._ampopt.check_gradients()
        if scale is None:
            optimizer._ampopt.missing_scale.warn()
    request = request_for(scale, max_norm=max_norm)
    for optimizer in optimizers:
        request = optimizer._ampopt.observers.extend(request)
    has_sums = any(cycle is not None for cycle in cycles)
    check = _check_of(optimizers)
    agreement = check.agreement(optimizers, process_group)
    if has_sums:
        decision = _end_cycles(optimizers, request, agreement, device)
    else:
        decision = check.check(optimizers, request, agreement)
    next_scale = next_scale_of(scale, decision)
    grad_scale = None if has_sums else request.scale  # the scale of the gradients in p.grad
    step = Request(check=False) if decision is None else _step_after(request, grad_scale, decision)
    try:
        for optimizer in optimizers:
            ours = optimizer._ampopt
            ours.note_norm(request, decision)  # before the step, whose hooks may read it
            ours.attempt(step)
            ours.phase.mark_stepped(scale, next_scale)
    finally:
        for optimizer in optimizers:
            optimizer._ampopt.accumulation.restore_gradients()
    if decision is None:
        return StepResult(None, as_flag(torch.zeros((), device=device)), next_scale)
    return StepResult(None, as_flag(decision.found_inf, decision.overflow_reports), next_scale)


_CHECKS: dict[tuple[weakref.ref[Optimizer], ...], OverflowCheck] = {}
"""The check of optimizers that have stepped together, while all of them exist."""


def _check_of(optimizers: list[Optimizer]) -> OverflowCheck:
    """The check of ``optimizers``, in this order."""
    key = tuple(map(weakref.ref, optimizers))
    if key not in _CHECKS:
        _CHECKS[key] = OverflowCheck()
        for optimizer in optimizers:  # no optimizer keeps the parameters of another in memory
            weakref.finalize(optimizer, _CHECKS.pop, key, None)
    return _CHECKS[key]


def _device_of(optimizers: list[Optimizer]) -> torch.device:
    """The device of the first optimizer that has gradients, or accumulated sums."""
    for optimizer in optimizers:
        cycle = optimizer._ampopt.accumulation.cycle
        if cycle is not None and cycle.params:
            return cycle.decision_device
        if gradients.present(optimizer.param_groups):
            break
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return gradients.device_of(groups)


def _end_cycles(
    optimizers: list[Optimizer],
    request: Request,
    agreement: Agreement | None,
    device: torch.device,
) -> Decision | None:
    """End the accumulation cycles of all optimizers; check, and measure, all sums together.

    For an optimizer that has not accumulated, the sums are the gradients in ``p.grad``.
    """
    strategies = [optimizer._ampopt for optimizer in optimizers]
    decision = accumulated_step.end_cycles(strategies, request, agreement, device)
    if decision is None:
        return None
    # `accumulate` named parameters by the groups of their own optimizer; number them by the groups
    # of all optimizers, as an optimizer without sums does.
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    owners = {owner.key: owner for _, _, owner in gradients.params_with_grads(groups)}
    return replace(decision, reports=tuple(_with_owners(p, owners) for p in decision.reports))


def _with_owners(part: Any, owners: dict[int, Owner]) -> Any:
    """``part``, the overflows found in some gradients, with parameters named as in ``owners``."""
    if not isinstance(part, GradientReport):
        return part
    return replace(part, owners=[owners.get(owner.key, owner) for owner in part.owners])


def _step_after(request: Request, scale: Tensor | None, decision: Decision) -> Request:
    """The request for the step of one optimizer, after the decision for all.

    Args:
        request: the request for all optimizers.
        scale: the scale of the gradients; ``None`` if they are unscaled.
        decision: the decision for all optimizers.
    """
    if request.max_norm is not None:
        # Divided by the clip coefficient, which is 1 or less, the scale clips as it unscales.
        coefficient = decision.clip
        wide = torch.ones_like(coefficient) if scale is None else scale.reshape(()).to(coefficient)
        scale = wide / coefficient
    return Request(
        scale=scale,
        check=False,
        found_inf=decision.found_inf,
        drop=request.drop,
        earlier_decision=decision,
    )


def _checked_optimizers(optimizers: Any) -> list[Optimizer]:
    """``optimizers`` as a list of ampopt optimizers that can step together, else an error."""
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(
            "optimizers must be a list of optimizers, got one: call its own "
            "unscale_and_step(grads_scaled_by=scale)"
        )
    if not isinstance(optimizers, Iterable):
        raise TypeError(f"optimizers must be a list of optimizers, got {type(optimizers).__name__}")
    optimizers = list(optimizers)
    if not optimizers:
        raise ValueError("optimizers must be a list of one or more optimizers, got none")
    for optimizer in optimizers:
        name = type(optimizer).__name__
        check_optimizer(optimizer)
        if type(optimizer).unscale_and_step is not Optimizer.unscale_and_step:
            raise TypeError(
                f"{name} defines its own unscale_and_step, which cannot take the overflow flag of "
                "other optimizers: step it by itself, and combine scales with ampopt.next_scale"
            )
        if optimizer._ampopt.needs_closure:
            raise TypeError(
                f"{name} needs a closure, which several optimizers cannot share: call its own "
                "unscale_and_step(closure, grads_scaled_by=scale)"
            )
        optimizer._ampopt.phase.refuse_pending("unscale_and_step of several optimizers")
        optimizer._ampopt.check_step()
    _refuse_shared(optimizers)
    return optimizers


def _common_group(optimizers: list[Optimizer]) -> Any:
    """The one process group that optimizers have; ``None`` if none of them has one."""
    process_groups = [optimizer._ampopt.process_group for optimizer in optimizers]
    groups = list(dict.fromkeys(group for group in process_groups if group is not None))
    if len(groups) > 1:
        raise ValueError(
            f"optimizers have {len(groups)} different process groups, but they skip together: pass "
            "process_group=, a group with the ranks of all of them"
        )
    return groups[0] if groups else None


def _refuse_shared(optimizers: list[Optimizer]) -> None:
    """Raise if an optimizer occurs twice, or two of them have a parameter in common."""
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        for param in gradients.params_of(optimizer.param_groups):
            other = owners.setdefault(id(param), index)
            if other == index:
                continue
            if optimizer is optimizers[other]:
                raise ValueError(
                    f"optimizers: {type(optimizer).__name__} {index} is also number {other}; pass "
                    "each optimizer once"
                )
            raise ValueError(
                f"optimizers {other} and {index} share a parameter, "
                f"{gradients.name_of(optimizer.param_groups, param)} of the latter: its gradient "
                "would be unscaled and counted twice; leave it to one of them"
            )
