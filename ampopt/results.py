"""The results of control points, and the names of the parameters that overflowed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ampopt.loss_scale.base import LossScale, drops
from ampopt_kernels.gradient_reports import GradientReport, RankFlags, named_ranks

__all__ = ["StepResult", "Unscaled", "as_flag", "is_flag", "overflowed", "reports_of"]


class Unscaled(NamedTuple):
    """The result of ``unscale`` and ``accumulate``: ``found_inf, scale = optimizer.unscale(S)``.

    Attributes:
        found_inf: float32, 0-d, on the parameters' device; more than 0 if a gradient was not finite
            after unscaling.
        scale: the loss scale to use next; see :meth:`ampopt.Optimizer.unscale`.
    """

    found_inf: Tensor
    scale: Any


class StepResult(NamedTuple):
    """The result of a step: ``loss, found_inf, scale = optimizer.unscale_and_step(...)``.

    Attributes:
        loss: the loss that the closure returned; without a closure, the result of a hand-written
            ``step()``, usually ``None``.
        found_inf: float32, 0-d, on the parameters' device; more than 0 if a gradient was not finite
            after unscaling, or if :class:`ampopt.skip_when` skipped the step.
        scale: the loss scale to use next.
    """

    loss: Any
    found_inf: Tensor
    scale: Any

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped. Synchronizes: the host waits for the device."""
        # StaticLossScale(drop_overflow_update=False) applies an overflowed update.
        skipped = drops(self.scale) and bool(self.found_inf > 0)
        if skipped and isinstance(self.scale, LossScale):
            self.scale.item()  # warns of a scale that has collapsed; nothing waits for it any more
        return skipped

    @property
    def overflowed(self) -> list[str]:
        """The names of the parameters whose gradients overflowed in this step. Synchronizes.

        The list may be read at any time after the step, which has recorded it on the device. A name
        is what ``named_parameters()`` gave to the optimizer, else group and position. Parameters
        that overflowed in a micro-batch that ``accumulate`` dropped are included, even though the
        step was applied. The list is empty in three cases: nothing overflowed; only the flag is
        known, as in a step after ``scaler.unscale_`` of torch's scaler; or the result was copied or
        loaded.

        If ranks skip together, the names are those of parameters whose shard on this rank
        overflowed. A last entry names the other ranks that found an overflow, as ``"rank 3"`` or
        ``"ranks 0-2, 5"``. Reading it is not a collective call.
        """
        return overflowed(self.found_inf)


class _Reports(tuple[GradientReport | RankFlags, ...]):
    """The overflows of each device and rank, from which a flag was computed."""

    def __reduce__(self) -> Any:
        """Keep only the mark of a flag in copies and files, as an empty set, which torch loads."""
        return set, ()


def as_flag(found_inf: Tensor, reports: Sequence[GradientReport | RankFlags] = ()) -> Tensor:
    """``found_inf``, marked as a flag, so that it is refused where a scale is expected.

    Args:
        found_inf: the flag, more than 0 for an overflow. It is marked in place.
        reports: what the flag was computed from, which has the names of parameters.
    """
    found_inf._ampopt_reports = _Reports(reports)  # type: ignore[attr-defined]
    return found_inf


def is_flag(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``found_inf`` that a control point returned."""
    return hasattr(tensor, "_ampopt_reports")


def reports_of(found_inf: Any) -> tuple[GradientReport | RankFlags, ...]:
    """The overflows of a flag; empty for a tensor that is not a flag, or is a copy of one."""
    return tuple(getattr(found_inf, "_ampopt_reports", ()))


def overflowed(found_inf: Tensor) -> list[str]:
    """The names of the parameters whose gradients overflowed; see :attr:`StepResult.overflowed`."""
    # Whatever the flag of the step is: a micro-batch that was dropped may have overflowed.
    names, ranks = [], set()
    for part in reports_of(found_inf):
        if isinstance(part, RankFlags):
            ranks.update(part.others())
        else:
            names += part.overflowed()
    names = list(dict.fromkeys(names))  # one may have overflowed in several micro-batches
    return [*names, named_ranks(sorted(ranks))] if ranks else names
