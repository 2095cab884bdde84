"""Invariant: finite gradients leave parameters finite."""

from typing import Any

from ampopt.testing.blueprints import History, Scale
from ampopt.testing.claims import Claims, invariant
from ampopt.testing.skipping import ways
from ampopt.testing.training import Trained, train

__all__ = ["Finiteness"]


class Finiteness(Claims):
    """Steps on ordinary numbers, including zeros."""

    @invariant(
        claim=("plain_steps", "finite_steps"),
        history=lambda cls: cls.histories(overflows=False),
        way=ways,
    )
    def test_finite_gradients_leave_finite_parameters(
        self, make: Any, history: History, way: str
    ) -> None:
        """Steps with finite gradients leave every parameter finite.

        A step that divides by the norm of a parameter, or by the square of a gradient, writes NaN
        where that is zero. The next loss is NaN, every later step is skipped for its gradients, and
        the scale gets the blame.
        """

        def after(index: int, trained: Trained) -> None:
            for i, p in enumerate(trained.params):
                bad = (~p.detach().isfinite()).nonzero()
                if len(bad):
                    at = tuple(bad[0].tolist())
                    element = f"[{', '.join(map(str, at))}]" if at else ""
                    raise AssertionError(
                        f"parameter {i}{element} is {p[at].item()} after step {index}, "
                        "whose gradients were finite"
                    )

        train(make, history, Scale("static", 2.0), way, after=after)
