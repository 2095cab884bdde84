"""Steps with a closure: evaluate it, and evaluate it again at a lower scale after an overflow.

``step_with_closure`` unscales and checks the gradients that the closure leaves;
``step_with_unscaling_closure`` takes a closure that calls ``unscale`` itself. Both define one
evaluation and pass it to :func:`_step_with_replays`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampopt._step import ranks
from ampopt._step.replay import Replay, Verdict
from ampopt.loss_scale.arguments import (
    check_bool,
    check_scale_number,
    request_for,
    rounded,
    successor_of,
)
from ampopt.loss_scale.base import LossScale
from ampopt.results import StepResult, as_flag, found_behind
from ampopt_kernels.decision import Decision

__all__ = ["evaluated", "step_with_closure", "step_with_unscaling_closure"]


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """What ``closure`` returns, called as torch's optimizers do; ``None`` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def step_with_closure(
    optimizer: Any,
    closure: Callable[[Any], Any],
    given: Any,
    *,
    max_norm: float | None,
    write: bool,
    max_replays: int,
    preserve_rng: bool,
) -> StepResult:
    """See ``Optimizer.unscale_and_step``, for whose closure gradients are judged here.

    Args:
        optimizer: to step; nothing is pending.
        closure: leaves gradients scaled.
        given: the scale to begin with, as the caller gave it.
        max_norm: to clip to.
        write: leave unscaled gradients in ``p.grad``.
        max_replays: how often an evaluation may be run again.
        preserve_rng: give replays the random state of the first attempt.
    """
    ours = optimizer._ampopt
    ours.refuse_unfinished("unscale_and_step(closure)")
    judges = given is not None or max_norm is not None

    def evaluate(now: Any) -> tuple[Any, Verdict]:
        scale = ours.scale(now)
        loss = closure(now)
        if ours.accumulation.cycle is not None:
            raise RuntimeError(
                "the closure of unscale_and_step called accumulate, whose sums no replay can take "
                "back: let its backward passes add up under the scale that it is given"
            )
        if ours.pending is not None:
            raise RuntimeError(
                "the closure of unscale_and_step must leave the gradients scaled, but called "
                "unscale; a closure that unscales belongs to step_after_unscale(closure, "
                "current_grad_scale=scale)"
            )
        if not judges:
            return loss, lambda: (None, None, None)
        _check_loss(loss)

        def verdict() -> tuple[Any, Any, Decision | None]:
            with ours.with_loss(loss):
                decision = ours.check_closure_gradients(
                    request_for(scale, max_norm=max_norm, write=write)
                )
            if decision is None:
                return 0.0, successor_of(scale, None), None
            flag = as_flag(decision.overflow, decision.overflow_details)
            return flag, successor_of(scale, decision), decision

        return loss, verdict

    agreement = ours.agreement() if judges else None
    return _step_with_replays(
        optimizer, closure, evaluate, given, agreement, max_replays, preserve_rng
    )


def step_with_unscaling_closure(
    optimizer: Any,
    closure: Callable[[Any], Any],
    given: Any,
    *,
    max_replays: int,
    preserve_rng: bool,
) -> StepResult:
    """See ``Optimizer.step_after_unscale``, whose closure has gradients judged by ``unscale``.

    Args:
        optimizer: to step; nothing is pending.
        closure: unscales its gradients.
        given: the scale to begin with, as the caller gave it.
        max_replays: how often an evaluation may be run again.
        preserve_rng: give replays the random state of the first attempt.
    """
    ours = optimizer._ampopt
    if ours.causes:
        raise RuntimeError(
            "step_after_unscale(closure): the closure would be run again after a skip_when, which "
            "no smaller scale mends: use unscale_and_step(closure, grads_scaled_by=scale)"
        )
    agreement = None if ours.scale(given) is None else ours.agreement()

    def evaluate(now: Any) -> tuple[Any, Verdict]:
        try:
            returned = closure(now)
        except Exception:
            if agreement is not None and ours.pending is None:
                agreement.join_without_gradients(
                    ours.decision_device
                )  # from the unscale of the others
            raise
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(
                "the closure of step_after_unscale must return (loss, found_inf, scale), got "
                f"{type(returned).__name__}: return (loss, *optimizer.unscale(scale))"
            )
        if ours.pending is None and now is not None:
            raise RuntimeError(
                "the closure of step_after_unscale must call unscale(grads_scaled_by=scale) "
                "after the backward pass; a closure that leaves gradients scaled belongs to "
                "unscale_and_step"
            )
        decision, ours.pending = ours.pending and ours.pending.decision, None
        _check_verdict(*returned)
        return returned[0], lambda: (*returned[1:], decision)

    return _step_with_replays(
        optimizer, closure, evaluate, given, agreement, max_replays, preserve_rng
    )


