"""The state machine's accumulation cycles: gradients that ``accumulate`` sums for the next step."""

from typing import Any

import pytest
from hypothesis.stateful import rule

from ampopt.testing.blueprints import Blueprint
from ampopt.testing.machine import Machine, bad_gradients, call, precondition, some_gradients

__all__ = ["Windows"]


class Windows(Machine):
    """The state machine with ``accumulate``.

    Attributes:
        sums: the sums of the gradients of each parameter; ``None`` outside of a cycle.
        spoilt: whether a summed gradient was non-finite.
    """

    sums: list[Blueprint | None] | None = None
    spoilt = False

    # Not in half precision: accumulate sums in float32, the reference training in the dtype.
    @precondition(lambda self: self.claims.accumulates and self.claims.dense_gradients)
    @precondition(lambda self: self.may_step and self.dtype.itemsize > 2)
    @rule(numbers=some_gradients, bad=bad_gradients)
    @call
    def accumulate(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Set the gradients of a micro-batch and call ``accumulate``."""
        self.give_gradients(numbers, None if self.kind == "none" else bad)
        if not any(self.unscaled_gradients):
            return
        found_inf, _ = self.optimizer.accumulate(grads_scaled_by=self.scale)
        assert bool(found_inf > 0) is self.overflows
        assert not any(p.grad is not None and p.grad.any() for p in self.params)
        sums, spoilt = self.with_sums(), self.overflows or self.spoilt
        self.forget()
        self.sums, self.spoilt = sums, spoilt

    def with_sums(self) -> list[Blueprint | None]:
        """The present gradients plus the accumulated ones."""
        if self.sums is None:
            return self.unscaled_gradients
        pairs = zip(self.sums, self.unscaled_gradients, strict=True)
        return [_sum_of(a, b) if a and b else a or b for a, b in pairs]

    @property
    def is_idle(self) -> bool:
        """Whether no unscaled or accumulated gradients wait for a step."""
        return self.pending is None and self.sums is None

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients for a step, in ``p.grad`` or accumulated."""
        return self.sums is not None or super().has_gradients

    def unscale_gradients(self) -> None:
        """Call ``unscale``, which ends the cycle."""
        self.end_window()
        super().unscale_gradients()

    def take_a_step(self, max_norm: float | None) -> None:
        """Call ``unscale_and_step``, which ends the cycle."""
        self.end_window()
        super().take_a_step(max_norm)

    def end_window(self) -> None:
        """Record that the accumulated gradients are now part of the present ones."""
        self.unscaled_gradients, self.overflows = self.with_sums(), self.overflows or self.spoilt
        self.sums, self.spoilt = None, False

    def forget(self) -> None:
        """Record that there are no gradients, and no cycle."""
        super().forget()
        self.sums, self.spoilt = None, False

    def check(self) -> None:
        """Check also that no checkpoint can be saved within a cycle."""
        super().check()
        if self.sums is not None:
            with pytest.raises(RuntimeError, match="accumulate"):
                self.optimizer.state_dict()


def _sum_of(a: Blueprint, b: Blueprint) -> Blueprint:
    """The sum of two gradients, as a blueprint."""
    numbers = (a.tensor() + b.tensor()).flatten().tolist()
    return Blueprint(a.shape, tuple(numbers), a.dtype)
