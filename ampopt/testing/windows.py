"""The state machine's windows: gradients that ``accumulate`` adds up for the step that follows."""

from typing import Any

import pytest
from hypothesis.stateful import precondition, rule

from ampopt.testing.blueprints import Blueprint
from ampopt.testing.machine import Machine, bad_gradients, call, some_gradients

__all__ = ["Windows"]


class Windows(Machine):
    """The machine with ``accumulate``.

    Attributes:
        sums: of the gradients of each parameter; ``None`` outside of a window.
        spoilt: whether one of them was not finite.
    """

    sums: list[Blueprint | None] | None = None
    spoilt = False

    # In half precision gradients add up in float32, where a plain step would have them rounded.
    @precondition(lambda self: self.claims.accumulates and self.claims.dense_gradients)
    @precondition(lambda self: self.may_step and self.dtype.itemsize > 2)
    @rule(numbers=some_gradients, bad=bad_gradients)
    @call
    def accumulate(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """A micro-batch, of which all but the last one of a window are added up so."""
        self.give_gradients(numbers, None if self.kind == "none" else bad)
        if not any(self.held):
            return
        found_inf, _ = self.optimizer.accumulate(grads_scaled_by=self.scale)
        assert bool(found_inf > 0) is self.overflows
        assert not any(p.grad is not None and p.grad.any() for p in self.params)
        sums, spoilt = self.with_sums(), self.overflows or self.spoilt
        self.forget()
        self.sums, self.spoilt = sums, spoilt

    def with_sums(self) -> list[Blueprint | None]:
        """The gradients that there are, with what was accumulated."""
        if self.sums is None:
            return self.held
        pairs = zip(self.sums, self.held, strict=True)
        return [_added(a, b) if a and b else a or b for a, b in pairs]

    @property
    def is_idle(self) -> bool:
        """No step is due that would take what was unscaled, or accumulated."""
        return self.pending is None and self.sums is None

    @property
    def has_gradients(self) -> bool:
        """There are some that a step would take."""
        return self.sums is not None or super().has_gradients

    def unscale_gradients(self) -> None:
        """Those of the window, too."""
        self.end_window()
        super().unscale_gradients()

    def take_a_step(self, max_norm: float | None) -> None:
        """With the window."""
        self.end_window()
        super().take_a_step(max_norm)

    def end_window(self) -> None:
        """What was accumulated is among the gradients from now on."""
        self.held, self.overflows = self.with_sums(), self.overflows or self.spoilt
        self.sums, self.spoilt = None, False

    def forget(self) -> None:
        """And no window."""
        super().forget()
        self.sums, self.spoilt = None, False

    def check(self) -> None:
        """A window is not saved."""
        super().check()
        if self.sums is not None:
            with pytest.raises(RuntimeError, match="accumulate"):
                self.optimizer.state_dict()


def _added(a: Blueprint, b: Blueprint) -> Blueprint:
    numbers = (a.tensor() + b.tensor()).flatten().tolist()
    return Blueprint(a.shape, tuple(numbers), a.dtype)