def _step_with_replays(
    optimizer: Any,
    closure: Callable[[Any], Any],
    evaluate: Callable[[Any], tuple[Any, Verdict]],
    given: Any,
    agreement: ranks.Agreement | None,
    max_replays: int,
    preserve_rng: bool,
) -> StepResult:
    """``optimizer.step`` with a closure that evaluates until the verdict is that all is finite."""
    _check_closure(closure)
    if isinstance(max_replays, bool) or not isinstance(max_replays, int) or max_replays < 0:
        raise ValueError(f"max_replays must be a whole number, 0 or more, got {max_replays!r}")
    check_bool("preserve_rng", preserve_rng)
    ours, groups = optimizer._ampopt, optimizer.param_groups

    @torch.enable_grad()
    def checked(scale: Any) -> tuple[Any, Verdict]:
        ours.in_closure = True
        try:
            loss, verdict = evaluate(scale)
        finally:
            ours.in_closure = False
        if agreement is not None:
            ours.check_gradients()  # while the other ranks can still be told
        return loss, verdict

    replay = Replay(
        checked,
        rounded(given),
        max_replays=max_replays,
        preserve_rng=preserve_rng,
        devices=dict.fromkeys(p.device for group in groups for p in group["params"]),
        offenders=ours.offenders,
        discard=ours.discard,
        meet=None
        if agreement is None
        else functools.partial(agreement.closures, ours.decision_device),
    )
    with ours.restored_on_failure(replay.restore_rng):
        loss = _call_step(optimizer.step, replay)
    ours.mark_given(given, replay.successor)
    ours.mark_given(replay.scale, replay.successor)
    found_inf = ours.no_overflow() + float(replay.overflowed)
    if ours.causes and ours.decided is not None:
        found_inf = found_inf + ours.decided.found_inf
    return StepResult(loss, as_flag(found_inf, found_behind(replay.found_inf)), replay.successor)


def _call_step(step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
    """Call an optimizer's ``step`` with ``closure``; if it takes none, evaluate that first.

    Returns:
        The loss.
    """
    # A scheduler's wrapper around step shows the self that it fills in.
    names = [name for name in inspect.signature(step).parameters if name != "self"]
    if "closure" in names[1:]:
        return step(closure=closure)
    if names:
        return step(closure)
    loss = closure()
    step()
    return loss


def _check_closure(closure: Any) -> None:
    """Refuse a closure that cannot take the scale, before anything has run.

    Raises:
        TypeError: it is not callable, or not with one argument.
    """
    if not callable(closure):
        raise TypeError(
            f"closure must be callable, got {type(closure).__name__}; a scale is passed by name, "
            "as in unscale_and_step(grads_scaled_by=scale)"
        )
    try:
        signature = inspect.signature(closure)
    except ValueError:  # some built-in callables have none to show
        return
    try:
        signature.bind(object())
    except TypeError:
        raise TypeError(
            f"closure{signature} must take the scale as its one argument: a replay lowers it. "
            "Write `def closure(scale): ...` and scale the loss with "
            "`scale_outputs(loss, scale).backward()`"
        ) from None


def _check_loss(loss: Any) -> None:
    """Refuse what a closure returned in place of a loss.

    Raises:
        TypeError: it is neither a number nor a tensor of one element.
    """
    if isinstance(loss, Tensor):
        if loss.numel() == 1:
            return
        got = f"a tensor of shape {tuple(loss.shape)}"
    elif isinstance(loss, (int, float)):
        return
    else:
        got = type(loss).__name__
    raise TypeError(
        f"closure must return the unscaled loss, a number or a one-element tensor, got {got}"
    )


def _check_verdict(loss: Any, found_inf: Any, scale: Any) -> None:
    """Refuse what a closure returned in place of ``(loss, found_inf, scale)``.

    Raises:
        TypeError: one of them is of the wrong kind.
        ValueError: the scale is a number that cannot be one.
    """
    _check_loss(loss)
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
