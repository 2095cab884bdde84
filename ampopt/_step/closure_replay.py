"""Replay: evaluate a closure again at a smaller scale until its gradients are finite."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampopt.errors import NonFiniteGradientError
from ampopt.loss_scale.base import drops
from ampopt.nonfinite import found_now, look_again
from ampopt_kernels.devices import ACCELERATORS
from ampopt_kernels.step_data import Decision

__all__ = ["Replay", "Verdict"]

Verdict = Callable[[], tuple[Any, Any, Decision | None]]
"""Returns ``found_inf``, the next scale, and the decision they come from (or ``None``). May have to
check the gradients first."""


class Replay:
    """A closure without arguments, for a ``step`` that does not know of loss scaling.

    The inner ``step`` calls it once for each evaluation that it needs (L-BFGS: several)::

        for _ in range(1 + max_replays):
            loss, verdict = evaluate(scale)
            found_inf, next_scale, decision = verdict()
            if not found_inf: return loss
            discard(decision)
            scale = next_scale
        raise NonFiniteGradientError

    Every call synchronizes, to read ``found_inf`` and the loss.

    Attributes:
        scale: the scale of the last evaluation, with which the next one starts.
        next_scale: the next scale, as computed from the last evaluation.
        overflowed: whether the last evaluation overflowed and was accepted, as a scale with
            ``drop_overflow_update=False`` demands.
        found_inf: the overflow flag of the last evaluation.
    """

    def __init__(
        self,
        evaluate: Callable[[Any], tuple[Any, Verdict]],
        scale: Any,
        *,
        max_replays: int,
        preserve_rng: bool,
        devices: Iterable[torch.device],
        offenders: Callable[[], Iterable[str]],
        discard: Callable[[Any], None],
        meet: Callable[..., tuple[bool, bool]] | None = None,
    ) -> None:
        """Prepare the evaluations of one step.

        Args:
            evaluate: ``evaluate(scale) -> (loss, verdict)``; ``verdict() -> (found_inf, next_scale,
                decision)`` checks the gradients and leaves them ready for the step.
            scale: the scale of the first evaluation; ``None`` for no scaling and no checks.
            max_replays: the number of replays allowed for one evaluation.
            preserve_rng: whether every replay starts from the random state of the first attempt.
                See also :meth:`restore_rng`.
            devices: the devices of the random states to preserve, in addition to the CPU.
            offenders: returns the names of the parameters with non-finite gradients.
            discard: called with the decision on gradients that are dropped.
            meet: ``meet(evaluation, finite=, raised=) -> (finite, raised)``, a collective: whether
                the loss of evaluation number ``evaluation`` is finite on all ranks, and whether the
                closure has raised on any. ``None`` on one rank.
        """
        self._evaluate = evaluate
        self.scale = self.next_scale = scale
        self.overflowed, self.found_inf = False, None
        self._max_replays = max_replays
        self._offenders, self._discard = offenders, discard
        self._meet, self._evaluations = meet, 0
        self._devices, self._rng_before = [], None
        if preserve_rng:
            self._devices = [d for d in dict.fromkeys(devices) if d.type in ACCELERATORS]
            self._rng_before = self._rng_state()

    def __call__(self) -> Any:
        """Evaluate until finite; return the loss.

        Raises:
            NonFiniteGradientError: the loss is not finite, the scale cannot be lowered, or the last
                of ``max_replays`` replays overflowed.
            RuntimeError: the closure has raised on another rank.
        """
        state = None if self._rng_before is None else self._rng_state()
        for attempt in range(1 + self._max_replays):
            if attempt and state is not None:
                self._set_rng_state(state)
            look_again()
            loss, finite, everywhere, verdict = self._evaluate_once()
            self.found_inf, self.next_scale, decision = verdict()
            if self.scale is None:
                return loss
            if not everywhere:
                what = "the loss of another rank is not finite"
                what = what if finite else f"the loss is {_as_number(loss)}"
                raise self._error("loss", f"{what}, which no loss scale can fix")
            self.overflowed = bool(self.found_inf > 0)
            if not self.overflowed or not drops(self.scale):
                return loss
            self._discard(decision)
            if self.next_scale is self.scale:
                raise self._error("replays", f"{self.scale!r} has no smaller scale to replay with")
            self.scale = self.next_scale
        raise self._error(
            "replays",
            f"gradients still overflow after {self._max_replays} replays (max_replays), as they do "
            "if the closure does not call zero_grad(), or ignores the scale that it is given",
        )

    def _evaluate_once(self) -> tuple[Any, bool, bool, Verdict]:
        """Evaluate the closure once.

        Returns:
            The loss, whether it is finite on this rank, whether on all ranks, and the verdict.
        """
        self._evaluations += 1
        try:
            loss, verdict = self._evaluate(self.scale)
        except Exception:
            if self._meet is not None:
                self._meet(self._evaluations, finite=True, raised=True)
            raise
        finite = self.scale is None or _finite(loss)
        if self._meet is None:
            return loss, finite, finite, verdict
        everywhere, raised = self._meet(self._evaluations, finite=finite, raised=False)
        if raised:
            raise RuntimeError(
                "the closure has raised on another rank: see the error there. Parameters and state "
                "are as before the call"
            )
        return loss, finite, everywhere, verdict

    def restore_rng(self) -> None:
        """Restore the random state of before the step, if ``preserve_rng`` was set."""
        if self._rng_before is not None:
            self._set_rng_state(self._rng_before)

    def _error(self, reason: Any, what: str) -> NonFiniteGradientError:
        """The error to raise; its message names the parameters with non-finite gradients."""
        names = list(self._offenders())
        where = f"; not finite: {', '.join(names)}" if names else ""
        first = found_now()
        if first is not None:
            where += f"; first of all, {first.subject} is not finite"
        return NonFiniteGradientError(
            f"replay ended, reason {reason!r}: {what}{where}. Parameters and state are as before "
            "the call.",
            reason=reason,
            parameters=names,
            module=None if first is None else first.name,
        )

    def _rng_state(self) -> list[Tensor]:
        """The state of the random generators of the CPU and of each device."""
        states = (torch.get_device_module(d).get_rng_state(d) for d in self._devices)
        return [torch.get_rng_state(), *states]

    def _set_rng_state(self, state: list[Tensor]) -> None:
        """Set the state of the random generators to what :meth:`_rng_state` returned."""
        torch.set_rng_state(state[0])
        for device, device_state in zip(self._devices, state[1:], strict=True):
            torch.get_device_module(device).set_rng_state(device_state, device)


def _finite(loss: Any) -> bool:
    """Whether ``loss``, of one element, is finite. Synchronizes."""
    return bool(loss.isfinite()) if isinstance(loss, Tensor) else math.isfinite(loss)


def _as_number(loss: Any) -> float:
    """``loss`` as a number. Synchronizes."""
    return loss.item() if isinstance(loss, Tensor) else loss
