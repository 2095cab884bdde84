"""Steps with a closure, which ``closure_replay`` evaluates again after an overflow.

``step_with_closure`` unscales and checks the gradients that the closure leaves;
``step_with_unscaling_closure`` takes a closure that calls ``unscale`` itself. Both define one
evaluation and pass it to :func:`_step_with_replays`.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt._argument_checks import check_bool, check_count
from ampopt._step import gradients
from ampopt._step.closure_replay import Replay, Verdict
from ampopt._step.observers import as_loss
from ampopt._step.rank_agreement import Agreement
from ampopt.loss_scale.arguments import check_scale, check_scale_number
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.scaled_losses import note_scale_passed
from ampopt.loss_scale.step_scale import next_scale_of, request_for
from ampopt.results import StepResult, as_flag, reports_of
from ampopt_kernels.step_data import Decision

__all__ = ["call_closure", "step_with_closure", "step_with_unscaling_closure"]

_NO_LOSS = "closure must return the unscaled loss, a number or a one-element tensor"


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Call ``closure`` with gradients enabled, as torch's optimizers do; ``None`` without one."""
    if closure is None:
        return None
    _check_callable(closure)
    with torch.enable_grad():
        return closure()


def step_with_closure(
    optimizer: Any,
    closure: Callable[[Any], Any],
    first_scale: Any,
    *,
    max_norm: float | None,
    write: bool,
    **of_replays: Any,
) -> StepResult:
    """``Optimizer.unscale_and_step`` with a closure, which leaves scaled gradients.

    Args:
        optimizer: the optimizer to step, with no unscale pending.
        closure: ``closure(scale) -> loss``, which calls ``backward`` on the scaled loss.
        first_scale: the loss scale of the first evaluation, as the user passed it.
        max_norm: the norm to which gradients are clipped; ``None`` for no clipping.
        write: whether ``p.grad`` is unscaled in place.
        of_replays: see :func:`_step_with_replays`.

    Returns:
        The loss of the last evaluation, whether it overflowed, and the next scale.
    """
    ours = optimizer._ampopt
    ours.phase.refuse_unfinished("unscale_and_step(closure)")
    checks = first_scale is not None or max_norm is not None

    def evaluate(now: Any) -> tuple[Any, Verdict]:
        scale = ours.scale(now)
        loss = closure(now)
        if ours.accumulation.cycle is not None:
            raise RuntimeError(
                "the closure of unscale_and_step called accumulate, which a replay cannot undo: "
                "let the backward passes add gradients up in p.grad, all under the scale that the "
                "closure takes"
            )
        if ours.phase.pending is not None:
            raise RuntimeError(
                "the closure of unscale_and_step must leave the gradients scaled, but called "
                "unscale; a closure that unscales belongs to step_after_unscale(closure, "
                "current_grad_scale=scale)"
            )
        if not checks:
            return loss, lambda: (None, None, None)
        ours.observers.loss = as_loss(loss, _NO_LOSS)

        def verdict() -> tuple[Any, Any, Decision | None]:
            decision = ours.check_closure_gradients(
                request_for(scale, max_norm=max_norm, write=write)
            )
            if decision is None:
                return 0.0, next_scale_of(scale, None), None
            flag = as_flag(decision.overflow, decision.overflow_reports)
            return flag, next_scale_of(scale, decision), decision

        return loss, verdict

    agreement = ours.agreement() if checks else None
    return _step_with_replays(optimizer, closure, evaluate, first_scale, agreement, **of_replays)


def step_with_unscaling_closure(
    optimizer: Any, closure: Callable[[Any], Any], first_scale: Any, **of_replays: Any
) -> StepResult:
    """``Optimizer.step_after_unscale`` with a closure, which calls ``unscale`` itself.

    Args:
        optimizer: the optimizer to step, with no unscale pending.
        closure: ``closure(scale) -> (loss, *optimizer.unscale(scale))``.
        first_scale: the loss scale of the first evaluation, as the user passed it.
        of_replays: see :func:`_step_with_replays`.

    Returns:
        The loss of the last evaluation, whether it overflowed, and the next scale.
    """
    ours = optimizer._ampopt
    if ours.observers.causes:
        raise RuntimeError(
            "step_after_unscale(closure) does not work with skip_when: the closure would be "
            "evaluated again after such a skip, though a smaller scale does not help. Use "
            "unscale_and_step(closure, grads_scaled_by=scale)"
        )
    agreement = None if ours.scale(first_scale) is None else ours.agreement()

    def evaluate(now: Any) -> tuple[Any, Verdict]:
        try:
            result = closure(now)
        except Exception:
            if agreement is not None and ours.phase.pending is None:
                # in the all-reduce of the others' unscale
                agreement.join_after_raise(ours.decision_device)
            raise
        if not isinstance(result, tuple) or len(result) != 3:
            raise TypeError(
                "the closure of step_after_unscale must return (loss, found_inf, scale), got "
                f"{type(result).__name__}: return (loss, *optimizer.unscale(scale))"
            )
        if ours.phase.pending is None and now is not None:
            raise RuntimeError(
                "the closure of step_after_unscale must call unscale(grads_scaled_by=scale) "
                "after the backward pass; a closure that leaves gradients scaled belongs to "
                "unscale_and_step"
            )
        decision = ours.phase.pending and ours.phase.pending.decision
        ours.phase.pending = None
        ours.observers.loss = as_loss(result[0], _NO_LOSS)
        _check_verdict(*result[1:])
        return result[0], lambda: (*result[1:], decision)

    return _step_with_replays(optimizer, closure, evaluate, first_scale, agreement, **of_replays)


