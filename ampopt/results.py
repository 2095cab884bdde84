"""What the control points return."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ampopt.loss_scale.base import LossScale, drops
from ampopt_kernels.found import Found, FoundByRanks, named_ranks

__all__ = ["StepResult", "Unscaled", "as_flag", "found_behind", "is_flag", "overflowed"]


class Unscaled(NamedTuple):
    """What :meth:`ampopt.Optimizer.unscale` found.

    Attributes:
        found_inf: float32, 0-d, on the parameters' device; more than 0 if a gradient was not
            finite after unscaling.
        scale: what to scale the next loss by; see :meth:`ampopt.Optimizer.unscale`.
    """

    found_inf: Tensor
    scale: Any


class StepResult(NamedTuple):
    """What a step did.

    Attributes:
        loss: what the closure returned; without one, what an ordinary ``step()`` returned, which
            is ``None`` as a rule.
        found_inf: float32, 0-d, on the parameters' device; more than 0 if a gradient was not
            finite after unscaling.
        scale: what to scale the next loss by.
    """

    loss: Any
    found_inf: Tensor
    scale: Any

    @property
    def skipped(self) -> bool:
        """Whether the update was left out. Synchronizes: the host waits for the device."""
        # A static scale may have been told to apply an overflowed update all the same.
        skipped = drops(self.scale) and bool(self.found_inf > 0)
        if skipped and isinstance(self.scale, LossScale):
            self.scale._warn_if_collapsed()  # the host has waited anyway
        return skipped

    @property
    def overflowed(self) -> list[str]:
        """The parameters whose gradients overflowed in this step, by name. Synchronizes.

        However late it is asked, and whatever was stepped since: the step has noted it on the
        device. By the names that ``named_parameters()`` gave the optimizer, else by group and
        position; and also those of a micro-batch that ``accumulate`` has left out, though the step
        was taken. Empty if nothing overflowed, where the flag alone is known, as in a step after
        ``scaler.unscale_`` of torch's scaler, and in a result that was copied or loaded.

        Where several ranks decide together, the names are those of parameters whose part on this
        rank overflowed, and one entry behind them has the numbers of the other ranks that found an
        overflow, as ``"rank 3"`` or ``"ranks 0-2, 5"``. No other rank need ask.
        """
        return overflowed(self.found_inf)


class _Culprits(tuple[Found | FoundByRanks, ...]):
    """What is behind a flag, which it holds on to."""

    def __reduce__(self) -> Any:
        # A copy or a file has the mark alone, as something that torch loads with weights_only=True.
        return set, ()


def as_flag(found_inf: Tensor, found: Sequence[Found | FoundByRanks] = ()) -> Tensor:
    """``found_inf``, marked, for it is easily unpacked where the scale is meant to be.

    Args:
        found_inf: to mark.
        found: what it was made of.
    """
    found_inf._culprits = _Culprits(found)  # type: ignore[attr-defined]
    return found_inf


def is_flag(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``found_inf`` that a control point returned."""
    return hasattr(tensor, "_culprits")


def found_behind(found_inf: Any) -> tuple[Found | FoundByRanks, ...]:
    """What a flag was made of; nothing of what is none, or a copy."""
    culprits = getattr(found_inf, "_culprits", ())
    return culprits if isinstance(culprits, _Culprits) else ()


def overflowed(found_inf: Tensor) -> list[str]:
    """The names of the parameters whose gradients made it; see :attr:`StepResult.overflowed`."""
    # Not asked whether the step overflowed: a micro-batch that was left out may have.
    names, ranks = [], set()
    for part in found_behind(found_inf):
        if isinstance(part, FoundByRanks):
            ranks.update(part.others())
        else:
            names += part.overflowed()
    names = list(dict.fromkeys(names))  # several micro-batches may have found one
    return [*names, named_ranks(sorted(ranks))] if ranks else names
