"""Replay: the same closure again under a smaller scale until its gradients are finite."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampopt.errors import NonFiniteGradientError
from ampopt.loss_scale.base import drops
from ampopt.nonfinite import found_now, look_anew
from ampopt_kernels.decision import Decision
from ampopt_kernels.devices import ACCELERATORS

__all__ = ["Replay", "Verdict"]

Verdict = Callable[[], tuple[Any, Any, Decision | None]]
"""Gives ``found_inf``, the successor of the scale, and the decision behind them, if there is one;
for which it may judge gradients first."""


class Replay:
    """A closure without arguments, for a ``step`` that knows nothing of scaling.

    Each call is one evaluation that the inner algorithm asked for::

        for _ in range(1 + max_replays):
            loss, verdict = evaluate(scale)
            found_inf, successor, decision = verdict()
            if not found_inf: return loss
            discard(decision)
            scale = successor
        raise NonFiniteGradientError

    Every call synchronizes: the host looks at ``found_inf`` and at the loss.

    Attributes:
        scale: the scale that the next evaluation starts from, which is that of the last finite
            one.
        successor: what follows ``scale`` after the last evaluation.
        overflowed: whether the last evaluation overflowed and was let pass.
        found_inf: its flag, as the verdict gave it.
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
            evaluate: ``evaluate(scale) -> (loss, verdict)``; ``verdict() -> (found_inf, successor,
                decision)`` judges the gradients and leaves them ready for the step.
            scale: to begin with; ``None`` for no scaling, when nothing is checked.
            max_replays: of one evaluation.
            preserve_rng: give every replay the random state of the first attempt. See also
                :meth:`restore_rng`.
            devices: whose random state that is, besides the CPU's.
            offenders: names of the parameters whose gradients are not finite now.
            discard: called with the decision on gradients that no step takes.
            meet: ``meet(evaluation, finite=, raised=)``, of this rank and of its so many-th
                evaluation: whether it is finite on all of those that evaluate together, and whether
                any has raised. ``None`` if it is alone.
        """
        self._evaluate = evaluate
        self.scale = self.successor = scale
        self.overflowed, self.found_inf = False, None
        self._max_replays = max_replays
        self._devices = [d for d in devices if d.type in ACCELERATORS]
        self._offenders, self._discard = offenders, discard
        self._meet, self._evaluations = meet, 0
        self._rng_before = self._rng_state() if preserve_rng else None

    def __call__(self) -> Any:
        """Evaluate until finite; return the loss.

        Raises:
            NonFiniteGradientError: no replay can help, or none is left.
            RuntimeError: the closure has raised on another rank.
        """
        state = None if self._rng_before is None else self._rng_state()
        for attempt in range(1 + self._max_replays):
            if attempt and state is not None:
                self._set_rng_state(state)
            look_anew()
            loss, finite, everywhere, verdict = self._evaluated()
            self.found_inf, self.successor, decision = verdict()
            if self.scale is None:
                return loss
            if not everywhere:
                whose = "the loss of another rank is not finite"
                whose = whose if finite else f"the loss is {_shown(loss)}"
                raise self._error("loss", f"{whose}, which no scale can mend")
            self.overflowed = bool(self.found_inf > 0)
            if not self.overflowed or not drops(self.scale):
                return loss
            self._discard(decision)
            if self.successor is self.scale:
                raise self._error("replays", f"{self.scale!r} has no smaller scale to replay with")
            self.scale = self.successor
        raise self._error(
            "replays",
            f"gradients still overflow after {self._max_replays} replays (max_replays)",
        )

    def _evaluated(self) -> tuple[Any, bool, bool, Verdict]:
        """Loss, whether it is finite here and on all ranks, and what gives the verdict."""
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
                "the closure has raised on another rank, which says why; parameters and state are "
                "as before the call"
            )
        return loss, finite, everywhere, verdict

    def restore_rng(self) -> None:
        """Put the random state back that the step began with, if it was to be preserved."""
        if self._rng_before is not None:
            self._set_rng_state(self._rng_before)

    def _error(self, reason: Any, what: str) -> NonFiniteGradientError:
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
        there = (torch.get_device_module(d).get_rng_state(d) for d in self._devices)
        return [torch.get_rng_state(), *there]

    def _set_rng_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for device, device_state in zip(self._devices, state[1:], strict=True):
            torch.get_device_module(device).set_rng_state(device_state, device)


def _finite(loss: Any) -> bool:
    return bool(loss.isfinite().all()) if isinstance(loss, Tensor) else math.isfinite(loss)


def _shown(loss: Any) -> float:
    return loss.item() if isinstance(loss, Tensor) else loss