def _step_with_replays(
    optimizer: Any,
    closure: Callable[[Any], Any],
    evaluate: Callable[[Any], tuple[Any, Verdict]],
    first_scale: Any,
    agreement: Agreement | None,
    *,
    max_replays: int,
    preserve_rng: bool,
) -> StepResult:
    """Call ``optimizer.step`` with a closure that repeats ``evaluate`` until nothing overflows.

    Args:
        optimizer: the optimizer to step.
        closure: the user's closure.
        evaluate: calls ``closure`` once; see :class:`Replay`.
        first_scale: the loss scale of the first evaluation, as the user passed it.
        agreement: the all-reduce over the ranks of the process group; ``None`` on one rank.
        max_replays: the number of times that an evaluation may be repeated.
        preserve_rng: whether replays start from the random state of the first evaluation.
    """
    _check_closure(closure)
    max_replays = check_count("max_replays", max_replays, least=0)
    check_bool("preserve_rng", preserve_rng)
    ours, groups = optimizer._ampopt, optimizer.param_groups
    if agreement is not None:
        agreement.prepare_for_closures(ours.decision_device, max_replays)

    @torch.enable_grad()
    def evaluate_and_check(scale: Any) -> tuple[Any, Verdict]:
        ours.in_closure = True
        try:
            loss, verdict = evaluate(scale)
        finally:
            ours.in_closure = False
            if scale is None:
                ours.missing_scale.warn()
            else:
                note_scale_passed()  # the closure got the scale, also if it raised
        if agreement is not None:
            ours.check_gradients()  # an error here is still all-reduced to the other ranks
        return loss, verdict

    def offenders() -> Iterator[str]:
        scale = None if ours.step_request is None else ours.step_request.scale
        return gradients.offenders(groups, scale, ours.masters.holder)

    replay = Replay(
        evaluate_and_check,
        # Rounded, as a closure may multiply a float64 loss by this number.
        check_scale("the first scale", first_scale),
        max_replays=max_replays,
        preserve_rng=preserve_rng,
        devices=(param.device for param in gradients.params_of(groups)),
        offenders=offenders,
        discard=ours.observers.discard,
        meet=None
        if agreement is None
        else functools.partial(agreement.closures, ours.decision_device, max_replays),
    )
    try:
        with ours.restored_on_failure(replay.restore_rng):
            loss = _call_step(optimizer.step, replay)
    finally:
        ours.observers.loss = None
    ours.phase.mark_stepped(first_scale, replay.next_scale)
    ours.phase.mark_stepped(replay.scale, replay.next_scale)
    found_inf = ours.no_overflow() + float(replay.overflowed)
    if ours.observers.causes and ours.decision_of_step is not None:
        found_inf = found_inf + ours.decision_of_step.found_inf
    return StepResult(loss, as_flag(found_inf, reports_of(replay.found_inf)), replay.next_scale)


def _call_step(step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
    """Call ``step(closure)``, or ``closure()`` and ``step()`` if ``step`` takes no closure.

    A step takes one as ``closure``, or under another name as its first argument, which is required
    or ``None``.

    Returns:
        The loss.
    """
    parameters = inspect.signature(step).parameters
    # The signature of a learning-rate scheduler's wrapper around step includes self.
    first = next((p for name, p in parameters.items() if name != "self"), None)
    if first is not None and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        may_be_closure = first.default is None or first.default is first.empty
        if first.name == "closure" or ("closure" not in parameters and may_be_closure):
            return step(closure)
    if "closure" in parameters:
        return step(closure=closure)
    loss = closure()
    step()
    return loss


def _check_callable(closure: Any) -> None:
    """Raise ``TypeError`` for what is passed as a closure, and cannot be called."""
    if not callable(closure):
        raise TypeError(
            f"closure must be callable, got {type(closure).__name__}; a scale is passed by name, "
            "as in unscale_and_step(grads_scaled_by=scale)"
        )


def _check_closure(closure: Any) -> None:
    """Refuse a closure that cannot take the scale, before anything has run.

    Raises:
        TypeError: ``closure`` is not callable with one argument.
    """
    _check_callable(closure)
    try:
        signature = inspect.signature(closure)
    except ValueError:  # some built-in callables have no signature
        return
    try:
        signature.bind(object())
    except TypeError:
        raise TypeError(
            f"closure{signature} must take the scale as its one argument: a replay lowers it. "
            "Write `def closure(scale): ...` and scale the loss with "
            "`scale_outputs(loss, scale).backward()`"
        ) from None


def _check_verdict(found_inf: Any, scale: Any) -> None:
    """Check what a closure returned as ``found_inf`` and ``scale``.

    Raises:
        TypeError: one of them has the wrong type.
        ValueError: ``scale`` is a number, but not a positive, finite one.
    """
    flag = isinstance(found_inf, Tensor) and found_inf.numel() == 1
    if not flag and not isinstance(found_inf, (bool, int, float)):
        raise TypeError(
            "the closure of step_after_unscale must return (loss, found_inf, scale), but its "
            f"found_inf is {found_inf!r}: return (loss, *optimizer.unscale(scale))"
        )
    if scale is None or isinstance(scale, (LossScale, Tensor)):
        return
    try:
        check_scale_number(scale)
    except TypeError:
        raise TypeError(
            "the closure of step_after_unscale must return (loss, found_inf, scale), but its "
            f"scale is {scale!r}: return (loss, *optimizer.unscale(scale))"
        ) from None
