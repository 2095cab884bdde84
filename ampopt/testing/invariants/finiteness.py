"""Invariant: finite gradients leave parameters finite."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import ampopt
from ampopt.testing.bits import element_at
from ampopt.testing.blueprints import Blueprint, History
from ampopt.testing.claims import Claims
from ampopt.testing.invariant import invariant
from ampopt.testing.invariants.examples import ways
from ampopt.testing.invariants.training import start, step_by

__all__ = ["Finiteness"]


@st.composite
def large_and_small(draw: st.DrawFn, cls: type[Claims]) -> History:
    """Strategy of finite trainings whose gradients are ordinary, large or small numbers."""
    history = draw(cls.histories(overflows=False))
    size = draw(st.sampled_from([1.0, 2.0**20, 2.0**-20]))

    def sized(grad: Blueprint | None) -> Blueprint | None:
        return grad and replace(grad, numbers=tuple(number * size for number in grad.numbers))

    return replace(history, steps=tuple(tuple(map(sized, step)) for step in history.steps))


class Finiteness(Claims):
    """Steps on finite numbers, including zeros."""

    @invariant(claim="finite_steps", history=large_and_small, way=ways)
    def test_finite_gradients_leave_finite_parameters(
        self, make: Any, history: History, way: str
    ) -> None:
        """Steps with finite gradients leave every parameter finite.

        A step that divides by the norm of a parameter, or by the square of a gradient, writes NaN
        where that is zero; one that keeps its state in float16 writes infinities where gradients
        are large. The next loss is NaN, every later step is skipped for its gradients, and the
        scale gets the blame.
        """
        trained = start(make, history)
        for index, step in enumerate(history.steps):
            step_by(trained, step, ampopt.StaticLossScale(2.0), way)
            for i, p in enumerate(trained.params):
                bad = (~p.detach().isfinite()).nonzero()
                if len(bad):
                    at = tuple(bad[0].tolist())
                    raise AssertionError(
                        f"parameter {i}{element_at(at)} is {p[at].item()} after step {index}, "
                        "whose gradients were finite"
                    )
