"""The phase of an optimizer between two calls, and which calls it allows.

An optimizer is in one of three phases::

               accumulate()
       idle ----------------> accumulating
         |                         |
         +-----------+-------------+
                     | unscale()
                     v
                  pending

*Accumulating* means that sums of gradients wait for a step (:attr:`Accumulation.cycle`), *pending*
that gradients are unscaled and no step has used them yet (:attr:`Phase.pending`). Every step, and
``zero_grad``, returns to *idle*.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampopt._step.accumulation import Accumulation
from ampopt._step.masters import Masters
from ampopt.loss_scale.base import AnyScale
from ampopt_kernels.step_data import Decision, Request

__all__ = ["Pending", "Phase"]


@dataclass(eq=False)
class Pending:
    """The result of an ``unscale`` that no step has followed yet.

    Attributes:
        found_inf: float32 flag, more than 0 if a gradient was inf or NaN; what ``unscale``
            returned.
        scale: the loss scale that was passed to ``unscale``; ``None`` for gradients without a
            scale.
        next_scale: the next loss scale, which ``unscale`` returned.
        decision: the result of the check; ``None`` if there was nothing to check, or no gradient.
        gradients: each parameter that had a gradient, and a weak reference to that gradient.
        has_stepped: whether a step has used the unscaled gradients, so that it pends no longer.
    """

    found_inf: Tensor
    scale: AnyScale | None
    next_scale: Any
    decision: Decision | None
    gradients: list[tuple[Tensor, weakref.ref[Any]]]
    has_stepped: bool = False

    @property
    def request(self) -> Request | None:
        """The request of the step that follows; ``None`` if it has no overflow flag to follow."""
        if self.decision is None:
            return None
        return Request(
            check=False,
            found_inf=self.found_inf,
            drop=self.scale is None or self.scale._drop,
            earlier_decision=self.decision,
        )

    @property
    def is_cleared(self) -> bool:
        """Whether there were gradients, and no parameter has one now."""
        return bool(self.gradients) and all(param.grad is None for param, _ in self.gradients)

    @property
    def is_left(self) -> bool:
        """Whether a parameter still has the gradient that was unscaled, and not another one."""
        return any(param.grad is not None and param.grad is ref() for param, ref in self.gradients)


class Phase:
    """The phase of one optimizer, and the scales that it has stepped with."""

    def __init__(self, accumulation: Accumulation, masters: Masters) -> None:
        """Start *idle*.

        Args:
            accumulation: the sums of gradients, of which a step uses those of the open cycle.
            masters: the master weights, which have the unscaled gradients while one is pending.
        """
        self._accumulation, self._masters = accumulation, masters
        self._pending: Pending | None = None
        self._stepped_with: set[weakref.ref[Any]] = set()  # generations of scales

    # --- which phase ------------------------------------------------------------------------------

    @property
    def pending(self) -> Pending | None:
        """The result of an unscale that no step has followed yet; else ``None``.

        An unscale whose gradients have all been cleared since, as ``model.zero_grad()`` does, is
        over.
        """
        if self._pending is not None and self._pending.is_cleared:
            self.forget()
        return self._pending

    @pending.setter
    def pending(self, pending: Pending | None) -> None:
        """Set or forget the result; gradients stay as they are."""
        self._pending = pending

    # --- the way back to idle ---------------------------------------------------------------------

    def end(self) -> None:
        """A step has used the unscaled gradients, or the sums."""
        self._masters.drop_gradients()
        self._accumulation.restore_gradients()
        if (pending := self._pending) is not None:
            self.mark_stepped(pending.scale, pending.next_scale)
            self._pending, pending.has_stepped = None, True

    def discard(self) -> None:
        """Drop the unscaled gradients and the sums, as ``zero_grad`` does."""
        self._pending = None
        self._accumulation.discard()
        self._masters.drop_gradients()

    def forget(self) -> None:
        """Drop an unscale, with what it has put on masters; ``p.grad`` stays as it is."""
        self._pending = None
        self._masters.drop_gradients()
        self._accumulation.restore_gradients(keep_present=True)

    # --- what is allowed now ----------------------------------------------------------------------

    def refuse_pending(self, call: str) -> None:
        """Raise, naming ``call``, if an unscale is pending.

        If other gradients have replaced all that were unscaled, as a new backward pass after
        ``model.zero_grad()`` does, or there were none, as on a rank without gradients, the unscale
        is over instead. A step uses such gradients: they may have been edited out of place.
        """
        if self._pending is None:
            return
        if not self._pending.is_left:
            self.forget()
            return
        raise RuntimeError(
            f"{call}: an unscale is pending. Call step_after_unscale() first, to step with the "
            "unscaled gradients (if an ampopt.GradScaler has unscaled them, "
            "scaler.step(optimizer)), or zero_grad() to discard them"
        )

    def refuse_unfinished(self, call: str) -> None:
        """Raise, naming ``call``, if an unscale is pending or sums wait."""
        self.refuse_pending(call)
        if self._accumulation.cycle is not None:
            raise RuntimeError(
                f"{call}: accumulate() was called, and no step has used the sums yet. Call "
                "unscale_and_step() first, or zero_grad() to discard them"
            )

    def refuse_stepped(self, scale: AnyScale | None) -> None:
        """Raise if an earlier step has used ``scale``, and its kind changes with each step."""
        generation = None if scale is None else scale._generation
        if generation is not None and weakref.ref(generation) in self._stepped_with:
            raise RuntimeError(
                f"this {type(scale).__name__} was used by an earlier step: each step returns the "
                "scale for the next one, so assign it, as in `_, _, scale = "
                "optimizer.unscale_and_step(grads_scaled_by=scale)`. A function that steps must "
                "return it, too"
            )

    def mark_stepped(self, scale: Any, next_scale: Any) -> None:
        """Record that a step has used ``scale``, unless the next scale is the same object.

        Args:
            scale: the scale, as the caller passed it or as :class:`AnyScale`.
            next_scale: what the caller gets.
        """
        generation = getattr(scale, "_generation", None)
        if generation is not None and next_scale is not scale:
            self._stepped_with.add(weakref.ref(generation, self._stepped_with.discard))

    def forget_scales(self) -> None:
        """Allow all scales again: the run goes back to a state that may have had one of them."""
        self._stepped_with.clear()
