"""Control points that are given a closure: they evaluate it, and again while it overflows.

What is common to both is in :func:`_replayed`; what one evaluation is, in their own functions.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ampopt._step import ranks
from ampopt._step.replay import Replay, check_closure, check_loss, check_verdict, step_with
from ampopt.loss_scale.given import request_for, successor_of
from ampopt.results import StepResult, as_flag, found_behind

__all__ = ["step_after_unscale", "unscale_and_step"]

Verdict = Callable[[], tuple[Any, Any]]
"""Gives ``found_inf`` and the successor of the scale, for which it may judge gradients first."""


def unscale_and_step(
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
        if ours.sums.window is not None:
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
            return loss, lambda: (None, None)
        check_loss(loss)

        def verdict() -> tuple[Any, Any]:
            with ours.told(loss):
                decision = ours.judge(request_for(scale, max_norm=max_norm, write=write))
            if decision is None:
                return 0.0, successor_of(scale, None)
            return as_flag(decision.overflow, decision.culprits), successor_of(scale, decision)

        return loss, verdict

    agreement = ours.agreement() if judges else None
    return _replayed(optimizer, closure, evaluate, given, agreement, max_replays, preserve_rng)


def step_after_unscale(
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
                agreement.abstain(ours.home)  # from the unscale of the others
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
        ours.pending = None
        check_verdict(*returned)
        return returned[0], lambda: returned[1:]

    return _replayed(optimizer, closure, evaluate, given, agreement, max_replays, preserve_rng)


def _replayed(
    optimizer: Any,
    closure: Callable[[Any], Any],
    evaluate: Callable[[Any], tuple[Any, Verdict]],
    given: Any,
    agreement: ranks.Agreement | None,
    max_replays: int,
    preserve_rng: bool,
) -> StepResult:
    """``optimizer.step`` with a closure that evaluates until the verdict is that all is finite."""
    check_closure(closure)
    if isinstance(max_replays, bool) or not isinstance(max_replays, int) or max_replays < 0:
        raise ValueError(f"max_replays must be a whole number, 0 or more, got {max_replays!r}")
    ours, groups = optimizer._ampopt, optimizer.param_groups
    replay = Replay(
        torch.enable_grad()(evaluate),
        given,
        max_replays=max_replays,
        preserve_rng=preserve_rng,
        devices=dict.fromkeys(p.device for group in groups for p in group["params"]),
        offenders=ours.offenders,
        meet=None if agreement is None else functools.partial(agreement.closures, ours.home),
    )
    with ours.restored_on_failure(replay.restore_rng):
        loss = step_with(optimizer.step, replay)
    ours.mark_given(given, replay.successor)
    ours.mark_given(replay.scale, replay.successor)
    found_inf = ours.no_overflow() + float(replay.overflowed)
    if ours.causes and ours.decided is not None:
        found_inf = found_inf + ours.decided.found_inf
    return StepResult(loss, as_flag(found_inf, found_behind(replay.found_inf)), replay.successor)
